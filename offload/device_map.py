"""Device maps: what users write in `device_map` and `max_memory`, and what is left of it once it is checked.

A place is a `torch.device`, or "disk". A map gives places to dotted names, and the longest name that begins a tensor's
own decides: `{"": 0, "up_blocks.1": "cpu"}`.
"""

import difflib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from diffusion_core.errors import PlacementError

from .host_memory import available_memory
from .quantized import QuantizedLayer, size_in_bytes
from .sizes import parse_bytes
from .structure import named_tensors as all_names

Place: TypeAlias = torch.device | str
SizeOf: TypeAlias = Callable[[str, torch.Tensor], int]

CPU = torch.device("cpu")
DISK = "disk"
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
# Without `max_memory`, this share of what a device has free may hold weights; the rest is for what they compute.
_WEIGHTS_SHARE = 0.9


# ---- devices and their memory ----


def accelerators() -> list[torch.device]:
    """The accelerators of this machine, in torch's order, which has the fastest first on CUDA."""
    if not torch.accelerator.is_available():
        return []
    found = torch.accelerator.current_accelerator()
    return [] if found is None else [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]


def free_bytes(device: torch.device) -> int:
    """The memory of a device that nothing uses; what its allocator keeps for reuse counts as free."""
    if device.type == "cpu":
        return available_memory()
    module = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.recommended_max_memory() - module.current_allocated_memory())
    free = module.mem_get_info(device)[0]
    return int(free + module.memory_reserved(device) - module.memory_allocated(device))


def find_device(value: Any, argument: str = "device") -> torch.device:
    """A device that is there, with its index, from an index, a name or a `torch.device`.

    Raises:
        PlacementError: if it is no device, or not one of this machine. The message names `argument`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        present = accelerators()
        if 0 <= value < len(present):
            return present[value]
        have = f"devices 0 to {len(present) - 1}" if present else "no accelerator: write 'cpu', or leave the map out"
        raise PlacementError(f"{argument}: there is no device {value}; this machine has {have}")
    try:
        device = torch.empty(0, device=torch.device(value)).device
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        shown = str(value) if isinstance(value, torch.device) else value
        raise PlacementError(f"{argument}: {shown!r} is not a device that can be used here: {reason}") from error
    if device.type == "meta":
        raise PlacementError(f"{argument}: weights on 'meta' have no values; name a device, 'cpu' or 'disk'")
    return device


def find_place(value: Any, argument: str = "device_map") -> Place:
    """As `find_device`, or "disk"."""
    return DISK if isinstance(value, str) and value == DISK else find_device(value, argument)


def label(place: Place) -> int | str:
    """A place as `hf_device_map` shows it: an accelerator's index, "cpu" or "disk"."""
    if isinstance(place, str):
        return place
    return place.index if place in accelerators() else str(place)


@dataclass(frozen=True)
class Budgets:
    """How many bytes of weights each place may hold.

    Attributes:
        devices: of accelerators, the fastest first; those that may hold nothing are left out.
        cpu: of the host, None for no limit. What is over goes to disk.
    """

    devices: dict[torch.device, int]
    cpu: int | None = None


def read_budgets(max_memory: Mapping[Any, int | str] | None) -> Budgets:
    """The budgets that `max_memory` states; without it, nine tenths of what each accelerator has free.

    Args:
        max_memory: bytes, as an int or as "8GB" (10^9) or "8GiB" (2^30), by index or name of a device or "cpu". An
            accelerator that is not named is not used; 0 means the same.

    Raises:
        TypeError: if it is no dict, or a size is neither int nor text.
        ValueError: if a key is no device of this machine, or a size makes no sense.
    """
    if max_memory is None:
        free = {device: int(free_bytes(device) * _WEIGHTS_SHARE) for device in accelerators()}
        return Budgets({device: size for device, size in free.items() if size > 0})
    if not isinstance(max_memory, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f'max_memory must be a dict such as {{0: "8GB", "cpu": "30GB"}}, not {max_memory!r}')
    sizes: dict[Place, int] = {}
    for key, size in max_memory.items():
        place = find_place(key, "max_memory")
        if place in sizes:
            raise ValueError(f"max_memory names {place} twice")
        sizes[place] = parse_bytes(size, f"max_memory[{key!r}]")
    order = [*accelerators(), *(place for place in sizes if isinstance(place, torch.device))]
    used = {device: sizes[device] for device in order if sizes.get(device) and device != CPU}
    return Budgets(used, sizes.get(CPU))


def read_reserve(reserve: Any, parts: Collection[str]) -> dict[str, int]:
    """For each part, the bytes that a device which holds it keeps free for what the part computes.

    Args:
        reserve: one size for all, a dict by part (0 for those that are absent), or None for 0.
        parts: the names of the parts.
    """
    if reserve is None:
        return dict.fromkeys(parts, 0)
    if not isinstance(reserve, Mapping):
        return dict.fromkeys(parts, parse_bytes(reserve, "reserve"))
    given = dict(cast("Mapping[str, int | str]", reserve))
    check_names(given, parts, "reserve")
    return {name: parse_bytes(given.get(name, 0), f"reserve[{name!r}]") for name in parts}


# ---- the parts of a module ----


