"""What a scheduler's step costs."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from ..meters import operations

STEPS, SHAPE = 20, (1, 4, 64, 64)
NAMES = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)


def scheduler_steps(side: str, folder: Path) -> dict[str, float]:
    """Operations and microseconds a step, of all eight together, and of each."""
    import torch

    library = importlib.import_module(side)
    figures: dict[str, float] = {}
    for name in NAMES:
        scheduler = getattr(library, name)()
        scheduler.set_timesteps(STEPS)
        _walk(torch, scheduler)
        scheduler.set_timesteps(STEPS)
        count = len(scheduler.timesteps)
        figures[f"{name} operations"] = operations(lambda scheduler=scheduler: _walk(torch, scheduler)) / count
        best = float("inf")
        for _ in range(5):
            scheduler.set_timesteps(STEPS)
            begun = time.perf_counter()
            _walk(torch, scheduler)
            best = min(best, time.perf_counter() - begun)
        figures[f"{name} microseconds"] = best / count * 1e6
    for unit in ("operations", "microseconds"):
        figures[unit] = sum(figures[f"{name} {unit}"] for name in NAMES)
    return figures


def _walk(torch: Any, scheduler: Any) -> None:
    value, output = torch.ones(SHAPE), torch.full(SHAPE, 0.1)
    for timestep in scheduler.timesteps:
        if hasattr(scheduler, "scale_model_input"):
            scheduler.scale_model_input(value, timestep)
        value = scheduler.step(output, timestep, value, return_dict=False)[0]
