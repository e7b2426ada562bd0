"""`Simulator`: one run of simulated devices, with all that it counts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_core.errors import RaceError

from ..sizes import parse_bytes
from . import backend, state
from .bindings import NAME
from .clock import Span, Timeline
from .dry import Shapes
from .faults import Faults
from .hardware import Hardware, get_hardware
from .host import HostWatch, PinnedMemory, Transfers
from .memory import Ledger
from .races import Race
from .streams import Stream, VectorClock, merge


@dataclass(frozen=True)
class Statistics:
    """What happened on one device since the start or the last `reset()`.

    Bytes: `allocated` (now), `peak`, `h2d` and `d2h` (copied from and to the host), `d2d` (to or from other devices).
    Counts: `allocations`, `copies` (to, from and between devices), `operators`.
    """

    capacity: int
    allocated: int
    peak: int
    allocations: int
    h2d: int
    d2h: int
    d2d: int
    copies: int
    operators: int


class _Thread(threading.local):
    """The current device and streams of a thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


class Simulator:
    """Simulated devices `sim:0` to `sim:N-1`; the context manager that `simulator()` returns.

    Inside, `torch.get_device_module("sim")` and `torch.accelerator` work as they do for a GPU. Devices hold real
    values, computed by the CPU, bit by bit as the CPU computes them. Only the forward direction is supported.

    Attributes:
        races: list of `Race`, in the order found.
        timeline: the clock; `timeline.spans` lists all work with its predicted times.
        pinned: `pinned.allocated` and `pinned.peak`, bytes of pinned host memory, in powers of two as CUDA reserves.
        synchronizations: how often the host waited for a stream, an event or a device.
        cache_clears: how often `empty_cache` was called.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        dry: bool = False,
        hardware: Hardware,
        raise_races: bool = True,
        granularity: int = 512,
    ) -> None:
        self.dry = dry
        self.races: list[Race] = []
        self.shapes = Shapes()
        self.timeline = Timeline(hardware)
        self.faults = Faults()
        self.pinned = PinnedMemory()
        self.transfers = Transfers(self)
        self.pinned.on_release.append(self.transfers.forget)
        self.ledger = Ledger(self, list(capacities), granularity)
        self.host_clock: VectorClock = {}
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.synchronizations = 0
        self.cache_clears = 0
        self._raise_races = raise_races
        self._default_streams: dict[int, Stream] = {}
        self._thread = _Thread()
        self._exit = ExitStack()
        self._used = False

    # ------------------------------------------------------------------ entering and leaving
    def __enter__(self) -> Simulator:
        """Start.

        Raises:
            RuntimeError: another simulator runs, this one has run before, or torch cannot do it.
        """
        if state.current() is not None:
            raise RuntimeError("A simulator is already running in this process; leave it before you start another.")
        if self._used:
            raise RuntimeError("This simulator has run before; call `simulator(...)` for a new one.")
        backend.register()
        self._used = True
        state.set_current(self)
        self._exit.callback(state.set_current, None)
        try:
            self._exit.enter_context(backend.patches())
            self._exit.enter_context(HostWatch(self))
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop and restore torch. A race that was raised inside and swallowed is raised again."""
        if kind is None:
            for index in range(self.device_count):
                self.synchronize(index)
        self._exit.close()
        if kind is None and self._raise_races and self.races:
            raise RaceError("\n".join(str(race) for race in self.races))

    def inject(self, drop: str, after: int = 0, count: int | None = None) -> AbstractContextManager[Any]:
        """As the function `inject`."""
        return self.faults.inject(drop, after, count)

    # ------------------------------------------------------------------ devices and streams
    @property
    def device_count(self) -> int:
        """Number of devices."""
        return len(self.ledger.devices)

    @property
    def devices(self) -> list[torch.device]:
        """All devices."""
        return [torch.device(NAME, index) for index in range(self.device_count)]

    def device_index(self, device: torch.device | str | int | None = None) -> int:
        """The index of a device; the current one for None or a device without index.

        Raises:
            ValueError: a device of another kind.
            RuntimeError: an index that does not exist.
        """
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != NAME:
                raise ValueError(f"Expected a {NAME} device, but got: {device}")
            device = device.index
        index = self._thread.device if device is None else device
        if not 0 <= index < self.device_count:
            last = self.device_count - 1
            raise RuntimeError(f"There is no device {NAME}:{index}; this simulator has {NAME}:0 to {NAME}:{last}.")
        return index

    def current_device(self) -> int:
        """The index of this thread's current device."""
        return self._thread.device

    def set_device(self, device: torch.device | str | int | None) -> None:
        """Change this thread's current device."""
        self._thread.device = self.device_index(device)

    def default_stream(self, device: torch.device | str | int | None = None) -> Stream:
        """The stream of a device that is current unless another is set."""
        index = self.device_index(device)
        if index not in self._default_streams:
            self._default_streams[index] = Stream(index)
        return self._default_streams[index]

    def current_stream(self, device: torch.device | str | int | None = None) -> Stream:
        """This thread's current stream of a device."""
        index = self.device_index(device)
        return self._thread.streams.get(index) or self.default_stream(index)

    def set_stream(self, stream: Stream) -> None:
        """Make a stream current on its device, and the device current."""
        self.set_device(stream.device)
        self._thread.streams[stream.device.index] = stream

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        """The host waits for all work on a device."""
        index = self.device_index(device)
        self.synchronizations += 1
        if self.faults.drops("synchronize"):
            return
        for stream in list(self.streams):
            if stream.device.index == index:
                self.host_joins(stream.clock, stream.time)

    def host_joins(self, clock: VectorClock, time: float) -> None:
        """The host learns what a clock knows, and waits until a time."""
        merge(self.host_clock, clock)
        self.timeline.now = max(self.timeline.now, time)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor, once it is let go, until a stream has finished what is now on it."""
        if not self.faults.drops("record_stream"):
            self.ledger.find(tensor).recorded.add(stream.stream_id)

    def report(self, race: Race) -> None:
        """Note a race, and raise it unless races are only collected."""
        self.races.append(race)
        if self._raise_races:
            raise RaceError(str(race))

    # ------------------------------------------------------------------ results
    @property
    def elapsed(self) -> float:
        """Predicted seconds of the host's clock; synchronise first to include all work."""
        return self.timeline.now

    def statistics(self, device: torch.device | str | int | None = None) -> Statistics:
        """The books of a device, the current one by default."""
        books = self.ledger.devices[self.device_index(device)]
        return Statistics(
            capacity=books.capacity,
            allocated=books.allocated,
            peak=books.peak,
            allocations=books.allocations,
            h2d=books.h2d_bytes,
            d2h=books.d2h_bytes,
            d2d=books.d2d_bytes,
            copies=books.copies,
            operators=books.operators,
        )

    def spans(self, device: torch.device | str | int | None = None) -> list[Span]:
        """The time line of a device, the current one by default."""
        index = self.device_index(device)
        return [span for span in self.timeline.spans if span.device == index]

    def memory_over_time(self, device: torch.device | str | int | None = None) -> list[tuple[float, int]]:
        """Predicted seconds and bytes in use, at every allocation and release of a device."""
        return list(self.timeline.memory.get(self.device_index(device), []))

    def reset_peak(self, device: torch.device | str | int | None = None) -> None:
        """Start the peak again from what is allocated now."""
        books = self.ledger.devices[self.device_index(device)]
        books.peak = books.allocated

    def reset(self) -> None:
        """Start all counts, the peaks, the races and the time line again; what is allocated stays."""
        for books in self.ledger.devices:
            books.peak = books.allocated
            books.allocations = books.copies = books.operators = 0
            books.h2d_bytes = books.d2h_bytes = books.d2d_bytes = 0
        self.pinned.peak = self.pinned.allocated
        self.synchronizations = self.cache_clears = 0
        self.races.clear()
        self.timeline.clear()


