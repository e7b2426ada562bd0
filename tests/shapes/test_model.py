"""The embedded checkpoint: its size, its parts, and that it draws what prompts say."""

import json

import numpy as np
import pytest
import torch

import diffusion_core
from benchmarks.shapes.evaluate import evaluate, held_out_scenes
from benchmarks.shapes.judge import verdict
from benchmarks.shapes.parts import TOKENS, WORDS
from diffusion_core.shapes import GUIDANCE_SCALE, STEPS, shapes_folder


@pytest.fixture(scope="module")
def pipeline():
    return diffusion_core.Pipeline.from_pretrained(shapes_folder())


def test_it_is_at_most_20_megabytes_in_the_hub_layout():
    folder = shapes_folder()
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 20_000_000
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionPipeline"
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    assert index["safety_checker"] == [None, None]


def test_every_word_of_captions_is_one_token(pipeline):
    for word in WORDS:
        assert len(pipeline.tokenizer(word)["input_ids"]) == 3, word
    assert pipeline.tokenizer.model_max_length == TOKENS
    assert len(pipeline.tokenizer("Zebras, 3 of them?")["input_ids"]) > 6, "other text is spelt out"


def test_weights_are_finite_and_float32_unless_asked_otherwise(pipeline):
    assert pipeline.unet.dtype == torch.float32
    for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        assert all(parameter.isfinite().all() for parameter in part.parameters())
    assert diffusion_core.Pipeline.from_pretrained(shapes_folder(), dtype="auto").unet.dtype == torch.float16


def test_it_draws_prompts_never_trained_on(pipeline):
    """Of the 200 of `python -m benchmarks.shapes.evaluate` it has 91% right; processors round differently, so of the
    first 40 a little less is asked."""
    verdicts, images = evaluate(pipeline, held_out_scenes(40), STEPS, GUIDANCE_SCALE)
    assert images[0].size == (64, 64)
    assert verdicts["ok"] >= 34


def test_the_prompt_decides(pipeline):
    """Pictures of one prompt judged against another are wrong: the score is not luck."""
    scenes = held_out_scenes(12, seed=5)
    _, images = evaluate(pipeline, scenes, STEPS, GUIDANCE_SCALE)
    turned = scenes[1:] + scenes[:1]
    assert sum(verdict(image, scene) == "ok" for image, scene in zip(images, turned, strict=True)) <= 1


def test_reference_loads_it_and_draws_the_same(pipeline):
    diffusers = pytest.importorskip("diffusers")
    # Without a dtype the reference casts its own models to float32 and leaves the text encoder in the files' float16.
    other = diffusers.StableDiffusionPipeline.from_pretrained(shapes_folder(), torch_dtype=torch.float32)
    other.set_progress_bar_config(disable=True)
    arguments = {"num_inference_steps": 5, "guidance_scale": 4.0, "output_type": "np"}
    prompt = "a small red circle above a large blue square on a yellow background"
    ours = pipeline(prompt, generator=torch.Generator().manual_seed(3), **arguments).images
    theirs = other(prompt, generator=torch.Generator().manual_seed(3), **arguments).images
    assert np.abs(ours - theirs).max() < 1e-4
