"""Prompts to embeddings: counting and pairing prompts, CLIP text encoding, prompts longer than the encoder takes."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from diffusion_core.logging import get_logger

from ..offload.engine import execution_device

logger = get_logger(__name__)

LongPrompt: TypeAlias = Literal["truncate", "chunk"]

# Tokenizers change their settings while they work, so two threads must not use one at the same time.
_tokenizing = threading.Lock()


@dataclass
class ClipText:
    """What a CLIP text encoder makes of N prompts.

    Attributes:
        embeds: a vector for each token, shape (N, tokens, size).
        pooled: the encoder's second result, of the first part of a long prompt: shape (N, size) where it has one.
        truncated: the end of each prompt that was left out; "" where nothing was.
    """

    embeds: torch.Tensor
    pooled: torch.Tensor
    truncated: list[str]


def count_prompts(prompt: Any, prompt_embeds: torch.Tensor | None, name: str = "prompt") -> int:
    """The number of prompts, given as text or as embeddings, but not both.

    Raises:
        TypeError: if `prompt` is neither a string nor a list of strings.
        ValueError: if both are given or none, or the list is empty, or the embeddings lack an axis.
    """
    if prompt is not None and prompt_embeds is not None:
        raise ValueError(f"{name} and {name}_embeds exclude each other: pass one of them")
    if prompt_embeds is not None:
        if not isinstance(prompt_embeds, torch.Tensor) or prompt_embeds.ndim != 3 or not len(prompt_embeds):
            shape = getattr(prompt_embeds, "shape", type(prompt_embeds).__name__)
            raise ValueError(f"{name}_embeds must be a tensor of shape (prompts, tokens, size), not {shape}")
        return len(prompt_embeds)
    if prompt is None:
        raise ValueError(f"pass {name} or {name}_embeds")
    return len(as_prompts(prompt, None, name))


def as_prompts(prompt: str | Sequence[str] | None, count: int | None, name: str = "prompt") -> list[str]:
    """A prompt argument as a list, with `count` entries if given: one text serves for all, none stands for "".

    Raises:
        TypeError: if something else than strings is given.
        ValueError: if the list is empty, or has neither one entry nor `count`.
    """
    texts = [prompt or ""] if prompt is None or isinstance(prompt, str) else prompt
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a string or a list of strings, not {prompt!r}")
    if not texts:
        raise ValueError(f"{name} is an empty list: pass one text at least")
    if count is None or len(texts) == count:
        return list(texts)
    if len(texts) != 1:
        raise ValueError(f"{name} has {len(texts)} texts for {count} prompts: pass one for each, or a single one")
    return list(texts) * count


def check_negative(
    negative_prompt: str | Sequence[str] | None,
    negative_prompt_embeds: torch.Tensor | None,
    prompt_embeds: torch.Tensor | None,
    count: int,
) -> None:
    """Refuse a negative prompt that does not fit `count` prompts.

    Raises:
        TypeError: if `negative_prompt` is neither a string nor a list of strings.
        ValueError: if it is given as text and as embeddings, or the numbers or shapes differ.
    """
    if negative_prompt is not None:
        if negative_prompt_embeds is not None:
            raise ValueError("negative_prompt and negative_prompt_embeds exclude each other: pass one of them")
        as_prompts(negative_prompt, count, "negative_prompt")
    if negative_prompt_embeds is None:
        return
    given = count_prompts(None, negative_prompt_embeds, "negative_prompt")
    if given not in (1, count):
        raise ValueError(f"negative_prompt_embeds has {given} entries for {count} prompts: pass one for each")
    if prompt_embeds is not None and prompt_embeds.shape[1:] != negative_prompt_embeds.shape[1:]:
        raise ValueError(
            f"prompt_embeds {tuple(prompt_embeds.shape)} and negative_prompt_embeds "
            f"{tuple(negative_prompt_embeds.shape)} differ in tokens or size: encode both alike"
        )


def check_clip_skip(clip_skip: int | None, text_encoder: Any) -> None:
    """Refuse to skip more layers than the text encoder has."""
    if clip_skip is None or text_encoder is None:
        return
    layers = text_encoder.config.num_hidden_layers
    if not isinstance(clip_skip, int) or not 0 <= clip_skip < layers:
        raise ValueError(f"clip_skip={clip_skip!r} must be a whole number from 0 to {layers - 1}")


def check_long_prompt(long_prompt: str) -> None:
    """Refuse an unknown way to treat prompts that are longer than the encoder takes."""
    if long_prompt not in ("truncate", "chunk"):
        raise ValueError(f"long_prompt={long_prompt!r} is unknown: choose 'truncate' or 'chunk'")


def repeat_for_images(embeds: torch.Tensor, images_per_prompt: int) -> torch.Tensor:
    """Each prompt's entry `images_per_prompt` times in a row: shape (N, ...) to (N * images_per_prompt, ...)."""
    return embeds.repeat_interleave(images_per_prompt, dim=0)