def simulator(
    devices: int = 1,
    capacity: int | str | Sequence[int | str] | None = None,
    *,
    dry: bool = False,
    hardware: str | Hardware = "generic",
    races: str = "raise",
    granularity: int = 512,
) -> Simulator:
    """Simulated accelerators, as a context manager.

    The first use registers the device type "sim" with torch, for the rest of the process. Use a process of its own.

    Args:
        devices: how many.
        capacity: of each, as bytes or text such as "8GB"; a list for unequal devices; the hardware's memory by default.
        dry: run full-size models without their memory: see `dry.py`.
        hardware: the clock's speeds, a name in `HARDWARE` ("generic", "rtx-3060", "rtx-4090", "h100") or a `Hardware`.
        races: "raise" raises a `RaceError` where a race is found; "collect" only lists it in `races`.
        granularity: allocations are rounded up to a multiple of this many bytes; CUDA's allocator takes 512.

    Returns:
        a `Simulator`; enter it once.

    Raises:
        ValueError: an argument that makes no sense. Entering raises `RuntimeError` where torch is older than 2.13.
    """
    if devices < 1:
        raise ValueError(f"`devices` must be at least 1, but is {devices}.")
    if races not in ("raise", "collect"):
        raise ValueError(f'`races` must be "raise" or "collect", but is {races!r}.')
    if granularity < 1:
        raise ValueError(f"`granularity` must be at least 1, but is {granularity}.")
    speeds = get_hardware(hardware)
    if capacity is None:
        capacity = speeds.memory
    caps = [capacity] * devices if isinstance(capacity, (int, str)) else list(capacity)
    if len(caps) != devices:
        raise ValueError(f"`capacity` lists {len(caps)} sizes for {devices} devices; give one for each.")
    sizes = [parse_bytes(cap, "capacity") for cap in caps]
    return Simulator(sizes, dry=dry, hardware=speeds, raise_races=races == "raise", granularity=granularity)
