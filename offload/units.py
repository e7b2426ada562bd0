"""Sizes and dtypes as people write them: "5GB", "30GiB", "bfloat16", "torch.float16"."""

import re

import torch

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("KMGT")}
_UNITS |= {f"{prefix}IB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")}
_SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}


def parse_size(value: int | str, argument: str = "size") -> int:
    """A number of bytes. "5GB" is 5 * 1000**3, "5GiB" is 5 * 1024**3.

    Raises:
        ValueError: if it is not a positive size; the message names `argument`.
    """
    size = value
    if isinstance(value, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if parts is None or parts[2].upper() not in _UNITS:
            raise ValueError(f"{argument}={value!r} is no size: write a number of bytes, '5GB' or '5GiB'")
        size = int(float(parts[1]) * _UNITS[parts[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(f"{argument}={value!r} must be a positive number of bytes, or a text such as '5GB'")
    return size


def parse_dtype(value: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """A dtype from its name; None and torch dtypes pass.

    Raises:
        ValueError: if there is no such floating-point dtype.
        TypeError: if it is neither a name nor a dtype. The message names `argument`.
    """
    found = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        found = getattr(torch, _SHORT.get(name, name), value)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{argument}={value!r} is no dtype of torch: write 'float32', 'float16' or 'bfloat16'")
    if found is not None and not isinstance(found, torch.dtype):
        raise TypeError(f"{argument} must be a torch.dtype, its name or None, not {type(value).__name__}")
    if found is not None and not found.is_floating_point:
        raise ValueError(f"{argument}={value!r} is not a floating-point dtype")
    return found
