"""Registers the device type "sim" with torch, once a process, and patches torch while a simulator runs."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch

from . import bindings, state
from .device_module import DeviceModule
from .kernels import HOST_KERNELS, KERNELS, WHOLE, whole
from .operators import execute

_libraries: list[torch.library.Library] = []


def unavailable() -> str | None:
    """Why the simulator cannot run in this process, or None. Asking registers nothing."""
    if _libraries:
        return None
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"The simulator needs torch 2.13 or newer, but this is torch {torch.__version__}; upgrade torch."
    name: str = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        return f"The simulator needs torch's place for one extra device type, which {name!r} has taken in this process."
    return None


def register() -> None:
    """Register the device type; later calls do nothing.

    Raises:
        RuntimeError: it cannot be registered; see `unavailable`.
    """
    if _libraries:
        return
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    from torch.utils.backend_registration import (
        _setup_privateuseone_for_python_backend,  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue]
    )

    importlib.import_module("torch._dynamo")  # it keeps some functions as it finds them, so before they are patched
    _setup_privateuseone_for_python_backend(bindings.NAME, backend_module=DeviceModule())
    everything: Any = torch.library.Library("_", "IMPL")
    everything.fallback(execute, bindings.DISPATCH_KEY)
    own: Any = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        own.impl(name, kernel, bindings.DISPATCH_KEY)
    for name in WHOLE:
        own.impl(name, whole(name), bindings.DISPATCH_KEY)
    for name in ("_copy_from", "_copy_from_and_resize"):
        for key in ("Conjugate", "Negative"):
            own.impl(name, torch.library.fallthrough_kernel, key)
    _libraries.extend((everything, own))


@contextmanager
def patches() -> Generator[None]:
    """Context: what a Python backend cannot reach otherwise is patched inside and restored after.

    Tensors: `.data =` between host and device keeps the Python object, so parameters keep their identity and ties;
    `record_stream`, `copy.deepcopy`, `torch.save` (comes back on the CPU), and reads that the dispatcher does not show.
    `torch.accelerator`: streams and memory. Pinned memory: the CPU's kernels. Gradients are refused.
    """
    undo: list[Callable[[], None]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        own = name in vars(owner)
        before: Any = cast("dict[str, Any]", vars(owner)).get(name)
        setattr(owner, name, value)
        undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    _patch_tensors(patch)
    _patch_accelerator(patch)
    for name in ("backward", "grad"):
        patch(torch.autograd, name, _no_gradients)
    pinning: Any = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
            for name, kernel in HOST_KERNELS.items():
                pinning.impl(name, kernel, "CPU")
        yield
    finally:
        pinning._destroy()
        for restore in reversed(undo):
            restore()


def _no_gradients(*args: Any, **kwargs: Any) -> Any:
    """In place of torch's backward pass, whose own threads know no Python backend and end the process."""
    raise RuntimeError("The simulator runs the forward direction only; compute gradients outside of it.")


def _crosses(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return {tensor.device.type, other.device.type} == {"cpu", bindings.NAME}


def _patch_tensors(patch: Callable[[Any, str, Any], None]) -> None:
    tensor_class: Any = torch.Tensor
    record_stream, deepcopy, reduce_ex = (
        tensor_class.record_stream,
        tensor_class.__deepcopy__,
        tensor_class.__reduce_ex__,
    )
    clone_storage = torch.UntypedStorage.clone
    compatible: Callable[[torch.Tensor, torch.Tensor], bool] = cast(Any, torch)._has_compatible_shallow_copy_type

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not _crosses(tensor, value):
            bindings.set_data(tensor, value)
            return
        with torch.inference_mode(value.is_inference()):  # as torch does: the new content decides
            replacement = value.detach()
            if tensor.requires_grad:
                replacement.requires_grad_(True)
        bindings.swap(tensor, replacement)

    def record(tensor: torch.Tensor, stream: Any) -> None:
        if tensor.device.type == bindings.NAME:
            state.running().record_stream(tensor, stream)
        else:
            record_stream(tensor, stream)

    def copy_tensor(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if tensor.device.type != bindings.NAME or type(tensor) is not torch.Tensor or not tensor.is_leaf:
            return deepcopy(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def reduce(tensor: torch.Tensor, protocol: int) -> Any:
        inside = tensor.device.type == bindings.NAME and type(tensor) is torch.Tensor
        return reduce_ex(tensor.detach().cpu() if inside else tensor, protocol)

    def copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type == bindings.NAME:  # torch's own way ends in a crash
            raise RuntimeError(f"A storage on {storage.device} cannot be copied by itself; clone its tensor.")
        return clone_storage(storage)

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            simulator = state.current()
            if simulator is not None and simulator.transfers and tensor.device.type == "cpu":
                simulator.transfers.check(tensor, False, method.__name__)
            return method(tensor, *args, **kwargs)

        return read

    def share_type(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        return _crosses(tensor, other) or compatible(tensor, other)

    patch(tensor_class, "data", property(bindings.get_data, set_data))
    patch(tensor_class, "record_stream", record)
    patch(tensor_class, "__deepcopy__", copy_tensor)
    patch(tensor_class, "__reduce_ex__", reduce)
    patch(tensor_class, "numpy", watched(tensor_class.numpy))
    patch(tensor_class, "tolist", watched(tensor_class.tolist))
    patch(torch.UntypedStorage, "clone", copy_storage)
    patch(torch, "_has_compatible_shallow_copy_type", share_type)


def _patch_accelerator(patch: Callable[[Any, str, Any], None]) -> None:
    module: Any = torch.get_device_module(bindings.NAME)
    same = (
        "current_stream",
        "empty_cache",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_peak_memory_stats",
        "set_stream",
        "synchronize",
    )
    for name in same:
        patch(torch.accelerator, name, getattr(module, name))
    patch(torch.accelerator, "current_device_index", module.current_device)
    patch(torch.accelerator, "set_device_index", module.set_device)
    patch(torch.accelerator, "device_index", module.device)
    patch(torch.accelerator, "get_memory_info", module.mem_get_info)
