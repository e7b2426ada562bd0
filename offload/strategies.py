"""Functions that make plans: `whole`, `leaves`, `blocks`, `by_map` and `within` a budget.

Each returns a strategy, which is called with a module, or with an `nn.ModuleDict` of the components of a pipeline. It
may be called again, when the module's structure has changed or the order of its calls has become known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from diffusion_core.errors import PlacementError

from .hoisting import hoist
from .plan import Group, Plan, Strategy, Transfers, Until
from .structure import calling_module, find_blocks, find_leaves, is_within, nbytes, submodules, tensor_names


@dataclass(frozen=True)
class Settings:
    """What all groups of a plan have in common, and the plan's own words; see `Group`, `Plan`.

    Attributes:
        device: where the tensors are used.
        home: where they are otherwise.
    """

    device: torch.device
    home: str | None = "cpu"
    transfers: Transfers = field(default_factory=Transfers)
    return_outputs: bool = False
    exclude_kwargs: tuple[str, ...] = ()
    name: str = "a placement"
    remedy: str = "remove_group_offloading(module)"

    def plan(self, groups: Iterable[Group], transfers: Transfers | None = None) -> Plan:
        """The plan of these groups."""
        return Plan(
            groups=tuple(groups),
            device=self.device,
            transfers=transfers or self.transfers,
            return_outputs=self.return_outputs,
            exclude_kwargs=self.exclude_kwargs,
            name=self.name,
            remedy=self.remedy,
        )


def whole(settings: Settings, *, until: Until = Until.NEXT) -> Strategy:
    """One group for a module, or one for each entry of an `nn.ModuleDict`: model offload."""

    def strategy(module: nn.Module, order: Sequence[str] = ()) -> Plan:
        roots = [*module] if isinstance(module, nn.ModuleDict) else [""]
        groups = partition(module, [[root] for root in roots], settings, until)
        return settings.plan(hoist(module, groups, by_default=until is not Until.REMOVED))

    return strategy


def leaves(settings: Settings) -> Strategy:
    """A group for each module that has tensors of its own: sequential and leaf-level offload.

    With streams, the next group is fetched ahead, and so many more as make up half of the largest one, but no more than
    half of the rest of the block that computes: where much is computed with small weights, less is on the device than
    with `blocks`.
    """

    def strategy(module: nn.Module, order: Sequence[str] = ()) -> Plan:
        groups = hoist(module, partition(module, [[name] for name in find_leaves(module)], settings))
        if settings.transfers.streams and settings.transfers.ahead_bytes is None:
            groups = _room_in_blocks(module, groups, settings)
        return settings.plan(groups, _looking_ahead(module, groups, settings.transfers, 0.5))

    return strategy


def _room_in_blocks(module: nn.Module, groups: Sequence[Group], settings: Settings) -> list[Group]:
    """Leaves with room for half of what the blocks around them take besides them."""
    stacked, loose = find_blocks(module)
    around = hoist(module, partition(module, [[name] for name in (*stacked, *loose)], settings))
    sizes, own = group_sizes(module, around), group_sizes(module, groups)
    block_of = {tensor: sizes[block.name] for block in around for tensor in block.tensors}
    return [
        replace(group, room=(own[group.name] + max(block_of[name] for name in group.tensors)) // 2) for group in groups
    ]


def blocks(settings: Settings, num_blocks: int = 1) -> Strategy:
    """A group for each run of `num_blocks` blocks, and for each module beside the blocks: block-level offload.

    Blocks are found in stacks at any depth, see `find_blocks`. Runs follow the definition at first, and the order of
    the calls once that is known. With streams, the next group is fetched ahead, and so many more as make up the largest
    one, but no more than what computes takes itself: less is on the device than with three blocks a group.
    """

    def strategy(module: nn.Module, order: Sequence[str] = ()) -> Plan:
        stacked, loose = find_blocks(module)
        position = {name: index for index, name in reversed(list(enumerate(order)))}
        if num_blocks > 1 and position:
            stacked.sort(key=lambda name: position.get(name, len(position)))
        runs = [stacked[start : start + num_blocks] for start in range(0, len(stacked), num_blocks)]
        groups = hoist(module, partition(module, [*runs, *([name] for name in loose)], settings))
        if settings.transfers.streams and settings.transfers.ahead_bytes is None:
            groups = _room_for_blocks(module, groups, set(loose))
        return settings.plan(groups, _looking_ahead(module, groups, settings.transfers, 1.0))

    return strategy


def _room_for_blocks(module: nn.Module, groups: Sequence[Group], loose: Collection[str]) -> list[Group]:
    """Groups with room for two of them; beside the blocks, of the largest one in the module around."""
    sizes = group_sizes(module, groups)
    rooms: list[Group] = []
    for group in groups:
        if group.hoisted:
            rooms.append(group)
            continue
        around = group.name.rpartition(".")[0] if group.name in loose else group.name
        largest = max(sizes[each.name] for each in groups if is_within(each.name, around))
        rooms.append(replace(group, room=2 * largest))
    return rooms


def _looking_ahead(module: nn.Module, groups: Sequence[Group], transfers: Transfers, share: float) -> Transfers:
    """With a bound on the bytes that are fetched ahead, unless there is one: a share of the largest group."""
    if transfers.ahead_bytes is not None:
        return transfers
    largest = max(group_sizes(module, groups).values(), default=0)
    return replace(transfers, ahead_bytes=int(largest * share))


def by_component(strategy: Strategy, resident: Collection[str] = ()) -> Strategy:
    """The plans of all components of a pipeline, from a strategy for one module; `resident` names those that stay."""

    def made(module: nn.Module, order: Sequence[str] = ()) -> Plan:
        plans: list[Plan] = []
        for name, part in module.named_children():
            inner = [each[len(name) + 1 :] for each in order if each.startswith(f"{name}.")]
            plan = strategy(part, inner)
            groups = [
                replace(
                    group,
                    name=f"{name}.{group.name}",
                    tensors=tuple(f"{name}.{tensor}" for tensor in group.tensors),
                    modules=tuple(f"{name}.{each}".rstrip(".") for each in group.modules),
                    until=Until.REMOVED if name in resident else group.until,
                )
                for group in plan.groups
            ]
            plans.append(replace(plan, groups=tuple(groups)))
        ahead = max((plan.transfers.ahead_bytes or 0 for plan in plans), default=0)
        transfers = replace(plans[0].transfers, ahead_bytes=ahead or plans[0].transfers.ahead_bytes)
        return replace(plans[0], groups=tuple(group for plan in plans for group in plan.groups), transfers=transfers)

    return made


def by_map(settings: Settings, device_map: Mapping[str, Any]) -> Strategy:
    """Resident groups where a map says, by names of submodules; what it sends home comes in to be used.

    Where the map changes the device, the inputs of the inner module move there, and its results move back.

    Args:
        settings: its `device` is where the rest is used.
        device_map: from names of submodules or tensors ("" for all else) to a device, or "disk". The longest name
            counts. Entries with the device "cpu" are at home there, unless `settings.device` is the CPU too.
    """

    def strategy(module: nn.Module, order: Sequence[str] = ()) -> Plan:
        places = _places(module, device_map, settings.device)
        resident: dict[torch.device, list[str]] = {}
        for name, place in places.items():
            if isinstance(place, torch.device):
                resident.setdefault(place, []).append(name)
        entries = _device_changes(module, places, device_map, settings.device)
        groups: list[Group] = []
        for device, names in resident.items():
            inner = [name for name, target in entries.items() if target == device]
            callers = tuple(dict.fromkeys([*_callers(module, names), *inner]))
            groups.append(Group(f"on {device}", tuple(names), callers, device, Until.REMOVED, home=str(device)))
        leaf_units = [[leaf] for leaf in find_leaves(module)]
        for home in dict.fromkeys(place for place in places.values() if isinstance(place, str)):
            for group in partition(module, leaf_units, replace(settings, home=home)):
                tensors = tuple(name for name in group.tensors if places[name] == home)
                if tensors:
                    groups.append(replace(group, name=f"{home} {group.name}", tensors=tensors))
        return replace(settings.plan(hoist(module, groups, by_default=False)), returns=tuple(entries))

    return strategy


def _entry(name: str, device_map: Mapping[str, Any]) -> str | None:
    """The longest name of a map that a dotted name lies within."""
    return max((key for key in device_map if is_within(name, key)), key=len, default=None)


def _entry_place(name: str, device_map: Mapping[str, Any], device: torch.device) -> torch.device | str:
    """The device that a tensor is resident on, or the name of its home."""
    entry = _entry(name, device_map)
    if entry is None:
        raise PlacementError(f'the device map says nothing about {name!r}; add an entry for it, or "" for all')
    place = device_map[entry]
    if place == "disk":
        return "disk"
    found = torch.device(place)
    return "cpu" if found.type == "cpu" and device.type != "cpu" else found


def _places(module: nn.Module, device_map: Mapping[str, Any], device: torch.device) -> dict[str, torch.device | str]:
    """The place of each tensor. What a module has beside a tied tensor goes where that is."""
    every = tensor_names(module)
    places = {name: _entry_place(name, device_map, device) for name in every}
    with_tied = {
        calling_module(module, alias): first for first, names in every.items() if len(names) > 1 for alias in names[1:]
    }
    for first, names in every.items():
        tied = with_tied.get(calling_module(module, first))
        if tied is not None and len(names) == 1:
            places[first] = places[tied]
    return places


def _device_changes(
    module: nn.Module,
    places: Mapping[str, torch.device | str],
    device_map: Mapping[str, Any],
    device: torch.device,
) -> dict[str, torch.device]:
    """The modules that run on another device than the module that calls them, and that device.

    A module runs where its own tensors are; one without, where the map puts it, or where its caller runs.
    """
    own: dict[str, set[torch.device]] = {}
    for first, names in tensor_names(module).items():
        place = places[first]
        for name in names:
            own.setdefault(calling_module(module, name), set()).add(device if isinstance(place, str) else place)
    runs_on: dict[str, torch.device] = {"": device}
    changes: dict[str, torch.device] = {}
    for name, _ in submodules(module):
        if calling_module(module, f"{name}.x") != name:
            continue
        caller = calling_module(module, name) if name else ""
        here = own.get(name, set())
        if len(here) > 1:
            raise PlacementError(f"{name or 'the module'} holds tensors itself, on {here}; put them on one device")
        entry = _entry(name, device_map)
        if here:
            runs_on[name] = next(iter(here))
        elif entry is not None:
            place = _entry_place(name, device_map, device)
            runs_on[name] = device if isinstance(place, str) else place
        else:
            runs_on[name] = runs_on[caller]
        if runs_on[name] != (runs_on[caller] if name else device):
            changes[name] = runs_on[name]
    return changes


def within(settings: Settings, strategy: Strategy, budget: int, among: str = "") -> Strategy:
    """Another strategy's plan with as many groups resident as fit into `budget` bytes of the device, spread evenly.

    Room for the largest moving group, and for what is fetched ahead, is kept back.

    Args:
        among: the name of a submodule; only its groups become resident.

    Raises:
        PlacementError: when the plan is made, if not even that room is within the budget.
    """

    def bounded(module: nn.Module, order: Sequence[str] = ()) -> Plan:
        plan = strategy(module, order)
        sizes = group_sizes(module, plan.groups)
        largest = largest_call(module, plan.groups)
        reserve = 2 * largest if plan.transfers.streams else largest
        if reserve > budget:
            raise PlacementError(
                f"a budget of {budget} bytes is too small: the largest group takes {largest}, and "
                f"{'twice that, since groups are fetched ahead' if plan.transfers.streams else 'it has to fit'}; "
                "raise the budget, or choose smaller groups (leaf_level)"
            )
        candidates = [group for group in plan.groups if is_within(group.name, among) and not group.hoisted]
        kept = _spread([sizes[group.name] for group in candidates], budget - reserve)
        names = {candidates[index].name for index in kept}
        groups = [replace(group, until=Until.REMOVED) if group.name in names else group for group in plan.groups]
        transfers = plan.transfers
        if transfers.ahead_bytes is None:
            transfers = replace(transfers, ahead_bytes=largest)
        return replace(plan, groups=tuple(groups), transfers=transfers)

    return bounded


def _spread(sizes: Sequence[int], room: int) -> set[int]:
    """Indices of groups that fit into `room` together, as evenly spread over the order as they can be.

    The k-th group stays if the bytes that may stay, in proportion to all bytes up to it, have grown by its size.
    """
    total = sum(sizes)
    if total <= room:
        return set(range(len(sizes)))
    chosen: set[int] = set()
    passed = taken = 0
    for index, size in enumerate(sizes):
        passed += size
        if taken + size <= room * passed / total:
            chosen.add(index)
            taken += size
    # The rest of the room goes to the largest that still fit.
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if index not in chosen and taken + sizes[index] <= room:
            chosen.add(index)
            taken += sizes[index]
    return chosen


def partition(
    module: nn.Module, units: Sequence[Sequence[str]], settings: Settings, until: Until = Until.USED
) -> list[Group]:
    """A group for each unit that has tensors, and for each other module that has tensors of its own.

    Args:
        units: each a list of names of submodules; a tensor goes to the unit of the innermost one that it is in.
    """
    unit_of = {name: index for index, unit in enumerate(units) for name in unit}
    tensors: dict[Any, list[str]] = {}
    callers: dict[Any, dict[str, None]] = {}
    for first, names in tensor_names(module).items():
        key = _unit(first, unit_of)
        key = calling_module(module, first) if key is None else key
        tensors.setdefault(key, []).append(first)
        found = callers.setdefault(key, {})
        for name in names:
            unit = _unit(name, unit_of)
            found.update(dict.fromkeys([calling_module(module, name)] if unit is None else units[unit]))
    return [
        Group(
            name=(units[key][0] if isinstance(key, int) else f"{key}.*" if key else "*") or "all",
            tensors=tuple(tensors[key]),
            modules=tuple(callers[key]),
            device=settings.device,
            until=until,
            home=settings.home,
        )
        for key in tensors
    ]


def _unit(name: str, unit_of: Mapping[str, int]) -> int | None:
    while name:
        name = name.rpartition(".")[0]
        if name in unit_of:
            return unit_of[name]
    return unit_of.get("")


def _callers(module: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    every = tensor_names(module)
    return tuple(dict.fromkeys(calling_module(module, alias) for name in names for alias in every[name]))


def largest_call(module: nn.Module, groups: Iterable[Group]) -> int:
    """Bytes that the calls of one module need at most, without tables of modulation (see `hoisting`)."""
    groups = list(groups)
    sizes = group_sizes(module, groups)
    needs: dict[str, int] = {}
    for group in groups:
        needs[group.modules[0]] = needs.get(group.modules[0], 0) + sizes[group.name]
    return max(needs.values(), default=0)


def group_sizes(module: nn.Module, groups: Iterable[Group]) -> dict[str, int]:
    """Bytes of each group by its name."""
    sizes = nbytes(module)
    return {group.name: sum(sizes[name] for name in group.tensors) for group in groups}
