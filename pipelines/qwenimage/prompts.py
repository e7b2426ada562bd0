"""The prompts of Qwen-Image: a language model's last layer over a chat that asks for a description of the prompt."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from diffusion_core.logging import get_logger

from ...offload.engine import execution_device
from .. import prompts as shared
from ..loop import check_count
from ..text import check_negative, count_prompts
from ..text_t5 import check_length

logger = get_logger(__name__)

LONGEST_TEXT = 1024
# The chat that the model was trained with (Wu et al. 2025, figure 7), and the tokens of it that come before the prompt.
CHAT = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
HEAD = 34

# Tokenizers change their settings while they work, so two threads must not use one at the same time.
_tokenizing = threading.Lock()


@dataclass(frozen=True)
class Prompts(shared.Prompts):
    """The arguments of a call that say what to draw; see there."""

    prompt_embeds_mask: torch.Tensor | None = None
    negative_prompt_embeds_mask: torch.Tensor | None = None
    max_sequence_length: int = 512

    @property
    def negative(self) -> bool:
        """Whether it is said what not to draw."""
        return self.negative_prompt is not None or self.negative_prompt_embeds is not None

    def count(self) -> int:
        """The number of prompts, after all that can be told about them alone was checked."""
        count = count_prompts(self.prompt, self.prompt_embeds)
        # Both sides are predicted apart, so they may differ in their number of tokens.
        check_negative(self.negative_prompt, self.negative_prompt_embeds, None, count)
        check_count("num_images_per_prompt", self.num_images_per_prompt)
        check_length("max_sequence_length", self.max_sequence_length, LONGEST_TEXT)
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            embeds, mask = getattr(self, name), getattr(self, f"{name}_mask")
            if mask is not None and (embeds is None or tuple(mask.shape) != tuple(embeds.shape[:2])):
                raise ValueError(f"{name}_mask must have one entry for each token of {name}, (prompts, tokens)")
        return count


class Text(NamedTuple):
    """What N prompts become.

    Attributes:
        embeds: a vector for each token, (N, tokens, size), zero where there is padding.
        mask: which tokens count, (N, tokens); None if all do.
        truncated: the end of each prompt that was left out; "" where nothing was.
    """

    embeds: torch.Tensor
    mask: torch.Tensor | None
    truncated: list[str] | None = None


def encode(
    prompts: Sequence[str], tokenizer: Any, text_encoder: Any, length: int, device: torch.device | None = None
) -> Text:
    """Encode prompts with Qwen2.5-VL.

    Args:
        prompts: N texts.
        tokenizer, text_encoder: of the language model.
        length: tokens of each prompt at most, the end of the chat included.
        device: where the encoder computes; its own by default.
    """
    device = device or execution_device(text_encoder)
    with _tokenizing:
        chats = [CHAT.format(prompt) for prompt in prompts]
        rows = tokenizer(chats, max_length=LONGEST_TEXT + HEAD, padding=True, truncation=True, return_tensors="pt").to(
            device
        )
        plain = tokenizer(list(prompts), padding=False, truncation=False, verbose=False)["input_ids"]
        truncated = [tokenizer.decode(tokens[length:]) if len(tokens) > length else "" for tokens in plain]
    for text in filter(None, truncated):
        logger.warning("the prompt is longer than %d tokens and was cut. Left out: %r", length, text)
    states = text_encoder(
        input_ids=rows.input_ids, attention_mask=rows.attention_mask, output_hidden_states=True
    ).hidden_states[-1]
    # Whichever side the tokenizer pads, the prompt's own tokens lie at the start of a row from here on.
    found = [row[mask.bool()][HEAD : HEAD + length] for row, mask in zip(states, rows.attention_mask, strict=True)]
    embeds = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    counts = torch.tensor([len(each) for each in found], device=device)
    mask = torch.arange(embeds.shape[1], device=device) < counts[:, None]
    return Text(embeds, None if bool(mask.all()) else mask.long(), truncated)
