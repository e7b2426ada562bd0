"""T5 encoding: lengths, padding, masks, and what was cut."""

import logging
from typing import Any

import pytest
import torch
from transformers import T5TokenizerFast

from diffusion_core.pipelines.text_t5 import check_length, encode_t5
from tests.support import hub_config

from . import t5


@pytest.fixture(scope="module")
def parts() -> Any:
    return t5.tokenizer(), t5.encoder()


@torch.no_grad()
def test_padded_to_the_length(parts: Any) -> None:
    tokenizer, encoder = parts
    text = encode_t5(["a red cat", "a dog"], tokenizer, encoder, length=7)
    assert text.embeds.shape == (2, 7, 32)
    assert text.mask.tolist() == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert text.truncated == ["", ""]
    tokens = torch.tensor([[4, 5, 6, 1, 0, 0, 0], [4, 7, 1, 0, 0, 0, 0]])
    assert torch.equal(text.embeds, encoder(tokens)[0])


@torch.no_grad()
def test_a_mask_hides_padding(parts: Any) -> None:
    short, long = (encode_t5(["a cat"], *parts, length=length, masked=True) for length in (3, 9))
    assert torch.allclose(short.embeds, long.embeds[:, :3], atol=1e-6)
    seen = encode_t5(["a cat"], *parts, length=9)
    assert not torch.allclose(seen.embeds[:, :3], long.embeds[:, :3], atol=1e-3)


@torch.no_grad()
def test_what_is_cut_is_told(parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="diffusion_core"):
        text = encode_t5(["a red cat", "a dog", ""], *parts, length=3)
    assert text.truncated == ["cat", "", ""]
    assert text.mask.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert torch.allclose(text.embeds[:1], encode_t5(["a red"], *parts, length=3).embeds, atol=1e-6)
    assert caplog.messages == ["the prompt is longer than 3 tokens and was cut. Left out: 'cat'"]


@torch.no_grad()
def test_real_tokens() -> None:
    folder = hub_config("stabilityai/stable-diffusion-3-medium-diffusers/tokenizer_3")
    tokenizer = T5TokenizerFast.from_pretrained(folder)

    def record(tokens: torch.Tensor, attention_mask: Any) -> Any:
        assert attention_mask is None
        return [torch.nn.functional.one_hot(tokens, len(tokenizer))]

    text = encode_t5(["a cat", "a very long cat"], tokenizer, record, length=5, device="cpu")
    assert text.embeds.argmax(-1).tolist() == [[3, 9, 1712, 1, 0], [3, 9, 182, 307, 1]]
    assert text.truncated == ["", "cat"]


@pytest.mark.parametrize("value", [0, 513, 2.5, None, "9"])
def test_lengths_out_of_range_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_sequence_length"):
        check_length("max_sequence_length", value, 512)
    check_length("max_sequence_length", 512, 512)
