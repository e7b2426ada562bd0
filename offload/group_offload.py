"""Group offload of any module, by the names and arguments that users know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from diffusion_core.errors import PlacementError

from .device_map import find_device
from .engine import Placement, apply_plan, placement_of
from .plan import Strategy, Transfers
from .strategies import Settings, blocks, leaves
from .structure import find_blocks, submodules
from .transfer import has_streams

BLOCK_LEVEL, LEAF_LEVEL = "block_level", "leaf_level"


def apply_group_offloading(
    module: nn.Module,
    onload_device: torch.device | str | int,
    offload_device: torch.device | str | int = "cpu",
    offload_type: str = BLOCK_LEVEL,
    num_blocks_per_group: int | None = None,
    non_blocking: bool = False,
    use_stream: bool = False,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: str | None = None,
    block_modules: Sequence[str] | None = None,
    exclude_kwargs: Sequence[str] | None = None,
    *,
    remedy: str = "remove_group_offloading(module)",
) -> Placement:
    """Keep the weights of a module on one device, and bring each group to another one while it computes.

    Any module will do. Doing it again replaces the settings; `remove_group_offloading` takes them back. Weights that
    are mapped from a checkpoint stay mapped, and what comes to the device is never copied back unless it was edited.

    Args:
        onload_device: where the module computes.
        offload_device: where the weights are otherwise.
        offload_type: "block_level" for groups of blocks, "leaf_level" for single layers: the least memory, the most
            copies.
        num_blocks_per_group: blocks in a group, 1 if None. Blocks are found in stacks at any depth.
        non_blocking: the host does not wait for copies from pinned memory.
        use_stream: copy the next groups while the present one computes. The order is learned in the first call.
        record_stream: with `use_stream`, let the allocator keep memory until its use is over, rather than wait.
        low_cpu_mem_usage: with `use_stream`, pass weights through a few pinned buffers rather than keep them pinned.
            Weights that are mapped from files are passed through buffers in any case.
        offload_to_disk_path: keep the weights in files in a private folder there, not in memory; weights that are
            mapped from a checkpoint need no new file. The folder goes with the offload, or at exit.
        block_modules: names of submodules that hold blocks. Not needed, since all are looked into; but checked.
        exclude_kwargs: names of keyword arguments of calls that are not moved to `onload_device`; what the class
            lists in `_skip_keys` if None.
        remedy: for messages, the call that takes it back.

    Raises:
        ValueError: an argument makes no sense, or a device is not there. Nothing is changed.
        TypeError: an argument is of the wrong kind.
        PlacementError: the module cannot be placed, see `apply_plan`.
    """
    strategy = group_strategy(
        module,
        onload_device,
        offload_device,
        offload_type,
        num_blocks_per_group,
        non_blocking,
        use_stream,
        record_stream,
        low_cpu_mem_usage,
        offload_to_disk_path,
        block_modules,
        exclude_kwargs,
        remedy=remedy,
    )
    return apply_plan(module, strategy)


def group_strategy(
    module: nn.Module,
    onload_device: torch.device | str | int,
    offload_device: torch.device | str | int,
    offload_type: str,
    num_blocks_per_group: int | None,
    non_blocking: bool,
    use_stream: bool,
    record_stream: bool,
    low_cpu_mem_usage: bool,
    offload_to_disk_path: str | None,
    block_modules: Sequence[str] | None = None,
    exclude_kwargs: Sequence[str] | None = None,
    *,
    remedy: str,
) -> Strategy:
    """The strategy for arguments of `apply_group_offloading`, after they have been checked against `module`.

    Args:
        module: what it is for; the components of a pipeline as an `nn.ModuleDict`.
    """
    device = find_device(onload_device, "onload_device")
    home = find_device(offload_device, "offload_device")
    _check_options(module, offload_type, num_blocks_per_group, block_modules)
    if use_stream and not has_streams(device):
        raise ValueError(f"use_stream=True needs a device with streams, which {device} has not; leave it out")
    if record_stream and not use_stream:
        raise ValueError("record_stream=True works only with use_stream=True")
    skipped = [exclude_kwargs] if exclude_kwargs is not None else _skip_keys(module)
    settings = Settings(
        device=device,
        home=str(home) if offload_to_disk_path is None else "disk",
        transfers=Transfers(
            streams=use_stream,
            record_stream=record_stream,
            non_blocking=non_blocking,
            pin_homes=not low_cpu_mem_usage,
            disk_folder=offload_to_disk_path,
        ),
        exclude_kwargs=tuple(name for names in skipped for name in ([names] if isinstance(names, str) else names)),
        name="group offload",
        remedy=remedy,
    )
    return leaves(settings) if offload_type == LEAF_LEVEL else blocks(settings, num_blocks_per_group or 1)


def _skip_keys(module: nn.Module) -> list[Any]:
    """What the class of a module, or of each component, lists as arguments that are not moved."""
    parts = module.children() if isinstance(module, nn.ModuleDict) else [module]
    return [keys for part in parts if (keys := getattr(part, "_skip_keys", None))]


def remove_group_offloading(module: nn.Module) -> None:
    """Take group offload, or whatever placement a module is under, back; without one there is nothing to do.

    Raises:
        PlacementError: the module is only one of several that are placed together, or a call is going on.
    """
    placement = placement_of(module)
    if placement is None:
        return
    names = [name for name, root in placement.modules.items() if root is module]
    if not names:
        raise PlacementError(f"this is a part of what is under {placement.plan.name}; call {placement.plan.remedy}")
    placement.forget(names[0])


def _check_options(
    module: nn.Module, offload_type: Any, num_blocks_per_group: Any, block_modules: Sequence[str] | None
) -> None:
    if offload_type not in (BLOCK_LEVEL, LEAF_LEVEL):
        raise ValueError(f'offload_type must be "{BLOCK_LEVEL}" or "{LEAF_LEVEL}", not {offload_type!r}')
    if num_blocks_per_group is not None:
        if isinstance(num_blocks_per_group, bool) or not isinstance(num_blocks_per_group, int):
            raise TypeError(f"num_blocks_per_group must be a whole number, not {num_blocks_per_group!r}")
        if num_blocks_per_group < 1:
            raise ValueError(f"num_blocks_per_group must be at least 1, not {num_blocks_per_group}")
    unknown = [name for name in block_modules or () if name not in dict(submodules(module))]
    if unknown:
        have = ", ".join(name for name, _ in module.named_children())
        raise ValueError(f"block_modules names {unknown}, which {type(module).__name__} does not have; it has {have}")
    if offload_type == BLOCK_LEVEL and not any(find_blocks(module)):
        raise ValueError(f"{type(module).__name__} has no weights to offload")
