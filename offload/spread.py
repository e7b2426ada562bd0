"""Spread parts of known sizes over devices with budgets. Pure arithmetic: no tensor and no device is touched.

Whole parts are placed by search: the fewest bytes stay without a device, and among the ways to do that, the fullest
device is as empty as can be. What fits nowhere whole is split into its units.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# So many places of parts are tried at most. Eight parts on four devices take a few thousand.
_MOST_TRIES = 50_000


@dataclass
class Loads(Generic[K]):
    """What devices hold while parts are placed.

    A device that holds parts needs their sizes together, and the largest reserve among them, as one part computes at
    a time.
    """

    budgets: Mapping[K, int]
    reserves: Mapping[str, int]
    held: dict[K, int] = field(default_factory=dict[K, int])
    reserved: dict[K, int] = field(default_factory=dict[K, int])

    def room(self, device: K, part: str) -> int:
        """Bytes of a part, or of units of it, that a device can still take; may be negative."""
        reserve = max(self.reserved.get(device, 0), self.reserves.get(part, 0))
        return self.budgets[device] - self.held.get(device, 0) - reserve

    def add(self, device: K, part: str, size: int) -> None:
        """Put `size` bytes of a part on a device."""
        self.held[device] = self.held.get(device, 0) + size
        self.reserved[device] = max(self.reserved.get(device, 0), self.reserves.get(part, 0))


def assign(
    sizes: Mapping[str, int], budgets: Mapping[K, int], reserves: Mapping[str, int] | None = None
) -> dict[str, K | None]:
    """The best device for each part, None where there is none.

    Best means, in this order: the fewest bytes are left without a device; the largest share of a budget that is
    taken, reserves included, is the smallest. Found by branch and bound; the search ends after 50,000 tries with the
    best that it has seen, which small numbers of parts never need.

    Args:
        sizes: bytes of each part.
        budgets: bytes of each device.
        reserves: bytes that the device of a part keeps free for it; see `Loads`.
    """
    reserves = reserves or {}
    usable = [device for device, budget in budgets.items() if budget > 0]
    order = sorted(sizes, key=lambda name: -sizes[name])
    rest = [sum(sizes[name] for name in order[index:]) for index in range(len(order) + 1)]
    held = dict.fromkeys(usable, 0)
    reserved = dict.fromkeys(usable, 0)
    chosen: dict[str, K | None] = {}
    best: tuple[float, float] = (float("inf"), float("inf"))
    found: dict[str, K | None] = dict.fromkeys(sizes)
    tries = 0

    def options(name: str) -> list[tuple[float, K]]:
        """The devices that can take a part, with their share taken then, the emptiest first; of equal ones, one."""
        result: dict[tuple[int, int, int], tuple[float, K]] = {}
        for device in usable:
            need = held[device] + sizes[name] + max(reserved[device], reserves.get(name, 0))
            if need <= budgets[device]:
                alike = (budgets[device], held[device], reserved[device])
                result.setdefault(alike, (need / budgets[device], device))
        return sorted(result.values(), key=lambda option: option[0])

    def search(index: int, left: int, fullest: float) -> None:
        nonlocal best, found, tries
        tries += 1
        free = sum(budgets[device] - held[device] for device in usable)
        if tries > _MOST_TRIES or (left + max(0, rest[index] - free), fullest) >= best:
            return
        if index == len(order):
            best, found = (left, fullest), dict(chosen)
            return
        name = order[index]
        for share, device in options(name):
            before = reserved[device]
            chosen[name] = device
            held[device] += sizes[name]
            reserved[device] = max(before, reserves.get(name, 0))
            search(index + 1, left, max(fullest, share))
            held[device] -= sizes[name]
            reserved[device] = before
        chosen[name] = None
        search(index + 1, left + sizes[name], fullest)

    search(0, 0, 0.0)
    return {name: found[name] for name in sizes}


def fill_in_order(
    order: Sequence[str], sizes: Mapping[str, int], budgets: Mapping[K, int], reserves: Mapping[str, int] | None = None
) -> dict[str, K | None]:
    """For each part, in `order`, the first device that has room for it; None where there is none."""
    loads = Loads(budgets, reserves or {})
    result: dict[str, K | None] = {}
    for name in order:
        device = next((each for each in budgets if loads.room(each, name) >= sizes[name]), None)
        result[name] = device
        if device is not None:
            loads.add(device, name, sizes[name])
    return result


def split(sizes: Sequence[int], rooms: Mapping[K, int], *, even: bool = False) -> list[K | None]:
    """A device for each unit of a part, in runs, so that data changes devices as rarely as can be.

    Args:
        sizes: bytes of the units, in their order.
        rooms: bytes that each device can take, in the order in which they are filled.
        even: fill all to the same share of their room, the smallest that is enough, rather than one after another.

    Returns:
        For each unit its device. None for those that no device has room for; gaps are filled before that.
    """
    usable = {device: room for device, room in rooms.items() if room > 0}
    share = 1.0
    if even and None not in _runs(sizes, usable):
        low = 0.0
        for _ in range(40):
            middle = (low + share) / 2
            enough = None not in _runs(sizes, {device: int(room * middle) for device, room in usable.items()})
            low, share = (low, middle) if enough else (middle, share)
    result = _runs(sizes, {device: int(room * share) for device, room in usable.items()})
    free = dict(usable)
    for size, device in zip(sizes, result, strict=True):
        if device is not None:
            free[device] -= size
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        fitting = [device for device in free if free[device] >= sizes[index]]
        if result[index] is None and fitting:
            device = min(fitting, key=lambda each: free[each])
            result[index] = device
            free[device] -= sizes[index]
    return result


def _runs(sizes: Sequence[int], rooms: Mapping[K, int]) -> list[K | None]:
    """Fill one device after another; what does not fit into the rest of the last one gets None."""
    left = list(rooms.items())
    result: list[K | None] = []
    for size in sizes:
        while left and left[0][1] < size:
            left.pop(0)
        if not left:
            result.append(None)
            continue
        device, room = left[0]
        left[0] = (device, room - size)
        result.append(device)
    return result


def spread(
    parts: Mapping[str, Sequence[int]],
    budgets: Mapping[K, int],
    strategy: str = "balanced",
    reserves: Mapping[str, int] | None = None,
    pieces: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, list[K | None]]:
    """A device for each unit of each part; the units of a part stay together where it fits whole.

    Args:
        parts: for each part the bytes of its units, in the order in which parts are used.
        budgets: bytes of each device, the fastest first.
        strategy: "balanced" fills all devices to the same share; "auto" fills one after another with the largest
            parts first; "sequential" does so with the parts in their order.
        reserves: bytes that the device of a part keeps free for it.
        pieces: for each unit the bytes that come in at once where it has no device; all of it if None.

    Returns:
        None for units that no device has room for. Where there are such, the first of the roomiest devices has room
        left for the largest piece of them, which has to come in to be used.

    Raises:
        ValueError: if that room cannot be made; the message names the part.
    """
    usable = {device: budget for device, budget in budgets.items() if budget > 0}
    if not usable:
        return {name: [None] * len(sizes) for name, sizes in parts.items()}
    visited = roomiest(usable)
    room = 0
    while True:
        rest = {**usable, visited: usable[visited] - room}
        result = _spread_once(parts, rest, strategy, reserves or {})
        left = {
            name: max(size for size, device in zip((pieces or parts)[name], places, strict=True) if device is None)
            for name, places in result.items()
            if None in places
        }
        largest = max(left, key=lambda name: left[name], default="")
        if not left or left[largest] <= room:
            return result
        room = left[largest]
        need = room + (reserves or {}).get(largest, 0)
        if need > usable[visited]:
            raise ValueError(
                f"{largest or 'the model'} has a layer that needs {need} bytes, which is more than any device may "
                f"hold ({usable[visited]} at most); allow more memory"
            )


def roomiest(budgets: Mapping[K, int]) -> K:
    """The device with the largest budget, the first of equals. What has no device of its own comes in here."""
    return max(budgets, key=lambda device: budgets[device])


def _spread_once(
    parts: Mapping[str, Sequence[int]], budgets: Mapping[K, int], strategy: str, reserves: Mapping[str, int]
) -> dict[str, list[K | None]]:
    sizes = {name: sum(units) for name, units in parts.items()}
    if strategy == "balanced":
        whole = assign(sizes, budgets, reserves)
    else:
        order = sorted(sizes, key=lambda name: -sizes[name]) if strategy == "auto" else list(sizes)
        whole = fill_in_order(order, sizes, budgets, reserves)
    loads = Loads(budgets, reserves)
    for name, device in whole.items():
        if device is not None:
            loads.add(device, name, sizes[name])
    result: dict[str, list[K | None]] = {name: [device] * len(parts[name]) for name, device in whole.items()}
    # The largest first: it is the one that has to be split, and smaller ones may be left for the gaps.
    for name in sorted((name for name, device in whole.items() if device is None), key=lambda name: -sizes[name]):
        rooms = {device: loads.room(device, name) for device in budgets}
        result[name] = split(parts[name], rooms, even=strategy == "balanced")
        for size, device in zip(parts[name], result[name], strict=True):
            if device is not None:
                loads.add(device, name, size)
    return result
