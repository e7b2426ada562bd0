"""Streams and events with vector clocks.

Everything launched on a stream gets the stream's next number. A vector clock says, for each stream, up to which number
something is known to have finished; two accesses are in order exactly when the later one's clock covers the earlier
one's number. A stream's clock grows when it waits, the host's when it synchronises, and every launch inherits what the
host knows.
"""

from __future__ import annotations

import itertools
from types import TracebackType
from typing import Any

import torch

from . import state
from .bindings import NAME

VectorClock = dict[int, int]
_identifiers = itertools.count(1)


def merge(into: VectorClock, other: VectorClock) -> None:
    """Let `into` know what `other` knows."""
    for stream, number in other.items():
        if into.get(stream, 0) < number:
            into[stream] = number


def covers(clock: VectorClock, needed: VectorClock) -> bool:
    """Whether a clock knows all of another."""
    return all(clock.get(stream, 0) >= number for stream, number in needed.items())


class Stream:
    """A queue of work on a simulated device, used as `torch.cuda.Stream` is.

    Args:
        device: the current device by default.
        priority: kept, without effect.
    """

    def __init__(self, device: torch.device | str | int | None = None, priority: int = 0, **_: Any) -> None:
        simulator = state.running()
        self.device = torch.device(NAME, simulator.device_index(device))
        self.priority = priority
        self.stream_id = next(_identifiers)
        self.clock: VectorClock = {}
        self.time = 0.0
        self._launched = 0
        self._entered: list[stream] = []
        simulator.streams.add(self)

    def launch(self) -> int:
        """Number the next piece of work; for the simulator's own use."""
        self._launched += 1
        merge(self.clock, state.running().host_clock)
        self.clock[self.stream_id] = self._launched
        return self._launched

    def wait_event(self, event: Event) -> None:
        """Work launched from now on starts after the event."""
        if not state.running().faults.drops("wait"):
            self.join(event.clock, event.time)

    def wait_stream(self, stream: Stream) -> None:
        """Work launched from now on starts after all that is now on the other stream."""
        if not state.running().faults.drops("wait"):
            self.join(stream.clock, stream.time)

    def join(self, clock: VectorClock, time: float) -> None:
        """Inherit a vector clock and a time; for the simulator's own use."""
        merge(self.clock, clock)
        self.time = max(self.time, time)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here, a new one by default, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for all that is on this stream."""
        simulator = state.running()
        simulator.synchronizations += 1
        if not simulator.faults.drops("synchronize"):
            simulator.host_joins(self.clock, self.time)

    def query(self) -> bool:
        """Whether all work has finished by the predicted time of the host."""
        return _finished(self.clock, self.time)

    def __enter__(self) -> Stream:
        context = stream(self)
        self._entered.append(context)
        context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"Stream({self.stream_id}, device='{self.device}')"


class Event:
    """A mark in a stream, used as `torch.cuda.Event` is; the arguments have no effect."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        self.clock: VectorClock = {}
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark what is now on a stream, the current one by default."""
        simulator = state.running()
        stream = stream or simulator.current_stream()
        if simulator.faults.drops("record_event"):
            return
        self.clock = dict(stream.clock)
        self.time = max(stream.time, simulator.timeline.now)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream, the current one by default, wait for the mark; an unrecorded event holds nobody up."""
        (stream or state.running().current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the mark."""
        simulator = state.running()
        simulator.synchronizations += 1
        if not simulator.faults.drops("synchronize"):
            simulator.host_joins(self.clock, self.time)

    def query(self) -> bool:
        """Whether the mark has passed by the predicted time of the host."""
        return _finished(self.clock, self.time)

    def elapsed_time(self, end: Event) -> float:
        """Predicted milliseconds from this mark to another."""
        return (end.time - self.time) * 1e3


def _finished(clock: VectorClock, time: float) -> bool:
    """Asking costs the host a little time, so that a loop that polls comes to an end."""
    simulator = state.running()
    simulator.timeline.now += simulator.timeline.hardware.launch
    if time > simulator.timeline.now and not covers(simulator.host_clock, clock):
        return False
    merge(simulator.host_clock, clock)
    return True


class stream:  # noqa: N801 - the name that every device module of torch gives it
    """Context: a stream, and its device, are current inside. None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: tuple[Stream, int] | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            simulator = state.running()
            self._before = simulator.current_stream(self.stream.device), simulator.current_device()
            simulator.set_stream(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        simulator = state.current()
        if self._before is not None and simulator is not None:
            simulator.set_stream(self._before[0])
            simulator.set_device(self._before[1])
