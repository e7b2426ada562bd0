"""A familiar import path: attention by the backend that was chosen. It lives in `offload.attention`."""

from typing import Any

import torch

from ..offload.attention import DEFAULT, AttentionBackendName, AttentionSettings, attention, attention_backend

__all__ = ["AttentionBackendName", "attention_backend", "dispatch_attention_fn"]


def dispatch_attention_fn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: str | None = None,
    parallel_config: None = None,
) -> torch.Tensor:
    """Attention of tensors (batch, tokens, heads, head size); see `attention`, whose arguments have other names.

    Args:
        attn_mask: bool or added to the scores; one of two axes is (batch, key tokens).
        enable_gqa: keys and values may have fewer heads, each for several of the query's.
        backend: None takes that of the surroundings.

    Raises:
        ValueError: for dropout, options of single kernels, or attention over several devices, which are not here.
    """
    for name, given in (
        ("dropout_p", dropout_p),
        ("attention_kwargs", attention_kwargs),
        ("parallel_config", parallel_config),
    ):
        if given:
            raise ValueError(f"{name}={given!r} is not supported; leave it out")
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask[:, None, None]
    if enable_gqa:
        times = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(times, dim=2), value.repeat_interleave(times, dim=2)
    settings = DEFAULT if backend is None else AttentionSettings(backend)
    return attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, settings=settings)
