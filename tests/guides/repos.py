"""Tiny checkpoints in place of those on the Hub, one a kind of pipeline that the guides name."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import PIL.Image
import torch

from tests.pipelines import families, sd
from tests.pipelines.families import Family

SD, SDXL, FLUX, COGVIDEOX = families.SD, families.SDXL, families.FLUX, families.COGVIDEOX
PROMPT = "a red cat"


def repo(family: Family, task: str = "text") -> str:
    """The folder of a pipeline, as a name that `from_pretrained` takes."""
    return str(families.saved(family, task))


def call(family: Family, task: str = "text", **changes: Any) -> dict[str, Any]:
    """The arguments of a short call of one prompt, without negative prompt."""
    found = family.call(task, **changes)
    return {name: value for name, value in found.items() if name != "negative_prompt"}


def draw(pipeline: Any, family: Family, task: str = "text", **changes: Any) -> torch.Tensor:
    """What a pipeline draws, or films, with the same noise each time."""
    pipeline.set_progress_bar_config(disable=True)
    found = pipeline(**call(family, task, **changes))
    return (found.frames if family.frames else found.images).cpu()


@cache
def expected(family: Family, task: str = "text") -> torch.Tensor:
    """What the CPU draws without any mode."""
    return draw(families.loaded(family, task), family, task)


@cache
def picture(side: int = 32) -> str:
    """A file with a picture, in place of an address."""
    path = Path(mkdtemp()) / "input.png"
    image: PIL.Image.Image = sd.image(side, side)
    image.save(path)
    return str(path)


def same(first: torch.Tensor, second: torch.Tensor, most: float = 2e-5) -> bool:
    """Equal up to the order of sums in float32."""
    return first.shape == second.shape and float((first - second).abs().max()) <= most
