"""DDIM as CogVideoX-2b uses it."""

import math
from typing import Any

import torch

from diffusion_core.randomness import Generators

from .base import Timestep, full_precision
from .cogvideox import CogVideoXScheduler
from .predictions import predict_original


class CogVideoXDDIMScheduler(CogVideoXScheduler):
    """DDIM (arXiv 2010.02502, eq. 12 without noise) on CogVideoX's shifted schedule (arXiv 2408.06072).

    Args:
        num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas: the training schedule before its shift
            (see `sigmas.make_betas`).
        set_alpha_to_one: end at no noise at all, rather than at the level of the first training step.
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
        prediction_type: "epsilon", "sample" or "v_prediction".
        rescale_betas_zero_snr: let the last level be pure noise (arXiv 2305.08891).
        snr_shift_scale: what the signal-to-noise ratio is divided by.
        clip_sample, clip_sample_range, sample_max_value: kept for configs; latents are not clipped.
    """

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        eta: float = 0.0,
        use_clipped_model_output: bool = False,
        generator: Generators | None = None,
        variance_noise: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One step down in noise.

        Args:
            model_output: (B, ...), what the network returned for `sample`.
            timestep: an element of `timesteps`, or any timestep of training.
            sample: (B, ...), the current sample.
            eta, use_clipped_model_output, generator, variance_noise: without effect; callers of DDIM pass them.
            return_dict: return a `SchedulerOutput`, or else a tuple.
        """
        self._ready()
        kept, kept_next = self._move_for(timestep)
        moving = full_precision(sample)
        output = full_precision(model_output)
        kind = self.config["prediction_type"]
        original = predict_original(kind, output, moving, math.sqrt(kept), math.sqrt(1 - kept))
        stays = math.sqrt((1 - kept_next) / (1 - kept))
        moved = torch.add(moving * stays, original, alpha=math.sqrt(kept_next) - math.sqrt(kept) * stays)
        return self._result_like(sample, moved, original, return_dict)
