"""The prompts of Stable Diffusion 3: two CLIP encoders side by side, and T5 behind them (Esser et al. 2024, fig. 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...offload.engine import execution_device
from ..stable_diffusion_xl import prompts as xl
from ..stable_diffusion_xl.prompts import Encoded
from ..text import as_prompts, encode_clip, token_limit
from ..text_t5 import T5Text, check_length, encode_t5

LONGEST_TEXT = 512


@dataclass(frozen=True)
class Prompts(xl.Prompts):
    """The arguments of a call that say what to draw; see there."""

    prompt_3: str | Sequence[str] | None = None
    negative_prompt_3: str | Sequence[str] | None = None
    max_sequence_length: int = 256

    def count(self) -> int:
        """The number of prompts, after all that can be told about them alone was checked."""
        count = super().count()
        check_length("max_sequence_length", self.max_sequence_length, LONGEST_TEXT)
        for prefix in ("", "negative_"):
            self.check_text(f"{prefix}prompt_3", count)
        return count

    def given(self, prefix: str) -> Encoded | None:
        """The embeddings that stand for the texts, of the negative prompt for the prefix "negative_"."""
        embeds, pooled = (getattr(self, f"{prefix}{name}") for name in ("prompt_embeds", "pooled_prompt_embeds"))
        return None if embeds is None else Encoded(embeds, pooled)

    def texts(self, prefix: str, count: int) -> list[list[str]]:
        """The texts for each of the three encoders, which read those for the first where they have none."""
        names = [f"{prefix}prompt{number}" for number in ("", "_2", "_3")]
        first = getattr(self, names[0])
        return [as_prompts(getattr(self, name) or first, count, name) for name in names]


class Encoders(NamedTuple):
    """(tokenizer, text encoder) of both CLIPs, and of T5 where there is one; and the width of the embeddings."""

    clips: Sequence[tuple[Any, Any]]
    t5: tuple[Any, Any] | None
    size: int


def encode(
    prompts: Prompts,
    count: int,
    encoders: Encoders,
    prefixes: Sequence[str],
    device: torch.device | None = None,
) -> list[Encoded]:
    """The embeddings of `count` prompts, for each prefix: "" for the prompts, "negative_" for the negative ones.

    Those of the CLIPs lie side by side, widened with zeros to T5's, which follow them: (N, 77 + length, size). The
    pooled ones lie side by side too. Without T5 there are zeros in its place.

    Args:
        prompts: what to draw; embeddings in it stand for texts.
        count: how many prompts there are.
        encoders: for the texts.
        prefixes: whose embeddings to make.
        device: where the encoders compute; their own by default.
    """
    found = {prefix: prompts.given(prefix) for prefix in prefixes}
    asked = {prefix: prompts.texts(prefix, count) for prefix in prefixes if found[prefix] is None}
    if not asked:
        return [each for each in found.values() if each is not None]
    # Each encoder is done with all texts before the next one begins, so that it is needed on the device once.
    clips = [
        {
            prefix: encode_clip(
                texts[number],
                tokenizer,
                encoder,
                device=device or execution_device(encoder),
                # All layers but the last count for negative prompts even with `clip_skip`, as in the reference.
                skip=1 + (0 if prefix else prompts.clip_skip or 0),
                final_norm=False,
            )
            for prefix, texts in asked.items()
        }
        for number, (tokenizer, encoder) in enumerate(encoders.clips)
    ]
    others = [each.embeds.shape[1] for each in found.values() if each is not None]
    length = _length(prompts.max_sequence_length, others, encoders.clips)
    long = _long([text for texts in asked.values() for text in texts[2]], encoders.t5, length, device)
    for index, prefix in enumerate(asked):
        made = [each[prefix] for each in clips]
        target = made[0].embeds if long is None else long.embeds
        short = torch.cat([each.embeds.to(target.device) for each in made], dim=-1)
        short = F.pad(short, (0, encoders.size - short.shape[-1]))
        pooled = torch.cat([each.pooled.to(target.device) for each in made], dim=-1)
        if long is None:
            rest = short.new_zeros(count, length, encoders.size)
            cut = [max(ends, key=len) for ends in zip(*(each.truncated for each in made), strict=True)]
        else:
            part = slice(index * count, (index + 1) * count)
            rest, cut = long.embeds[part], long.truncated[part]
        found[prefix] = Encoded(torch.cat([short, rest], dim=1), pooled, cut)
    return [each for each in found.values() if each is not None]


def _length(asked: int, others: list[int], clips: Sequence[tuple[Any, Any]]) -> int:
    """Tokens of T5: what was asked for, or what makes up embeddings of as many tokens as those that are given."""
    if not others:
        return asked
    limit = min(token_limit(*each) for each in clips)
    if others[0] <= limit:
        raise ValueError(
            f"embeddings of {others[0]} tokens go with no text, which makes {limit} tokens and those for T5: pass "
            "prompt_embeds and negative_prompt_embeds, both from encode_prompt"
        )
    return others[0] - limit


def _long(texts: list[str], t5: tuple[Any, Any] | None, length: int, device: torch.device | None) -> T5Text | None:
    """What T5 makes of the texts, if there is one."""
    if t5 is None:
        return None
    tokenizer, encoder = t5
    return encode_t5(texts, tokenizer, encoder, length=length, device=device or execution_device(encoder))
