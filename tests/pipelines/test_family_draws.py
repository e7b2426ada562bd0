"""Random calls of every pipeline of `families.py`: pictures equal to the reference's, to 1e-4."""

import logging
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import diffusion_core

from .draws import Draw
from .families import CASES, Family, _made, _matched, _parts
from .family_draws import draw, takes_pictures

logging.getLogger("diffusers").setLevel(logging.CRITICAL)
PICTURES = [(family, task) for family, task in CASES if takes_pictures(family, task)]
every_pipeline = pytest.mark.parametrize(
    ("family", "task"), PICTURES, ids=[f"{family}-{task}" for family, task in PICTURES]
)


def pictures(library: Any, family: Family, task: str, one: Draw) -> torch.Tensor:
    parts = _matched(family) if library is diffusion_core else _parts(family, library)
    scheduler = getattr(library, one.scheduler)(**one.config)
    encoder: Any = parts.get("text_encoder")
    if type(encoder).__name__ == "CLIPTextModel":
        # The reference looks for a layer where older versions of transformers had it.
        norm = next(part for name, part in encoder.named_modules() if name.endswith("final_layer_norm"))
        encoder.__dict__.setdefault("text_model", SimpleNamespace(final_layer_norm=norm))
    torch.manual_seed(0)
    images = _made(library, family, task, {**parts, "scheduler": scheduler})(**one.made_for_call())[0]
    if isinstance(images, list):
        return torch.stack([torch.from_numpy(np.array(image)).float() / 255 for image in images])
    return torch.as_tensor(images)


def outcome(family: Family, task: str, seed: int) -> str:
    """ "equal", "refused there", or what is wrong, with all that is needed to see it again."""
    one = draw(family, task, seed)
    try:
        expected = pictures(diffusers, family, task, one)
    except Exception as error:
        return f"refused there: {type(error).__name__}: {str(error)[:90]}"
    try:
        found = pictures(diffusion_core, family, task, one)
    except Exception as error:
        return f"WRONG {family} {task} {seed}: {error!r} {one}"
    if found.shape != expected.shape:
        return f"WRONG {family} {task} {seed}: shape {tuple(found.shape)}, not {tuple(expected.shape)} {one}"
    # Latents may be large; a byte may fall to either side of a half.
    limit = 1.01 / 255 if one.arguments["output_type"] == "pil" else 1e-4 * max(1.0, float(expected.abs().max()))
    apart = float((found - expected).abs().max())
    return "equal" if apart <= limit else f"WRONG {family} {task} {seed}: {apart:.2g} apart, {one}"


@every_pipeline
def test_random_calls_equal_the_reference(family: Family, task: str) -> None:
    outcomes = [outcome(family, task, seed) for seed in range(4)]
    assert [each for each in outcomes if each.startswith("WRONG")] == []
    assert "equal" in outcomes


@pytest.mark.slow
@every_pipeline
def test_many_random_calls_equal_the_reference(family: Family, task: str) -> None:
    outcomes = [outcome(family, task, seed) for seed in range(100, 130)]
    assert [each for each in outcomes if each.startswith("WRONG")] == []
    assert outcomes.count("equal") >= 15
