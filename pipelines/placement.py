"""Where the components of a pipeline keep their weights and where they compute: `.to`, offload, device maps."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from diffusion_core.errors import PlacementError

from ..offload import engine
from ..offload.device_map import accelerators, find_device, free_bytes
from ..offload.dtypes import dtype_named, parse_dtype
from ..offload.group_offload import group_strategy
from ..offload.layout import DEVICE_MAP, Layout, place
from ..offload.plan import Strategy
from ..offload.planner import WITHIN_BUDGET, MemoryPlan, plan_memory, require
from ..offload.quantized import is_quantized
from ..offload.strategies import Settings, by_component, leaves, whole
from ..offload.structure import nbytes
from .components import unwrap

Self = TypeVar("Self", bound="PlacementMixin")

MODEL_OFFLOAD = "model offload"
SEQUENTIAL_OFFLOAD = "sequential offload"
GROUP_OFFLOAD = "group offload"
# The components that hold the loop's tensors; where they compute, the pipeline does.
_DENOISERS = ("unet", "transformer", "prior")


class PlacementMixin:
    """The memory modes of pipelines. One is on at a time: enabling one replaces the one before.

    All state is in the components, so pipelines that share components see the same. A component can be put under a
    mode of its own after the pipeline's, `pipe.vae.enable_group_offload(...)`; it then leaves the pipeline's.
    """

    components: Any
    _runs: Any
    _hf_device_map: Mapping[str, int | str] | None = None

    # ---- where things are ----

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes, wherever the weights are kept."""
        return self._execution_device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first component that has weights, else float32."""
        return next((engine.execution_dtype(module) for module in self._modules().values()), torch.float32)

    @property
    def _execution_device(self) -> torch.device:
        """The device of the denoiser, else of the first component that is placed or not on the cpu, else the cpu."""
        modules = self._modules()
        found = {name: engine.execution_device(module) for name, module in modules.items()}
        for name in _DENOISERS:
            if name in found:
                return found[name]
        return next((device for device in found.values() if device.type != "cpu"), torch.device("cpu"))

    @property
    def hf_device_map(self) -> dict[str, int | str] | None:
        """The place of each component, or of its parts: an accelerator's index, "cpu" or "disk". None without a map.

        A component that has got a mode of its own is not under the map any more.
        """
        if self._hf_device_map is None:
            return None
        modules = self._modules()
        placements = {name: engine.placement_of(module) for name, module in modules.items()}
        left = {name for name, placement in placements.items() if placement and placement.plan.name != DEVICE_MAP}
        return {name: place for name, place in self._hf_device_map.items() if name.partition(".")[0] not in left}

    def to(self: Self, *args: Any, silence_dtype_warnings: bool = False, **kwargs: Any) -> Self:
        """Move and cast all components that are modules: `to(device)`, `to(dtype)`, or both in either order.

        A dtype may be a name, such as "bfloat16". Layers that a model keeps in float32 stay so. Components that are no
        modules are left alone.

        Raises:
            TypeError: if an argument is neither a device nor a dtype, or there is none.
            ValueError: if a device or dtype is given twice, the device is not there, or a component is quantised for
                another dtype. Nothing is changed then.
            PlacementError: for a device, if a memory mode or device map is on; the message says how to end it. The
                device on which a mode keeps the weights, the cpu as a rule, is taken: nothing stays elsewhere then.
        """
        device, dtype = _device_and_dtype(args, kwargs)
        modules = self._modules()
        fixed = [
            name
            for name, module in modules.items()
            if dtype is not None and is_quantized(module) and engine.execution_dtype(module) != dtype
        ]
        if fixed:
            raise ValueError(
                f"{', '.join(fixed)}: quantised weights cannot be cast to {dtype}; load them for that dtype"
            )
        if device is not None:
            for name, module in modules.items():
                placement = engine.placement_of(module)
                if placement is not None and (placement.plan.name == DEVICE_MAP or not placement.keeps_on(device)):
                    raise PlacementError(
                        f"{name} is under {placement.plan.name}, so the pipeline cannot be moved to {device}; "
                        f"call {placement.plan.remedy} first"
                    )
        for module in modules.values():
            target = {"device": device, "dtype": dtype}
            module.to(**{key: value for key, value in target.items() if value is not None})
        if device is not None:
            self._hf_device_map = None
        return self

    # ---- device maps ----

    def apply_layout(self, layout: Layout, folder: str | None = None) -> None:
        """Bring the components to the places of a layout; `from_pretrained(device_map=...)` does so.

        Args:
            folder: where files for weights at home on disk go.
        """
        modules = self._modules()
        if layout.single is None:
            parts = {name: module for name, module in modules.items() if name in layout.places}
            place(parts, layout, folder=folder, remedy="reset_device_map()")
        else:
            self.to(layout.single)
        self._hf_device_map = layout.shown

    def reset_device_map(self) -> None:
        """Undo a device map: all components are on the cpu, without hooks. Without a map there is nothing to do.

        A component that has got a mode of its own since keeps it.
        """
        mapped = self._under(DEVICE_MAP)
        if self._hf_device_map is None and not mapped:
            return
        self._remove(mapped)
        for module in self._modules().values():
            if engine.placement_of(module) is None:
                module.to("cpu")
        self._hf_device_map = None

    # ---- offload ----

    def enable_model_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Keep the components on the cpu, and bring each to the device while it works. The next one takes its place.

        Args:
            gpu_id: the index of the accelerator, 0 by default.
            device: the device, in place of `gpu_id`.

        Raises:
            ValueError: if `gpu_id` and `device` name different devices.
            PlacementError: if the device is not there, or the pipeline has a device map. Nothing is changed then.
        """
        target = _target(gpu_id, device)
        self._place(whole(Settings(target, name=MODEL_OFFLOAD, remedy="disable_model_cpu_offload()")), MODEL_OFFLOAD)

    def disable_model_cpu_offload(self) -> None:
        """Undo `enable_model_cpu_offload`: the components are where they were. Without it there is nothing to do."""
        self._remove(self._under(MODEL_OFFLOAD))

    def enable_sequential_cpu_offload(self, gpu_id: int | None = None, device: Any = None) -> None:
        """Keep the components on the cpu, and bring each layer to the device just while it computes.

        It takes the least memory and the most time. Arguments and errors are those of `enable_model_cpu_offload`.
        """
        target = _target(gpu_id, device)
        settings = Settings(target, name=SEQUENTIAL_OFFLOAD, remedy="disable_sequential_cpu_offload()")
        self._place(leaves(settings), SEQUENTIAL_OFFLOAD)

    def disable_sequential_cpu_offload(self) -> None:
        """Undo `enable_sequential_cpu_offload`. Without it there is nothing to do."""
        self._remove(self._under(SEQUENTIAL_OFFLOAD))

    def enable_group_offload(
        self,
        onload_device: Any,
        offload_device: Any = "cpu",
        offload_type: str = "block_level",
        num_blocks_per_group: int | None = None,
        non_blocking: bool = False,
        use_stream: bool = False,
        record_stream: bool = False,
        low_cpu_mem_usage: bool = False,
        offload_to_disk_path: str | None = None,
        exclude_modules: str | Sequence[str] | None = None,
    ) -> None:
        """Keep the components off the device, and bring groups of layers in while they compute.

        Args:
            onload_device: where the components compute.
            exclude_modules: names of components that stay on `onload_device`.
            offload_device, offload_type, num_blocks_per_group, non_blocking, use_stream, record_stream,
                low_cpu_mem_usage, offload_to_disk_path: as for `apply_group_offloading`.

        Raises:
            ValueError: if an argument makes no sense, or `exclude_modules` names what is no component.
            PlacementError: if the device is not there, or the pipeline has a device map. Nothing is changed then.
        """
        excluded = [exclude_modules] if isinstance(exclude_modules, str) else list(exclude_modules or ())
        unknown = [name for name in excluded if name not in self.components]
        if unknown:
            raise ValueError(f"exclude_modules names {unknown}, which are no components: {list(self.components)}")
        strategy = group_strategy(
            nn.ModuleDict(self._modules()),
            onload_device,
            offload_device,
            offload_type,
            num_blocks_per_group,
            non_blocking,
            use_stream,
            record_stream,
            low_cpu_mem_usage,
            offload_to_disk_path,
            remedy="disable_group_offload()",
        )
        self._place(by_component(strategy, excluded), GROUP_OFFLOAD)

    def disable_group_offload(self) -> None:
        """Undo `enable_group_offload`. Without it there is nothing to do."""
        self._remove(self._under(GROUP_OFFLOAD))

    # ---- within a budget ----

    def plan_memory(
        self, memory: int | str | None = None, device: Any = None, *, reserve: int | str | None = None
    ) -> MemoryPlan:
        """Tell which memory modes fit into a budget, and which one `fit_memory` would choose. Nothing is changed.

        Args:
            memory: bytes of the device that may be taken, as 8_000_000_000, "8GB" or "7.5GiB"; what is free if None.
            device: where to compute; the first accelerator if None.
            reserve: the part of `memory` that is kept free for what is computed; a quarter if None.

        Returns:
            the modes with what they need, the fastest first. `print` shows them as a table.

        Raises:
            ValueError: if a size cannot be read, or `reserve` leaves nothing.
            PlacementError: if the device is not there.
        """
        target = _target(None, device)
        modules = self._modules()
        sizes = {name: sum(nbytes(module).values()) for name, module in modules.items()}
        main = next(
            (name for name in _DENOISERS if name in sizes), max(sizes, key=lambda name: sizes[name], default="")
        )
        room = free_bytes(target) if memory is None else memory
        return plan_memory(nn.ModuleDict(modules), main, target, room, reserve)

    def fit_memory(
        self, memory: int | str | None = None, device: Any = None, *, reserve: int | str | None = None
    ) -> MemoryPlan:
        """Place the weights by the fastest memory mode that fits into a budget; `remove_all_hooks()` undoes it.

        What room is left keeps as many groups of the denoiser on the device as it holds. Arguments and errors are
        those of `plan_memory`.

        Returns:
            what was chosen, and what else there was.

        Raises:
            PlacementError: if nothing fits, or the pipeline has a device map. Nothing is changed then.
        """
        plan = self.plan_memory(memory, device, reserve=reserve)
        self._place(require(plan), WITHIN_BUDGET)
        return plan

    def remove_all_hooks(self) -> None:
        """Undo whatever memory mode or device map is on."""
        if self._under(DEVICE_MAP):
            self.reset_device_map()
        self._remove([name for name, module in self._modules().items() if engine.placement_of(module) is not None])

    def maybe_free_model_hooks(self) -> None:
        """Let go of the weights that a memory mode has brought to its device; without one there is nothing to do."""
        for module in self._modules().values():
            engine.free(module)

    @contextmanager
    def letting_go(self) -> Iterator[None]:
        """Context for what can be called by itself, such as `encode_prompt`: nothing it brought in stays after it."""
        try:
            yield
        finally:
            if not self._runs.active:
                self.maybe_free_model_hooks()

    # ---- inside ----

    def _modules(self) -> dict[str, nn.Module]:
        """The components that are modules with weights, without what `torch.compile` puts around them; each once."""
        found: dict[str, nn.Module] = {}
        for name, part in self.components.items():
            module = unwrap(part)
            if isinstance(module, nn.Module) and not any(module is other for other in found.values()):
                found[name] = module
        return {name: part for name, part in found.items() if next(part.parameters(), None) is not None}

    def _under(self, mode: str) -> list[str]:
        """The names of the components that are under a mode."""
        found = {name: engine.placement_of(module) for name, module in self._modules().items()}
        return [name for name, placement in found.items() if placement is not None and placement.plan.name == mode]

    def _place(self, strategy: Strategy, mode: str) -> None:
        mapped = self._under(DEVICE_MAP)
        if mapped:
            raise PlacementError(
                f"{', '.join(mapped)} have a device map, which {mode} would break; call reset_device_map() first"
            )
        modules = self._modules()
        if modules:
            engine.apply_plan(modules, strategy)
            self._hf_device_map = None

    def _remove(self, names: Collection[str]) -> None:
        """Take components out of the placements that they are under; a placement that keeps none goes whole."""
        modules = self._modules()
        own = {id(modules[name]) for name in names}
        for name in names:
            placement = engine.placement_of(modules[name])
            if placement is None:
                continue
            inside = placement.modules
            if {id(module) for module in inside.values()} <= own:
                placement.remove()
            else:
                placement.forget(next(key for key, module in inside.items() if module is modules[name]))


