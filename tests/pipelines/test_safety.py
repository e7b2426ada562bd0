"""The safety checker: its judgement, its files, and its place in a pipeline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker as Reference
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPImageProcessor

import diffusion_core
from diffusion_core import StableDiffusionSafetyChecker

from . import sd
from .sd import pipe, seeded

CONFIG: dict[str, Any] = {
    "text_config": {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "vision_config": {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    },
    "projection_dim": 6,
}


def checker(kind: type = StableDiffusionSafetyChecker, threshold: float = 0.5, special: float = 0.5) -> Any:
    """A checker with random concepts."""
    torch.manual_seed(0)
    made = kind(CLIPConfig(**CONFIG)).eval()
    generator = seeded(7)
    with torch.no_grad():
        for name, value in (("concept_embeds_weights", threshold), ("special_care_embeds_weights", special)):
            getattr(made, name).fill_(value)
        for name in ("concept_embeds", "special_care_embeds"):
            getattr(made, name).normal_(generator=generator)
        made.visual_projection.weight.normal_(generator=generator)
    return made


def features() -> CLIPImageProcessor:
    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


@pytest.mark.filterwarnings("ignore")
def test_judgement_equals_the_reference() -> None:
    generator = seeded(1)
    verdicts: set[bool] = set()
    for threshold in (0.2, 0.6, 0.8, 0.9):
        for special in (0.2, 2.0):
            theirs = checker(Reference, threshold, special)
            ours = checker(threshold=threshold, special=special)
            ours.load_state_dict(theirs.state_dict())
            inputs = torch.randn(8, 3, 16, 16, generator=generator)
            images = np.ones((8, 4, 4, 3), dtype=np.float32)
            pictures, flagged = ours(inputs, images.copy())
            expected, reference = theirs(clip_input=inputs, images=images.copy())
            assert flagged == [bool(flag) for flag in reference]
            assert np.array_equal(pictures, expected)
            verdicts |= set(flagged)
    assert verdicts == {True, False}


def test_a_picture_close_to_a_special_concept_is_judged_more_strictly() -> None:
    lenient = checker(threshold=0.0, special=2.0)
    inputs = torch.randn(1, 3, 16, 16, generator=seeded(1))
    embeds = lenient.visual_projection(lenient.vision_model(inputs).pooler_output)
    nearest = torch.nn.functional.cosine_similarity(embeds, lenient.concept_embeds).max().item()
    assert checker(threshold=nearest + 0.005, special=2.0).judge(inputs) == [False]
    assert checker(threshold=nearest + 0.005, special=-2.0).judge(inputs) == [True]


def test_files_go_both_ways(tmp_path: Path) -> None:
    checker().save_pretrained(tmp_path / "ours")
    checker(Reference).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    inputs = torch.randn(4, 3, 16, 16, generator=seeded(1))
    for kind, folder in ((Reference, "ours"), (StableDiffusionSafetyChecker, "theirs")):
        loaded = kind.from_pretrained(tmp_path / folder)
        for name, value in checker().state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)
        assert len(loaded(inputs, np.zeros((4, 2, 2, 3)))[1]) == 4


def test_a_pipeline_uses_the_checker_that_its_checkpoint_has(tmp_path: Path) -> None:
    saved = pipe(safety_checker=checker(threshold=-2.0), feature_extractor=features(), requires_safety_checker=True)
    saved.save_pretrained(tmp_path)
    loaded = diffusion_core.StableDiffusionPipeline.from_pretrained(tmp_path)
    assert type(loaded.safety_checker) is StableDiffusionSafetyChecker
    loaded.set_progress_bar_config(disable=True)
    out = loaded("cat", num_inference_steps=1, generator=seeded(), num_images_per_prompt=2, output_type="np")
    assert out.nsfw_content_detected == [True, True] and not out.images.any()
    strict = loaded.safety_checker.concept_embeds_weights
    strict.data.fill_(2.0)
    out = loaded("cat", num_inference_steps=1, generator=seeded(), output_type="np")
    assert out.nsfw_content_detected == [False]
    without = pipe()("cat", num_inference_steps=1, generator=seeded(), output_type="np")
    assert without.nsfw_content_detected is None
    assert np.allclose(out.images, without.images, atol=1e-5)


def test_latents_are_not_judged() -> None:
    made = pipe(safety_checker=checker(threshold=-2.0), feature_extractor=features())
    out = made("cat", num_inference_steps=1, output_type="latent")
    assert out.nsfw_content_detected is None and out.images.abs().max() > 0


def test_a_checker_needs_a_feature_extractor() -> None:
    with pytest.raises(ValueError, match="needs a feature_extractor"):
        pipe(safety_checker=checker())


def test_sizes_other_than_the_checkers_work() -> None:
    made = pipe("StableDiffusionImg2ImgPipeline", safety_checker=checker(threshold=2.0), feature_extractor=features())
    out = made("cat", image=sd.image(40, 24), num_inference_steps=2, strength=0.5)
    assert out.images[0].size == (40, 24) and out.nsfw_content_detected == [False]
