"""The prompts of Z-Image: the last layer but one of a language model that is asked the prompt, and thinks about it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from diffusion_core.logging import get_logger

from ...offload.engine import execution_device
from ..loop import check_count
from ..picture import PictureOutput
from ..text import as_prompts
from ..text_t5 import check_length

logger = get_logger(__name__)

LONGEST_TEXT = 512
# Tokenizers change their settings while they work, so two threads must not use one at the same time.
_tokenizing = threading.Lock()

# A tensor (tokens, size) for each prompt.
Embeds = list[torch.Tensor]


@dataclass
class ZImagePipelineOutput(PictureOutput):
    """Pictures, and what was cut from their prompts; see `PictureOutput`."""


@dataclass(frozen=True)
class Prompts:
    """The arguments of a call that say what to draw; see there. Embeddings differ in length from prompt to prompt."""

    prompt: str | Sequence[str] | None
    negative_prompt: str | Sequence[str] | None = None
    prompt_embeds: Any = None
    negative_prompt_embeds: Any = None
    num_images_per_prompt: int = 1
    max_sequence_length: int = LONGEST_TEXT
    embeds_of: ClassVar[str] = "a list with a tensor (tokens, size) for each prompt"

    def count(self) -> int:
        """The number of prompts, after all that can be told about them alone was checked."""
        check_count("num_images_per_prompt", self.num_images_per_prompt)
        check_length("max_sequence_length", self.max_sequence_length, LONGEST_TEXT)
        if self.prompt is None and self.prompt_embeds is None:
            raise ValueError("pass prompt or prompt_embeds")
        for name in ("prompt", "negative_prompt"):
            embeds = getattr(self, f"{name}_embeds")
            if embeds is None:
                continue
            if getattr(self, name) is not None:
                raise ValueError(f"{name} and {name}_embeds exclude each other: pass one of them")
            if not isinstance(embeds, list | tuple) or not len(embeds):
                raise TypeError(f"{name}_embeds must be {self.embeds_of}, not {type(embeds).__name__}")
            if not all(isinstance(each, torch.Tensor) and each.ndim == 2 for each in embeds):
                raise ValueError(f"{name}_embeds must be {self.embeds_of}")
        given = self.prompt_embeds
        count = len(as_prompts(self.prompt, None) if given is None else given)
        other = self.negative_prompt_embeds
        if other is not None and len(other) not in (1, count):
            raise ValueError(f"negative_prompt_embeds has {len(other)} entries for {count} prompts: pass one for each")
        if self.negative_prompt is not None:
            as_prompts(self.negative_prompt, count, "negative_prompt")
        return count


def encode(
    prompts: Sequence[str], tokenizer: Any, text_encoder: Any, length: int, device: torch.device | None = None
) -> tuple[Embeds, list[str]]:
    """Encode prompts with Qwen3; returns their embeddings, and the end of each that was left out.

    Args:
        prompts: N texts.
        tokenizer, text_encoder: of the language model.
        length: tokens of each chat at most.
        device: where the encoder computes; its own by default.
    """
    device = device or execution_device(text_encoder)
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
    with _tokenizing:
        chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}], **options) for text in prompts]
        rows = tokenizer(chats, padding=True, max_length=length, truncation=True, return_tensors="pt").to(device)
        whole = tokenizer(chats, padding=False, truncation=False, verbose=False)["input_ids"]
        truncated = [tokenizer.decode(tokens[length:]) if len(tokens) > length else "" for tokens in whole]
    for text in filter(None, truncated):
        logger.warning("the prompt is longer than %d tokens and was cut. Left out: %r", length, text)
    mask = rows.attention_mask.bool()
    states = text_encoder(input_ids=rows.input_ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
    return [row[counts] for row, counts in zip(states, mask, strict=True)], truncated
