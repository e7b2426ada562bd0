"""DPM-Solver and DPM-Solver++ as singlestep methods."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from diffusion_core.randomness import Generators

from .base import SchedulerOutput, Timestep
from .solvers import Integral, SolverScheduler, Update, first_order

ALGORITHMS = ("dpmsolver", "dpmsolver++", "sde-dpmsolver++")


class DPMSolverSinglestepScheduler(SolverScheduler):
    """DPM-Solver-2 and -3, arXiv 2206.00927, algorithms 1 and 2; DPM-Solver++(2S), arXiv 2211.01095, algorithm 1.

    Steps go in groups of `solver_order`: a step of order 1, then the same way again from the group's start with order
    2, then with order 3, each with one more prediction.

    Args:
        solver_order: 1, 2 or 3.
        solver_type: "midpoint" or "heun", the rule for the differences.
        lower_order_final: end with a step of order 1.
        final_sigmas_type: end at "zero" noise, where the last step has order 1 in any case, or at "sigma_min".

    The other arguments are those of `DPMSolverMultistepScheduler`.
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
        lower_order_final: bool = False,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        use_flow_sigmas: bool = False,
        flow_shift: float = 1.0,
        final_sigmas_type: str = "zero",
        lambda_min_clipped: float = -math.inf,
        variance_type: str | None = None,
        use_dynamic_shifting: bool = False,
        time_shift_type: str = "exponential",
    ) -> None:
        self._take_algorithm(ALGORITHMS)
        self._prepare()

    def get_order_list(self, num_inference_steps: int) -> list[int]:
        """The order of each step of a run: 1, 2, 3, 1, 2, 3, ... for `solver_order` 3."""
        highest = int(self.config["solver_order"])
        orders = [1 + index % highest for index in range(num_inference_steps)]
        whole_groups = num_inference_steps % highest == 0
        if self.config["final_sigmas_type"] == "zero" or (self.config["lower_order_final"] and whole_groups):
            orders[-1] = 1
        return orders

    def _plan(self) -> None:
        self.order_list = self.get_order_list(len(self._times))
        if self._points[-1].sigma == 0:
            self.order_list[-1] = 1
        self._steps: list[list[tuple[Update, list[float]]]] = [
            [self._update(index, order) for order in range(1, highest + 1)]
            for index, highest in enumerate(self.order_list)
        ]

    def _update(self, index: int, order: int) -> tuple[Update, list[float]]:
        """The way from the start of a group to the end of step `index`, which is the group's step number `order`.

        It is for the differences between the places of the group's predictions, in units of the way, the newest first.
        """
        start, end = self._points[index - order + 1], self._points[index + 1]
        options = {"data": self._wants_data, "stochastic": self._stochastic}
        if order == 1:
            return first_order(start, end, **options), []
        integral = Integral.between(start, end, **options)
        heun = self.config["solver_type"] == "heun"
        h = end.log_snr - start.log_snr
        places = [float((self._points[index - k].log_snr - start.log_snr) / h) for k in range(order - 1)]
        if order == 2:
            return integral.update(integral.whole, integral.first if heun else integral.midpoint), places
        if not heun:
            return integral.update(integral.whole, integral.first), places[:1]
        return integral.update(integral.whole, integral.first, integral.second), places

    def _forget(self) -> None:
        super()._forget()
        self._group_start: torch.Tensor | None = None

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One step down in noise. A run that begins inside a group begins a group of its own there.

        Args:
            model_output: (B, C, ...), what the network returned for `sample`.
            timestep: an element of `timesteps`.
            sample: (B, C, ...), the current sample.
            generator: draws the noise of "sde-dpmsolver++"; a list has one for each image.
            return_dict: return a `SchedulerOutput`, or else a tuple.
        """
        index, prediction, moving = self._start(model_output, timestep, sample)
        order = min(self.order_list[index], len(self._history) + 1)
        if order == 1 or self._group_start is None:
            self._history, self._group_start = [], moving
        outputs = self._remember(prediction, order)
        noise = self._randn(model_output, generator).to(moving) if self._stochastic else None
        update, places = self._steps[index][order - 1]
        moved = update(self._group_start, _at_the_start(outputs, places), noise).to(model_output.dtype)
        self._step_index = index + 1
        return SchedulerOutput(moved) if return_dict else (moved,)


def _at_the_start(outputs: Sequence[torch.Tensor], places: Sequence[float]) -> list[torch.Tensor]:
    """D0, D1, D2 at the start of a group, of the line or parabola through its predictions.

    Args:
        outputs: the group's predictions, the newest first.
        places: where the newest stand, none to two, the start being 0.
    """
    oldest = outputs[-1]
    slopes = [(output - oldest).mul_(1 / place) for output, place in zip(outputs, places, strict=False)]
    if len(slopes) < 2:
        return [oldest, *slopes]
    (near, far), span = places, places[0] - places[1]
    slope = (slopes[1] * near).sub_(slopes[0] * far).div_(span)
    return [oldest, slope, (slopes[0] - slopes[1]).mul_(2).div_(span)]
