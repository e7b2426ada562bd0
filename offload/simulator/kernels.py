"""Operators with a kernel of their own: those that allocate, reshape storage, copy, or hand a value to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import bindings, dry, state
from .operators import execute
from .races import check_access
from .streams import Stream

_aten = torch.ops.aten


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """`torch.empty`."""
    kwargs: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
    shape = torch.empty(size, dtype=dtype, device="meta", **kwargs)
    return empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """`torch.empty_strided`. Asks for room before it takes memory of the host."""
    simulator = state.running()
    index = simulator.device_index(device)
    dtype = dtype or torch.get_default_dtype()
    simulator.ledger.reserve(math.prod(size) * dtype.itemsize, index)
    if simulator.dry:
        return simulator.ledger.adopt(dry.blank(size, stride, dtype), index)
    return simulator.ledger.adopt(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), index)


def as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """`torch.as_strided`; the storage object stays the same."""
    view = tensor.detach()
    return view.as_strided_(size, stride, tensor.storage_offset() if storage_offset is None else storage_offset)


def resize_(tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
    """`tensor.resize_`; grows into new memory, with the old elements in front."""
    kwargs: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
    stride = torch.empty(size, device="meta", **kwargs).stride()
    needed = (tensor.storage_offset() + math.prod(size)) * tensor.element_size()
    if needed <= tensor.untyped_storage().nbytes():
        return tensor.as_strided_(size, stride, tensor.storage_offset())
    grown = torch.empty_strided(tuple(size), stride, dtype=tensor.dtype, device=tensor.device)
    if tensor.numel():
        grown.view(-1)[: tensor.numel()].copy_(tensor.reshape(-1))
    tensor.data = grown
    return tensor


def set_source(
    tensor: torch.Tensor, source: Any, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    """Refused: a storage from elsewhere cannot be adopted."""
    raise RuntimeError(f"`set_` is not available on {tensor.device}; use `tensor.data = other` or `as_strided`.")


def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`target.copy_(source)` where at least one of them is on a simulated device."""
    simulator = state.current()
    source_in, target_in = source.device.type == bindings.NAME, target.device.type == bindings.NAME
    if simulator is None:
        if target_in:
            state.running()
        target.copy_(bindings.to_host(source))
        return target
    if source_in and target_in:
        _copy_within(source, target)
    else:
        _copy_across(source, target, non_blocking)
    if not (simulator.dry and dry.is_large((source, target))):
        host = bindings.to_host(source) if source_in else source
        (bindings.to_host(target) if target_in else target).copy_(host)
    return target


def _copy_within(source: torch.Tensor, target: torch.Tensor) -> None:
    """On one device an operator like others; between two, both current streams wait for each other, as on CUDA."""
    simulator = state.running()
    timeline = simulator.timeline
    from_index, to_index = simulator.device_index(source.device), simulator.device_index(target.device)
    stream = simulator.current_stream(from_index)
    size = target.numel() * target.element_size()
    with simulator.ledger.lock:
        if from_index == to_index:
            stream.launch()
            check_access(simulator, source, stream, False, "copy")
            check_access(simulator, target, stream, True, "copy")
            moved = size + source.numel() * source.element_size()
            timeline.spend("copy", "compute", (stream,), timeline.compute_seconds(0, moved, False), moved)
            return
        other = simulator.current_stream(to_index)
        stream.join(other.clock, other.time)
        stream.launch()
        check_access(simulator, source, stream, False, "copy")
        check_access(simulator, target, stream, True, "copy")
        timeline.spend("copy", "d2d", (stream, other), timeline.copy_seconds(size, "d2d", True), size)
        other.join(stream.clock, stream.time)
        for index in (from_index, to_index):
            simulator.ledger.devices[index].d2d_bytes += size
        simulator.ledger.devices[to_index].copies += 1


def _copy_across(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Between host and device. Only pinned memory of the same dtype and layout is copied without blocking the host."""
    simulator = state.running()
    incoming = target.device.type == "cpu"
    inside, host = (source, target) if incoming else (target, source)
    kind = "d2h" if incoming else "h2d"
    stream: Stream = simulator.current_stream(inside.device)
    size = source.numel() * inside.element_size()
    alike = source.dtype == target.dtype and source.shape == target.shape and source.stride() == target.stride()
    pinned = alike and host in simulator.pinned
    device = simulator.ledger.devices[simulator.device_index(inside.device)]
    with simulator.ledger.lock:
        stream.launch()
        check_access(simulator, inside, stream, not incoming, "copy")
        if simulator.transfers:
            simulator.transfers.check(host, incoming, "copy", stream)
        device.copies += 1
        device.d2h_bytes += size if incoming else 0
        device.h2d_bytes += 0 if incoming else size
        timeline = simulator.timeline
        timeline.spend("copy", kind, (stream,), timeline.copy_seconds(size, kind, pinned), size)
        if pinned and non_blocking:
            simulator.transfers.add(host, stream, incoming)
        else:
            simulator.host_joins(stream.clock, stream.time)


def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """`tensor.to(...)`. As on CUDA, a non-blocking copy to the host makes pinned memory and returns at once."""
    device = device or tensor.device
    like = torch.empty_like(dry.to_meta(tensor), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    if device.type != "cpu":
        out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return out.copy_(tensor, non_blocking=non_blocking)
    simulator = state.current()
    if simulator is not None and simulator.dry:
        out = dry.blank(like.shape, like.stride(), like.dtype)
    else:
        out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if simulator is not None and non_blocking:
        simulator.pinned.add(out)
    return out.copy_(tensor, non_blocking=non_blocking)


def copy_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As `copy`, after the target has taken the source's shape."""
    if source.shape != target.shape:
        target.resize_(source.shape)
    return copy(source, target)


def item(tensor: torch.Tensor) -> Any:
    """`tensor.item()`: the host waits for the current stream."""
    simulator = state.current()
    if simulator is not None:
        stream = simulator.current_stream(tensor.device)
        with simulator.ledger.lock:
            stream.launch()
            check_access(simulator, tensor, stream, False, "item")
            simulator.host_joins(stream.clock, stream.time)
    return bindings.to_host(tensor).item()


def convolution(*args: Any) -> Any:
    """The name under which torch asks out-of-tree devices for a convolution."""
    return execute(_aten.convolution.default, *args)


def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """`tensor.pin_memory()` of a host tensor: a copy in pinned memory."""
    simulator = state.running()
    if simulator.dry and dry.is_large((tensor,)):
        return simulator.pinned.add(
            dry.blank(tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype)
        )
    return simulator.pinned.add(torch.empty_like(tensor).copy_(tensor))


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """`tensor.is_pinned()` of a host tensor."""
    simulator = state.current()
    return simulator is not None and tensor in simulator.pinned


def whole(name: str) -> Any:
    """A kernel that runs a composite operator in one piece, so that it computes exactly what the CPU does."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return execute(op, *args, **kwargs)

    return kernel


KERNELS = {
    "_copy_from": copy,
    "_copy_from_and_resize": copy_and_resize,
    "_local_scalar_dense": item,
    "_to_copy": to_copy,
    "as_strided": as_strided,
    "convolution_overrideable": convolution,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "resize_": resize_,
    "set_.source_Storage_storage_offset": set_source,
}
WHOLE = ("linear", "matmul", "native_group_norm", "native_layer_norm", "scaled_dot_product_attention")
HOST_KERNELS = {"_pin_memory": pin_memory, "is_pinned": is_pinned}
