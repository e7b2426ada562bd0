"""What the exponential-integrator solvers share: points on the noise path, and one step's coefficients.

A sample at noise level i is ``x_i = alpha_i x_0 + sigma_i eps``; ``lambda_i = log(alpha_i / sigma_i)`` is half the log
signal-to-noise ratio. DPM-Solver (arXiv 2206.00927), DPM-Solver++ (2211.01095), DEIS (2204.13902) and UniPC
(2302.04867) all solve the linear part of the ODE exactly, and the network's part with a polynomial in lambda. A step
is therefore a weighted sum of the sample and of the last predictions, whose weights depend on the noise levels alone:
they are worked out once, on the host, before sampling begins.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from diffusion_core.randomness import Generators, randn_tensor

from .base import (
    Device,
    VPScheduler,
    check_one_schedule,
    full_precision,
    to_list,
)
from .predictions import noise_in, predict_noise, predict_original, threshold_sample
from .rounding import exp, log, mixed, root
from .sigmas import (
    SPACINGS,
    Array,
    Numbers,
    check_sigmas,
    check_steps,
    check_timesteps,
    choice,
    respaced,
    shifted,
    shifted_by_mu,
    sigma_at,
    spaced_timesteps,
    stretched,
    timestep_at,
    training_sigmas,
)

# Pure noise has no signal: lambda is -inf there. This much is assumed so that every weight is finite.
LEAST_ALPHA = 1e-6


class Point(NamedTuple):
    """A noise level: the scales of signal and noise, float32, and lambda, ``inf`` where there is no noise."""

    alpha: np.float32
    sigma: np.float32
    log_snr: np.float32

    @classmethod
    def variance_preserving(cls, sigma: float) -> "Point":
        """From the ratio noise / signal, with ``alpha**2 + sigma**2 = 1``."""
        ratio = np.float32(sigma)
        alpha = 1 / root(ratio * ratio + 1)
        return cls(alpha, ratio * alpha, log(alpha) - log(ratio * alpha))

    @classmethod
    def straight(cls, sigma: float) -> "Point":
        """From the place on the straight path of flow matching, with ``alpha + sigma = 1``."""
        alpha = np.float32(max(1 - np.float32(sigma), LEAST_ALPHA))
        return cls(alpha, np.float32(sigma), log(alpha) - log(sigma))


class Update(NamedTuple):
    """One step: ``sample * x + outputs[0] * m_0 + outputs[1] * m_1 + ... + noise * z``, the newest prediction first."""

    sample: float
    outputs: tuple[float, ...]
    noise: float = 0.0

    def __call__(
        self, sample: torch.Tensor, outputs: Sequence[torch.Tensor], noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The next sample, from `outputs` listed from the newest to the oldest, of which as many are used as count."""
        terms = [(sample, self.sample), *zip(outputs, self.outputs, strict=False)]
        return mixed(*terms, *([] if noise is None or self.noise == 0 else [(noise, self.noise)]))


class Integral(NamedTuple):
    """The exact part of a step from one point to another.

    With ``u`` the signed distance in lambda and D0, D1, D2 the prediction and its first two scaled differences,

        x' = carry * x - scale * (expm1(u) * D0 + first * D1 + second * D2) + noise * z

    Data prediction has ``u = -h``, noise prediction ``u = h``, where ``h`` is the rise of lambda (DPM-Solver++,
    propositions 4.1 and 4.2). The stochastic kinds solve the diffusion SDE (DPM-Solver++, appendix B): the same
    integrals with twice the weight of the network's part.
    """

    carry: np.float32
    scale: np.float32
    u: np.float32
    noise: np.float32
    whole: np.float32

    @classmethod
    def between(cls, start: Point, end: Point, *, data: bool, stochastic: bool = False) -> "Integral":
        """The integral from `start` to a point `end` that still has noise in it."""
        h = end.log_snr - start.log_snr
        u, none = (-h if data else h), np.float32(0)
        if data:
            carry, scale = end.sigma / start.sigma, end.alpha
        else:
            carry, scale = end.alpha / start.alpha, end.sigma
        if not stochastic:
            return cls(carry, scale, u, none, exp(u) - 1)
        spread = end.sigma * root(abs(exp(2 * u) - 1))
        if data:
            return cls(carry * exp(u), scale, 2 * u, spread, exp(2 * u) - 1)
        return cls(carry, 2 * scale, u, spread, exp(u) - 1)

    @property
    def first(self) -> np.float32:
        """The weight of a first difference, integrated exactly (``heun``)."""
        return self.whole / self.u - 1

    @property
    def midpoint(self) -> np.float32:
        """The weight of a first difference, by the midpoint rule."""
        return self.whole / 2

    @property
    def second(self) -> np.float32:
        """The weight of a second difference."""
        if abs(self.u) < 1e-4:
            return self.u / 6  # the series: the closed form cancels to nothing
        return (self.whole - self.u) / self.u**2 - np.float32(0.5)

    def update(self, *weights: np.float32) -> Update:
        """The step with these weights for D0, D1, ..."""
        return Update(float(self.carry), tuple(-float(self.scale * weight) for weight in weights), float(self.noise))


