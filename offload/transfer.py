"""How tensors travel to a device: at once, or on a stream of their own through a few pinned buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .host_memory import pinned_size

_PAGE = 4096
_LARGEST_CHUNK = 16 << 20  # three of them stay well under 100 MB of the host
_CHUNKS = 3
_ALIGNMENT = 64


class Arrival:
    """Tensors on a device, perhaps still on their way.

    `wait` before each use, on the stream that uses them; `release` before letting go of them.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None:
        """Let the current stream wait until they are there."""

    def release(self) -> None:
        """Tell the allocator about their last use, and drop them."""
        self.tensors = []


class Transfer:
    """Copies on the current stream; all there is on devices without streams.

    Args:
        device: where to.
        non_blocking: do not hold the host up where the source is pinned memory.
    """

    def __init__(self, device: torch.device, non_blocking: bool = False) -> None:
        self.device = device
        self._non_blocking = non_blocking

    def fetch(self, homes: Sequence[torch.Tensor]) -> Arrival:
        """Copies of these tensors, with the same strides."""
        return Arrival([self._fresh(home).copy_(home, non_blocking=self._non_blocking) for home in homes])

    def _fresh(self, home: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(home, device=self.device)


class StreamTransfer(Transfer):
    """Copies on a stream of its own, while others compute.

    The memory of what it fetches belongs to that stream. Before it is let go, the stream waits for the streams that
    use it, or, with `record_stream`, the allocator keeps it back until these are done.

    Args:
        device: where to; it must have streams.
        record_stream: see there.
        pinned_budget: bytes of pinned buffers at most; under two pages, copies hold the host up.
        largest: bytes of the largest group that will travel, for the size of the buffers.
    """

    def __init__(
        self, device: torch.device, *, record_stream: bool = False, pinned_budget: int = 1 << 62, largest: int = 1 << 62
    ) -> None:
        super().__init__(device, non_blocking=True)
        self._module: Any = torch.get_device_module(device)
        self.stream: Any = self._module.Stream(device)
        self._record_stream = record_stream
        chunk = min(_LARGEST_CHUNK, pinned_size(max(largest, _PAGE)))
        while chunk * 2 > pinned_budget and chunk > _PAGE:
            chunk //= 2
        count = min(_CHUNKS, pinned_budget // chunk)
        self._ring = PinnedRing(chunk, count) if count >= 2 else None

    def fetch(self, homes: Sequence[torch.Tensor]) -> Arrival:
        """Copies of these tensors, on their way."""
        with self._module.stream(self.stream):
            tensors = [self._send(home) for home in homes]
            event = self.stream.record_event()
        return _StreamArrival(tensors, self, event)

    def _send(self, home: torch.Tensor) -> torch.Tensor:
        fresh = self._fresh(home)
        plain = home.device.type == "cpu" and fresh.stride() == home.stride() and _is_dense(home)
        if self._ring is None or not plain or home.numel() == 0 or home.is_pinned():
            return fresh.copy_(home, non_blocking=True)
        self._ring.send(_as_bytes(home), _as_bytes(fresh), self.stream)
        return fresh

    def current_stream(self) -> Any:
        """The stream that computes now."""
        return self._module.current_stream(self.device)

    def give_back(self, tensors: Sequence[torch.Tensor], users: Sequence[Any]) -> None:
        """Before these tensors are dropped, which streams have used."""
        for user in users:
            if self._record_stream:
                for tensor in tensors:
                    tensor.record_stream(user)
            else:
                self.stream.wait_stream(user)


class _StreamArrival(Arrival):
    def __init__(self, tensors: list[torch.Tensor], transfer: StreamTransfer, event: Any) -> None:
        super().__init__(tensors)
        self._transfer = transfer
        self._event = event
        self._users: list[Any] = []

    def wait(self) -> None:
        user = self._transfer.current_stream()
        if user not in self._users:
            user.wait_event(self._event)
            self._users.append(user)

    def release(self) -> None:
        self._transfer.give_back(self.tensors, self._users)
        super().release()


class PinnedRing:
    """A few pinned buffers that host memory of any kind passes through: the host fills one while another is copied.

    Args:
        chunk: bytes of each, a power of two, so that the allocator takes no more.
        count: how many, at least two.
    """

    def __init__(self, chunk: int, count: int) -> None:
        self._chunk = chunk
        self._buffers: list[torch.Tensor] = []
        self._events: list[Any] = [None] * count
        self._turn = itertools.cycle(range(count))
        self._index = next(self._turn)
        self._filled = 0

    def send(self, source: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
        """Copy bytes of the host to bytes of the device on a stream, which is the current one."""
        sent = 0
        while sent < source.numel():
            if self._filled >= self._chunk:
                self._turn_over(stream)
            buffer = self._buffer()
            size = min(source.numel() - sent, self._chunk - self._filled)
            staged = buffer[self._filled : self._filled + size]
            staged.copy_(source[sent : sent + size])
            target[sent : sent + size].copy_(staged, non_blocking=True)
            sent += size
            self._filled += -(-size // _ALIGNMENT) * _ALIGNMENT

    def _buffer(self) -> torch.Tensor:
        if self._index == len(self._buffers):
            self._buffers.append(torch.empty(self._chunk, dtype=torch.uint8).pin_memory())
        return self._buffers[self._index]

    def _turn_over(self, stream: Any) -> None:
        """Go on to the next buffer, once what was in it before has been copied."""
        self._events[self._index] = stream.record_event()
        self._index = next(self._turn)
        if self._events[self._index] is not None:
            self._events[self._index].synchronize()
        self._filled = 0


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, in its order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def has_streams(device: torch.device) -> bool:
    """Whether copies can overlap with computing there."""
    try:
        module: Any = torch.get_device_module(device)
    except RuntimeError:
        return False
    return device.type not in ("cpu", "meta") and hasattr(module, "Stream") and hasattr(module, "current_stream")
