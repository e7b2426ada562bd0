"""Tells what each memory mode needs on the device, and finds the fastest one within a budget. Nothing moves here."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from diffusion_core.errors import PlacementError

from .plan import Strategy, Transfers, Until
from .sizes import format_bytes, parse_bytes
from .strategies import Settings, blocks, by_component, group_sizes, largest_call, leaves, whole, within
from .transfer import has_streams

WITHIN_BUDGET = "a memory budget"
_RESERVED_SHARE = 4  # without `reserve`, one part in so many is kept free for what is computed


@dataclass(frozen=True)
class MemoryOption:
    """What a mode needs.

    Attributes:
        name: of the mode.
        least: bytes of weights on the device that it cannot do without.
        most: bytes of weights on the device at most, as it is planned; None if it does not fit.
        moved: bytes that each step of the denoiser copies to the device; None if it does not fit.
    """

    name: str
    least: int
    most: int | None = None
    moved: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """What fits into a budget; as a string, a table.

    Attributes:
        device: where the weights are used.
        memory: bytes of the device that may be taken.
        reserve: the part of them that is kept free for what is computed.
        options: all modes, the fastest first.
        chosen: the first one that fits.
        strategy: makes its plan.
    """

    device: torch.device
    memory: int
    reserve: int
    options: tuple[MemoryOption, ...]
    chosen: MemoryOption | None
    strategy: Strategy | None

    def __str__(self) -> str:
        rows = [("mode", "weights on the device", "copied each step", ""), *map(self._row, self.options)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        kept = f"{format_bytes(self.memory)} on {self.device}, {format_bytes(self.reserve)} kept for what is computed"
        return "\n".join([kept, *lines])

    def _row(self, option: MemoryOption) -> tuple[str, str, str, str]:
        if option.most is None or option.moved is None:
            return option.name, f"at least {format_bytes(option.least)}", "", "does not fit"
        verdict = "chosen" if option is self.chosen else "fits"
        return option.name, format_bytes(option.most), format_bytes(option.moved), verdict


def plan_memory(
    modules: nn.ModuleDict, main: str, device: torch.device, memory: int | str, reserve: int | str | None = None
) -> MemoryPlan:
    """Find the fastest mode whose weights fit into a budget.

    Args:
        modules: the components of a pipeline.
        main: the one that is called at every step; what room is left keeps parts of it on the device.
        device: where they compute.
        memory: bytes of the device that may be taken, also as "8GB".
        reserve: the part of these that is kept free for what is computed; a quarter if None.

    Raises:
        ValueError: `memory` or `reserve` is no size, or `reserve` leaves nothing.
    """
    total = parse_bytes(memory, "memory")
    kept = total // _RESERVED_SHARE if reserve is None else parse_bytes(reserve, "reserve")
    if kept >= total:
        raise ValueError(f"reserve={reserve!r} leaves nothing of memory={memory!r} for the weights; lower it")
    room = total - kept
    settings = Settings(device, name=WITHIN_BUDGET, remedy="remove_all_hooks()")
    found: list[tuple[MemoryOption, Strategy | None]] = [
        _at_once("all on the device", modules, whole(settings, until=Until.REMOVED), room),
        _at_once("model offload", modules, whole(settings), room),
    ]
    streams = has_streams(device)
    moving = replace(settings, transfers=Transfers(streams=streams))
    way = ", stream" if streams else ""
    found.append(_in_groups(f"blocks{way}", modules, main, moving, blocks(moving), room))
    found.append(_in_groups(f"leaves{way}", modules, main, moving, leaves(moving), room))
    if streams:
        found.append(_in_groups("leaves", modules, main, settings, leaves(settings), room))
    option, strategy = next((each for each in found if each[1] is not None), (None, None))
    return MemoryPlan(device, total, kept, tuple(option for option, _ in found), option, strategy)


def require(plan: MemoryPlan) -> Strategy:
    """The chosen strategy.

    Raises:
        PlacementError: nothing fits; the message says what would.
    """
    if plan.strategy is not None:
        return plan.strategy
    least = min(plan.options, key=lambda option: option.least)
    raise PlacementError(
        f"no memory mode fits into {format_bytes(plan.memory)} of which {format_bytes(plan.reserve)} are kept free for "
        f"what is computed: {least.name} takes the least, {format_bytes(least.least)} of weights; raise memory to "
        f"{format_bytes(least.least + plan.reserve)} or lower reserve"
    )


def _at_once(name: str, modules: nn.ModuleDict, strategy: Strategy, room: int) -> tuple[MemoryOption, Strategy | None]:
    """A mode whose groups are whole components; between the steps of one, nothing moves."""
    plan = strategy(modules, ())
    sizes = group_sizes(modules, plan.groups).values()
    needed = sum(sizes) if plan.groups and plan.groups[0].until is Until.REMOVED else max(sizes, default=0)
    if needed > room:
        return MemoryOption(name, needed), None
    return MemoryOption(name, needed, needed, 0), strategy


def _in_groups(
    name: str, modules: nn.ModuleDict, main: str, settings: Settings, strategy: Strategy, room: int
) -> tuple[MemoryOption, Strategy | None]:
    """A mode that moves groups, with as many of the main component's on the device as there is room for."""
    moving = by_component(strategy)
    largest = largest_call(modules, moving(modules, ()).groups)
    least = 2 * largest if settings.transfers.streams else largest
    if least > room:
        return MemoryOption(name, least), None
    bounded = within(settings, moving, room, main)
    plan = bounded(modules, ())
    sizes = group_sizes(modules, plan.groups)
    resident = sum(sizes[group.name] for group in plan.groups if group.until is Until.REMOVED)
    # Weights of modulation are needed once a run, not in its steps.
    mine = [group for group in plan.groups if group.tensors[0].startswith(f"{main}.") and not group.hoisted]
    moved = sum(sizes[group.name] for group in mine) - resident
    return MemoryOption(name, least, resident + least, max(0, moved)), bounded
