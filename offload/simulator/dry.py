"""Dry mode: full-size models run without their memory.

An operator with a tensor of more than `SMALL` elements is evaluated on the meta device only. Its large results are
memory that is promised and never touched (it would read as zeros); its small results are zeros. All smaller tensors are
real, so schedulers, token ids and masks keep their values.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import torch

from .signatures import Signature

SMALL = 8192
"""Tensors with at most this many elements are computed for real."""

_NEEDS_VALUES = frozenset(
    {
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::_unique",
        "aten::_unique2",
    }
)
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def is_large(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors is too large to be real."""
    return any(tensor.numel() > SMALL for tensor in tensors)


def blank(shape: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A host tensor that reads as zeros and, when large, takes no memory until it is written."""
    shape, stride = tuple(shape), tuple(stride)
    length = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if length <= SMALL:
        return torch.zeros(length, dtype=dtype).as_strided(shape, stride)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, length * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, stride)


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def realise(info: Signature, result: torch.Tensor) -> torch.Tensor:
    """The host tensor that stands for a meta result."""
    host = blank(result.shape, result.stride(), result.dtype)
    if info.name.startswith("aten::all") and result.numel() <= SMALL:
        host.fill_(True)  # zeros are finite, equal and in range: a check over a large tensor passes
    return host


def run(op: Any, info: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on meta tensors.

    Raises:
        RuntimeError: its result depends on values.
    """
    if info.name == "aten::equal":
        return True
    message = f"A dry run cannot evaluate {info.name} on more than {SMALL} elements: the result depends on values."
    if info.name in _NEEDS_VALUES:
        raise RuntimeError(message)
    try:
        return op(*args, **kwargs)
    except NotImplementedError as error:
        raise RuntimeError(f"{message} Or torch has no meta version of it.") from error
