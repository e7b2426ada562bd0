"""Euler steps that go further down than asked, and back up with fresh noise."""

import torch

from diffusion_core.randomness import Generators

from .base import Device, SchedulerOutput, Timestep, VEScheduler, full_precision, tensor_of, to_list
from .predictions import ancestral_splits
from .sigmas import Numbers, choice


class EulerAncestralDiscreteScheduler(VEScheduler):
    """Euler ancestral (Crowson, k-diffusion's `sample_euler_ancestral`): DDPM's noise (eq. 7) on Euler's steps.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        prediction_type: "epsilon", "sample" or "v_prediction".
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
        rescale_betas_zero_snr: let the last level be nearly pure noise (arXiv 2305.08891).
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Numbers | None = None,
        prediction_type: str = "epsilon",
        timestep_spacing: str = "linspace",
        steps_offset: int = 0,
        rescale_betas_zero_snr: bool = False,
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        self._take_training_schedule()

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Choose the steps: how many, or which timesteps (falling), or which sigmas (falling, with the end)."""
        times, levels = self._sigma_schedule(num_inference_steps, timesteps, sigmas)
        self.num_inference_steps = len(times)
        self._take_schedule(times, device, sigmas=levels)
        downs, ups = ancestral_splits(tensor_of(self._sigmas, torch.float32))
        self._splits = list(zip(to_list(downs), to_list(ups), strict=True))

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """One step: the sample at the next sigma.

        Args:
            model_output: what the model predicted for ``scale_model_input(sample, timestep)``, (B, ...).
            timestep: an element of `timesteps`; only the first one is looked at.
            sample: x, (B, ...).
            generator: for the noise; from a list, each image's own.
            return_dict: return a `SchedulerOutput` rather than a tuple.
        """
        index = self._index(timestep)
        sigma = self._sigmas[index]
        sample = full_precision(sample)
        original, slope = self._solve(model_output, sample, sigma)
        down, up = self._splits[index]
        previous = self._moved(sample, slope, sigma, down)
        # drawn on the last step too, where it counts for nothing, so that a generator ends as in the reference
        previous = previous.add_(self._randn(model_output, generator) * up).to(model_output.dtype)
        self._step_index = index + 1
        return self._result(return_dict, previous, original)