@dataclass(frozen=True)
class Unit:
    """What stays together when a module is spread: a block, a layer, or the tensors that a module holds itself.

    Attributes:
        names: of the module, or of each tensor.
        size: in bytes; a tensor of several names counts in the first unit that has it.
        piece: bytes of the largest layer inside.
    """

    names: tuple[str, ...]
    size: int
    piece: int


def stored_bytes(name: str, tensor: torch.Tensor) -> int:
    """The bytes of a tensor as it is."""
    return size_in_bytes(tensor)


def units(module: nn.Module, size_of: SizeOf = stored_bytes, limit: int | None = None) -> list[Unit]:
    """The parts of a module that may go to different devices, in the order in which it defines them.

    A class in `_no_split_modules` of the module, or of a part of it, is one unit; where a module names none, so are
    the entries of its `ModuleList`s. What is larger than `limit` is split further.

    Args:
        module: its weights may be on meta.
        size_of: the bytes that a tensor will take.
        limit: the largest budget.
    """
    whole = _whole_classes(module)
    seen: set[int] = set()

    def size(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        return sum(size_of(name, tensor) for name, tensor in tensors)

    def unit(names: tuple[str, ...], part: nn.Module, path: str, recurse: bool) -> Unit:
        tensors = [(name, each) for name, each in named_tensors(part, path, recurse) if id(each) not in seen]
        seen.update(id(tensor) for _, tensor in tensors)
        inside = cast("Iterable[tuple[str, nn.Module]]", part.named_modules(prefix=path))
        layers = inside if recurse and not _is_one(part) else [(path, part)]
        pieces = [size(named_tensors(layer, name, _is_one(layer))) for name, layer in layers]
        return Unit(names, size(tensors), max(pieces))

    def walk(part: nn.Module, path: str, is_entry: bool) -> list[Unit]:
        children = [(name, child) for name, child in part.named_children() if _has_tensors(child)]
        declared = type(part).__name__ in whole or (is_entry and not whole)
        fits = limit is None or size(named_tensors(part, path)) <= limit
        if _is_one(part) or not children or (declared and fits):
            return [unit((path,), part, path, True)] if _has_tensors(part) else []
        own = tuple(name for name, _ in named_tensors(part, path, recurse=False))
        found = [unit(own, part, path, False)] if own else []
        for name, child in children:
            found += walk(child, f"{path}.{name}".lstrip("."), isinstance(part, nn.ModuleList))
        return found

    return walk(module, "", False)


def _is_one(module: nn.Module) -> bool:
    """Whether a module reads the tensors of its children without calling them."""
    return isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer | QuantizedLayer)


def named_tensors(module: nn.Module, path: str = "", recurse: bool = True) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module with names that begin with `path`, each tensor once."""
    return [*module.named_parameters(path, recurse), *module.named_buffers(path, recurse)]


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


def _whole_classes(module: nn.Module) -> set[str]:
    """The class names that the module or its parts declare as not to be split."""
    declared = [getattr(type(part), "_no_split_modules", None) or () for part in module.modules()]
    return {name for names in declared for name in names}


# ---- maps ----


def check_names(given: Iterable[object], known: Collection[str], argument: str) -> None:
    """Refuse names that are not among `known`.

    Raises:
        ValueError: naming `argument`, the first unknown name and what may have been meant.
    """
    for name in given:
        if name not in known:
            similar = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(similar)}?" if similar else f"known are {', '.join(sorted(known)[:12])}"
            raise ValueError(f"{argument} names {name!r}, which is not there; {hint}")


def read_map(device_map: Mapping[str, Any], module: nn.Module, argument: str = "device_map") -> dict[str, Place]:
    """A user's map for a module, checked: every name exists, every tensor has a place.

    Raises:
        ValueError: for a name that the module does not have.
        PlacementError: for a device that is not there, or tensors without a place.
    """
    found = cast("Iterable[tuple[str, nn.Module]]", module.named_modules(remove_duplicate=False))
    modules = [name for name, _ in found]
    tensors = [name for name, _ in all_names(module)]
    check_names(device_map, {*modules, *tensors}, argument)
    places = {name: find_place(value, argument) for name, value in device_map.items()}
    lost = [name for name in tensors if place_of(places, name) is None]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise PlacementError(
            f"{argument} leaves {', '.join(lost[:3])}{more} without any device set; an entry '' holds for all else"
        )
    return places


def place_of(places: Mapping[str, Place], name: str) -> Place | None:
    """The place that a map gives to a dotted name."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return places[name]


def collapse(places: Mapping[str, Place], path: str = "") -> dict[str, Place]:
    """The same map with as few entries as say it: a parent stands for children that are all at one place.

    `places` holds all units below `path`, so that no name lies within another.
    """
    if len(set(places.values())) == 1:
        return {path: next(iter(places.values()))}
    families: dict[str, dict[str, Place]] = {}
    for name, place in places.items():
        child = name[len(path) :].lstrip(".").split(".")[0]
        families.setdefault(f"{path}.{child}".lstrip("."), {})[name] = place
    return {name: place for child, inside in families.items() for name, place in collapse(inside, child).items()}


def show(places: Mapping[str, Place]) -> dict[str, int | str]:
    """A map as `hf_device_map` has it."""
    return {name: label(place) for name, place in places.items()}
