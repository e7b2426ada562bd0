"""Ancestral sampling of a diffusion model, step by step as it was trained."""

import math
from typing import Any

import numpy as np
import torch

from diffusion_core.randomness import Generators

from .base import Device, SchedulerOutput, Timestep, VPScheduler
from .rounding import mixed, root
from .sigmas import Numbers, choice

VARIANCE_TYPES = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range")


class DDPMScheduler(VPScheduler):
    """DDPM (Ho et al., arXiv 2006.11239): draws from the posterior ``q(x_{t-1} | x_t, x_0)`` of eq. 6 and 7.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        variance_type: "fixed_small" (eq. 7's ``beta tilde``) or "fixed_large" (beta), with "_log" or without the same;
            "learned" or "learned_range" if the model puts out twice the channels, the second half being the variance
            (arXiv 2102.09672, eq. 15).
        clip_sample, clip_sample_range: keep the predicted clean sample in this range.
        prediction_type: "epsilon", "sample" or "v_prediction".
        thresholding, dynamic_thresholding_ratio, sample_max_value: dynamic thresholding; see `threshold_sample`.
        timestep_spacing, steps_offset: how fewer steps than T are spread; see `spaced_timesteps`.
        rescale_betas_zero_snr: let the last level be pure noise (arXiv 2305.08891).
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Numbers | None = None,
        variance_type: str = "fixed_small",
        clip_sample: bool = True,
        prediction_type: str = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        clip_sample_range: float = 1.0,
        sample_max_value: float = 1.0,
        timestep_spacing: str = "leading",
        steps_offset: int = 0,
        rescale_betas_zero_snr: bool = False,
    ) -> None:
        choice("variance_type", variance_type, VARIANCE_TYPES)
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        self.variance_type = variance_type
        self._take_training_schedule()

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Choose the steps: how many, or which timesteps (falling), or which VE sigmas (falling, with the end)."""
        self._take_vp_schedule(num_inference_steps, device, timesteps, sigmas)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """One step: the sample at the next level, drawn from the posterior.

        Args:
            model_output: what the model predicted, (B, C, ...), or (B, 2C, ...) with a learned variance.
            timestep: an element of `timesteps`, or any timestep of training.
            sample: x_t, (B, C, ...).
            generator: for the noise; from a list, each image's own.
            return_dict: return a `SchedulerOutput` rather than a tuple.
        """
        kept, kept_next = self._single(timestep)
        learned: torch.Tensor | None = None
        if self.variance_type.startswith("learned") and model_output.shape[1] == 2 * sample.shape[1]:
            model_output, learned = torch.tensor_split(model_output, 2, dim=1)
        alpha, sigma = float(root(kept)), float(root(1 - kept))
        original = self._predict_original(model_output, sample, alpha, sigma)
        # one step from the next level to this one multiplies by sqrt(ratio) and adds `beta`
        ratio = kept / kept_next
        beta = 1 - ratio
        data_share = root(kept_next) * beta / (1 - kept)
        previous = mixed((original, data_share), (sample, root(ratio) * (1 - kept_next) / (1 - kept)))
        if kept != self._kept[0]:
            noise = self._randn(model_output, generator)
            previous = previous.add_(noise.mul_(self._deviation(kept, kept_next, learned)))
        self._step_done()
        return self._result(return_dict, previous, original)

    def _deviation(self, kept: np.float32, kept_next: np.float32, learned: torch.Tensor | None) -> Any:
        """The standard deviation of the posterior."""
        if kept_next == 1:
            return 0.0  # the end is clean
        large = float(1 - kept / kept_next)
        small = max(float((1 - kept_next) / (1 - kept) * (1 - kept / kept_next)), 1e-20)
        if learned is None:
            return float(root(large if self.variance_type.startswith("fixed_large") else small))
        if self.variance_type == "learned":
            return learned.sqrt()
        share = (learned + 1) / 2
        return torch.exp(0.5 * (share * math.log(large) + (1 - share) * math.log(small)))
