"""DEIS: exponential integrators with polynomial extrapolation, as a multistep method."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .base import SchedulerOutput, Timestep
from .sigmas import Array, choice
from .solvers import SolverScheduler, Update, first_order


class DEISMultistepScheduler(SolverScheduler):
    """DEIS, arXiv 2204.13902: rho-AB methods (section 3.3) with polynomials in log rho, rho = noise / signal.

    ``x' / alpha' = x / alpha + sum_j m_j C_j`` where ``C_j`` is the integral over rho of the Lagrange polynomial that
    is 1 at the j-th earlier prediction of the noise (eq. 15).

    Args:
        solver_order: 1, 2 or 3: how many predictions a step uses.
        algorithm_type: "deis"; the names of DPM-Solver are taken for it.
        solver_type: "logrho"; the names of other solvers are taken for it.
        lower_order_final: fall to lower order in the last two steps, where there are fewer than 15.

    The other arguments are those of `DPMSolverMultistepScheduler`.
    """

    _final_sigmas_type = "sigma_min"

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
        algorithm_type: str = "deis",
        solver_type: str = "logrho",
        lower_order_final: bool = True,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        use_flow_sigmas: bool = False,
        flow_shift: float = 1.0,
        timestep_spacing: str = "linspace",
        steps_offset: int = 0,
        use_dynamic_shifting: bool = False,
        time_shift_type: str = "exponential",
    ) -> None:
        choice("algorithm_type", algorithm_type, ("deis", "dpmsolver", "dpmsolver++"))
        choice("solver_type", solver_type, ("logrho", "midpoint", "heun", "bh1", "bh2"))
        self.register_to_config(algorithm_type="deis", solver_type="logrho")
        self._prepare()

    @property
    def _wants_data(self) -> bool:
        return False

    def _end(self, levels: Array) -> float:
        return 0.0 if self.config["use_flow_sigmas"] else super()._end(levels)

    def _plan(self) -> None:
        last = len(self._times) - 1
        few = bool(self.config["lower_order_final"]) and last < 14
        self._steps: list[list[Update]] = []
        for index in range(last + 1):
            most = int(self.config["solver_order"])
            if index == last and (few or self._points[index + 1].sigma == 0):
                most = 1
            elif index == last - 1 and few:
                most = min(most, 2)
            self._steps.append([self._update(index, order) for order in range(1, min(most, index + 1) + 1)])

    def _update(self, index: int, order: int) -> Update:
        """The step from `index` on, of one order."""
        start, end = self._points[index], self._points[index + 1]
        if order == 1:
            return first_order(start, end, data=False)
        # in y = log(rho / rho_start) the newest prediction stands at 0, and d rho = rho_start e^y dy
        nodes = [start.log_snr - self._points[index - k].log_snr for k in range(order)]
        rho = start.sigma / start.alpha
        weights = lagrange_integrals(nodes, start.log_snr - end.log_snr)
        return Update(end.alpha / start.alpha, tuple(end.alpha * rho * weight for weight in weights))

    def step(
        self, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor, return_dict: bool = True
    ) -> Any:
        """One step down in noise.

        Args:
            model_output: (B, C, ...), what the network returned for `sample`.
            timestep: an element of `timesteps`.
            sample: (B, C, ...), the current sample.
            return_dict: return a `SchedulerOutput`, or else a tuple.
        """
        index, prediction, moving = self._start(model_output, timestep, sample)
        outputs = self._remember(prediction, self.config["solver_order"])
        updates = self._steps[index]
        moved = updates[min(len(outputs), len(updates)) - 1](moving, outputs).to(model_output.dtype)
        self._step_index = index + 1
        return SchedulerOutput(moved) if return_dict else (moved,)


def lagrange_integrals(nodes: Sequence[float], end: float) -> list[float]:
    """For each node, the integral of ``e^y`` times its Lagrange polynomial, for y from 0 to `end`."""
    moments = [math.expm1(end)]
    for power in range(1, len(nodes)):
        moments.append(end**power * math.exp(end) - power * moments[-1])
    integrals: list[float] = []
    for node in nodes:
        others = [other for other in nodes if other != node]
        coefficients = np.poly(others)[::-1] / math.prod(node - other for other in others)
        integrals.append(float(np.dot(coefficients, moments)))
    return integrals
