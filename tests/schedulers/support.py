"""What scheduler tests share: a model that is a formula, a sampling loop, and the list of classes."""

import inspect
import math
from typing import Any

import torch

import diffusion_core.schedulers as package

CLASSES = {
    name: value
    for name in package.__all__
    if isinstance(value := getattr(package, name), type)
    and issubclass(value, package.Scheduler)
    and value is not package.Scheduler
    and "step" in vars(value)
    # CogVideoX's DPM solver is handed the step before, and has tests of its own
    and "old_pred_original_sample" not in inspect.signature(value.step).parameters
}
SHAPE = (3, 4, 4)


def fake_model(sample: torch.Tensor, timestep: torch.Tensor | float) -> torch.Tensor:
    """A smooth function of sample and timestep, the same for every image of a batch."""
    time = float(timestep)
    return torch.sin(1.3 * sample + time / 500) * 0.7 + 0.3 * sample * (0.5 + time / 2000)


def accepts(scheduler: Any, method: str, argument: str) -> bool:
    return argument in inspect.signature(getattr(scheduler, method)).parameters


def start(batch: int, seed: int = 0) -> torch.Tensor:
    """Noise of which image k does not depend on the size of the batch."""
    images = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * seed + k)) for k in range(batch)]
    return torch.stack(images)


def generators(batch: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(7 + k) for k in range(batch)]


def sample(scheduler: Any, noise: torch.Tensor, *, first: int = 0, model: Any = fake_model, **options: Any):
    """Run a scheduler's own timesteps from index `first`. Returns each step's input, output and clean estimate."""
    value = noise
    trace = []
    for time in scheduler.timesteps[first:]:
        scaled = scheduler.scale_model_input(value, time) if hasattr(scheduler, "scale_model_input") else value
        output = scheduler.step(model(scaled, time), time, value, **options)
        trace.append((value, output.prev_sample, getattr(output, "pred_original_sample", None)))
        value = output.prev_sample
    return trace


def initial(scheduler: Any, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return start(batch, seed) * float(getattr(scheduler, "init_noise_sigma", 1.0))


def worst_difference(theirs: list[Any], ours: list[Any]) -> float:
    """The largest difference of two traces, relative to the size of what each step was given or gave (at least 1)."""
    assert len(theirs) == len(ours)
    worst = 0.0
    for (given, *their_values), (_, *our_values) in zip(theirs, ours, strict=True):
        size = max(1.0, float(given.abs().max()))
        for their_value, our_value in zip(their_values, our_values, strict=True):
            if their_value is not None and our_value is not None:
                scale = max(size, float(their_value.abs().max()))
                difference = float((their_value - our_value).abs().max()) / scale
                worst = math.inf if math.isnan(difference) else max(worst, difference)
    return worst
