"""DEIS: exponential integrators with polynomial extrapolation, as a multistep method."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .base import SchedulerOutput, Timestep
from .sigmas import Array, choice
from .solvers import SolverScheduler, Update, first_order


class Quadrature(NamedTuple):
    """A step ``x' = alpha' (x / alpha + sum_j m_j C_j)``, the newest prediction first."""

    alpha: float
    alpha_next: float
    weights: tuple[float, ...]

    def __call__(self, sample: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        total = sample / self.alpha
        for output, weight in zip(outputs, self.weights, strict=False):
            total = total.add_(output * weight)
        return total.mul_(self.alpha_next)


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
    _noise_by_data = True

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
        self._steps: list[list[Update | Quadrature]] = []
        for index in range(last + 1):
            most = int(self.config["solver_order"])
            if index == last and (few or self._points[index + 1].sigma == 0):
                most = 1
            elif index == last - 1 and few:
                most = min(most, 2)
            self._steps.append([self._update(index, order) for order in range(1, min(most, index + 1) + 1)])

    def _update(self, index: int, order: int) -> "Update | Quadrature":
        """The step from `index` on, of one order."""
        start, end = self._points[index], self._points[index + 1]
        if order == 1:
            return first_order(start, end, data=False)
        rhos = [point.sigma / point.alpha for point in self._points[index - order + 1 : index + 2]][::-1]
        weights = lagrange_integrals(rhos[1], rhos[0], rhos[1:])
        return Quadrature(float(start.alpha), float(end.alpha), tuple(weights))

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


def lagrange_integrals(start: np.float32, end: np.float32, nodes: Sequence[np.float32]) -> list[float]:
    """For each node, the integral over rho from `start` to `end` of its Lagrange polynomial in log rho."""
    integrals: list[float] = []
    for place, node in enumerate(nodes):
        others = [*nodes[place + 1 :], *nodes[:place]]
        integrals.append(float(_antiderivative(end, node, others) - _antiderivative(start, node, others)))
    return integrals


def _antiderivative(rho: np.float32, node: np.float32, others: Sequence[np.float32]) -> np.float32:
    """The antiderivative at `rho` of the polynomial in log rho that is 1 at `node` and 0 at the one or two `others`."""
    here, top = np.log(rho), np.log(node)
    roots = [np.log(other) for other in others]
    if len(roots) == 1:
        return rho * (-roots[0] + here - 1) / (top - roots[0])
    c, d = roots
    total = rho * (c * (d - here + 1) - d * here + d + here**2 - 2 * here + 2)
    return total / ((top - c) * (top - d))
