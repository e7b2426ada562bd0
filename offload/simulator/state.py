"""Which simulator runs now. One a process at a time; all other modules ask here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Simulator

_current: Simulator | None = None


def current() -> Simulator | None:
    """The running simulator, or None."""
    return _current


def running() -> Simulator:
    """The running simulator.

    Raises:
        RuntimeError: none runs; tensors that outlive their simulator can only be copied to the host.
    """
    if _current is None:
        raise RuntimeError(
            "No simulator is running, so nothing can run on a simulated device. Work inside `with simulator(...):`; "
            "tensors that are left over can only be copied to the host with `.cpu()`."
        )
    return _current


def set_current(simulator: Simulator | None) -> None:
    """Make a simulator the running one, or none."""
    global _current
    _current = simulator
