"""From a device map to a place for every part of a module, or of the components of a pipeline."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from diffusion_core.errors import PlacementError
from diffusion_core.logging import get_logger

from .device_map import (
    CPU,
    DISK,
    STRATEGIES,
    Budgets,
    Place,
    SizeOf,
    Unit,
    check_names,
    collapse,
    find_device,
    find_place,
    place_of,
    read_budgets,
    read_map,
    read_reserve,
    show,
    stored_bytes,
    units,
)
from .engine import Modules, Placement, apply_plan
from .plan import Transfers
from .sizes import format_bytes
from .spread import roomiest, split, spread
from .strategies import Settings, by_map

logger = get_logger(__name__)

DEVICE_MAP = "a device map"


@dataclass(frozen=True)
class Layout:
    """A place for every tensor of some parts.

    Attributes:
        places: for each part a map from names inside of it to places, "" for all else.
        device: where data comes from and goes to, and where what is at home on the cpu or disk is used.
    """

    places: dict[str, dict[str, Place]]
    device: torch.device

    @property
    def flat(self) -> dict[str, Place]:
        """One map for all parts, with names that begin with the part's."""
        return {
            f"{part}.{name}".strip("."): place for part, places in self.places.items() for name, place in places.items()
        }

    @property
    def shown(self) -> dict[str, int | str]:
        """As `hf_device_map` has it."""
        return show(self.flat)

    @property
    def single(self) -> torch.device | None:
        """The one device that everything is on, if there is one."""
        places = set(self.flat.values())
        return self.device if places == {self.device} else None

    def loads_onto(self, name: str) -> torch.device:
        """The device that a tensor of the only part is loaded onto; what is at home on disk is mapped on the CPU."""
        place = place_of(self.flat, name)
        return place if isinstance(place, torch.device) else CPU

    def of(self, part: str) -> "Layout":
        """The layout of one part alone, under the name ""."""
        return Layout({"": self.places[part]}, self.device)


def read_layout(
    device_map: Any,
    parts: Mapping[str, nn.Module],
    budgets: Budgets,
    *,
    reserves: Mapping[str, int] | None = None,
    size_of: SizeOf = stored_bytes,
) -> Layout:
    """What a `device_map` means for parts: one of `STRATEGIES`, a device, or a dict by part or submodule.

    Args:
        parts: modules by name, in the order in which they are used; their weights may be on meta.
        budgets: for strategies, what each place may hold.
        reserves: for strategies, bytes that the device of a part keeps free for it.
        size_of: the bytes that a tensor will take, by its name with the part's, "unet.conv_in.weight".

    Raises:
        ValueError: if it is none of these, or leaves something without a place.
        PlacementError: if a device is not there, or something fits nowhere.
    """
    if isinstance(device_map, Mapping):
        return _explicit(dict(cast("Mapping[Any, Any]", device_map)), parts)
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return _strategic(device_map, parts, budgets, reserves or {}, size_of)
    device = single_place(device_map)
    return Layout({name: {"": device} for name in parts}, device if isinstance(device, torch.device) else CPU)


def single_place(device_map: Any) -> Place:
    """The place that a `device_map` names which is neither a dict nor a strategy.

    Raises:
        PlacementError: listing what is valid.
    """
    try:
        return find_place(device_map)
    except PlacementError as error:
        valid = ", ".join(repr(name) for name in STRATEGIES)
        raise PlacementError(f"{error}. Valid are a device, its index, {valid}, or a dict of places by name") from error


def is_spread(device_map: Any) -> bool:
    """Whether a `device_map` may mean more than one place."""
    if isinstance(device_map, Mapping):
        entries = dict(cast("Mapping[str, Any]", device_map))
        return set(entries) != {""} or entries[""] == DISK
    return isinstance(device_map, str) and device_map in {*STRATEGIES, DISK}


