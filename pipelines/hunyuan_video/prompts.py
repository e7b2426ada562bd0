"""The prompts of HunyuanVideo: states of Llama over a chat that asks to describe a film, and CLIP's pooled vector."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from diffusion_core.logging import get_logger

from ...offload.engine import execution_device
from .. import prompts as shared
from ..loop import check_count
from ..text_masked import check_masks

logger = get_logger(__name__)

# The chat that the model was trained with (Kong et al. 2024, section 4.3): what comes before the prompt is not shown to
# the transformer.
DEFAULT_PROMPT_TEMPLATE: Mapping[str, Any] = {
    "template": (
        "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
        "1. The main content and theme of the video."
        "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
        "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
        "4. background environment, light, style and atmosphere."
        "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    ),
    "crop_start": 95,
}
# The last layers of Llama are too near to its next word.
_LAYER = -3

# Tokenizers change their settings while they work, so two threads must not use one at the same time.
_tokenizing = threading.Lock()


@dataclass(frozen=True)
class Prompts(shared.PooledPrompts):
    """The arguments of a call that say what to show; see there."""

    prompt_attention_mask: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None
    prompt_template: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_PROMPT_TEMPLATE)
    max_sequence_length: int = 256

    _repeats: ClassVar[str] = "num_videos_per_prompt"

    @property
    def negative(self) -> bool:
        """Whether it is said what not to show."""
        return self.negative_prompt is not None or self.negative_prompt_embeds is not None

    def count(self) -> int:
        count = super().count()
        check_count("max_sequence_length", self.max_sequence_length)
        check_masks(self)
        check_template(self.prompt_template)
        return count


class Text(NamedTuple):
    """What Llama makes of N prompts.

    Attributes:
        embeds: a vector for each token, (N, length, size).
        mask: 1 for tokens of the prompt and its end, 0 for padding, (N, length).
        truncated: the end of each prompt that was left out; "" where nothing was.
    """

    embeds: torch.Tensor
    mask: torch.Tensor
    truncated: list[str]


def check_template(template: Any) -> None:
    """Refuse what is not {"template": text with one {}, "crop_start": number of tokens}."""
    text = template.get("template") if isinstance(template, Mapping) else None
    if not isinstance(text, str) or text.count("{}") != 1:
        raise ValueError(
            'prompt_template must be a dict whose "template" is a text with one {} where the prompt goes, not '
            f"{template!r}"
        )
    start = template.get("crop_start")
    if start is not None and (not isinstance(start, int) or start < 0):
        raise ValueError(f'"crop_start" of prompt_template must be a number of tokens, not {start!r}')


def encode_llama(
    prompts: Sequence[str],
    tokenizer: Any,
    text_encoder: Any,
    template: Mapping[str, Any],
    length: int,
    device: torch.device | None = None,
) -> Text:
    """Encode prompts with Llama.

    Args:
        prompts: N texts.
        tokenizer, text_encoder: of the language model; the tokenizer pads at the end.
        template: the chat, see `check_template`. Without "crop_start", what comes before {} is cut off.
        length: tokens of each prompt, the end of the chat included; shorter ones are padded, longer ones cut.
        device: where the encoder computes; its own by default.
    """
    device = device or execution_device(text_encoder)
    chats = [template["template"].format(prompt) for prompt in prompts]
    start = template.get("crop_start")
    with _tokenizing:
        if start is None:
            start = len(tokenizer(template["template"].partition("{}")[0])["input_ids"])
        rows = tokenizer(
            chats, max_length=start + length, padding="max_length", truncation=True, return_tensors="pt"
        ).to(device)
        whole = tokenizer(chats, padding=False, truncation=False, verbose=False)["input_ids"]
        rests = [tokens[start + length :] for tokens in whole]
        truncated = [tokenizer.decode(rest, skip_special_tokens=True) if rest else "" for rest in rests]
    for text in filter(None, truncated):
        logger.warning("the prompt is longer than %d tokens and was cut. Left out: %r", length, text)
    states = text_encoder(
        input_ids=rows.input_ids, attention_mask=rows.attention_mask, output_hidden_states=True
    ).hidden_states[_LAYER]
    return Text(states[:, start:], rows.attention_mask[:, start:], truncated)
