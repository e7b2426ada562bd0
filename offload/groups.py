"""`LiveGroup`: a group of a plan that is applied: its tensors, and their way to the device and home again."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .plan import Group, Until
from .transfer import Arrival, Transfer


@contextmanager
def plain_mode() -> Generator[None]:
    """No gradients are recorded for moves, and no inference tensors made, whatever the caller's mode is."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Place:
    """Where a module keeps a tensor. The tensor may be replaced; it is looked up each time."""

    def __init__(self, owner: nn.Module, leaf: str) -> None:
        self._owner = weakref.ref(owner)
        self._leaf = leaf

    def tensor(self) -> torch.Tensor | None:
        """The parameter or buffer that is there now."""
        owner = self._owner()
        if owner is None:
            return None
        found = owner._parameters.get(self._leaf)
        return owner._buffers.get(self._leaf) if found is None else found


@dataclass
class _Guest:
    """A tensor that is away from home."""

    tensor: torch.Tensor
    home: torch.Tensor
    copy: torch.Tensor
    version: int | None


class LiveGroup:
    """A group of a plan that is applied.

    Args:
        spec: what the plan says.
        places: for each tensor, all places where modules keep it (several for a tied one).
        transfer: how it comes in.
    """

    def __init__(self, spec: Group, places: Sequence[Sequence[Place]], transfer: Transfer) -> None:
        self.spec = spec
        self.places = places
        self.active = 0
        """How many calls are using it now."""
        self._transfer = transfer
        self._guests: list[_Guest] | None = None
        self._arrival: Arrival | None = None
        self.size = 0
        self.measure()

    @property
    def is_in(self) -> bool:
        """Whether its tensors are on the device, or on their way."""
        return self._guests is not None

    @property
    def moves(self) -> bool:
        """Whether calls bring it in and let it go."""
        return self.spec.until is not Until.REMOVED

    def measure(self) -> None:
        """Note the bytes of its tensors anew."""
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """The tensors as they are now, each once."""
        found = {
            id(tensor): tensor for places in self.places for place in places if (tensor := place.tensor()) is not None
        }
        return list(found.values())

    def bring_in(self) -> None:
        """Start the tensors' way to the device. If that fails, nothing has changed."""
        if self.is_in:
            return
        with plain_mode():
            moving = [tensor for tensor in self.tensors() if tensor.device != self.spec.device]
            homes = [tensor.data for tensor in moving]
            arrival = self._transfer.fetch(homes)
            guests: list[_Guest] = []
            for tensor, home, copy in zip(moving, homes, arrival.tensors, strict=True):
                tensor.data = copy
                guests.append(_Guest(tensor, home, copy, _version(tensor)))
            self._guests, self._arrival = guests, arrival

    def wait(self) -> None:
        """Let the current stream wait for the tensors."""
        if self._arrival is not None:
            self._arrival.wait()

    def let_go(self) -> None:
        """Point the tensors at their homes again and drop the copies; only what was edited is copied back."""
        guests, arrival = self._guests, self._arrival
        self._guests = self._arrival = None
        if guests is None or arrival is None:
            return
        with plain_mode():
            if not self.moves:
                arrival.wait()
            for guest in guests:
                guest.tensor.data = self._home_of(guest)
            guests.clear()
            arrival.release()

    def _home_of(self, guest: _Guest) -> torch.Tensor:
        now = guest.tensor.data
        if not _same_memory(now, guest.copy):
            return now.to(guest.home.device)
        edited = guest.version != _version(guest.tensor)
        if not edited and not self.moves:
            # A resident copy may have been edited through `.data`, which leaves no trace.
            edited = not torch.equal(now.cpu(), guest.home)
        return guest.home.copy_(now) if edited else guest.home


def room_beside(groups: Iterable[LiveGroup]) -> int:
    """How many bytes may be fetched ahead while a call of these groups computes."""
    return min((group.spec.room - group.size for group in groups if group.spec.room is not None), default=1 << 62)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and a.shape == b.shape and a.data_ptr() == b.data_ptr()