def _explicit(device_map: dict[Any, Any], parts: Mapping[str, nn.Module]) -> Layout:
    """A user's dict. Its names begin with a part's, unless the only part is called ""."""
    for name in device_map:
        if not isinstance(name, str):
            raise TypeError(f"the keys of device_map are names of parts, not {name!r}; write {{'': {name!r}}} for all")
    if set(parts) == {""}:
        places = {"": read_map(device_map, parts[""])}
    else:
        check_names([name.split(".")[0] for name in device_map if name], parts, "device_map")
        missing = [name for name in parts if not any(key.split(".")[0] in ("", name) for key in device_map)]
        if missing:
            raise PlacementError(
                f"device_map says nothing about {', '.join(missing)}; add entries, or '' for all others"
            )
        places = {name: read_map(_inside(device_map, name), part) for name, part in parts.items()}
    devices = [place for inside in places.values() for place in inside.values() if isinstance(place, torch.device)]
    return Layout(places, next((device for device in devices if device != CPU), CPU))


def _inside(device_map: Mapping[str, Any], part: str) -> dict[str, Any]:
    """The entries of a dict that are about one part, named from there on."""
    general = {"": device_map[""]} if "" in device_map else {}
    own = {name[len(part) :].lstrip("."): place for name, place in device_map.items() if _begins(name, part)}
    return {**general, **own}


