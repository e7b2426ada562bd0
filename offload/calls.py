"""What a placement knows about calls: the watcher of each, where each thread is, and who else uses the device."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .hoisting import is_serving

if TYPE_CHECKING:
    from .engine import Placement
    from .groups import LiveGroup


class Lane:
    """Groups of which one at a time is in, `Until.NEXT`. Placements that have shared a module share it."""

    def __init__(self) -> None:
        self.groups: weakref.WeakSet[LiveGroup] = weakref.WeakSet()
        self.lock = threading.RLock()


class Call:
    """The watcher of one method of one module for a placement."""

    order = 0

    def __init__(self, placement: Placement, name: str, method: str) -> None:
        self.placement = placement
        self.name = name
        self.method = method
        self.number = 0
        self.groups: list[LiveGroup] = []
        self.generation = 0

    @property
    def needed(self) -> list[LiveGroup]:
        """The groups that it needs now."""
        return needed(self.groups)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.placement.enter(self, args, kwargs)

    def result(self, output: Any) -> Any:
        return self.placement.result(self, output)

    def leave(self) -> None:
        self.placement.leave(self)


def needed(groups: list[LiveGroup]) -> list[LiveGroup]:
    """Those of some groups that calls of this thread need: where tables serve, without what these replace."""
    return [group for group in groups if not group.spec.hoisted] if is_serving() else groups


class Run(threading.local):
    """Where a thread is: the calls that are going on, and the two that began last.

    `callers` has, for each call that is going on, the device that its results go to, or None if they stay.
    """

    def __init__(self) -> None:
        self.callers: list[torch.device | None] = []
        self.before: int | None = None
        self.call: int | None = None
