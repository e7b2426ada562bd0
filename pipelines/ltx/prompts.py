"""The prompts of LTX-Video: embeddings of T5, with masks that say which tokens count."""

from dataclasses import dataclass

import torch

from .. import film
from ..text_masked import check_masks


@dataclass(frozen=True)
class Prompts(film.Prompts):
    """The arguments of a call that say what to show; see there."""

    prompt_attention_mask: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None

    def count(self) -> int:
        count = super().count()
        check_masks(self)
        return count
