"""DPM-Solver and DPM-Solver++ as multistep methods, with their stochastic forms."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from diffusion_core.randomness import Generators

from .base import SchedulerOutput, Timestep
from .sigmas import Array
from .solvers import Integral, SolverScheduler, Update, differences, first_order

ALGORITHMS = ("dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++")


class DPMSolverMultistepScheduler(SolverScheduler):
    """DPM-Solver++ (2M and its kin), arXiv 2211.01095, algorithm 2; DPM-Solver, arXiv 2206.00927, as a multistep.

    Of order 1, 2 or 3 in the steps before. "dpmsolver++" integrates the predicted data, "dpmsolver" the predicted
    noise; the "sde-" forms solve the diffusion SDE and draw fresh noise each step (2211.01095, appendix B).

    Args:
        num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas, rescale_betas_zero_snr: the training
            schedule (see `sigmas.make_betas`).
        solver_order: 1, 2 (for guided sampling) or 3 (without guidance).
        prediction_type: "epsilon", "sample", "v_prediction" or "flow_prediction".
        thresholding, dynamic_thresholding_ratio, sample_max_value: dynamic thresholding, for models in pixel space.
        algorithm_type: as above.
        solver_type: "midpoint" or "heun", the rule for the difference of second order.
        lower_order_final: fall to lower order in the last two steps, where there are fewer than 15.
        euler_at_final: take the last step with order 1.
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas, use_lu_lambdas: another spacing of noise levels.
        use_flow_sigmas, flow_shift: a straight path, as flow matching has it, and its shift.
        final_sigmas_type: end at "zero" noise, or at "sigma_min", the least of training.
        lambda_min_clipped: start no lower in log-SNR than this; -5.1 for cosine schedules (2206.00927, appendix D).
        variance_type: "learned" or "learned_range" where the network's output has a variance behind its prediction.
        timestep_spacing, steps_offset: see `sigmas.spaced_timesteps`.
        use_dynamic_shifting, time_shift_type: shift flow sigmas by the `mu` of the run.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Sequence[float] | None = None,
        solver_order: int = 2,
        prediction_type: str = "epsilon",
        thresholding: bool = False,
        dynamic_thresholding_ratio: float = 0.995,
        sample_max_value: float = 1.0,
        algorithm_type: str = "dpmsolver++",
        solver_type: str = "midpoint",
        lower_order_final: bool = True,
        euler_at_final: bool = False,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        use_lu_lambdas: bool = False,
        use_flow_sigmas: bool = False,
        flow_shift: float = 1.0,
        final_sigmas_type: str = "zero",
        lambda_min_clipped: float = -math.inf,
        variance_type: str | None = None,
        timestep_spacing: str = "linspace",
        steps_offset: int = 0,
        rescale_betas_zero_snr: bool = False,
        use_dynamic_shifting: bool = False,
        time_shift_type: str = "exponential",
    ) -> None:
        self._take_algorithm(ALGORITHMS)
        self._prepare()

    def _plan(self) -> None:
        config, last = self.config, len(self._times) - 1
        few = bool(config["lower_order_final"]) and last < 14
        self._steps: list[list[tuple[Update, list[float]]]] = []
        for index in range(last + 1):
            most = int(config["solver_order"])
            if index == last and (config["euler_at_final"] or few or self._points[index + 1].sigma == 0):
                most = 1
            elif index == last - 1 and few:
                most = min(most, 2)
            self._steps.append([self._update(index, order) for order in range(1, min(most, index + 1) + 1)])

    def _whole(self, times: Array, spacing: str) -> Array:
        # where the cosine schedule is steep, rounding up would tell the model of more noise than there is
        steep = self.config["beta_schedule"] == "squaredcos_cap_v2"
        return super()._whole(times, "exponential" if steep else spacing)

    def _update(self, index: int, order: int) -> tuple[Update, list[float]]:
        """The step from `index` on, of one order, for the differences that belong to its ratios."""
        start, end = self._points[index], self._points[index + 1]
        options = {"data": self._wants_data, "stochastic": self._stochastic}
        if order == 1:
            return first_order(start, end, **options), []
        integral = Integral.between(start, end, **options)
        places = [point.log_snr for point in self._points[index - order + 1 : index + 2]]
        h = places[-1] - places[-2]
        ratios = [float((places[-2 - k] - places[-3 - k]) / h) for k in range(order - 1)]
        if order == 3:
            return integral.update(integral.whole, integral.first, integral.second), ratios
        rule = integral.first if self.config["solver_type"] == "heun" else integral.midpoint
        return integral.update(integral.whole, rule), ratios

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        generator: Generators | None = None,
        variance_noise: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One step down in noise.

        Args:
            model_output: (B, C, ...), what the network returned for `sample`.
            timestep: an element of `timesteps`.
            sample: (B, C, ...), the current sample.
            generator: draws the noise of the "sde-" algorithms; a list has one for each image.
            variance_noise: noise to take instead.
            return_dict: return a `SchedulerOutput`, or else a tuple.
        """
        index, prediction, moving = self._start(model_output, timestep, sample)
        outputs = self._remember(prediction, self.config["solver_order"])
        updates = self._steps[index]
        update, ratios = updates[min(len(outputs), len(updates)) - 1]
        noise = None
        if self._stochastic:
            noise = self._noise_for(moving, generator, variance_noise)
        moved = update(moving, differences(outputs, ratios), noise).to(model_output.dtype)
        self._step_index = index + 1
        return SchedulerOutput(moved) if return_dict else (moved,)
