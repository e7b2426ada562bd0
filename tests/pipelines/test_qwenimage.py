"""Qwen-Image: what it does besides what every family does, against the reference with the same weights."""

from typing import Any

import pytest
import torch

from diffusion_core import AutoPipelineForText2Image, QwenImagePipeline

from . import sd
from .families import QWEN, pair, pipe

LONG = "a red cat and a blue dog on a mat"


@pytest.fixture(scope="module")
def pipes() -> Any:
    return pair(QWEN)


def difference(pipes: Any, count: int = 2, **changes: Any) -> float:
    settings = {"output_type": "latent", "num_inference_steps": 3, **changes}
    results = [made(**QWEN.call("text", count, generator=sd.seeded(), **settings)).images for made in pipes]
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [LONG, "a dog"]},
        {"prompt": [LONG, "a dog"], "negative_prompt": None},
        {"negative_prompt": ["", LONG]},
        {"height": 48, "width": 24},
        {"sigmas": [1.0, 0.7, 0.2]},
        {"max_sequence_length": 9},
    ],
    ids=str,
)
def test_calls_agree(pipes: Any, changes: dict[str, Any]) -> None:
    assert difference(pipes, **changes) < 1e-4


def test_several_pictures_agree(pipes: Any) -> None:
    assert difference(pipes, 1, num_images_per_prompt=2) < 1e-4


@torch.no_grad()
def test_embeddings_are_those_of_the_reference(pipes: Any) -> None:
    for prompts in (["a cat"], [LONG, "a dog"]):
        ours, theirs = (made.encode_prompt(prompts) for made in pipes)
        assert float((ours[0] - theirs[0]).abs().max()) < 1e-5
        if len(prompts) == 1:
            assert ours[1] is theirs[1] is None
        else:
            assert torch.equal(ours[1], theirs[1])


def test_masks_stay_with_their_prompts(pipes: Any) -> None:
    embeds, mask = pipes[0].encode_prompt([LONG, "a dog"], num_images_per_prompt=2)
    assert torch.equal((embeds != 0).any(dim=-1), mask.bool())


def test_padding_does_not_change_a_picture(pipes: Any) -> None:
    made = pipes[0]
    both = made(**QWEN.call("text", 2, prompt=["a dog", LONG], negative_prompt=["", LONG])).images
    alone = made(**QWEN.call("text", prompt="a dog", negative_prompt="")).images
    assert torch.allclose(both[:1], alone, atol=2e-5)


def test_there_is_no_guidance_without_a_negative_prompt(pipes: Any) -> None:
    made, seen = pipes[0], []
    hook = made.transformer.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        made(**QWEN.call("text", negative_prompt=None))
        assert len(seen) == 2
        made(**QWEN.call("text", negative_prompt=" "))
        assert len(seen) == 6
    finally:
        hook.remove()


def test_what_was_cut_is_told(pipes: Any) -> None:
    result = pipes[0](**QWEN.call("text", 2, prompt=["a b c d", "ab"], max_sequence_length=5))
    assert result.truncated_prompts == [" d", ""]
    assert pipes[0](**QWEN.call("text")).truncated_prompts is None


def test_without_an_autoencoder_latents_come_out() -> None:
    made = pipe(QWEN, vae=None)
    with pytest.raises(ValueError, match="output_type='latent'"):
        made(**QWEN.call("text"))
    assert made.config["vae_scale_factor"] == 8
    assert made(**QWEN.call("text", output_type="latent")).images.shape == (1, 4, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sequence_length": 1025}, "max_sequence_length=1025"),
        ({"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 9, 15)}, "prompt_embeds has vectors of size 15"),
        (
            {
                "prompt": None,
                "prompt_embeds": torch.zeros(1, 9, 16),
                "prompt_embeds_mask": torch.ones(1, 8),
            },
            "prompt_embeds_mask",
        ),
        ({"height": 36}, "height=36 must be a positive multiple of 8"),
        ({"true_cfg_scale": float("inf")}, "true_cfg_scale"),
    ],
)
def test_what_makes_no_sense_is_refused(pipes: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pipes[0](**QWEN.call("text", **changes))


def test_the_family_is_known_to_automatic_pipelines(pipes: Any) -> None:
    assert type(AutoPipelineForText2Image.from_pipe(pipes[0])) is QwenImagePipeline
