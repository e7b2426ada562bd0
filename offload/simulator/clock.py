"""The clock: how long each operator and copy takes, and when it starts.

A device has three engines: one computes, one copies in, one copies out. Work starts when its stream, its engine and the
host that launches it have come that far. The host runs ahead until it synchronises. Its own work costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.flop_counter import flop_registry

from .hardware import Hardware
from .streams import Stream

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on the time line.

    `kind` is "compute", "h2d", "d2h" or "d2d"; `start` and `end` are seconds; `bytes` are those moved (for a copy) or
    read and written (for an operator).
    """

    name: str
    kind: str
    device: int
    stream: int
    start: float
    end: float
    bytes: int


class Timeline:
    """Predicted times of one simulator."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.now = 0.0
        self.spans: list[Span] = []
        self.memory: dict[int, list[tuple[float, int]]] = {}
        self._engines: dict[tuple[int, str], float] = {}

    def clear(self) -> None:
        """Forget the past; the time goes on."""
        self.spans.clear()
        self.memory.clear()

    def spend(self, name: str, kind: str, streams: tuple[Stream, ...], seconds: float, size: int) -> None:
        """Let work occupy its streams and their engines."""
        self.now += self.hardware.launch
        engines = [(stream.device.index, kind) for stream in streams]
        start = max(self.now, *(s.time for s in streams), *(self._engines.get(engine, 0.0) for engine in engines))
        end = start + seconds
        for stream, engine in zip(streams, engines, strict=True):
            stream.time = self._engines[engine] = end
        self.spans.append(Span(name, kind, streams[0].device.index, streams[0].stream_id, start, end, size))

    def compute_seconds(self, flops: float, size: int, half: bool) -> float:
        """Time of an operator: bound by arithmetic or by the device's memory, whichever takes longer."""
        peak = self.hardware.half_flops if half else self.hardware.single_flops
        return max(flops / peak, size / self.hardware.memory_bandwidth) / self.hardware.efficiency

    def copy_seconds(self, size: int, kind: str, pinned: bool) -> float:
        """Time of a copy between host and device or between devices."""
        hardware = self.hardware
        if kind == "d2d":
            return size / hardware.peer_bandwidth
        return size / (hardware.pinned_bandwidth if pinned else hardware.pageable_bandwidth)

    def sample_memory(self, device: int, size: int) -> None:
        """Note how much memory a device has in use, at the time when its computing has come as far as the host."""
        now = max(self.now, self._engines.get((device, "compute"), 0.0))
        self.memory.setdefault(device, []).append((now, size))


def count_flops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Multiplications and additions of an operator; 0 for those that only move memory."""
    packet = op._overloadpacket
    if packet is _aten.linear:
        return 2.0 * args[0].numel() * args[1].shape[0]
    if packet is _aten.matmul:
        return 2.0 * out.numel() * args[0].shape[-1]
    if packet is _aten.scaled_dot_product_attention:
        query, key, value = args[:3]
        return 2.0 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    formula = cast("dict[Any, Callable[..., float]]", flop_registry).get(packet)
    if formula is None:
        return 0.0
    return formula(*args, **{name: value for name, value in kwargs.items() if name != "out"}, out_val=out)
