"""Prompts to embeddings with T5 encoders, which read more of a prompt than CLIP's do."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_core.logging import get_logger

from ..offload.engine import execution_device

logger = get_logger(__name__)

# Tokenizers change their settings while they work, so two threads must not use one at the same time.
_tokenizing = threading.Lock()


@dataclass
class T5Text:
    """What a T5 encoder makes of N prompts.

    Attributes:
        embeds: a vector for each token, shape (N, length, size).
        mask: 1 for tokens of the prompt and its end, 0 for padding: shape (N, length), integers.
        truncated: the end of each prompt that was left out; "" where nothing was.
    """

    embeds: torch.Tensor
    mask: torch.Tensor
    truncated: list[str]


def encode_t5(
    prompts: Sequence[str],
    tokenizer: Any,
    text_encoder: Any,
    *,
    length: int,
    masked: bool = False,
    device: torch.device | str | None = None,
) -> T5Text:
    """Encode prompts with a T5 encoder (Raffel et al. 2020).

    Args:
        prompts: N texts.
        tokenizer: with marks of end and padding.
        text_encoder: a `T5EncoderModel` or one like it.
        length: tokens for each prompt, the mark of the end included; shorter ones are padded, longer ones cut.
        masked: the encoder does not see padding. Models that were trained without a mask need it unset.
        device: where the encoder computes; its own device by default.
    """
    rows, truncated = _fill(prompts, tokenizer, length)
    for text in filter(None, truncated):
        logger.warning("the prompt is longer than %d tokens and was cut. Left out: %r", length, text)
    if device is None:
        device = execution_device(text_encoder)
    tokens = rows["input_ids"].to(device)
    mask = rows["attention_mask"].to(device)
    embeds = text_encoder(tokens, attention_mask=mask if masked else None)[0]
    return T5Text(embeds, mask, truncated)


def check_length(name: str, value: Any, limit: int) -> None:
    """Refuse a number of tokens that is not a whole number from 1 to `limit`."""
    if not isinstance(value, int) or not 1 <= value <= limit:
        raise ValueError(f"{name}={value!r} must be a whole number from 1 to {limit}")


def _fill(prompts: Sequence[str], tokenizer: Any, length: int) -> tuple[Any, list[str]]:
    """The tokens of each prompt, `length` of them, with their mask, and what was cut."""
    with _tokenizing:
        rows = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        whole = tokenizer(list(prompts), add_special_tokens=False, truncation=False, padding=False, verbose=False)
        room = length - tokenizer.num_special_tokens_to_add()
        rests = [tokens[room:] for tokens in whole["input_ids"]]
        return rows, [tokenizer.decode(rest) if rest else "" for rest in rests]