def _begins(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _strategic(
    strategy: str, parts: Mapping[str, nn.Module], budgets: Budgets, reserves: Mapping[str, int], size_of: SizeOf
) -> Layout:
    limit = max(budgets.devices.values(), default=None)
    found = {
        name: units(part, lambda inner, tensor, name=name: size_of(f"{name}.{inner}".strip("."), tensor), limit)
        for name, part in parts.items()
    }
    sizes = {name: [unit.size for unit in inside] for name, inside in found.items()}
    pieces = {name: [unit.piece for unit in inside] for name, inside in found.items()}
    if not budgets.devices:
        chosen: dict[str, list[torch.device | None]] = {name: [None] * len(inside) for name, inside in sizes.items()}
        device = CPU
    else:
        chosen = _chosen(strategy, sizes, pieces, budgets.devices, reserves)
        device = _main_device(chosen, sizes, budgets.devices)
    left = budgets.cpu
    places: dict[str, dict[str, Place]] = {}
    for name, inside in found.items():
        here: dict[str, Place] = {}
        for unit, target in zip(inside, chosen[name], strict=True):
            place: Place = target or CPU
            if target is None and left is not None:
                place = CPU if unit.size <= left else DISK
                left -= unit.size if place == CPU else 0
            here.update(dict.fromkeys(unit.names, place))
        places[name] = collapse(here)
    layout = Layout(places, device)
    if device != CPU:
        _say_what_is_left(found, layout)
    return layout


def _chosen(
    strategy: str,
    sizes: Mapping[str, list[int]],
    pieces: Mapping[str, list[int]],
    devices: Mapping[torch.device, int],
    reserves: Mapping[str, int],
) -> dict[str, list[torch.device | None]]:
    try:
        if set(sizes) != {""} or strategy == "auto":
            known = "balanced" if strategy == "balanced_low_0" else strategy
            return spread(sizes, devices, known, reserves, pieces)
        return {"": _over_all(strategy, sizes[""], pieces[""], devices)}
    except ValueError as error:
        raise PlacementError(f"device_map={strategy!r}: {error}") from error


def _over_all(
    strategy: str, sizes: list[int], pieces: list[int], devices: Mapping[torch.device, int]
) -> list[torch.device | None]:
    """The units of one model over all devices, also where it fits one of them whole."""
    first = next(iter(devices))
    rooms = dict(devices)
    if strategy == "balanced_low_0" and len(devices) > 1:
        del rooms[first]
    result = split(sizes, rooms, even=strategy != "sequential")
    late = [index for index, device in enumerate(result) if device is None]
    if late and first not in rooms:
        for index, device in zip(late, split([sizes[i] for i in late], {first: devices[first]}), strict=True):
            result[index] = device
    if None not in result:
        return result
    # What has no device comes in to be used, which takes room; `spread` knows how to keep it.
    known = "sequential" if strategy == "sequential" else "balanced"
    return spread({"": sizes}, devices, known, pieces={"": pieces})[""]


def _main_device(
    chosen: Mapping[str, list[torch.device | None]], sizes: Mapping[str, list[int]], devices: Mapping[torch.device, int]
) -> torch.device:
    """Where data is at home: where something has to come in, if it has to; else where the largest part begins."""
    if any(None in inside for inside in chosen.values()):
        return roomiest(devices)
    largest = max(sizes, key=lambda name: sum(sizes[name]))
    return next((device for device in chosen[largest] if device is not None), roomiest(devices))


def _say_what_is_left(found: Mapping[str, Iterable[Unit]], layout: Layout) -> None:
    for name, inside in found.items():
        lost: dict[str, int] = {}
        for unit in inside:
            place = place_of(layout.places[name], unit.names[0])
            if place in (CPU, DISK):
                lost[str(place)] = lost.get(str(place), 0) + unit.size
        for place, size in lost.items():
            what = f"{name or 'the model'}: {format_bytes(size)}"
            logger.warning("%s fit on no device and stay on %s; they come in to be used, which is slow", what, place)


@dataclass(frozen=True)
class MapRequest:
    """The arguments of `from_pretrained` that say where weights go, checked as far as can be without the weights.

    Attributes:
        device_map: as for `read_layout`, or a `Layout` that has been made before.
        budgets: of the places.
        reserve: as for `read_reserve`.
        folder: where files for weights at home on disk go; None is the system's temporary folder.
    """

    device_map: Any = None
    budgets: Budgets = field(default_factory=lambda: Budgets({}))
    reserve: Any = None
    folder: str | None = None

    @property
    def device(self) -> torch.device | None:
        """The one device that everything goes to, where that can be told without the weights."""
        if self.device_map is None:
            return CPU
        if isinstance(self.device_map, Layout):
            return self.device_map.single
        if is_spread(self.device_map):
            return None
        given: Any = self.device_map
        return find_device(given[""] if isinstance(given, Mapping) else given, "device_map")

    def layout(self, parts: Mapping[str, nn.Module], size_of: SizeOf = stored_bytes) -> Layout:
        """See `read_layout`; everything on the CPU without a map."""
        if isinstance(self.device_map, Layout):
            return self.device_map
        if self.device_map is None:
            return Layout({name: {"": CPU} for name in parts}, CPU)
        reserves = read_reserve(self.reserve, parts)
        return read_layout(self.device_map, parts, self.budgets, reserves=reserves, size_of=size_of)

    def apply(self, model: nn.Module, layout: Layout) -> None:
        """Place a model that was loaded with this request, and note its map; one device needs no hooks."""
        if self.device_map is None or isinstance(self.device_map, Layout):
            return
        if layout.single is None:
            place(model, layout, folder=self.folder, remedy="remove_group_offloading(model)")
        model.hf_device_map = {"": layout.single} if layout.single else layout.shown  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


def read_request(
    device_map: Any, max_memory: Any = None, reserve: Any = None, offload_folder: Any = None
) -> MapRequest:
    """Check the arguments that say where weights go, before anything is read.

    Raises:
        PlacementError: if a device is not there, or an argument has nothing to act on.
        ValueError, TypeError: as for `read_budgets` and `read_layout`.
    """
    strategic = isinstance(device_map, str) and device_map in STRATEGIES
    for name, value in {"max_memory": max_memory, "reserve": reserve}.items():
        if value is not None and not strategic:
            raise PlacementError(
                f"{name} is for weights that are spread; device_map={device_map!r} says where they go: "
                f"take one of {', '.join(STRATEGIES)}, or leave {name} out"
            )
    if isinstance(device_map, Mapping):
        for place in cast("Mapping[Any, Any]", device_map).values():
            find_place(place)
    elif device_map is not None and not strategic and not isinstance(device_map, Layout):
        single_place(device_map)
    budgets = read_budgets(max_memory) if strategic else Budgets({})
    return MapRequest(device_map, budgets, reserve, None if offload_folder is None else str(offload_folder))


def place(modules: Modules, layout: Layout, *, folder: str | None = None, remedy: str) -> Placement:
    """Keep the tensors of a module, or of several by name, where a layout says.

    Args:
        folder: see `MapRequest`.
        remedy: for messages, the call that takes it back.
    """
    settings = Settings(
        device=layout.device,
        transfers=Transfers(disk_folder=folder),
        return_outputs=True,
        name=DEVICE_MAP,
        remedy=remedy,
    )
    return apply_plan(modules, by_map(settings, layout.flat))
