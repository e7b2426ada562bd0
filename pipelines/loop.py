"""The loop over the steps: which steps are taken, what a scheduler's step is given, progress and interruption."""

import inspect
import math
import numbers
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_core.logging import get_logger
from diffusion_core.randomness import Generators

from ..offload.runs import current_run

logger = get_logger(__name__)


@dataclass(frozen=True)
class Steps:
    """The steps of one call, with a scheduler of its own: calls in two threads do not disturb each other.

    Attributes:
        scheduler: a copy of the pipeline's, ready to begin.
        timesteps: what the denoiser is told at each step, on the device.
        count: how many steps were asked for; a scheduler of order 2 needs more timesteps than that.
        left: timesteps that follow, which are left to another model.
    """

    scheduler: Any
    timesteps: torch.Tensor
    count: int
    left: int = 0

    def __len__(self) -> int:
        return len(self.timesteps)

    def ends_at(self, index: int) -> bool:
        """Whether the call of the denoiser number `index`, from 0, is the last one of a step that was asked for."""
        # Timesteps beyond a multiple of the order are the scheduler's warm-up, not steps that were asked for.
        done, order = index + 1 - max(len(self) - self.count * self.scheduler.order, 0), self.scheduler.order
        return index + 1 == len(self) or (done > 0 and done % order == 0)


def plan_steps(
    scheduler: Any,
    num_inference_steps: int | None,
    device: torch.device | str,
    *,
    timesteps: Sequence[int] | None = None,
    sigmas: Sequence[float] | None = None,
    strength: float | None = None,
    round_up: bool = False,
    **schedule: Any,
) -> Steps:
    """Choose the steps of a call.

    Args:
        scheduler: the pipeline's; it is left as it is.
        num_inference_steps: how many; what `timesteps` or `sigmas` say goes before it.
        device: where the timesteps lie.
        timesteps: the scheduler's own choice is used if None.
        sigmas: noise levels in place of timesteps.
        strength: how far an image is taken back towards noise, from 0 to 1: only the last `strength` of the steps are
            taken. With None all are.
        round_up: take one step more where `strength` does not give a whole number of steps.
        schedule: what else the scheduler's `set_timesteps` takes, such as `mu`.

    Raises:
        TypeError: if `num_inference_steps` is not a whole number, or `timesteps` or `sigmas` no list of numbers.
        ValueError: if it is less than 1, both `timesteps` and `sigmas` are given or one is empty, `strength` is out of
            its range or leaves no step, or the scheduler refuses the values.
    """
    if timesteps is not None and sigmas is not None:
        raise ValueError("timesteps and sigmas exclude each other: pass one of them")
    given = {name: value for name, value in (("timesteps", timesteps), ("sigmas", sigmas)) if value is not None}
    for name, values in given.items():
        check_numbers(name, values)
        if len(values) == 0:
            raise ValueError(f"{name} is empty: pass one value for each step, or leave it out")
    count = 0 if given else check_count("num_inference_steps", num_inference_steps)
    if strength is not None:
        check_share("strength", strength)
    if isinstance(scheduler, type) or not hasattr(scheduler, "copy_for_run"):
        raise TypeError(
            f"the pipeline's scheduler is {scheduler!r}, which takes no steps: assign an object, such as "
            "pipe.scheduler = EulerDiscreteScheduler.from_config(config)"
        )
    own = scheduler.copy_for_run()
    # Values that are given decide the number of steps, which the scheduler must not be told as well.
    own.set_timesteps(*([] if given else [count]), device=device, **given, **schedule)
    count = own.num_inference_steps
    chosen = own.timesteps
    if strength is not None:
        count, whole = _share_of(count, float(strength), round_up), count
        if count < 1:
            raise ValueError(
                f"strength={strength} of num_inference_steps={whole} leaves no step: "
                f"raise one of them so that their product is 1 at least"
            )
        skipped = (whole - count) * own.order
        chosen = chosen[skipped:]
        own.set_begin_index(skipped)
    return Steps(own, chosen, count)


def _share_of(count: int, share: float, round_up: bool) -> int:
    """A share of `count` steps. Rounding up counts what is skipped, so that float errors fall as in the reference."""
    return count - int(max(count - count * share, 0)) if round_up else min(int(count * share), count)


def check_count(name: str, value: Any) -> int:
    """A number of steps or images, which must be a whole number of 1 at least."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if count < 1:
        raise ValueError(f"{name}={count} must be 1 at least")
    return count


def check_numbers(name: str, values: Any) -> None:
    """Refuse what is not a list, array or tensor of numbers."""
    try:
        if isinstance(values, str):
            raise TypeError
        for value in values:
            float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a list of numbers, not {values!r}") from None


def check_share(name: str, value: Any) -> None:
    """Refuse what is not a number from 0 to 1, such as a strength."""
    if not isinstance(value, numbers.Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"{name}={value!r} must be a number from 0 to 1")


def check_scale(name: str, value: Any) -> None:
    """Refuse a guidance scale, or a like number, that is not finite."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")


def step_options(scheduler: Any, *, eta: float = 0.0, generator: Generators | None = None) -> dict[str, Any]:
    """What this scheduler's `step` takes besides the prediction: `eta` is DDIM's, `generator` for those that draw."""
    taken = inspect.signature(scheduler.step).parameters
    if eta and "eta" not in taken:
        logger.warning("eta=%s has no effect with %s", eta, type(scheduler).__name__)
    options = {"eta": eta, "generator": generator}
    return {name: value for name, value in options.items() if name in taken}


def walk(pipe: Any, run: Any, steps: Steps) -> Iterator[tuple[int, torch.Tensor]]:
    """Go through the steps, count them in the progress bar, and stop where the run is interrupted.

    Yields:
        The index of the step and its timestep, a view of `steps.timesteps` without axes.
    """
    run.num_timesteps = len(steps)
    # The same tensors all the time, by which what depends on them can be told.
    timesteps, memory = steps.timesteps.unbind(), current_run()
    if memory is not None:
        memory.expect(timesteps)
    with pipe.progress_bar(total=steps.count) as bar:
        for index in range(len(steps)):
            if run.interrupt:
                break
            run.current_timestep = timesteps[index]
            if memory is not None:
                memory.step, memory.timestep = index, timesteps[index]
            yield index, timesteps[index]
            if steps.ends_at(index):
                bar.update()
    if memory is not None:
        # What comes after, the autoencoder as a rule, needs the room.
        memory.forget()
