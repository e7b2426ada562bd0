"""Device memory: what is allocated where, by whom it is used, and when it may be used again.

Sizes are rounded up as CUDA's caching allocator does, and its rules hold for memory that is let go: it belongs to the
stream that allocated it, and that stream may get it again at once. Another stream's unfinished use is waited for only
if `record_stream` announced it.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..sizes import format_bytes
from . import bindings
from .races import Allocation, Pool, check_reuse

if TYPE_CHECKING:
    from .session import Simulator


@dataclass
class DeviceMemory:
    """The books of one device, in bytes and counts."""

    capacity: int
    allocated: int = 0
    peak: int = 0
    allocations: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    d2d_bytes: int = 0
    copies: int = 0
    operators: int = 0
    pools: dict[int, Pool] = field(default_factory=dict[int, Pool])


class Ledger:
    """All allocations of one simulator."""

    def __init__(self, simulator: Simulator, capacities: list[int], granularity: int) -> None:
        self.devices = [DeviceMemory(capacity) for capacity in capacities]
        self._simulator = simulator
        self._granularity = granularity
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], Allocation]] = {}
        self.lock = threading.RLock()

    def reserve(self, size: int, index: int) -> int:
        """The rounded size, if it fits.

        Raises:
            torch.OutOfMemoryError: it does not.
        """
        size = -(-size // self._granularity) * self._granularity
        device = self.devices[index]
        free = device.capacity - device.allocated
        if size > free:
            raise torch.OutOfMemoryError(
                f"{bindings.NAME}:{index} is out of memory. Tried to allocate {format_bytes(size)}. The device has a "
                f"total capacity of {format_bytes(device.capacity)}, of which {format_bytes(device.allocated)} are in "
                f"use and {format_bytes(free)} are free."
            )
        return size

    def adopt(self, host: torch.Tensor, index: int, name: str = "empty", written: bool = False) -> torch.Tensor:
        """Make fresh host memory an allocation of a device.

        Args:
            host: a host tensor that nothing else uses.
            index: the device.
            name: the operator that made it, for reports.
            written: whether its content comes from the current stream's latest work.
        """
        with self.lock:
            size = self.reserve(host.untyped_storage().nbytes(), index)
            tensor = bindings.to_device(host, index)
            self._enter(tensor, index, size, name, written)
        return tensor

    def _enter(self, tensor: torch.Tensor, index: int, size: int, name: str, written: bool) -> Allocation:
        stream = self._simulator.current_stream(index)
        device = self.devices[index]
        allocation = Allocation(index, size, stream)
        device.allocated += size
        device.allocations += 1
        device.peak = max(device.peak, device.allocated)
        self._simulator.timeline.sample_memory(index, device.allocated)
        self._watch(tensor, allocation)
        allocation.owners = 1
        pool = device.pools.setdefault(stream.stream_id, Pool())
        check_reuse(self._simulator, pool, allocation)
        if written:
            allocation.written(stream, name)
        return allocation

    def alias(self, view: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Let a view with a storage object of its own count as the memory of another tensor."""
        with self.lock:
            allocation = self.find(of)
            if bindings.storage_key(view) not in self._entries:
                self._watch(view, allocation)
                allocation.owners += 1
        return view

    def find(self, tensor: torch.Tensor) -> Allocation:
        """The allocation of a tensor; one that came from elsewhere is entered now."""
        entry = self._entries.get(bindings.storage_key(tensor))
        if entry is not None:
            return entry[1]
        with self.lock:
            index = tensor.device.index
            size = self.reserve(tensor.untyped_storage().nbytes(), index)
            return self._enter(tensor, index, size, "import", False)

    def _watch(self, tensor: torch.Tensor, allocation: Allocation) -> None:
        storage, key = tensor.untyped_storage(), bindings.storage_key(tensor)

        def release(reference: weakref.ref[torch.UntypedStorage]) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry[0] is reference:
                del self._entries[key]
                self._release(allocation)

        self._entries[key] = (weakref.ref(storage, release), allocation)

    def _release(self, allocation: Allocation) -> None:
        with self.lock:
            allocation.owners -= 1
            if allocation.owners:
                return
            device = self.devices[allocation.device]
            device.allocated -= allocation.size
            self._simulator.timeline.sample_memory(allocation.device, device.allocated)
            device.pools.setdefault(allocation.stream.stream_id, Pool()).take_back(allocation)