def first_order(start: Point, end: Point, *, data: bool, stochastic: bool = False) -> Update:
    """The step of order one: DDIM, and its SDE form.

    Where the end has no noise, it is the predicted data, and no fresh noise is drawn for it.
    """
    if end.sigma == 0:
        if data:
            return Update(0.0, (float(end.alpha),))
        return Update(float(end.alpha / start.alpha), (float(-end.alpha * start.sigma / start.alpha),))
    integral = Integral.between(start, end, data=data, stochastic=stochastic)
    return integral.update(integral.whole)


def differences(outputs: Sequence[torch.Tensor], ratios: Sequence[float]) -> list[torch.Tensor]:
    """D0, D1, D2 of a multistep method (DPM-Solver++, algorithm 2 and appendix D), as many as there are ratios and one.

    Args:
        outputs: predictions, the newest first.
        ratios: the lengths of the steps before, none to two, in units of this one, the newest first.
    """
    newest = outputs[0]
    if not ratios:
        return [newest]
    steep = (newest - outputs[1]).mul_(1 / ratios[0])
    if len(ratios) == 1:
        return [newest, steep]
    bend, span = steep - (outputs[1] - outputs[2]).mul_(1 / ratios[1]), ratios[0] + ratios[1]
    return [newest, (bend * (ratios[0] / span)).add_(steep), bend * (1 / span)]