def token_limit(tokenizer: Any, text_encoder: Any) -> int:
    """How many tokens, with the marks of start and end, the encoder takes at once."""
    positions = getattr(text_encoder.config, "max_position_embeddings", None)
    return min(tokenizer.model_max_length, positions or tokenizer.model_max_length)


def chunks_needed(prompts: Sequence[str], tokenizer: Any, text_encoder: Any) -> int:
    """How many parts of the encoder's length it takes to hold the longest of `prompts`."""
    room = token_limit(tokenizer, text_encoder) - 2
    return max(1, *(-(-len(tokens) // room) for tokens in _tokens(prompts, tokenizer)))


def parts_for(
    texts: Sequence[str], given: torch.Tensor | None, long_prompt: str, encoders: Sequence[tuple[Any, Any]]
) -> dict[str, int]:
    """How `encode_clip` cuts texts so that all get the same number of tokens, that of embeddings they go with.

    Args:
        texts: what is encoded.
        given: embeddings (N, tokens, size) that others have to match in tokens, if there are such.
        long_prompt: as for `check_long_prompt`.
        encoders: (tokenizer, text encoder) of each encoder that `texts` go through.

    Raises:
        ValueError: if no text gives as many tokens as `given` has.
    """
    if given is None:
        return {"chunks": max(chunks_needed(texts, *each) for each in encoders) if long_prompt == "chunk" else 1}
    tokens, limit = given.shape[1], min(token_limit(*each) for each in encoders)
    if tokens <= limit:
        return {"length": tokens}
    if tokens % limit:
        raise ValueError(
            f"embeddings of {tokens} tokens go with no text, as the text encoder gives multiples of {limit}: "
            f"pass prompt_embeds and negative_prompt_embeds"
        )
    return {"chunks": tokens // limit}


def encode_clip(
    prompts: Sequence[str],
    tokenizer: Any,
    text_encoder: Any,
    *,
    device: torch.device | str | None = None,
    chunks: int = 1,
    length: int | None = None,
    skip: int | None = None,
    final_norm: bool = True,
) -> ClipText:
    """Encode prompts with a CLIP text encoder (Radford et al. 2021, section 2.4).

    A prompt is cut to `chunks` parts of `length` tokens. Each part gets its own marks of start and end and is encoded
    alone, and the parts' embeddings follow one another: cross-attention takes any number of tokens.

    Args:
        prompts: N texts.
        tokenizer: with marks of start, end and padding.
        text_encoder: a `CLIPTextModel`, with or without projection.
        device: where the encoder computes; its own device by default.
        chunks: parts for each prompt; short prompts are padded.
        length: tokens in a part, what the encoder takes by default.
        skip: how many of the last layers to leave out; with None the encoder's own result counts.
        final_norm: apply the encoder's last norm to what an earlier layer gives.
    """
    rows, mask, truncated = _fill(prompts, tokenizer, chunks, length or token_limit(tokenizer, text_encoder))
    for text in filter(None, truncated):
        logger.warning(
            "too long for CLIP, so the prompt was cut; 'chunk' as `long_prompt` avoids it. Left out: %r", text
        )
    if device is None:
        device = execution_device(text_encoder)
    masked = getattr(text_encoder.config, "use_attention_mask", None)
    out = text_encoder(
        torch.tensor(rows, device=device),
        attention_mask=torch.tensor(mask, device=device) if masked else None,
        output_hidden_states=skip is not None,
    )
    # With a projection the first result is the pooled one and the tokens come second.
    tokens = out.last_hidden_state
    pooled = out[0] if out[0].ndim == 2 else out.pooler_output
    if skip is not None:
        tokens = out.hidden_states[-(skip + 1)]
        if final_norm:
            tokens = _final_norm(text_encoder)(tokens)
    embeds = tokens.reshape(len(prompts), -1, tokens.shape[-1])
    return ClipText(embeds, pooled.reshape(len(prompts), chunks, -1)[:, 0], truncated)


def _tokens(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of each prompt, however many, without marks of start and end."""
    with _tokenizing:
        return tokenizer(list(prompts), add_special_tokens=False, truncation=False, padding=False, verbose=False)[
            "input_ids"
        ]


def _fill(
    prompts: Sequence[str], tokenizer: Any, chunks: int, length: int
) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """Rows of exactly `length` tokens, `chunks` for each prompt, the mask of those that count, and what was cut."""
    rows: list[list[int]] = []
    mask: list[list[int]] = []
    truncated: list[str] = []
    room = length - 2
    for tokens in _tokens(prompts, tokenizer):
        for start in range(0, chunks * room, room):
            row = [tokenizer.bos_token_id, *tokens[start : start + room], tokenizer.eos_token_id]
            padding = length - len(row)
            rows.append(row + [tokenizer.pad_token_id] * padding)
            mask.append([1] * len(row) + [0] * padding)
        rest = tokens[chunks * room :]
        with _tokenizing:
            truncated.append(tokenizer.decode(rest) if rest else "")
    return rows, mask, truncated


def _final_norm(text_encoder: Any) -> Any:
    """The norm behind the last layer, which sits at different places in different versions of transformers."""
    return next(module for name, module in text_encoder.named_modules() if name.endswith("final_layer_norm"))
