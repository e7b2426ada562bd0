"""A second-order midpoint method on the probability-flow ODE."""

import numpy as np
import torch

from .base import Device, SchedulerOutput, Timestep, full_precision
from .sigmas import Array, Numbers, choice, sigma_mode, timestep_at
from .two_stage import TwoStageScheduler, between


class KDPM2DiscreteScheduler(TwoStageScheduler):
    """DPM-Solver-2's kin (Karras et al., arXiv 2206.00364, appendix D.2; Crowson, k-diffusion's `sample_dpm_2`).

    Half a step to the geometric mean of both sigmas, then the whole step with the slope found there. n steps take
    2n - 1 calls: the last is Euler's.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas: one may choose another spacing of sigmas.
        prediction_type: "epsilon", "sample" or "v_prediction".
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: str = "linear",
        trained_betas: Numbers | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        prediction_type: str = "epsilon",
        timestep_spacing: str = "linspace",
        steps_offset: int = 0,
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        self._take_training_schedule()
        self.set_timesteps(num_train_timesteps)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        num_train_timesteps: int | None = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Choose the steps: how many, or which timesteps (falling), or which sigmas (falling, with the end)."""
        self._check_train_steps(num_train_timesteps)
        times, levels = self._sigma_schedule(num_inference_steps, timesteps, sigmas)
        mode = sigma_mode(self._own_config())
        if sigmas is None and mode == "karras":
            times = np.round(times)
        second = self._second_levels(levels)
        second_times = timestep_at(second, self._training_sigmas)
        self._take_two_stages(times, levels, second_times, second, device, exact=mode is not None)

    def _second_levels(self, levels: Array) -> Array:
        """The sigma that each step but the last looks ahead to."""
        return between(levels[1:-1], levels[:-2])

    def step(
        self, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor, return_dict: bool = True
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """Half of a step: to the midpoint, or from there to the end.

        Args:
            model_output: what the model predicted for ``scale_model_input(sample, timestep)``, (B, ...).
            timestep: an element of `timesteps`; only the first one is looked at.
            sample: x, (B, ...).
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
            previous = self._moved(start, slope, self._sigmas[index - 1], self._sigmas[index + 1])
            self._pending = None
        self._step_index = index + 1
        return self._result(return_dict, previous.to(model_output.dtype), original)
