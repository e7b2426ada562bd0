"""The midpoint method with fresh noise after each step."""

import torch

from diffusion_core.randomness import Generators

from .base import SchedulerOutput, Timestep, full_precision
from .k_dpm_2_discrete import KDPM2DiscreteScheduler
from .predictions import ancestral_split
from .sigmas import Array


class KDPM2AncestralDiscreteScheduler(KDPM2DiscreteScheduler):
    """KDPM2 that goes further down than asked, and back up with noise (k-diffusion's `sample_dpm_2_ancestral`).

    The midpoint between a sigma and the level below the next one is, as a geometric mean, just the next sigma.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas: one may choose another spacing of sigmas.
        prediction_type: "epsilon", "sample" or "v_prediction".
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
    """

    def _second_levels(self, levels: Array) -> Array:
        return levels[1:-1]

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]  # the reference has `generator` in this place
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """Half of a step: to the midpoint, or from there to the end and back up with noise.

        Args:
            model_output: what the model predicted for ``scale_model_input(sample, timestep)``, (B, ...).
            timestep: an element of `timesteps`; only the first one is looked at.
            sample: x, (B, ...).
            generator: for the noise; from a list, each image's own.
            return_dict: return a `SchedulerOutput` rather than a tuple.
        """
        index = self._index(timestep)
        sample = full_precision(sample)
        original, slope = self._solve(model_output, sample, self._sigmas[index])
        if self._pending is None:
            previous = torch.add(sample, slope, alpha=self._sigmas[index + 1] - self._sigmas[index])
            self._pending = (sample, slope) if index + 1 < len(self._times) else None
        else:
            start, _ = self._pending
            before = self._sigmas[index - 1]
            down, up = ancestral_split(before, self._sigmas[index + 1])
            previous = torch.add(start, slope, alpha=down - before)
            previous = previous.add_(self._randn(model_output, generator), alpha=up)
            self._pending = None
        self._step_index = index + 1
        return self._result(return_dict, previous.to(model_output.dtype), original)
