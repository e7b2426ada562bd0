"""`torch.sim`: the functions that torch and its users expect of a device's module, by the names of `torch.cuda`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from . import state
from .bindings import NAME
from .streams import Event, Stream, stream

DeviceLike = torch.device | str | int | None


@dataclass(frozen=True)
class DeviceProperties:
    """What `get_device_properties` tells."""

    name: str
    total_memory: int
    major: int = 8
    minor: int = 9


class DeviceModule:
    """An object in the place of a module; every call goes to the running simulator."""

    Stream, Event, stream = Stream, Event, stream
    OutOfMemoryError = torch.OutOfMemoryError

    def is_available(self) -> bool:
        """Whether a simulator runs."""
        return state.current() is not None

    def is_initialized(self) -> bool:
        """Always: there is nothing to start up."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        """Number of devices, 0 when no simulator runs."""
        simulator = state.current()
        return 0 if simulator is None else simulator.device_count

    def current_device(self) -> int:
        """Index of this thread's current device."""
        simulator = state.current()
        return 0 if simulator is None else simulator.current_device()

    def set_device(self, device: DeviceLike) -> None:
        """Change this thread's current device."""
        state.running().set_device(device)

    @contextmanager
    def device(self, device: DeviceLike) -> Generator[None]:
        """Context: a device is current inside. None changes nothing."""
        simulator = state.running()
        before = simulator.current_device()
        simulator.set_device(device)
        try:
            yield
        finally:
            simulator.set_device(before)

    def current_stream(self, device: DeviceLike = None) -> Stream:
        """This thread's current stream."""
        return state.running().current_stream(device)

    def default_stream(self, device: DeviceLike = None) -> Stream:
        """The stream that is current unless another is set."""
        return state.running().default_stream(device)

    def set_stream(self, stream: Stream) -> None:
        """Make a stream current, and its device."""
        state.running().set_stream(stream)

    def synchronize(self, device: DeviceLike = None) -> None:
        """Wait for all work on a device."""
        state.running().synchronize(device)

    def memory_allocated(self, device: DeviceLike = None) -> int:
        """Bytes in use."""
        return state.running().statistics(device).allocated

    def max_memory_allocated(self, device: DeviceLike = None) -> int:
        """Most bytes in use since the last `reset_peak_memory_stats`."""
        return state.running().statistics(device).peak

    def memory_reserved(self, device: DeviceLike = None) -> int:
        """As `memory_allocated`: the simulated allocator keeps nothing back."""
        return self.memory_allocated(device)

    def max_memory_reserved(self, device: DeviceLike = None) -> int:
        """As `max_memory_allocated`."""
        return self.max_memory_allocated(device)

    def memory_stats(self, device: DeviceLike = None) -> OrderedDict[str, int]:
        """The two figures above under CUDA's keys."""
        books = state.running().statistics(device)
        return OrderedDict({"allocated_bytes.all.current": books.allocated, "allocated_bytes.all.peak": books.peak})

    def reset_peak_memory_stats(self, device: DeviceLike = None) -> None:
        """Start the peak again from what is in use."""
        state.running().reset_peak(device)

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        """Free and total bytes."""
        books = state.running().statistics(device)
        return books.capacity - books.allocated, books.capacity

    def empty_cache(self) -> None:
        """Counted; there is no cache."""
        state.running().cache_clears += 1

    def get_device_name(self, device: DeviceLike = None) -> str:
        """The hardware's name."""
        return self.get_device_properties(device).name

    def get_device_properties(self, device: DeviceLike = None) -> DeviceProperties:
        """Name and size."""
        simulator = state.running()
        name = f"simulated {simulator.timeline.hardware.name}"
        return DeviceProperties(name, simulator.statistics(device).capacity)

    def get_device_capability(self, device: DeviceLike = None) -> tuple[int, int]:
        """As of a recent device: stores 8-bit floats and computes in bfloat16."""
        properties = self.get_device_properties(device)
        return properties.major, properties.minor

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Always."""
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may choose."""
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        """Random numbers without a generator come from the CPU's, which `torch.manual_seed` seeds."""

    def manual_seed_all(self, seed: int) -> None:
        """As `manual_seed`."""

    def get_rng_state(self, device: DeviceLike = NAME) -> torch.Tensor:
        """The state of the CPU's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: DeviceLike = NAME) -> None:
        """Set the state of the CPU's generator."""
        torch.set_rng_state(new_state)
