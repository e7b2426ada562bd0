"""DPM-Solver++ (2M SDE) as CogVideoX-5b uses it."""

import math
from typing import Any

import torch

from diffusion_core.randomness import Generators

from .base import Timestep, full_precision
from .cogvideox import CogVideoXScheduler
from .predictions import predict_original


class CogVideoXDPMScheduler(CogVideoXScheduler):
    """SDE-DPM-Solver++ (2M) (arXiv 2211.01095, appendix B) on CogVideoX's shifted schedule (arXiv 2408.06072).

    The prediction of the step before is handed in by the caller, so that the scheduler has no history. The first
    step and the last one have order 1. Arguments as for `CogVideoXDDIMScheduler`.
    """

    def step(
        self,
        model_output: torch.Tensor,
        old_pred_original_sample: torch.Tensor | None,
        timestep: Timestep,
        timestep_back: Timestep | None,
        sample: torch.Tensor,
        eta: float = 0.0,
        use_clipped_model_output: bool = False,
        generator: Generators | None = None,
        variance_noise: torch.Tensor | None = None,
        return_dict: bool = False,
    ) -> Any:
        """One step down in noise.

        Args:
            model_output: (B, ...), what the network returned for `sample`.
            old_pred_original_sample: what the step before returned as its second value; None in the first step.
            timestep: an element of `timesteps`, or any timestep of training.
            timestep_back: the timestep of the step before; None in the first step.
            sample: (B, ...), the current sample.
            eta, use_clipped_model_output: without effect; callers of DDIM pass them.
            generator: draws the noise; a list has one for each image.
            variance_noise: the noise itself, in place of `generator`.
            return_dict: return a `SchedulerOutput`, or else a tuple.
        """
        self._ready()
        if old_pred_original_sample is not None and timestep_back is None:
            raise ValueError("old_pred_original_sample needs timestep_back, the timestep that it was predicted at")
        kept, kept_next = self._move_for(timestep)
        moving, output = full_precision(sample), full_precision(model_output)
        kind = self.config["prediction_type"]
        original = predict_original(kind, output, moving, math.sqrt(kept), math.sqrt(1 - kept))
        noise = self._randn(moving, generator) if variance_noise is None else variance_noise.to(moving)
        if kept_next >= 1:
            return self._result_like(sample, original, original, return_dict)
        h = _log_snr(kept_next) - _log_snr(kept)
        data = original
        last = (timestep if self._step_index is None else self._times[self._step_index]) < self._stride
        if old_pred_original_sample is not None and timestep_back is not None and not last:
            before = _log_snr(kept) - _log_snr(self._kept_at(timestep_back))
            data = torch.lerp(full_precision(old_pred_original_sample), original, 1 + h / (2 * before))
            if variance_noise is None:
                noise = self._randn(moving, generator)  # the reference draws twice; so a seed gives its video
        stays = math.sqrt((1 - kept_next) / (1 - kept)) * math.exp(-h)
        moved = torch.add(moving * stays, data, alpha=-math.expm1(-2 * h) * math.sqrt(kept_next))
        moved = moved.add_(noise, alpha=math.sqrt((1 - kept_next) * -math.expm1(-2 * h)))
        return self._result_like(sample, moved, original, return_dict)

    def _kept_at(self, timestep: Timestep) -> float:
        """The running product of alphas at the step before, found without a look at the tensor where that can be."""
        if isinstance(timestep, torch.Tensor) and self._step_index:
            return self._moves[self._step_index - 1][0]
        return self._share(int(timestep))


def _log_snr(kept: float) -> float:
    """Half the log signal-to-noise ratio, -inf for pure noise."""
    return 0.5 * math.log(kept / (1 - kept)) if kept > 0 else -math.inf
