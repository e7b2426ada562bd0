"""The race detector: whether every access is ordered after those that it depends on.

It looks at bytes, not at whole storages, so the halves of a double buffer do not disturb each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from . import bindings
from .streams import Stream, VectorClock, covers, merge

if TYPE_CHECKING:
    from .session import Simulator

EARLY = "use before arrival"
OVERWRITE = "overwritten while in use"
FREED = "freed while in use"
REUSED = "use before the memory was free"
HOST = "host access during a copy"


@dataclass(frozen=True)
class Race:
    """Two accesses without an order.

    `kind` is one of the five names above; `operator` the later access, on `stream` (None for the host); `earlier` the
    one it should have waited for, on `earlier_stream`.
    """

    kind: str
    device: int
    operator: str
    stream: int | None
    earlier: str
    earlier_stream: int
    remedy: str

    def __str__(self) -> str:
        place = "the host" if self.stream is None else f"stream {self.stream}"
        return (
            f"{self.kind} on {bindings.NAME}:{self.device}: {self.operator} on {place} is not ordered after "
            f"{self.earlier} on stream {self.earlier_stream}; {self.remedy}."
        )


@dataclass(slots=True)
class Use:
    """An access to some bytes of an allocation. `told` is the last stream reported to be in conflict with it."""

    start: int
    end: int
    stream: int
    number: int
    write: bool
    name: str
    told: int = 0


@dataclass(slots=True)
class Allocation:
    """A piece of device memory. `owners` counts the storage objects that stand for it."""

    device: int
    size: int
    stream: Stream
    owners: int = 0
    born: VectorClock = field(default_factory=dict[int, int])
    uses: list[Use] = field(default_factory=list[Use])
    recorded: set[int] = field(default_factory=set[int])

    def written(self, stream: Stream, name: str) -> None:
        """Note that the latest work of a stream wrote all of it."""
        self.uses = [Use(0, self.size, stream.stream_id, stream.clock.get(stream.stream_id, 0), True, name)]


@dataclass
class Pool:
    """Memory that a stream let go and may get again.

    `pending` holds what other streams may still use; `finished_by` says what must be over before anyone may use memory
    that comes from here.
    """

    pending: list[Allocation] = field(default_factory=list[Allocation])
    finished_by: VectorClock = field(default_factory=dict[int, int])

    def take_back(self, allocation: Allocation) -> None:
        """Receive memory that is let go."""
        own = allocation.stream.stream_id
        merge(self.finished_by, allocation.born)
        for use in allocation.uses:
            if use.stream == own or use.stream not in allocation.recorded:
                merge(self.finished_by, {use.stream: use.number})
        if any(use.stream != own and use.stream not in allocation.recorded for use in allocation.uses):
            self.pending.append(allocation)


def check_reuse(simulator: Simulator, pool: Pool, allocation: Allocation) -> None:
    """On an allocation: memory in the pool that another stream may still use is a race."""
    stream = allocation.stream
    known = dict(stream.clock)
    merge(known, simulator.host_clock)
    pool.finished_by = {s: n for s, n in pool.finished_by.items() if simulator.host_clock.get(s, 0) < n}
    allocation.born = dict(pool.finished_by)
    pending, pool.pending = pool.pending, []
    for freed in pending:
        for use in freed.uses:
            if use.stream not in freed.recorded and known.get(use.stream, 0) < use.number:
                remedy = f"call `record_stream` before letting go, or let stream {stream.stream_id} wait first"
                simulator.report(Race(FREED, freed.device, "allocate", stream.stream_id, use.name, use.stream, remedy))
                break


def check_access(simulator: Simulator, tensor: torch.Tensor, stream: Stream, write: bool, name: str) -> None:
    """On an access by the latest work of a stream: it must come after all conflicting ones."""
    if tensor.numel() == 0:
        return
    allocation = simulator.ledger.find(tensor)
    clock, own = stream.clock, stream.stream_id
    start, end = bindings.byte_range(tensor)
    if own != allocation.stream.stream_id and allocation.born and not covers(clock, allocation.born):
        other = next(s for s, n in allocation.born.items() if clock.get(s, 0) < n)
        remedy = f"let it wait for stream {allocation.stream.stream_id}, where the memory was allocated"
        simulator.report(Race(REUSED, allocation.device, name, own, "the memory's former use", other, remedy))
        allocation.born = {}
    kept: list[Use] = []
    for use in allocation.uses:
        ordered = use.stream == own or clock.get(use.stream, 0) >= use.number
        conflict = use.start < end and start < use.end and (use.write or write)
        if not ordered and conflict and use.told != own:
            use.told = own
            kind = EARLY if use.write else OVERWRITE
            remedy = f"let stream {own} wait for stream {use.stream}"
            simulator.report(Race(kind, allocation.device, name, own, use.name, use.stream, remedy))
        implied = ordered and start <= use.start and use.end <= end and (write or not use.write)
        if not implied:
            kept.append(use)
    kept.append(Use(start, end, own, clock[own], write, name))
    allocation.uses = kept