def _target(gpu_id: int | None, device: Any) -> torch.device:
    """The device that `gpu_id` or `device` names."""
    if device is None:
        if gpu_id is None and not accelerators():
            raise PlacementError("there is no accelerator here to bring weights to; device='cpu' runs the mode without")
        return find_device(gpu_id or 0, "gpu_id")
    try:
        named = device if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlacementError(f"device={device!r} is not a device: {str(error).splitlines()[0]}") from error
    index = named if isinstance(named, int) else named.index
    if gpu_id is not None and index is not None and index != gpu_id:
        raise ValueError(f"gpu_id={gpu_id} and device={str(device)!r} name different devices; pass one of them")
    if gpu_id is not None and isinstance(named, torch.device) and named.type != "cpu":
        named = torch.device(named.type, gpu_id)
    return find_device(named)


def _device_and_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None]:
    given: dict[str, list[Any]] = {"device": [], "dtype": []}
    for value in args:
        of_dtype = isinstance(value, torch.dtype) or (isinstance(value, str) and dtype_named(value) is not None)
        given["dtype" if of_dtype else "device"].append(value)
    for name, value in kwargs.items():
        if name not in given:
            raise TypeError(f"to() takes a device and a dtype, not {name!r}")
        if value is not None:
            given[name].append(value)
    for name, values in given.items():
        if len(values) > 1:
            raise ValueError(f"to() was given more than one {name}: {values}")
    devices, dtypes = given["device"], given["dtype"]
    if not devices and not dtypes:
        raise TypeError("to() needs a device, a dtype, or both")
    if devices and not isinstance(devices[0], str | int | torch.device):
        raise TypeError(f"to() takes a device and a dtype, not {type(devices[0]).__name__}")
    if dtypes and isinstance(dtypes[0], torch.dtype) and not dtypes[0].is_floating_point:
        raise TypeError(f"to() takes a floating point dtype such as torch.float16, not {dtypes[0]!r}")
    return (_usable(devices[0]) if devices else None), parse_dtype(dtypes[0] if dtypes else None)


def _usable(device: str | int | torch.device) -> torch.device:
    """A device that is there, found out before anything moves."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return found
