"""The midpoint method with fresh noise after each step."""

import torch

from diffusion_core.randomness import Generators

from .base import SchedulerOutput, Timestep, full_precision, tensor_of, to_list
from .k_dpm_2_discrete import KDPM2DiscreteScheduler
from .predictions import ancestral_splits
from .sigmas import Array
from .two_stage import between


class KDPM2AncestralDiscreteScheduler(KDPM2DiscreteScheduler):
    """KDPM2 that goes further down than asked, and back up with noise (k-diffusion's `sample_dpm_2_ancestral`).

    The midpoint between a sigma and the level below the next one is, as a geometric mean, just the next sigma, but for
    the digits that the level below loses in float32 (see `ancestral_splits`).

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas: one may choose another spacing of sigmas.
        prediction_type: "epsilon", "sample" or "v_prediction".
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
    """

    def _second_levels(self, levels: Array) -> Array:
        sigmas = tensor_of(levels, torch.float32)
        downs, ups = ancestral_splits(sigmas)
        # where all digits are lost, the exact value
        downs = torch.where(downs == 0, sigmas[1:] ** 2 / sigmas[:-1], downs)
        self._splits = list(zip(to_list(downs), to_list(ups), strict=True))
        return between(levels[:-2], downs[:-1].double().numpy())

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
            previous = self._moved(sample, slope, self._sigmas[index], self._sigmas[index + 1])
            self._pending = (sample, slope) if index + 1 < len(self._times) else None
        else:
            start, _ = self._pending
            before = self._sigmas[index - 1]
            down, up = self._splits[index // 2]
            previous = self._moved(start, slope, before, down)
            previous = previous.add_(self._randn(model_output, generator) * up)
            self._pending = None
        self._step_index = index + 1
        return self._result(return_dict, previous.to(model_output.dtype), original)
