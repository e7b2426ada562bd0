"""What a step of every scheduler costs beside diffusers': tensor operations and microseconds.

Run ``python -m benchmarks.scheduler_steps``. Operations are what torch's dispatcher sees in `scale_model_input` and
`step`; the time is the best of five runs of 20 steps on one latent of 4 x 64 x 64, on the CPU.
"""

import inspect
import logging
import time
from typing import Any

import diffusers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diffusion_core.schedulers as ours

STEPS = 20
SHAPE = (1, 4, 64, 64)


class Count(TorchDispatchMode):
    """Counts tensor operations."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return function(*args, **(kwargs or {}))


def names() -> list[str]:
    """The public schedulers that diffusers has, too, and that take a model's output in the usual way."""
    found = {name: getattr(ours, name) for name in ours.__all__ if hasattr(diffusers, name)}
    classes = {name: cls for name, cls in found.items() if isinstance(cls, type) and "step" in vars(cls)}
    odd = "old_pred_original_sample"
    return [name for name, cls in classes.items() if odd not in inspect.signature(cls.step).parameters]


def run(scheduler: Any) -> int:
    """A whole run without a model. Returns how many steps it had."""
    scheduler.set_timesteps(STEPS)
    return walk(scheduler)


def walk(scheduler: Any) -> int:
    value = torch.ones(SHAPE)
    output = torch.full(SHAPE, 0.1)
    for timestep in scheduler.timesteps:
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(value, timestep)
        value = scheduler.step(output, timestep, value, return_dict=False)[0]
    return len(scheduler.timesteps)


def cost(scheduler: Any, repeats: int = 5) -> tuple[float, float]:
    """Operations and microseconds a step, without `set_timesteps`."""
    run(scheduler)  # warm up
    times: list[float] = []
    for _ in range(repeats):
        scheduler.set_timesteps(STEPS)
        begin = time.perf_counter()
        steps = walk(scheduler)
        times.append((time.perf_counter() - begin) / steps * 1e6)
    scheduler.set_timesteps(STEPS)
    with Count() as count:
        steps = walk(scheduler)
    return count.total / steps, min(times)


def main() -> None:
    """Print the table."""
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{'scheduler':<32}{'ops':>7}{'theirs':>8}{'ratio':>7}{'us':>9}{'theirs':>9}{'ratio':>7}")
    for name in names():
        ops, micros = cost(getattr(ours, name)())
        their_ops, their_micros = cost(getattr(diffusers, name)())
        print(
            f"{name:<32}{ops:>7.1f}{their_ops:>8.1f}{ops / their_ops:>7.2f}"
            f"{micros:>9.0f}{their_micros:>9.0f}{micros / their_micros:>7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
