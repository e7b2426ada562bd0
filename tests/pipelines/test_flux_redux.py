"""Pictures in place of prompts for FLUX.1, against the reference."""

from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

import diffusion_core

from . import flux, sd, t5

NAME = "FluxPriorReduxPipeline"


@cache
def pair(text: bool = True) -> tuple[Any, Any]:
    """Our pipeline and the reference's with the same weights."""
    torch.manual_seed(0)
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    theirs = diffusers.pipelines.flux.modeling_flux.ReduxImageEncoder(16, 32)
    ours = diffusion_core.ReduxImageEncoder(16, 32)
    ours.load_state_dict(theirs.state_dict())
    shared: dict[str, Any] = {
        "image_encoder": SiglipVisionModel(config).eval(),
        "feature_extractor": SiglipImageProcessor(size={"height": 16, "width": 16}),
    }
    if text:
        shared |= {
            "text_encoder": sd.text_encoder(),
            "tokenizer": sd.tokenizer(),
            "text_encoder_2": flux.text_encoder_2(),
            "tokenizer_2": t5.tokenizer(),
        }
    found = []
    for library, embedder in ((diffusion_core, ours), (diffusers, theirs)):
        found.append(getattr(library, NAME)(**shared, image_embedder=embedder))
    return found[0], found[1]


def agree(pipes: tuple[Any, Any], **given: Any) -> None:
    ours, theirs = (made(**given, return_dict=False) for made in pipes)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ""},
        {"prompt": "a red cat", "prompt_2": "a dog"},
        {
            "image": [sd.image(seed=1), sd.image(seed=2)],
            "prompt": ["a", "b"],
            "prompt_embeds_scale": [0.7, 0.4],
            "pooled_prompt_embeds_scale": [1.0, 0.2],
        },
    ],
)
def test_agrees_with_the_reference(changes: dict[str, Any]) -> None:
    agree(pair(), **{"image": sd.image(), **changes})


def test_no_prompt_is_an_empty_one() -> None:
    ours, _ = pair()
    assert torch.equal(ours(sd.image()).prompt_embeds, ours(sd.image(), prompt="").prompt_embeds)


def test_without_text_encoders_zeros_stand_for_the_prompt() -> None:
    ours, _ = pair(text=False)
    result = ours(sd.image())
    assert result.prompt_embeds.shape == (1, 512 + 4, 32)
    assert not result.prompt_embeds[:, :512].any() and result.prompt_embeds[:, 512:].any()
    assert result.pooled_prompt_embeds.shape == (1, 768)
    with pytest.raises(ValueError, match="prompt needs text_encoder"):
        ours(sd.image(), prompt="a cat")


def test_one_prompt_serves_all_pictures_and_the_result_draws() -> None:
    ours, _ = pair()
    several = [sd.image(seed=1), sd.image(seed=2)]
    result = ours(several, prompt="a cat", prompt_embeds_scale=0.5)
    assert torch.equal(result.prompt_embeds, ours(several, prompt=["a cat"] * 2, prompt_embeds_scale=0.5).prompt_embeds)
    pictures = flux.pipe()(**result, height=32, width=32, num_inference_steps=1, output_type="pt").images
    assert pictures.shape == (1, 3, 32, 32)


def test_saves_and_loads(tmp_path: Any) -> None:
    ours, theirs = pair()
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = diffusion_core.Pipeline.from_pretrained(tmp_path / "theirs")
    assert type(loaded) is diffusion_core.FluxPriorReduxPipeline
    agree((loaded, diffusers.FluxPriorReduxPipeline.from_pretrained(tmp_path / "ours")), image=sd.image(), prompt="x")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"image": []}, "image"),
        ({"image": None}, "image"),
        ({"prompt_embeds_scale": [1.0, 2.0]}, "prompt_embeds_scale has 2"),
        ({"pooled_prompt_embeds_scale": float("nan")}, "pooled_prompt_embeds_scale"),
        ({"prompt": ["a", "b"]}, "prompt has 2"),
        ({"prompt_embeds": torch.zeros(1, 4, 32)}, "come together"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pair()[0](**{"image": sd.image(), **changes})
