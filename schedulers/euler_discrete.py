"""Euler's method on the probability-flow ODE, with Karras's churn."""

import math

import numpy as np
import torch

from diffusion_core.randomness import Generators

from .base import Device, SchedulerOutput, Timestep, VEScheduler, full_precision
from .rounding import mixed, root
from .sigmas import Numbers, choice, exponential_sigmas, sigma_mode


class EulerDiscreteScheduler(VEScheduler):
    """Euler (Karras et al., arXiv 2206.00364): algorithm 2 without its second-order correction.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        prediction_type: "epsilon", "sample" or "v_prediction".
        interpolation_type: "linear", or "log_linear" (even in log sigma, from the highest of training to the lowest,
            whatever the timesteps).
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas: one may choose another spacing of sigmas.
        sigma_min, sigma_max: the ends of that spacing; by default those of the schedule.
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
        timestep_type: "discrete", or "continuous": v-prediction models are then told ``log(sigma) / 4``.
        rescale_betas_zero_snr: let the last level be nearly pure noise (arXiv 2305.08891).
        final_sigmas_type: "zero", or "sigma_min": end at the noise of the first training step, where that is below that
            of the last step.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Numbers | None = None,
        prediction_type: str = "epsilon",
        interpolation_type: str = "linear",
        use_karras_sigmas: bool | None = False,
        use_exponential_sigmas: bool | None = False,
        use_beta_sigmas: bool | None = False,
        sigma_min: float | None = None,
        sigma_max: float | None = None,
        timestep_spacing: str = "linspace",
        timestep_type: str = "discrete",
        steps_offset: int = 0,
        rescale_betas_zero_snr: bool = False,
        final_sigmas_type: str = "zero",
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        choice("interpolation_type", interpolation_type, ("linear", "log_linear"))
        choice("timestep_type", timestep_type, ("discrete", "continuous"))
        choice("final_sigmas_type", final_sigmas_type, ("zero", "sigma_min"))
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
        config = self.config
        if config["interpolation_type"] == "log_linear" and sigmas is None and sigma_mode(config) is None:
            # n steps from the highest of training to the lowest; what follows is there for those who look at `sigmas`
            even = exponential_sigmas(self._training_sigmas[-1], self._training_sigmas[0], len(times) + 1)
            levels = np.append(even, levels[-1])
        if config["timestep_type"] == "continuous" and config["prediction_type"] == "v_prediction":
            times = 0.25 * np.log(levels[: len(times)])
        self.num_inference_steps = len(times)
        self._take_schedule(times, device, sigmas=levels)

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = float("inf"),
        s_noise: float = 1.0,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """One step: the sample at the next sigma.

        Args:
            model_output: what the model predicted for ``scale_model_input(sample, timestep)``, (B, ...).
            timestep: an element of `timesteps`; only the first one is looked at.
            sample: x, (B, ...).
            s_churn, s_tmin, s_tmax, s_noise: the stochastic part of algorithm 2, off by default.
            generator: for its noise; from a list, each image's own.
            return_dict: return a `SchedulerOutput` rather than a tuple.
        """
        index = self._index(timestep)
        sigma, sigma_next = self._sigmas[index], self._sigmas[index + 1]
        sample = full_precision(sample)
        raised = sigma
        if s_churn > 0 and s_tmin <= sigma <= s_tmax:
            level = np.float32(sigma)
            higher = level * np.float32(1 + min(s_churn / (len(self._sigmas) - 1), math.sqrt(2) - 1))
            noise = self._randn(model_output, generator) * s_noise
            sample = mixed((noise, root(higher**2 - level**2)), (sample, 1))
            raised = float(higher)
        original, slope = self._solve(model_output, sample, sigma, raised)
        previous = self._moved(sample, slope, raised, sigma_next).to(model_output.dtype)
        self._step_index = index + 1
        return self._result(return_dict, previous, original)
