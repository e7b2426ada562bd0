"""The prompts of Stable Diffusion XL: two encoders side by side, and the pooled result of the second."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...offload.engine import execution_device
from ..prompts import PooledPrompts
from ..text import as_prompts, check_long_prompt, encode_clip, parts_for


@dataclass(frozen=True)
class Prompts(PooledPrompts):
    """The arguments of a call that say what to draw; see there."""

    clip_skip: int | None = None
    long_prompt: str = "truncate"

    def count(self) -> int:
        """The number of prompts, after all that can be told about them alone was checked."""
        check_long_prompt(self.long_prompt)
        return super().count()


class Encoded(NamedTuple):
    """What prompts become: a vector for each token (N, tokens, size), a pooled one (N, size), and what was cut."""

    embeds: torch.Tensor
    pooled: torch.Tensor
    truncated: list[str] | None = None


def encode(
    prompts: Prompts,
    count: int,
    encoders: Sequence[tuple[Any, Any]],
    guided: bool,
    zeros: bool,
    device: torch.device | None = None,
) -> tuple[Encoded, Encoded | None]:
    """The prompts, and the negative ones if `guided`, from the layer before the last of each encoder.

    Args:
        prompts: what to draw; embeddings in it stand for texts.
        count: how many prompts there are.
        encoders: (tokenizer, text encoder), the one whose pooled result counts at the end.
        guided: encode the negative prompts too.
        zeros: where there is no negative prompt, take zeros for it.
        device: where the encoders compute; their own by default.
    """
    positive = _given(prompts.prompt_embeds, prompts.pooled_prompt_embeds)
    negative = _given(prompts.negative_prompt_embeds, prompts.negative_pooled_prompt_embeds)
    negatives = (prompts.negative_prompt, prompts.negative_prompt_2)
    texts = _rows((prompts.prompt, prompts.prompt_2), count, len(encoders)) if positive is None else []
    others: list[list[str]] = []
    if guided and negative is None and not (zeros and negatives == (None, None)):
        others = _rows(negatives, count, len(encoders), "negative_prompt")
    if texts or others:
        given = positive or negative
        rows = [text for row in [*texts, *others] for text in row]
        parts = parts_for(rows, given.embeds if given else None, prompts.long_prompt, encoders)
        if texts:
            positive = _encoded(texts, encoders, 1 + (prompts.clip_skip or 0), parts, device)
        if others:
            # All layers but the last count here even with `clip_skip`, as in the reference.
            negative = _encoded(others, encoders, 1, parts, device)._replace(truncated=None)
    assert positive is not None
    if guided and negative is None:
        negative = Encoded(torch.zeros_like(positive.embeds), torch.zeros_like(positive.pooled))
    return positive, negative if guided else None


def _given(embeds: torch.Tensor | None, pooled: torch.Tensor | None) -> Encoded | None:
    return None if embeds is None or pooled is None else Encoded(embeds, pooled)


def _rows(texts: tuple[Any, Any], count: int, encoders: int, name: str = "prompt") -> list[list[str]]:
    """The texts for each encoder: the second one reads those for the first where it has none of its own."""
    first = as_prompts(texts[0], count, name)
    second = first if texts[1] is None else as_prompts(texts[1], count, f"{name}_2")
    return [first, second][-encoders:]


def _encoded(
    rows: list[list[str]],
    encoders: Sequence[tuple[Any, Any]],
    skip: int,
    parts: dict[str, int],
    device: torch.device | None,
) -> Encoded:
    made = [
        encode_clip(
            texts,
            *each,
            device=device or execution_device(each[1]),
            skip=skip,
            final_norm=False,
            **parts,
        )
        for texts, each in zip(rows, encoders, strict=True)
    ]
    # Both encoders cut at the same place in the usual checkpoints; where they do not, the longer end is told.
    cut = [max(ends, key=len) for ends in zip(*(each.truncated for each in made), strict=True)]
    target = made[-1].embeds
    embeds = torch.cat([each.embeds.to(target.device) for each in made], dim=-1)
    return Encoded(embeds, made[-1].pooled, cut)
