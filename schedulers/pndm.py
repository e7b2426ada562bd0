"""Pseudo numerical methods: Runge-Kutta and linear multistep, made to stay on the data's manifold."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from diffusion_core.config import FrozenDict

from .base import Device, SchedulerOutput, Timestep, VPScheduler, check_one_schedule
from .sigmas import (
    Numbers,
    check_sigmas,
    check_steps,
    check_timesteps,
    choice,
    sigma_at,
    spaced_timesteps,
    timestep_at,
    training_sigmas,
)

# A call of the model: timestep, share of the signal before, share after, and the rule that moves the sample.
Call = tuple[float, float, float, str]

# Adams-Bashforth, newest first (arXiv 2202.09778, eq. 9 and its lower orders)
_MULTISTEP = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))
# Runge-Kutta's weights for its four stages (eq. 13)
_STAGES = (1 / 6, 1 / 3, 1 / 3, 1 / 6)


class PNDMScheduler(VPScheduler):
    """PNDM (Liu et al., arXiv 2202.09778): eq. 11 moves the sample, eq. 9 and 13 say with which noise.

    The first steps, for want of a history, are Runge-Kutta's with four calls each, or, with `skip_prk_steps`, one
    improved Euler step with two calls.

    A run that starts in the middle and skips Runge-Kutta's steps repeats its first step too, but without the extra call
    that a whole run has for it: it stays one level behind and ends a little noisy. That is what the reference does with
    every Stable Diffusion checkpoint, so it is the default here; `start_exactly` begins with Euler's step instead.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        skip_prk_steps: no Runge-Kutta steps, as latent diffusion has it.
        set_alpha_to_one: end at no noise at all, rather than at the level of the first training step.
        prediction_type: "epsilon" or "v_prediction".
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
        start_exactly: let a run that starts in the middle end at the picture; our own option.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Numbers | None = None,
        skip_prk_steps: bool = False,
        set_alpha_to_one: bool = False,
        prediction_type: str = "epsilon",
        timestep_spacing: str = "leading",
        steps_offset: int = 0,
        start_exactly: bool = False,
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "v_prediction"))
        if not start_exactly:
            # our own option: files and configs are diffusers' where it is not used
            self._internal_dict = FrozenDict({key: self.config[key] for key in self.config if key != "start_exactly"})
        self._take_training_schedule(ends_clean=set_alpha_to_one)
        self.set_timesteps(num_train_timesteps)

    def _forget(self) -> None:
        super()._forget()
        self._first: int | None = None  # the index of the run's first call
        self._outputs: list[torch.Tensor] = []  # the model's, newest first, for the multistep rule
        self._start: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # of a step of several calls: sample, weighted noise
        )

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Choose the steps: how many, or which timesteps (falling), or which VE sigmas (falling, with the end)."""
        check_one_schedule(num_inference_steps, timesteps, sigmas)
        config, count = self.config, len(self)
        self._calls: list[Call] = []
        self._stride = 0
        if timesteps is None and sigmas is None:
            steps = check_steps(num_inference_steps)
            times = spaced_timesteps(config["timestep_spacing"], steps, count, offset=config["steps_offset"])
            self._plan_strides([int(time) for time in times], count // steps)
        elif sigmas is not None:
            levels = check_sigmas(sigmas)
            times = timestep_at(levels[:-1], training_sigmas(self.alphas_cumprod))
            self._plan_points(times.tolist(), [1 / (1 + float(level) ** 2) for level in levels])
        else:
            assert timesteps is not None
            points = [int(time) for time in check_timesteps(timesteps, count, whole=True)]
            times = points
            self._plan_points(points, [*map(self._share, points), self._final_share])
        self.num_inference_steps = len(times)
        dtype = torch.float32 if sigmas is not None else torch.int64
        self._take_schedule([call[0] for call in self._calls], device, dtype=dtype)

    def _warm_up(self, steps: int) -> int:
        """How many steps are Runge-Kutta's: three, or fewer in a run that is as short."""
        return 0 if self.config["skip_prk_steps"] else min(3, steps - 1)

    def _plan_strides(self, times: list[int], stride: int) -> None:
        """The calls for evenly spread steps. Each counts on a whole stride, as the reference does."""
        calls, share = self._calls, self._share
        self._stride = stride
        half, warm = stride // 2, self._warm_up(len(times))
        for here, after in pairwise(times[: warm + 1]):
            middle, kept = after + half, share(here)
            calls.append((here, kept, share(here - half), "first stage"))
            calls.append((middle, kept, share(middle), "stage"))
            calls.append((middle, kept, share(middle - half), "stage"))
            calls.append((after, kept, share(after), "last stage"))
        for here in times[warm:]:
            calls.append((here, share(here), share(here - stride), "multistep"))
        if self.config["skip_prk_steps"] and len(times) > 1:
            before = min(times[1] + stride, len(self) - 1)
            calls.insert(1, (times[1], share(before), share(times[1]), "again"))

    def _plan_points(self, times: Sequence[float], shares: Sequence[float]) -> None:
        """The calls for the caller's own steps: from each exactly to the next."""
        calls, warm = self._calls, self._warm_up(len(times))
        for index in range(warm):
            here, after, kept, kept_after = *times[index : index + 2], *shares[index : index + 2]
            middle = (here + after) / 2 if isinstance(here, float) else (here + after) // 2
            sigma = float(sigma_at(middle, training_sigmas(self.alphas_cumprod)))
            halfway = 1 / (1 + sigma**2)
            calls.append((here, kept, halfway, "first stage"))
            calls.append((middle, kept, halfway, "stage"))
            calls.append((middle, kept, kept_after, "stage"))
            calls.append((after, kept, kept_after, "last stage"))
        for index in range(warm, len(times)):
            calls.append((times[index], shares[index], shares[index + 1], "multistep"))
        if self.config["skip_prk_steps"] and len(times) > 1:
            calls.insert(1, (times[1], shares[0], shares[1], "again"))

    def step(
        self, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor, return_dict: bool = True
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """One call of a step: the sample for the next one.

        Args:
            model_output: what the model predicted, (B, ...).
            timestep: an element of `timesteps`; only the first one is looked at.
            sample: what the model was given, (B, ...).
            return_dict: return a `SchedulerOutput` rather than a tuple.
        """
        index = self._index(timestep)
        if self._first is None:
            self._first = index
        _, kept, kept_next, rule = self._call(index)
        noise = model_output
        if rule in ("multistep", "first stage"):
            self._outputs = [model_output, *self._outputs[:3]]
            self._start = (sample, model_output * _STAGES[0]) if rule == "first stage" else None
            if rule == "multistep":
                noise = _weighted(_MULTISTEP[len(self._outputs) - 1], self._outputs)
                if index + 1 < len(self._calls) and self._call(index + 1)[3] == "again":
                    self._start = (sample, model_output / 2)
        elif self._start is None:
            kept, kept_next = self._plain_move(index)
        else:
            weight = 0.5 if rule == "again" else _STAGES[index % 4]
            start, gathered = self._start
            gathered = torch.add(gathered, model_output, alpha=weight)
            noise = model_output if rule == "stage" else gathered
            self._start = (start, gathered) if rule == "stage" else None
            sample = start
        self._step_index = index + 1
        return self._result(return_dict, self._transfer(sample, noise, kept, kept_next))

    def _call(self, index: int) -> Call:
        """The call at an index; in a run that starts in the middle, the second one repeats the first step."""
        config, stride = self.config, self._stride
        if not self._first or not config["skip_prk_steps"] or config.get("start_exactly") or not stride:
            return self._calls[index]
        here = int(self._calls[index][0])
        if index == self._first + 1:
            return here, self._share(min(here + stride, len(self) - 1)), self._share(here), "again"
        return here, self._share(here), self._share(here - stride), "multistep"

    def _plain_move(self, index: int) -> tuple[float, float]:
        """From a call's own level to the next one's: what is left to do when a run begins amid a step."""
        levels = [self._share(int(self._calls[at][0])) for at in (index, index + 1)]
        return levels[0], levels[1]

    def _transfer(self, sample: torch.Tensor, noise: torch.Tensor, kept: float, kept_next: float) -> torch.Tensor:
        """The sample moved to another level along the noise (arXiv 2202.09778, eq. 11).

        In float32, and operation by operation: on a steep schedule `kept` is 1e-9, and what is rounded is magnified.
        The square roots are torch's, which are not quite numpy's.
        """
        here, after = (torch.tensor(share, dtype=torch.float32, device="cpu") for share in (kept, kept_next))
        if self.config["prediction_type"] == "v_prediction":
            noise = (noise * here.sqrt()).add_(sample * (1 - here).sqrt())
        scale = here * (1 - after).sqrt() + (here * (1 - here) * after).sqrt()
        return sample * (after / here).sqrt() - (noise * (after - here)).div_(scale)


def _weighted(weights: tuple[float, ...], outputs: list[torch.Tensor]) -> torch.Tensor:
    total = outputs[0] if weights[0] == 1 else outputs[0] * weights[0]
    for weight, output in zip(weights[1:], outputs[1:], strict=True):
        total = torch.add(total, output, alpha=weight)
    return total
