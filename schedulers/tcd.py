"""Sampling of trajectory consistency models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators

from .base import Timestep
from .consistency import ConsistencyScheduler
from .predictions import noise_in, predict_original
from .rounding import mixed, root
from .sigmas import Array


@dataclass
class TCDSchedulerOutput(BaseOutput):
    """One step's result.

    Args:
        prev_sample: the sample at the next noise level.
        pred_noised_sample: the sample as predicted at the level s between, before fresh noise.
    """

    prev_sample: torch.Tensor
    pred_noised_sample: torch.Tensor | None = None


class TCDScheduler(ConsistencyScheduler):
    """Strategic stochastic sampling of a trajectory consistency model (TCD, arXiv 2402.19159, algorithm 4).

    Each step goes to the level ``s = (1 - eta) t'`` below the next timestep t' (eq. 22), and noises up to t'.

    Args:
        original_inference_steps: how many timesteps the teacher's solver took in distillation.
        set_alpha_to_one: what `final_alpha_cumprod` is; sampling does not use it.
        timestep_scaling, steps_offset, timestep_spacing, clip_sample, thresholding and what goes with them: kept for
            configs; sampling does not depend on them.

    The other arguments are those of `LCMScheduler`.
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

    def _origin(self, original_inference_steps: int | None, strength: float) -> Array:
        if original_inference_steps is None:
            return super()._origin(None, strength)
        # TCD was taught at any timestep; asked for another number, it takes from all of them
        return np.arange(int(len(self) * strength), dtype=np.float64)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        eta: float = 0.3,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One step down in noise.

        Args:
            model_output: (B, C, ...), what the network returned for `sample`.
            timestep: an element of `timesteps`.
            sample: (B, C, ...), the current sample.
            eta: gamma, in [0, 1]: how random the steps are; more for more steps.
            generator: draws the noise of all steps but the last; a list has one for each image.
            return_dict: return a `TCDSchedulerOutput`, or else a tuple.
        """
        if not 0 <= eta <= 1:
            raise ValueError(f"eta={eta!r} must be at least 0 and at most 1")
        index, time, following = self._begin_step(timestep)
        kept = np.float32(self._kept[time])
        alpha, sigma = float(root(kept)), float(root(1 - kept))
        kind = self.config["prediction_type"]
        original = predict_original(kind, model_output, sample, alpha, sigma)
        noise = noise_in(kind, model_output, sample, alpha, sigma)
        goal = 0 if following is None else following
        # a hair more, for 0.7 * 700 is a hair less than 490
        between = np.float32(self._kept[math.floor((1 - eta) * goal + 1e-6)])
        moved = noised = mixed((original, root(between)), (noise, root(1 - between)))
        if eta > 0 and following is not None:
            ratio = np.float32(self._kept[following]) / between
            moved = mixed((noised, root(ratio)), (self._randn(noised, generator), root(1 - ratio)))
        self._step_index = index + 1
        return TCDSchedulerOutput(moved, noised) if return_dict else (moved, noised)
