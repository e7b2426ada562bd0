"""Checkpoints of tiny Stable Diffusion pipelines go to the reference and come from it, with the same pictures."""

from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

import diffusion_core
from diffusion_core import Pipeline

from . import tiny
from .test_loading import same_weights

MODELS = ("unet", "vae", "text_encoder")


def pictures(pipe, **arguments) -> np.ndarray:
    generator = torch.Generator().manual_seed(3)
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        ["red cat", ""],
        negative_prompt=["car", "dog"],
        num_inference_steps=3,
        generator=generator,
        output_type="np",
        **arguments,
    ).images


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    parts = tiny.components(diffusers, tmp_path_factory.mktemp("parts"))
    return diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}, {"variant": "fp16"}], ids=str)
def test_saved_there_loads_here(reference, tmp_path: Path, options) -> None:
    reference.save_pretrained(tmp_path, **options)
    pipe = Pipeline.from_pretrained(tmp_path, variant=options.get("variant"))
    assert type(pipe) is diffusion_core.StableDiffusionPipeline
    for name in MODELS:
        assert same_weights(getattr(pipe, name), getattr(reference, name))
    assert pipe.config.safety_checker == (None, None)
    np.testing.assert_allclose(pictures(pipe), pictures(reference), atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}, {"variant": "fp16"}], ids=str)
def test_saved_here_loads_there(tmp_path: Path, options, caplog: pytest.LogCaptureFixture) -> None:
    parts = tiny.components(diffusion_core, tmp_path / "parts", seed=1)
    pipe = diffusion_core.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipe.save_pretrained(tmp_path / "saved", **options)
    there = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved", variant=options.get("variant"))
    assert type(there) is diffusers.StableDiffusionPipeline
    assert [record.message for record in caplog.records if "ignored" in record.message] == []
    for name in MODELS:
        assert same_weights(getattr(pipe, name), getattr(there, name))
    config = {key: value for key, value in there.scheduler.config.items() if not key.startswith("_")}
    assert {key: pipe.scheduler.config[key] for key in config} == config
    np.testing.assert_allclose(pictures(pipe), pictures(there), atol=1e-4)


def test_a_half_precision_checkpoint_keeps_or_changes_its_dtype(reference, tmp_path: Path) -> None:
    """With "auto" a float16 checkpoint stays float16; the reference makes it float32 whatever is asked."""
    half = diffusers.StableDiffusionPipeline.from_pretrained(_saved(reference, tmp_path), torch_dtype="float16")
    assert str(half.unet.dtype) == "torch.float32"  # the name of a dtype is not understood there
    Pipeline.from_pretrained(tmp_path, dtype="float16").save_pretrained(tmp_path / "half")
    for asked, found in {"auto": "float16", None: "float32", "bfloat16": "bfloat16"}.items():
        pipe = Pipeline.from_pretrained(tmp_path / "half", dtype=asked)
        assert {str(getattr(pipe, name).dtype) for name in MODELS} == {f"torch.{found}"}


def _saved(pipe, folder: Path) -> Path:
    pipe.save_pretrained(folder)
    return folder


def test_the_safety_checker_goes_both_ways(reference, tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPImageProcessor

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "image_size": 32, "patch_size": 16}
    config = CLIPConfig(text_config=small, vision_config=vision, projection_dim=8)
    checker = diffusers.pipelines.stable_diffusion.StableDiffusionSafetyChecker(config)
    parts = {**reference.components, "safety_checker": checker, "feature_extractor": CLIPImageProcessor()}
    diffusers.StableDiffusionPipeline(**parts).save_pretrained(tmp_path / "there")
    pipe = Pipeline.from_pretrained(tmp_path / "there")
    assert pipe.config.safety_checker == ("stable_diffusion", "StableDiffusionSafetyChecker")
    assert same_weights(pipe.safety_checker, checker)
    pipe.save_pretrained(tmp_path / "here")
    there = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "here")
    assert same_weights(there.safety_checker, checker)


def test_switching_the_scheduler_is_saved(reference, tmp_path: Path) -> None:
    pipe = Pipeline.from_pretrained(_saved(reference, tmp_path))
    pipe.scheduler = diffusion_core.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.save_pretrained(tmp_path / "euler")
    there = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "euler")
    assert type(there.scheduler) is diffusers.EulerDiscreteScheduler
    np.testing.assert_allclose(pictures(pipe), pictures(there), atol=1e-4)
