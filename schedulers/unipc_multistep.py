"""UniPC: a predictor and a corrector from the same formula."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .base import Device, Scheduler, SchedulerOutput, Timestep
from .rounding import expm1, mixed
from .sigmas import Array, Numbers, choice
from .solvers import Integral, SolverScheduler, Update, first_order


class Rule(NamedTuple):
    """A step by the newest prediction, and by the others' differences to it, weighted and divided by their places."""

    update: Update
    weights: list[float]
    places: list[float]

    def __call__(self, sample: torch.Tensor, newest: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(others, self.places, self.weights, strict=True)
        slopes = [((other - newest).div_(float(place)), weight) for other, place, weight in pairs]
        return self.update(sample, [newest, mixed(*slopes)] if slopes else [newest])


class UniPCMultistepScheduler(SolverScheduler):
    """UniPC, arXiv 2302.04867: UniP-p (algorithm 2) predicts, UniC-p (algorithm 1) corrects with the next output.

    The corrector costs no model call: the output for the next step is also used to redo the step before.

    Args:
        solver_order: the order p of both; 2 for guided sampling, 3 without. Higher ones work too, and are unstable.
        predict_x0: integrate the predicted data, or else the predicted noise.
        solver_type: "bh1" or "bh2", the function B(h): ``h`` or ``e^h - 1`` (section 3.1).
        lower_order_final: lower the order so that the last steps use fewer predictions.
        disable_corrector: indexes of steps whose result is not corrected.
        solver_p: another scheduler to predict with.
        sigma_min, sigma_max: the ends of Karras, exponential and beta spacings, instead of training's.
        shift_terminal: stretch flow sigmas so that the last step starts from this level.

    The other arguments are those of `DPMSolverMultistepScheduler`.
    """

    _orders = range(1, 10)
    _flow_from_noise = True

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
        predict_x0: bool = True,
        solver_type: str = "bh2",
        lower_order_final: bool = True,
        disable_corrector: Sequence[int] = [],
        solver_p: Scheduler | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        use_flow_sigmas: bool = False,
        flow_shift: float = 1.0,
        timestep_spacing: str = "linspace",
        steps_offset: int = 0,
        final_sigmas_type: str = "zero",
        rescale_betas_zero_snr: bool = False,
        use_dynamic_shifting: bool = False,
        time_shift_type: str = "exponential",
        sigma_min: float | None = None,
        sigma_max: float | None = None,
        shift_terminal: float | None = None,
    ) -> None:
        if choice("solver_type", solver_type, ("bh1", "bh2", "midpoint", "heun", "logrho")) not in ("bh1", "bh2"):
            self.register_to_config(solver_type="bh2")
        if solver_p is not None and not isinstance(solver_p, Scheduler):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"solver_p must be a scheduler or None, not {type(solver_p).__name__}")
        self.predict_x0 = predict_x0
        self.solver_p = solver_p
        self.disable_corrector = list(disable_corrector)
        self._prepare()

    @property
    def _wants_data(self) -> bool:
        return self.predict_x0

    def set_timesteps(  # pyright: ignore[reportIncompatibleMethodOverride] - the order that callers know from the reference
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        sigmas: Numbers | None = None,
        mu: float | None = None,
        timesteps: Numbers | None = None,
    ) -> None:
        """See `DPMSolverMultistepScheduler.set_timesteps`; the order of the arguments is UniPC's own."""
        super().set_timesteps(num_inference_steps, device, mu=mu, timesteps=timesteps, sigmas=sigmas)
        if self.solver_p is not None:
            self.solver_p.set_timesteps(timesteps=self.timesteps.tolist(), device=device)  # type: ignore[attr-defined]

    def copy_for_run(self) -> Any:
        twin = super().copy_for_run()
        twin.solver_p = None if self.solver_p is None else self.solver_p.copy_for_run()
        return twin

    # --- weights -----------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        count, highest = len(self._times), int(self.config["solver_order"])
        self._predictors: list[list[Rule]] = []
        self._correctors: list[list[Rule]] = []
        for index in range(count):
            most = min(highest, index + 1)
            if self.config["lower_order_final"]:
                most = min(most, count - index)
            ends = self._points[index + 1].sigma == 0
            self._predictors.append([self._predictor(index, order) for order in range(1, (1 if ends else most) + 1)])
            # the last step has nothing after it that could correct it
            self._correctors.append([] if ends else [self._corrector(index, order) for order in range(1, most + 1)])

    def _system(self, index: int, order: int) -> tuple[Integral, np.float32, list[float], Array, Array]:
        """The step's integral, B(h), where the predictions stand, and the equations for their weights (eq. 9).

        The places r_k are in units of the step, the newest earlier prediction first; the end of the step is 1.
        """
        integral = Integral.between(self._points[index], self._points[index + 1], data=self._wants_data)
        integral = integral._replace(whole=expm1(integral.u))
        here = self._points[index].log_snr
        h = self._points[index + 1].log_snr - here
        places = [(self._points[index - k].log_snr - here) / h for k in range(1, order)]
        scale = integral.u if self.config["solver_type"] == "bh1" else integral.whole
        matrix = np.vander([*places, 1.0], order, increasing=True).T
        # u phi_{k+1}(u) = phi_k(u) - 1 / k!, the integrals of e^u times the powers
        part, right = integral.whole, np.empty(order, dtype=np.float64)
        for power in range(1, order + 1):
            part = _next_part(part, integral.u, power)
            right[power - 1] = part * np.float32(math.factorial(power)) / scale
        return integral, scale, [float(place) for place in places], matrix, right

    def _predictor(self, index: int, order: int) -> "Rule":
        if order == 1:
            return Rule(first_order(self._points[index], self._points[index + 1], data=self._wants_data), [], [])
        integral, scale, places, matrix, right = self._system(index, order)
        # the paper has 1/2 for order 2, for every B(h)
        weights = [0.5] if order == 2 else _solve(matrix[:-1, :-1], right[:-1])
        return Rule(integral.update(integral.whole, scale), weights, places)

    def _corrector(self, index: int, order: int) -> "Rule":
        """The weights that redo step `index`; the last one is for the prediction at its end."""
        integral, scale, places, matrix, right = self._system(index, order)
        weights = [0.5] if order == 1 else _solve(matrix, right)
        return Rule(integral.update(integral.whole, scale), weights, [*places, 1.0])

    # --- a step ------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        super()._forget()
        self._last: tuple[int, int, torch.Tensor] | None = None

    def step(
        self, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor, return_dict: bool = True
    ) -> Any:
        """One step down in noise, after the step before it has been corrected.

        Args:
            model_output: (B, C, ...), what the network returned for `sample`.
            timestep: an element of `timesteps`.
            sample: (B, C, ...), the current sample.
            return_dict: return a `SchedulerOutput`, or else a tuple.
        """
        index, prediction, moving = self._start(model_output, timestep, sample)
        if self._last is not None and index - 1 not in self.disable_corrector:
            before, order, origin = self._last
            newest, *older = self._history
            moving = self._correctors[before][order - 1](origin, newest, [*older[: order - 1], prediction])
        outputs = self._remember(prediction, self.config["solver_order"])
        updates = self._predictors[index]
        order = min(len(outputs), len(updates))
        self._last = (index, order, moving)
        if self.solver_p is None:
            moved = updates[order - 1](moving, outputs[0], outputs[1:order])
        else:
            moved = self.solver_p.step(model_output, timestep, moving, return_dict=False)[0]  # type: ignore[attr-defined]
        moved = moved.to(model_output.dtype)
        self._step_index = index + 1
        return SchedulerOutput(moved) if return_dict else (moved,)


def _solve(matrix: Array, right: Array) -> list[float]:
    return [float(weight) for weight in np.linalg.solve(matrix, right)]


def _next_part(part: np.float32, u: np.float32, power: int) -> np.float32:
    """``u phi_{power + 1}(u)`` from ``u phi_power(u)``; by its series where the difference would cancel."""
    if abs(u) > 0.02 * power:
        return part / u - np.float32(1 / math.factorial(power))
    return np.float32(sum(float(u) ** (k + 1) / math.factorial(power + 1 + k) for k in range(12)))
