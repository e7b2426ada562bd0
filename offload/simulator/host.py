"""The host's side: pinned memory, and copies that are still under way while the host could touch their memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import bindings, dry
from .races import HOST, Race
from .signatures import describe

if TYPE_CHECKING:
    from .session import Simulator
    from .streams import Stream

_COPY = torch.ops.aten.copy_.default


class PinnedMemory:
    """Which host storages are pinned. Sizes count as CUDA's host allocator reserves them: the next power of two."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0
        self._entries: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.on_release: list[Callable[[int, int], None]] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a fresh host tensor as pinned and return it."""
        storage, key = tensor.untyped_storage(), bindings.storage_key(tensor)
        start, length = storage.data_ptr(), storage.nbytes()
        size = 1 << (length - 1).bit_length() if length else 0

        def release(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if self._entries.get(key) is reference:
                del self._entries[key]
                self.allocated -= size
                for callback in self.on_release:
                    callback(start, start + length)

        self._entries[key] = weakref.ref(storage, release)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and bindings.storage_key(tensor) in self._entries


@dataclass(frozen=True, slots=True)
class _Transfer:
    start: int
    end: int
    stream: int
    number: int
    device: int
    incoming: bool


class Transfers:
    """Asynchronous copies whose end the host has not waited for."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._open: list[_Transfer] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, host: torch.Tensor, stream: Stream, incoming: bool) -> None:
        """A copy on a stream reads a host tensor, or writes it (`incoming`)."""
        start, end = bindings.address_range(host)
        number = stream.clock[stream.stream_id]
        self._open.append(_Transfer(start, end, stream.stream_id, number, stream.device.index, incoming))

    def forget(self, start: int, end: int) -> None:
        """Drop what concerns memory that is given back; the host allocator waits by itself before it reuses it."""
        self._open = [t for t in self._open if t.end <= start or end <= t.start]

    def check(self, tensor: torch.Tensor, write: bool, name: str, stream: Stream | None = None) -> None:
        """On an access by the host or a stream: it must not read what is being written nor write what is being read."""
        known = self._simulator.host_clock
        self._open = [t for t in self._open if known.get(t.stream, 0) < t.number]
        if not self._open or tensor.numel() == 0:
            return
        if stream is not None:
            known = stream.clock
        start, end = bindings.address_range(tensor)
        for transfer in self._open:
            if known.get(transfer.stream, 0) >= transfer.number:
                continue
            if transfer.start < end and start < transfer.end and (write or transfer.incoming):
                self._open.remove(transfer)
                earlier = "the copy to the host" if transfer.incoming else "the copy from the host"
                by = None if stream is None else stream.stream_id
                remedy = f"synchronise stream {transfer.stream} or an event on it first"
                self._simulator.report(Race(HOST, transfer.device, name, by, earlier, transfer.stream, remedy))
                return


class HostWatch(TorchDispatchMode):
    """Sees every operator of the thread that opened the simulator: checks host accesses, and pins where asked.

    `torch.empty(..., pin_memory=True)` cannot reach a Python backend in another way.
    """

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._simulator = simulator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._simulator.transfers:
            self._check(func, args, kwargs)
        if kwargs.get("pin_memory"):
            out = func(*args, **{**kwargs, "pin_memory": False})
            return self._simulator.pinned.add(out) if out.device.type == "cpu" else out
        if func is _COPY and self._simulator.dry and self._is_staging(args[0], args[1]):
            return args[0]
        return func(*args, **kwargs)

    def _is_staging(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """A large copy on the host into pinned memory: in a dry run, there is nothing in it."""
        return source.device.type == "cpu" and dry.is_large((target,)) and target in self._simulator.pinned

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        info = describe(func)
        if not info.reads or any(_touches_device(value) for value in (*args, *kwargs.values())):
            return
        for position, value in info.pair(args, kwargs):
            values = cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]
            for tensor in values:
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                    self._simulator.transfers.check(tensor, info.writes[position], info.name)


def _touches_device(value: Any) -> bool:
    """Copies between host and device are checked where they are launched."""
    if isinstance(value, torch.Tensor):
        return value.device.type == bindings.NAME
    return isinstance(value, torch.device) and value.type == bindings.NAME