class SolverScheduler(VPScheduler):
    """Base of the exponential-integrator solvers: their schedules, predictions and history.

    A subclass states in `_wants_data` what it integrates, and makes its steps in `_plan` from `self._points`, the noise
    levels of the schedule.

    Attributes:
        sigmas: noise / signal of every step and of the end; with `use_flow_sigmas`, the place on the straight path.
    """

    # Flow schedules of UniPC begin at pure noise, those of the others one training step later.
    _flow_from_noise = False
    _orders: Sequence[int] = (1, 2, 3)
    # Where sampling ends, in a class whose config does not say.
    _final_sigmas_type = "zero"
    # Whether noise is taken from the predicted data in any case. It loses a digit, and is what DEIS users have.
    _noise_by_data = False
    _points: list[Point]
    _history: list[torch.Tensor]

    def _prepare(self) -> None:
        """Check what the config asks for, and take the training schedule."""
        choice("prediction_type", self.config["prediction_type"], PREDICTIONS)
        choice("timestep_spacing", self._option("timestep_spacing", "linspace"), SPACINGS)
        choice("final_sigmas_type", self._option("final_sigmas_type", "zero"), ("zero", "sigma_min"))
        choice("time_shift_type", self.config["time_shift_type"], ("exponential", "linear"))
        order = self.config["solver_order"]
        if isinstance(order, bool) or order not in self._orders:
            raise ValueError(f"solver_order={order!r} must be one of {list(self._orders)}")
        self._sigma_spacing()
        self._take_training_schedule()
        if self._option("rescale_betas_zero_snr"):
            # pure noise would have an infinite sigma; this leaves 4096
            self.alphas_cumprod[-1] = 2**-24
        self._training_sigmas = training_sigmas(self.alphas_cumprod)
        self.sigmas = torch.tensor([*self._training_sigmas[::-1], 0.0], dtype=torch.float32)

    def _take_algorithm(self, algorithms: Sequence[str]) -> None:
        """Check DPM-Solver's `algorithm_type` and `solver_type`; names from other solvers' configs mean the default."""
        config = self.config
        choice("algorithm_type", config["algorithm_type"], (*algorithms, "deis"))
        choice("solver_type", config["solver_type"], ("midpoint", "heun", "logrho", "bh1", "bh2"))
        if config["algorithm_type"] == "deis":
            self.register_to_config(algorithm_type="dpmsolver++")
        if config["solver_type"] not in ("midpoint", "heun"):
            self.register_to_config(solver_type="midpoint")

    @property
    def _wants_data(self) -> bool:
        """Whether the solver integrates the predicted data, or else the predicted noise."""
        return str(self.config["algorithm_type"]).endswith("++")

    @property
    def _stochastic(self) -> bool:
        """Whether a step draws fresh noise."""
        return str(self.config["algorithm_type"]).startswith("sde-")

    def _plan(self) -> None:
        """Work out the weights of every step from `self._points`."""
        raise TypeError(f"{type(self).__name__} has no steps of its own")

    # --- the schedule ------------------------------------------------------------------------------------------

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        mu: float | None = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Lay out the steps of a run.

        Args:
            num_inference_steps: how many.
            device: where `timesteps` shall lie; the weights of the steps stay on the host.
            mu: the shift of flow sigmas, with `use_dynamic_shifting`; ignored without.
            timesteps: in place of a number of steps: whole numbers, falling.
            sigmas: in place of a number of steps: noise levels, falling, on the scale of `sigmas`. A 0 at the end is
                where sampling ends; otherwise it ends as `final_sigmas_type` says. Flow sigmas are shifted.
        """
        times, levels = self._levels(num_inference_steps, mu, timesteps, sigmas)
        self.num_inference_steps = len(times)
        self._take_schedule(times, device, sigmas=levels, dtype=torch.int64)
        point = Point.straight if self.config["use_flow_sigmas"] else Point.variance_preserving
        self._points = [point(sigma) for sigma in self._sigmas]
        self._plan()

    def _sigma_spacing(self) -> str | None:
        """ "karras", "exponential", "beta" or "lu", if the config asks for one."""
        chosen = [name for name in ("karras", "exponential", "beta") if self.config[f"use_{name}_sigmas"]]
        if self._option("use_lu_lambdas"):
            chosen.append("lu")
        if len(chosen) > 1:
            raise ValueError(f"the config asks for the spacings {chosen} at once; set only one of them")
        return chosen[0] if chosen else None

    def _levels(
        self, steps: int | None, mu: float | None, timesteps: Numbers | None, sigmas: Numbers | None
    ) -> tuple[Array, Array]:
        """The timesteps of n steps, and n + 1 sigmas."""
        spacing, flow = self._sigma_spacing(), self.config["use_flow_sigmas"]
        check_one_schedule(steps, timesteps, sigmas, spacing)
        train_steps, known = len(self._kept), self._training_sigmas
        if sigmas is not None:
            levels, ended = _without_end(sigmas, 1.0 if flow else math.inf)
            levels = self._shift(levels, mu) if flow else levels
            times = levels * train_steps if flow else np.round(timestep_at(levels, known))
            return times, np.append(levels, 0.0 if ended else self._end(levels))
        if timesteps is not None:
            times = check_timesteps(timesteps, train_steps, whole=True)
            levels = times / train_steps if flow else sigma_at(times, known)
            if levels[-1] == 0:
                raise ValueError("timesteps holds a 0, where the straight path has no noise left to take a step from")
            return times, np.append(levels, self._end(levels))
        count = check_steps(steps, train_steps)
        if spacing is not None:
            times, levels = self._respaced(spacing, count)
        elif flow:
            levels = self._flow_sigmas(count, mu)
            times = levels * train_steps
        else:
            times = self._spaced(count)
            levels = sigma_at(times, known)
        return times, np.append(levels, self._end(levels))

    def _end(self, levels: Array) -> float:
        """The sigma after the last step: 0, or that of the first training step where it is below the last level."""
        lowest = float(self._training_sigmas[0])
        wanted = self._option("final_sigmas_type", self._final_sigmas_type) == "sigma_min"
        return lowest if wanted and levels[-1] > lowest * (1 + 1e-6) else 0.0

    def _spaced(self, count: int) -> Array:
        """Timesteps as `timestep_spacing` says, from the first whose lambda is not clipped."""
        clipped = self._option("lambda_min_clipped", -math.inf)
        usable = int((-np.log(self._training_sigmas) >= clipped).sum())
        if count > usable:
            raise ValueError(f"num_inference_steps={count} is more than the {usable} that lambda_min_clipped leaves")
        spacing = self._option("timestep_spacing", "linspace")
        return spaced_timesteps(
            spacing, count, usable, offset=self._option("steps_offset", 0), drop_last=spacing != "trailing"
        )

    def _respaced(self, spacing: str, count: int) -> tuple[Array, Array]:
        """Timesteps and sigmas that are even in another measure (see `sigmas.respaced`)."""
        known, config = self._training_sigmas, self.config
        low, high = self._option("sigma_min"), self._option("sigma_max")
        low, high = float(known[0]) if low is None else low, float(known[-1]) if high is None else high
        # Lu's steps are even in lambda (arXiv 2206.00927, section 3.4), which is minus log sigma
        levels = respaced("exponential" if spacing == "lu" else spacing, high, low, count)
        if config["use_flow_sigmas"]:
            levels = levels / (1 + levels)
            return levels * len(known), levels
        # the reference takes this logarithm in float32, which decides between 999 and 998 for the first timestep
        logs = np.log(known.astype(np.float32))
        return self._whole(np.interp(np.log(levels), logs, np.arange(len(known))), spacing), levels

    def _whole(self, times: Array, spacing: str) -> Array:
        """Timesteps as the integers that a model is told."""
        return np.round(times) if spacing in ("karras", "lu") else np.floor(times)

    def _flow_sigmas(self, count: int, mu: float | None) -> Array:
        """Places on the straight path, from noise to data."""
        even = np.linspace(1, 1 / len(self._kept), count + 1)
        start = even if self._flow_from_noise else 1 - even[::-1]
        return self._shift(start[:-1], mu)

    def _shift(self, levels: Array, mu: float | None) -> Array:
        """Flow sigmas shifted as the config, or `mu`, says."""
        config = self.config
        if not config["use_dynamic_shifting"]:
            levels = shifted(levels, config["flow_shift"])
        elif mu is None:
            raise ValueError("use_dynamic_shifting=True needs `mu`: pass it to set_timesteps")
        else:
            levels = shifted_by_mu(levels, mu, config["time_shift_type"])
        terminal = self._option("shift_terminal")
        levels = levels if not terminal else stretched(levels, terminal)
        return np.minimum(levels, 1 - 1e-6)

    # --- a step ------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        super()._forget()
        self._history = []

    def _start(
        self, output: torch.Tensor, timestep: Any, sample: torch.Tensor
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The step's index, its prediction, and the sample in full precision."""
        if self.num_inference_steps is None:
            raise ValueError("call `set_timesteps` before `step`")
        index = self._index(timestep)
        sample = full_precision(sample)
        return index, self._predict(full_precision(output), sample, index), sample

    def _predict(self, output: torch.Tensor, sample: torch.Tensor, index: int) -> torch.Tensor:
        """What the solver integrates, from what the network returned."""
        config, point, data = self.config, self._points[index], self._wants_data
        alpha, sigma = float(point.alpha), float(point.sigma)
        if self._option("variance_type") in ("learned", "learned_range") and output.shape[1] != sample.shape[1]:
            output = output[:, : sample.shape[1]]  # the rest is a variance, of which these solvers make no use
        kind, thresholding = config["prediction_type"], config["thresholding"]
        if not data and not thresholding and not self._noise_by_data:
            return noise_in(kind, output, sample, alpha, sigma)
        spread = self._sigmas[index] if kind == "flow_prediction" else sigma
        original = predict_original(kind, output, sample, alpha, spread)
        if thresholding:
            original = threshold_sample(original, config["dynamic_thresholding_ratio"], config["sample_max_value"])
        return original if data else predict_noise(original, sample, alpha, sigma)

    def _noise_for(
        self, sample: torch.Tensor, generator: Generators | None, given: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A step's fresh noise, drawn in float32 whatever the sample is in, unless it was `given`."""
        if given is None:
            given = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=torch.float32)
        return given.to(sample)

    def _remember(self, prediction: torch.Tensor, most: int) -> list[torch.Tensor]:
        """Put a prediction in front of the earlier ones, of which `most` are kept in all."""
        self._history = [prediction, *self._history[: most - 1]]
        return self._history

    def _noise_levels(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The run's own levels where a timestep is one of its steps, else those of training."""
        points = [self._point_for_noise(time) for time in to_list(timesteps)]
        alphas, sigmas = ([float(point[at]) for point in points] for at in (0, 1))
        return torch.tensor(alphas), torch.tensor(sigmas)

    def _point_for_noise(self, timestep: float) -> Point:
        if self.num_inference_steps is not None:
            index = self._begin_index if self._step_index is None else self._step_index
            if index is not None:
                return self._points[index]
            if timestep in self._times:
                return self._points[self._times.index(timestep)]
        if self.config["use_flow_sigmas"]:
            return Point.straight(timestep / len(self._kept))
        return Point.variance_preserving(float(sigma_at(timestep, self._training_sigmas)))


PREDICTIONS = ("epsilon", "sample", "v_prediction", "flow_prediction")


def _without_end(sigmas: Numbers, most: float) -> tuple[Array, bool]:
    """A caller's sigmas without the 0 at their end, and whether there was one."""
    values = check_sigmas(sigmas, most=most, ends=len(sigmas) > 1)
    return (values[:-1], True) if values[-1] == 0 else (values, False)
