"""What a placement is: pure values. No tensor is touched here.

A plan is a partition of a module's tensors into groups. A group says where its tensors are used, where they are at
home, which calls bring it in, and what lets it go. Every memory mode is such a plan; `strategies.py` makes them and
`engine.py` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from diffusion_core.errors import PlacementError


class Until(Enum):
    """What lets a group go that a call has brought in."""

    USED = "used"
    """The end of the call; for several modules, of the last call in a row. At the latest, of the outermost call."""
    NEXT = "next"
    """The next group of this kind that comes in, or `Placement.free()`."""
    REMOVED = "removed"
    """Nothing: the group is resident, from applying the plan until it is removed."""


@dataclass(frozen=True)
class Group:
    """Tensors that move together.

    Attributes:
        name: unique within the plan.
        tensors: dotted names of parameters and buffers; of a tied tensor, its first name.
        modules: dotted names of the modules whose calls need the group, "" for the root. Any of them brings it in.
        device: where the tensors are used.
        until: what lets the group go.
        home: where the tensors are while the group is not in: a device such as "cpu", "disk" for files that are
            mapped into memory, or None for the place where they are when the plan is applied.
        room: while its calls compute, this group and what is fetched ahead, beyond the first, may take so many bytes
            together; None is no bound.
        hoisted: weights of modulating layers: calls in a run that has tables do not need the group, see `hoisting`.
    """

    name: str
    tensors: tuple[str, ...]
    modules: tuple[str, ...]
    device: torch.device
    until: Until = Until.USED
    home: str | None = "cpu"
    room: int | None = None
    hoisted: bool = False


@dataclass(frozen=True)
class Transfers:
    """How groups travel.

    Attributes:
        streams: copy on a stream of its own, while the groups before compute.
        record_stream: let the allocator keep memory until its last use, in place of waiting for it on that stream.
        non_blocking: let the host go on during copies from pinned memory; streams always do.
        ahead: how many groups are fetched ahead at most; with streams only.
        ahead_bytes: how large these may be together, beyond the first; None is no bound.
        pin_homes: keep the homes in pinned memory, where they fit, rather than pass them through a few pinned buffers.
        pinned_budget: bytes of pinned memory at most, as the allocator counts; None leaves it to the machine.
        disk_folder: where files for homes on disk go, in a private folder; None is the system's temporary folder.
    """

    streams: bool = False
    record_stream: bool = False
    non_blocking: bool = False
    ahead: int = 16
    ahead_bytes: int | None = None
    pin_homes: bool = False
    pinned_budget: int | None = None
    disk_folder: str | None = None


@dataclass(frozen=True)
class Plan:
    """A partition of the tensors of a module into groups.

    Attributes:
        groups: every parameter and buffer is in exactly one of them.
        device: where inputs go, unless a group's module says otherwise.
        transfers: how groups travel.
        return_outputs: whether the outermost call gives its results on the device that its inputs came from.
        exclude_kwargs: names of keyword arguments that are passed on without moving them.
        returns: names of modules whose calls give their results on the device that their inputs came from, inside of
            other calls too: so the code around them meets tensors of one device only.
        name: of the mode, for messages.
        remedy: the call that takes the plan back, for messages.
    """

    groups: tuple[Group, ...]
    device: torch.device
    transfers: Transfers = field(default_factory=Transfers)
    return_outputs: bool = False
    exclude_kwargs: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    name: str = "a placement"
    remedy: str = "remove_group_offloading(module)"

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that something is used on, each once."""
        return tuple(dict.fromkeys([self.device, *(group.device for group in self.groups)]))

    def check(self, tensors: Iterable[str], modules: Iterable[str]) -> None:
        """Compare the plan with the names of a module's tensors and of its submodules.

        Raises:
            PlacementError: a tensor is in no group or in two, or a name is not one of the module's.
        """
        owners: dict[str, str] = {}
        names: set[str] = set()
        known, known_modules = set(tensors), set(modules)
        for group in self.groups:
            if group.name in names:
                raise PlacementError(f"two groups of {self.name} are called {group.name!r}; names must differ")
            names.add(group.name)
            for module in group.modules:
                if module not in known_modules:
                    raise PlacementError(f"group {group.name!r} waits for calls of {module!r}, which does not exist")
            for tensor in group.tensors:
                if tensor not in known:
                    raise PlacementError(f"group {group.name!r} lists {tensor!r}, which does not exist")
                if tensor in owners:
                    raise PlacementError(f"{tensor!r} is in the groups {owners[tensor]!r} and {group.name!r}; keep one")
                owners[tensor] = group.name
        missing = sorted(known - owners.keys())
        if missing:
            raise PlacementError(f"{self.name} says nothing about {_listed(missing)}; every tensor needs a group")


Strategy = Callable[[nn.Module, Sequence[str]], Plan]
"""Makes a plan for a module, given names of its submodules in the order of their calls, empty before the first run."""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
