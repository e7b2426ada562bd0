"""The prompts of Wan: embeddings of UMT5, with zeros where a prompt has ended."""

import html
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from ..text_t5 import encode_t5


def clean(text: str) -> str:
    """A prompt as Wan's was trained: entities resolved, each space single. Package ftfy, if it is there, mends letters.

    It turns round quotes into straight ones, and what was decoded wrongly into what it was.
    """
    if importlib.util.find_spec("ftfy") is not None:
        text = importlib.import_module("ftfy").fix_text(text)
    return " ".join(html.unescape(html.unescape(text)).split())


def encode(
    texts: Sequence[str], tokenizer: Any, text_encoder: Any, length: int, device: torch.device | None
) -> tuple[torch.Tensor, list[str]]:
    """Embeddings (N, length, size) of N texts, zeros after the end of each, and what was cut from each."""
    cleaned = [clean(text) for text in texts]
    text = encode_t5(cleaned, tokenizer, text_encoder, length=length, masked=True, device=device)
    seen = text.mask.bool().unsqueeze(-1)
    return torch.where(seen, text.embeds, torch.zeros((), dtype=text.embeds.dtype, device=seen.device)), text.truncated
