"""What only Z-Image has, against the reference; all else is in the tests that all families share."""

from typing import Any

import pytest
import torch

from . import sd
from .families import ZIMAGE, pair, pipe
from .test_family_parity import difference


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance_scale": 0.5},
        {"cfg_normalization": True},
        {"cfg_normalization": 0.5},
        {"cfg_truncation": 0.2},
        {"cfg_truncation": 0.6},
        {"max_sequence_length": 10},
        {"sigmas": [0.9, 0.4]},
        {"num_inference_steps": 1},
        {"negative_prompt": None},
    ],
)
def test_pictures_are_those_of_the_reference(changes: dict[str, Any]) -> None:
    assert difference(ZIMAGE, "text", pair(ZIMAGE), **{"num_inference_steps": 4, **changes}) < 1e-4


def test_embeddings_are_those_of_the_reference() -> None:
    results = [made.encode_prompt(["a cat", "a dog on a mat"], negative_prompt=["", "x"]) for made in pair(ZIMAGE)]
    for ours, theirs in zip(*results, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert pipe(ZIMAGE).encode_prompt("a cat", do_classifier_free_guidance=False)[1] == []


def test_what_was_cut_is_said() -> None:
    drawn = pipe(ZIMAGE)(**ZIMAGE.call("text", max_sequence_length=12))
    assert drawn.truncated_prompts[0].endswith("think")


def test_the_list_of_prompts_stays() -> None:
    """The reference writes the chat into it."""
    prompts = ["a cat"]
    pipe(ZIMAGE)(**ZIMAGE.call("text", prompt=prompts, negative_prompt=None))
    assert prompts == ["a cat"]


EMBEDS = [torch.zeros(5, 16)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_embeds": EMBEDS}, "prompt and prompt_embeds exclude"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 5, 16)}, "must be a list with a tensor"),
        ({"prompt": None, "prompt_embeds": [torch.zeros(1, 5, 16)]}, "must be a list with a tensor"),
        ({"prompt": None, "prompt_embeds": [torch.zeros(5, 15)]}, "vectors of size 15, the transformer takes size 16"),
        ({"negative_prompt": None, "negative_prompt_embeds": EMBEDS * 3}, "3 entries for 1 prompts"),
        ({"max_sequence_length": 513}, "max_sequence_length=513"),
        ({"cfg_truncation": 2.0}, "cfg_truncation=2.0"),
        ({"cfg_normalization": float("inf")}, "cfg_normalization=inf"),
        ({"joint_attention_kwargs": {"odd": 1}}, "odd"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pipe(ZIMAGE)(**ZIMAGE.call("text", **changes))


def test_one_negative_embedding_serves_all() -> None:
    made = pipe(ZIMAGE)
    _, negative = made.encode_prompt(["x"], negative_prompt=["ugly"])
    given = {"negative_prompt": None, "negative_prompt_embeds": negative}
    texts = ZIMAGE.call("text", 2, negative_prompt="ugly")
    wanted = made(**texts).images
    found = made(**{**ZIMAGE.call("text", 2), **given, "generator": [sd.seeded(index) for index in range(2)]}).images
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
