"""Brings masters to the homes that a plan gives them, and back to where they were before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .groups import Place, plain_mode
from .host_memory import default_pinned_budget
from .plan import Transfers
from .stores import DiskStore, PinnedStore


class Homes:
    """Moves masters between homes. What was where at first is noted, for `restore`."""

    def __init__(self, options: Transfers) -> None:
        self._options = options
        self._came_from: dict[str, torch.device] = {}
        self._disk: DiskStore | None = None
        self._pinned: PinnedStore | None = None
        budget = options.pinned_budget
        self.pinned_budget = (default_pinned_budget() if budget is None else budget) if options.streams else 0
        """Bytes of pinned memory that may be taken."""

    def settle(self, places: Mapping[str, Sequence[Place]], home: str | None) -> None:
        """Move the masters of a group to its home. `places` has the places of each tensor by its name."""
        tensors = {name: tensor for name, own in places.items() for tensor in _tensors(own)}
        with plain_mode():
            before = [tensor.data for tensor in tensors.values()]
            after = self._moved(before, home)
            for name, old, new in zip(tensors, before, after, strict=True):
                if new is not old:
                    self._came_from.setdefault(name, old.device)
                    tensors[name].data = new

    def _moved(self, tensors: list[torch.Tensor], home: str | None) -> list[torch.Tensor]:
        if home == "disk":
            self._disk = self._disk or DiskStore(self._options.disk_folder)
            return self._disk.put(tensors)
        device = None if home is None else torch.device(home)
        moved = [tensor if device in (None, tensor.device) else tensor.to(device) for tensor in tensors]
        if not (self._options.pin_homes and self._options.streams):
            return moved
        self._pinned = self._pinned or PinnedStore(self.pinned_budget)
        return [self._pinned.put(tensor) if tensor.device.type == "cpu" else tensor for tensor in moved]

    def restore(self, places: Mapping[str, Sequence[Place]]) -> None:
        """Undo `settle` for these tensors; those that it left alone are left alone again."""
        with plain_mode():
            for name, own in places.items():
                device = self._came_from.pop(name, None)
                if device is not None:
                    for tensor in _tensors(own):
                        now = tensor.data
                        tensor.data = now.clone() if now.device == device else now.to(device)
        self._pinned = None
        if self._disk is not None and not self._came_from:
            self._disk.close()
            self._disk = None


def _tensors(places: Sequence[Place]) -> list[torch.Tensor]:
    found = {id(tensor): tensor for place in places if (tensor := place.tensor()) is not None}
    return list(found.values())
