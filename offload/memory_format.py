"""Memory layouts of weights by tensor: channels last for 4 axes, its 3d form for 5, nothing for others."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def layout_of(tensor: torch.Tensor, memory_format: "torch.memory_format | str") -> "torch.memory_format | None":
    """The layout that a tensor gets when a module is asked for `memory_format`; None leaves it as it is.

    Args:
        memory_format: either spelling of channels last, or "auto", stands for both; another counts for all tensors
            with 4 or 5 axes.

    Raises:
        ValueError: if it is a word other than "auto".
        TypeError: if it is neither a word nor a memory format.
    """
    if isinstance(memory_format, str):
        if memory_format != "auto":
            raise ValueError(f"memory_format={memory_format!r} is unknown; give a torch.memory_format or 'auto'")
    elif not isinstance(memory_format, torch.memory_format):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"memory_format must be a torch.memory_format or 'auto', not {type(memory_format).__name__}")
    if tensor.dim() not in _CHANNELS_LAST:
        return None
    if isinstance(memory_format, str) or memory_format in _CHANNELS_LAST.values():
        return _CHANNELS_LAST[tensor.dim()]
    return memory_format


def to_memory_format(module: _Module, memory_format: "torch.memory_format | str" = "auto") -> _Module:
    """Lay out every weight of a module for kernels that read channels last; values and shapes stay.

    `nn.Module.to(memory_format=...)` gives one layout to all weights, and ends with an error halfway through a
    model that has weights of 4 and of 5 axes. Here each tensor gets the layout that fits it.

    Args:
        module: any module; changed in place.
        memory_format: `torch.channels_last`, `torch.channels_last_3d` or "auto", which all mean the same;
            `torch.contiguous_format` takes it back.

    Returns:
        The module.
    """
    layout_of(torch.empty(0), memory_format)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        layout = layout_of(tensor, memory_format)
        return tensor if layout is None else tensor.to(memory_format=layout)

    return cast("Any", module)._apply(convert)


def pays_channels_last(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> bool:
    """Whether convolutions of such maps, or with such weights, are faster channels last, in this dtype on this device.

    In half precisions they are, on processors (SD 1.5's UNet 0.97 s contiguous, 0.81 s channels last, on one core with
    AVX-512; its decoder 18.8 s and 4.8 s on two with AMX) and on GPUs with tensor cores. Apple's GPUs gain nothing.
    """
    half = (dtype or tensor.dtype) in (torch.float16, torch.bfloat16)
    return half and tensor.dim() == 4 and (device or tensor.device).type != "mps"


def in_best_layout(compute: Callable[[torch.Tensor], torch.Tensor], maps: torch.Tensor) -> torch.Tensor:
    """`compute(maps)` with maps (B, C, H, W) in the layout that is fastest; the result has the layout of `maps`."""
    if not pays_channels_last(maps) or not maps.is_contiguous():
        return compute(maps)
    return compute(maps.contiguous(memory_format=torch.channels_last)).contiguous()
