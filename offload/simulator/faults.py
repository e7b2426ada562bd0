"""Faults put in on purpose, so that tests can show that the race detector would see a real mistake."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from . import state

KINDS = ("record_event", "record_stream", "synchronize", "wait")


@dataclass
class _Fault:
    kind: str
    skip: int
    left: int | None
    dropped: int = 0


class Faults:
    """The faults that are active now, and how many calls each swallowed."""

    def __init__(self) -> None:
        self._active: list[_Fault] = []

    def drops(self, kind: str) -> bool:
        """Whether this call of a kind is to do nothing."""
        for fault in self._active:
            if fault.kind != kind:
                continue
            if fault.skip:
                fault.skip -= 1
            elif fault.left is None or fault.left > 0:
                fault.left = None if fault.left is None else fault.left - 1
                fault.dropped += 1
                return True
        return False

    @contextmanager
    def inject(self, drop: str, after: int = 0, count: int | None = None) -> Generator[_Fault]:
        """See the module's `inject`."""
        if drop not in KINDS:
            raise ValueError(f"`drop` is {drop!r}; it must be one of {', '.join(KINDS)}.")
        fault = _Fault(drop, after, count)
        self._active.append(fault)
        try:
            yield fault
        finally:
            self._active.remove(fault)


@contextmanager
def inject(drop: str, after: int = 0, count: int | None = None) -> Generator[_Fault]:
    """Context in which calls of one kind do nothing on the running simulator.

    Args:
        drop: "record_stream" (`tensor.record_stream`), "wait" (a stream waiting for an event or a stream),
            "synchronize" (the host waiting for a stream, an event or a device) or "record_event".
        after: this many calls still work.
        count: how many calls are dropped then; None for all.

    Yields:
        an object whose `dropped` says how many calls did nothing, so that a test knows that the fault took place.

    Raises:
        ValueError: an unknown kind.
    """
    with state.running().faults.inject(drop, after, count) as fault:
        yield fault
