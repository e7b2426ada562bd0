"""Deterministic sampling in few steps, with noise added back on request."""

import numpy as np
import torch

from diffusion_core.randomness import Generators

from .base import Device, SchedulerOutput, Timestep, VPScheduler
from .predictions import noise_in, predict_noise
from .rounding import mixed, root
from .sigmas import Numbers, choice


class DDIMScheduler(VPScheduler):
    """DDIM (Song et al., arXiv 2010.02502): eq. 12, with the noise of eq. 16 where `eta` > 0.

    A step goes down by ``num_train_timesteps // num_inference_steps`` as in the reference, which with "linspace" is not
    quite the next timestep; with timesteps or sigmas of one's own it is.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        clip_sample, clip_sample_range: keep the predicted clean sample in this range.
        set_alpha_to_one: end at no noise at all, rather than at the level of the first training step.
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
        prediction_type: "epsilon", "sample" or "v_prediction".
        thresholding, dynamic_thresholding_ratio, sample_max_value: dynamic thresholding; see `threshold_sample`.
        rescale_betas_zero_snr: let the last level be pure noise (arXiv 2305.08891).
    """

    _strides = True

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Numbers | None = None,
        clip_sample: bool = True,
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
        prediction_type: str = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        clip_sample_range: float = 1.0,
        sample_max_value: float = 1.0,
        timestep_spacing: str = "leading",
        rescale_betas_zero_snr: bool = False,
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        self._take_training_schedule(ends_clean=set_alpha_to_one)

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
        eta: float = 0.0,
        use_clipped_model_output: bool = False,
        generator: Generators | None = None,
        variance_noise: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """One step: the sample at the next level.

        Args:
            model_output: what the model predicted, (B, ...).
            timestep: an element of `timesteps`, or any timestep of training.
            sample: x_t, (B, ...).
            eta: how much of the noise is fresh: 0 none (deterministic), 1 as much as DDPM has.
            use_clipped_model_output: take the direction from the clipped clean sample, not from the model.
            generator: for the noise; from a list, each image's own.
            variance_noise: the noise itself, in place of `generator`.
            return_dict: return a `SchedulerOutput` rather than a tuple.
        """
        if generator is not None and variance_noise is not None:
            raise ValueError("give generator or variance_noise, not both")
        kept, kept_next = self._single(timestep)
        alpha, sigma = float(root(kept)), float(root(1 - kept))
        original = self._predict_original(model_output, sample, alpha, sigma)
        if use_clipped_model_output:
            noise = predict_noise(original, sample, alpha, sigma)
        else:
            noise = noise_in(self.config["prediction_type"], model_output, sample, alpha, sigma)
        fresh_share = np.float32(eta) * root(max((1 - kept_next) / (1 - kept) * (1 - kept / kept_next), kept * 0))
        stays = root(max(1 - kept_next - fresh_share * fresh_share, kept * 0))
        previous = mixed((original, root(kept_next)), (noise, stays))
        if eta > 0:
            fresh = self._randn(model_output, generator) if variance_noise is None else variance_noise
            previous = previous.add_(fresh * float(fresh_share))
        self._step_done()
        return self._result(return_dict, previous, original)
