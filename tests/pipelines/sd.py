"""Pairs of Stable Diffusion pipelines with the same weights, ours and the reference's, and inputs for them."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch

import diffusion_core

from . import tiny

SCHEDULERS: dict[str, dict[str, Any]] = {
    "PNDMScheduler": {"skip_prk_steps": True},
    "DDIMScheduler": {"clip_sample": False},
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "HeunDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {},
}


@cache
def tokenizer() -> Any:
    return tiny.tokenizer(Path(mkdtemp(prefix="tokenizer-")))


@cache
def text_encoder() -> Any:
    return tiny.text_encoder()


@cache
def unets(in_channels: int = 4) -> tuple[Any, Any]:
    """Ours and the reference's."""
    theirs = tiny.unet(diffusers, in_channels=in_channels)
    ours = tiny.unet(diffusion_core, in_channels=in_channels)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@cache
def vaes() -> tuple[Any, Any]:
    theirs, ours = tiny.vae(diffusers), tiny.vae(diffusion_core)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def scheduler(library: Any, name: str = "DDIMScheduler") -> Any:
    config = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    return getattr(library, name)(**config, **SCHEDULERS[name])


def pipe(name: str = "StableDiffusionPipeline", scheduler_name: str = "DDIMScheduler", **changes: Any) -> Any:
    """Our pipeline."""
    return _made(diffusion_core, 0, name, scheduler_name, changes.pop("in_channels", 4), changes)


def pair(name: str = "StableDiffusionPipeline", scheduler_name: str = "DDIMScheduler", in_channels: int = 4) -> Any:
    """Our pipeline, and the reference's with the same weights."""
    libraries = (diffusion_core, diffusers)
    return tuple(_made(library, side, name, scheduler_name, in_channels, {}) for side, library in enumerate(libraries))


def _made(library: Any, side: int, name: str, scheduler_name: str, in_channels: int, changes: dict[str, Any]) -> Any:
    parts = {
        "vae": vaes()[side],
        "text_encoder": text_encoder(),
        "tokenizer": tokenizer(),
        "unet": unets(in_channels)[side],
        "scheduler": scheduler(library, scheduler_name),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    made = getattr(library, name)(**{**parts, **changes})
    made.set_progress_bar_config(disable=True)
    return made


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image(width: int = 36, height: int = 40, seed: int = 0) -> PIL.Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(values)


def mask(width: int = 36, height: int = 40, box: tuple[int, int, int, int] = (8, 8, 24, 30)) -> PIL.Image.Image:
    made = PIL.Image.new("L", (width, height))
    made.paste(255, box)
    return made


def difference(ours: Any, theirs: Any, **arguments: Any) -> float:
    """The largest difference of the pictures, from 0 to 1. Callable arguments are called anew for each pipeline."""
    results = []
    for each in (ours, theirs):
        made = {key: value() if getattr(value, "fresh", False) else value for key, value in arguments.items()}
        results.append(each(**{"output_type": "pt", **made}).images)
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


def fresh(function: Any) -> Any:
    """Mark an argument of `difference` to be made anew for each call, as generators must be."""
    function.fresh = True
    return function
