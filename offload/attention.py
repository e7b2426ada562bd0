"""`attention`: the one function through which every model attends, and the settings of how it does."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SliceSize: TypeAlias = int | str | None

# The names are the reference's. None leaves the choice of a kernel to torch.
BACKENDS: dict[str, SDPBackend | None] = {
    "native": None,
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    "_native_math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class AttentionSettings:
    """How the layers of a model attend. Every layer has its own, so nothing is shared between models.

    Args:
        backend: a key of `BACKENDS`.
        slice_size: None computes all heads at once, a number so many heads of one sample at a time, "auto" half of
            them, and "max" one. Less memory where torch has no fused kernel, with the same numbers.

    Raises:
        ValueError: if there is no such backend, or `slice_size` is none of these.
    """

    backend: str = "native"
    slice_size: SliceSize = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"attention backend {self.backend!r} is not available; choose of {', '.join(BACKENDS)}")
        size = self.slice_size
        if not (size in (None, "auto", "max") or (type(size) is int and size > 0)):
            raise ValueError(f"slice_size={size!r} must be 'auto', 'max', or a number of heads, 1 or more")

    def heads_at_once(self, heads: int) -> int:
        """How many of `heads` heads are computed at a time."""
        size = self.slice_size
        if isinstance(size, str):
            size = max(heads // 2, 1) if size == "auto" else 1
        return min(size or heads, heads)


DEFAULT = AttentionSettings()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    settings: AttentionSettings = DEFAULT,
) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1).

    Args:
        query: shape (batch, query tokens, heads, head size).
        key: shape (batch, key tokens, heads, head size).
        value: as `key`.
        attn_mask: broadcastable to (batch, heads, query tokens, key tokens); bool (True takes part) or added to the
            scores.
        is_causal: each query sees keys up to its own position; not together with a mask.
        scale: factor of the scores, 1 / sqrt(head size) by default.
        settings: those of the layer.

    Returns:
        As `query`, with the head size of `value`.

    Raises:
        ValueError: if the backend that was set cannot take the call.
    """
    parts = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    if settings is DEFAULT:
        attended = F.scaled_dot_product_attention(*parts, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
        return attended.transpose(1, 2)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    if settings.slice_size is None:
        return _computed(*parts, attn_mask, settings.backend, options).transpose(1, 2)
    rows = [
        torch.cat([_computed(*slices, settings.backend, options) for slices in sample], dim=1)
        for sample in _slices(*parts, attn_mask, settings.heads_at_once(query.shape[2]))
    ]
    return torch.cat(rows).transpose(1, 2)


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    backend: str,
    options: dict[str, Any],
) -> torch.Tensor:
    """One call of torch, in the layout (batch, heads, tokens, head size)."""
    if backend == "native":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    try:
        with forced(backend):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    except RuntimeError as error:
        if "kernel" not in str(error):
            raise
        raise ValueError(
            f"attention backend {backend!r} cannot take {'masked ' if mask is not None else ''}attention of "
            f"{query.dtype} with head size {query.shape[-1]} on {query.device}; set_attention_backend('native') can"
        ) from error


def forced(backend: str) -> AbstractContextManager[Any]:
    """A context in which torch computes attention with one kernel only."""
    kernel = BACKENDS[backend]
    return nullcontext() if kernel is None else cast("AbstractContextManager[Any]", sdpa_kernel(kernel))


def check_backend(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a backend that does not work on a device in a dtype, before a model is told to use it.

    Raises:
        ValueError: if it is unknown or does not work there; the message names those that can be set.
    """
    AttentionSettings(backend)
    if BACKENDS[backend] is None or device.type == "meta":
        return
    probe = torch.zeros(1, 1, 8, 64, device=device, dtype=dtype)
    try:
        _computed(probe, probe, probe, None, backend, {})
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"attention backend {backend!r} does not work in {dtype} on {device}: {str(error).splitlines()[0]}"
        ) from error


def _slices(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, heads: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
    """For each sample, its parts of `heads` heads, with their part of the mask."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)].expand(*query.shape[:2], -1, -1)
    for sample in range(len(query)):
        one = slice(sample, sample + 1)
        yield [
            (
                query[one, start : start + heads],
                key[one, start : start + heads],
                value[one, start : start + heads],
                None if mask is None else mask[one, start : start + heads],
            )
            for start in range(0, query.shape[1], heads)
        ]
