"""Sampling of latent consistency models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators

from .base import Timestep
from .consistency import ConsistencyScheduler
from .rounding import mixed, root

# The standard deviation of the data that the boundary condition assumes (2310.04378, section 4.1).
SIGMA_DATA = 0.5


@dataclass
class LCMSchedulerOutput(BaseOutput):
    """One step's result.

    Args:
        prev_sample: the sample at the next noise level.
        denoised: the clean sample as the model now sees it.
    """

    prev_sample: torch.Tensor
    denoised: torch.Tensor | None = None


class LCMScheduler(ConsistencyScheduler):
    """Multistep sampling of a latent consistency model (LCM, arXiv 2310.04378, algorithm 3).

    Each step predicts the data, ``f = c_skip x + c_out x_0`` (eq. 9), and noises it to the next level.

    Args:
        num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas, rescale_betas_zero_snr: the training
            schedule (see `sigmas.make_betas`).
        original_inference_steps: how many timesteps the teacher's solver took in distillation.
        clip_sample, clip_sample_range: keep the predicted data in range.
        set_alpha_to_one: what `final_alpha_cumprod` is; sampling does not use it.
        steps_offset, timestep_spacing: kept for configs; the taught timesteps do not depend on them.
        prediction_type: "epsilon", "sample" or "v_prediction".
        thresholding, dynamic_thresholding_ratio, sample_max_value: dynamic thresholding, for models in pixel space.
        timestep_scaling: how fast the boundary condition falls off with the timestep.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: str = "scaled_linear",
        trained_betas: Sequence[float] | None = None,
        original_inference_steps: int = 50,
        clip_sample: bool = False,
        clip_sample_range: float = 1.0,
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
        prediction_type: str = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        sample_max_value: float = 1.0,
        timestep_spacing: str = "leading",
        timestep_scaling: float = 10.0,
        rescale_betas_zero_snr: bool = False,
    ) -> None:
        self._prepare()

    def get_scalings_for_boundary_condition_discrete(self, timestep: float) -> tuple[float, float]:
        """``(c_skip, c_out)`` at a timestep, which are (1, 0) at 0 (2310.04378, section 4.1)."""
        scaled = np.float32(timestep * float(self.config["timestep_scaling"]))
        total = scaled**2 + np.float32(SIGMA_DATA**2)
        return float(np.float32(SIGMA_DATA**2) / total), float(scaled / root(total))

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One step down in noise.

        Args:
            model_output: (B, C, ...), what the network returned for `sample`.
            timestep: an element of `timesteps`.
            sample: (B, C, ...), the current sample.
            generator: draws the noise of all steps but the last; a list has one for each image.
            return_dict: return an `LCMSchedulerOutput`, or else a tuple.
        """
        index, time, following = self._begin_step(timestep)
        kept = np.float32(self._kept[time])
        original = self._predict_original(model_output, sample, float(root(kept)), float(root(1 - kept)))
        skip, out = self.get_scalings_for_boundary_condition_discrete(time)
        moved = denoised = mixed((original, out), (sample, skip))
        if following is not None:
            left = np.float32(self._kept[following])
            fresh = self._randn(model_output, generator)
            moved = mixed((denoised, root(left)), (fresh, root(1 - left)))
        self._step_index = index + 1
        return LCMSchedulerOutput(moved, denoised) if return_dict else (moved, denoised)
