"""A tiny T5 encoder and a tokenizer for it, made from nothing."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

_SPECIAL = ["<pad>", "</s>", "<unk>"]
_WORDS = ["▁", "▁a", "▁red", "▁cat", "▁dog", "▁ugly", "▁blue"]


@cache
def tokenizer() -> Any:
    """A T5 tokenizer that knows single characters and a few words."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    scores = {0.0: _SPECIAL, -2.0: _WORDS, -9.0: letters}
    vocabulary = [(piece, score) for score, pieces in scores.items() for piece in pieces]
    folder = Path(mkdtemp(prefix="t5-tokenizer-"))
    T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=512).save_pretrained(folder)
    return T5TokenizerFast.from_pretrained(folder)


def encoder(size: int = 32, seed: int = 5) -> Any:
    """A T5 encoder of that width for the tokenizer."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=128, d_model=size, d_kv=8, d_ff=37, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return T5EncoderModel(config).eval()
