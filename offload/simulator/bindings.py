"""The few private calls into torch on which the simulator stands, all in one place.

A simulated tensor is an ordinary tensor over host memory whose device says `sim:i`. DLPack makes it: a capsule
describes the memory of a tensor and its device, and a tensor imported from an edited capsule is on the edited device.
Nothing is copied, and the new tensor keeps the old one alive.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch

NAME = "sim"
DISPATCH_KEY = "PrivateUse1"
_DLPACK_HOST = 1
_DLPACK_EXTENSION = 12


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _Header(ctypes.Structure):
    """The first fields of a DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_export = cast("Callable[[torch.Tensor], Any]", torch._C._to_dlpack)
_import = cast("Callable[[Any], torch.Tensor]", torch._C._from_dlpack)
conj_view = cast("Callable[[torch.Tensor], torch.Tensor]", cast(Any, torch)._conj)
neg_view = cast("Callable[[torch.Tensor], torch.Tensor]", cast(Any, torch)._neg_view)


def _retag(tensor: torch.Tensor, kind: int, index: int) -> torch.Tensor:
    capsule = _export(tensor)
    header = _Header.from_address(_pointer(capsule, b"dltensor"))
    header.device.type, header.device.index = kind, index
    return _import(capsule)


def to_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The tensor of a host tensor's memory on device `sim:index`; nothing is copied or counted."""
    return _retag(tensor, _DLPACK_EXTENSION, index)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The host tensor of a simulated tensor's memory; nothing is copied."""
    if tensor.is_conj():
        return conj_view(to_host(conj_view(tensor)))
    if tensor.is_neg():
        return neg_view(to_host(neg_view(tensor)))
    return _retag(tensor, _DLPACK_HOST, 0)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly when they share one storage object."""
    return cast(int, tensor.untyped_storage()._cdata)


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two Python tensors stand for; names, ties and weak references stay with the Python objects."""
    cast(Any, torch._C)._swap_tensor_impl(tensor, other)


def get_data(tensor: torch.Tensor) -> torch.Tensor:
    """torch's own `tensor.data`."""
    return cast(Any, torch._C.TensorBase).data.__get__(tensor)


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """torch's own `tensor.data = value`, which refuses to cross from the host to a simulated device."""
    cast(Any, torch._C.TensorBase).data.__set__(tensor, value)


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that a strided tensor touches, counted from the start of its storage."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last: int = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """As `byte_range`, as addresses."""
    start, end = byte_range(tensor)
    base = tensor.untyped_storage().data_ptr()
    return base + start, base + end
