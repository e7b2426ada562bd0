"""Dry mode: full-size models run without their memory.

An operator with a tensor of more than `SMALL` elements is evaluated on the meta device only. Its large results are
memory that is promised and never touched (it would read as zeros); its small results are zeros. All smaller tensors are
real, so schedulers, token ids and masks keep their values. On the host everything is real, but for large copies into
pinned memory, which is what weights pass through on their way.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any, cast

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


class Shapes:
    """Runs operators on meta tensors, and remembers: the steps of a denoising loop ask the same again and again."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def run(self, op: Any, info: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator as meta tensors.

        Raises:
            RuntimeError: it depends on values.
        """
        key = _key(op, args, kwargs)
        if key is not None and key in self._known:
            known = self._known[key]
            return _returned(info, args, kwargs) if known is _IN_PLACE else known
        written = [t for position, t in info.pair(args, kwargs) if info.writes[position]]
        before = [_describe(t) for t in written]
        out = _evaluate(op, info, args, kwargs)
        if key is not None and not written:
            self._known[key] = out
        elif key is not None and None not in info.returned and before == [_describe(t) for t in written]:
            self._known[key] = _IN_PLACE
        return out


_IN_PLACE = object()


def _returned(info: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator returns that only fills its arguments: those."""
    given = dict(info.pair(args, kwargs))
    results = tuple(given[origin] for origin in info.returned if origin is not None)
    return None if not results else results[0] if len(results) == 1 else results


def _describe(value: Any) -> Any:
    """All that a result's shape, strides and dtype can depend on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, cast("list[Any]", value)))
    return type(value), value


def _key(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A key of a call; None if it has a part that cannot be one, or a real number of the host's."""
    values = (*args, *kwargs.values())
    if any(isinstance(value, torch.Tensor) and value.device.type != "meta" for value in values):
        return None
    key = (op, tuple(kwargs), tuple(map(_describe, values)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _evaluate(op: Any, info: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if info.name == "aten::equal":
        return True
    message = f"A dry run cannot evaluate {info.name} on more than {SMALL} elements: the result depends on values."
    if info.name in _NEEDS_VALUES:
        raise RuntimeError(message)
    try:
        return op(*args, **kwargs)
    except NotImplementedError as error:
        raise RuntimeError(f"{message} Or torch has no meta version of it.") from error
