"""AuraFlow beyond the battery: masked embeddings, sizes, steps of one's own choice, bad input."""

from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from . import masked, sd
from .families import AURAFLOW, pair, pipe


def call(**changes: Any) -> dict[str, Any]:
    return AURAFLOW.call("text", **{"prompt": "a red cat", "negative_prompt": "ugly", **changes})


def difference(ours: Any, theirs: Any, **changes: Any) -> float:
    results = [each(**call(**changes, generator=sd.seeded())).images for each in (ours, theirs)]
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {"sigmas": [1.0, 0.6, 0.1]},
        {"height": 48, "width": 24, "num_images_per_prompt": 2},
        {"prompt": ["a", "a red cat and a dog"], "negative_prompt": None},
        {"latents": torch.randn(1, 4, 8, 8, generator=sd.seeded(4))},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_calls_agree_with_the_reference(changes: dict[str, Any]) -> None:
    assert difference(*pair(AURAFLOW), **changes) < 1e-4


def test_embeddings_are_those_of_the_reference_and_zero_where_there_is_padding() -> None:
    ours, theirs = pair(AURAFLOW)
    arguments = {"prompt": ["a RED cat", "dog"], "negative_prompt": "ugly", "num_images_per_prompt": 2}
    made = ours.encode_prompt(**arguments, max_sequence_length=12)
    wanted = theirs.encode_prompt(**arguments, max_sequence_length=12)
    for index in (0, 2):
        # Not so the masks, which the reference repeats for every channel.
        torch.testing.assert_close(made[index], wanted[index], atol=1e-5, rtol=0)
    embeds, mask = made[:2]
    assert embeds[mask == 0].abs().max() == 0
    assert (mask == 0).any()


def test_embeddings_stand_for_prompts_in_both() -> None:
    ours, theirs = pair(AURAFLOW)
    embeds = masked.auraflow_embed(ours, ["a dog"], ["blue"])
    assert difference(ours, theirs, prompt=None, negative_prompt=None, **embeds) < 1e-4


def test_the_size_is_1024_unless_said_otherwise() -> None:
    made, sizes = pipe(AURAFLOW), []

    def look(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        sizes.append(tuple(tensors["latents"].shape[-2:]))

    changes = {"height": None, "width": None, "callback_on_step_end": look}
    assert made(**call(**changes)).images.shape == (1, 3, 32, 32)
    assert made(**call(**changes, latents=torch.zeros(1, 4, 4, 6))).images.shape == (1, 3, 16, 24)
    assert sizes == [(8, 8), (8, 8), (4, 6), (4, 6)]
    with pytest.raises(ValueError, match=r"expected \(1, 4, 256, 256\)"):
        made("a cat", latents=torch.zeros(1, 4, 8, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 36}, "height=36 must be a positive multiple of 8, such as 32"),
        ({"attention_kwargs": {"gamma": 1}}, r"attention_kwargs has \['gamma'\]"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 5, 32)}, "come together"),
        ({"max_sequence_length": 0}, "max_sequence_length=0"),
        ({"sigmas": []}, "sigmas is empty"),
        ({"prompt": ["a", "b"], "negative_prompt": ["c", "d", "e"]}, "negative_prompt has 3 texts for 2 prompts"),
    ],
)
def test_wrong_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe(AURAFLOW)(**call(**changes))


def test_adapters_are_not_there() -> None:
    with pytest.raises(ValueError, match="lora_scale has nothing to act on"):
        pipe(AURAFLOW).encode_prompt("a cat", lora_scale=0.5)


def test_one_negative_text_serves_all_prompts() -> None:
    made = pipe(AURAFLOW)
    given = {"prompt": ["a cat", "a dog"], "generator": None, "latents": torch.zeros(2, 4, 8, 8)}
    one, each = (made(**call(**given, negative_prompt=text)).images for text in ("ugly", ["ugly", "ugly"]))
    assert torch.equal(one, each)


def test_automatic_choice_knows_the_family(tmp_path: Any) -> None:
    _, theirs = pair(AURAFLOW)
    theirs.save_pretrained(tmp_path)
    ours = diffusion_core.AutoPipelineForText2Image.from_pretrained(tmp_path)
    assert type(ours) is diffusion_core.AuraFlowPipeline
    assert type(diffusers.AutoPipelineForText2Image.from_pretrained(tmp_path)) is diffusers.AuraFlowPipeline
