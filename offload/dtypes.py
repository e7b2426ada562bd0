"""Dtypes as people write them: "bfloat16", "torch.float16", "fp16"."""

import torch

_SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}


def parse_dtype(value: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """A dtype from its name; None and torch dtypes pass.

    Raises:
        ValueError: if there is no such floating-point dtype, or models do not compute in it.
        TypeError: if it is neither a name nor a dtype. The message names `argument`.
    """
    found: object = value
    if isinstance(value, str):
        found = dtype_named(value)
        if found is None:
            raise ValueError(f"{argument}={value!r} is no dtype of torch: write 'float32', 'float16' or 'bfloat16'")
    if found is None:
        return None
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{argument} must be a torch.dtype, its name or None, not {type(value).__name__}")
    if not found.is_floating_point:
        raise ValueError(f"{argument}={value!r} is not a floating-point dtype")
    if found.itemsize < 2:
        raise ValueError(
            f"{argument}={value!r} is for storing weights, not for computing: load them as bfloat16, and then call "
            f"enable_layerwise_casting(storage_dtype={found})"
        )
    return found


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of a name, or None if there is none of it."""
    plain = name.removeprefix("torch.")
    found = getattr(torch, _SHORT.get(plain, plain), None)
    return found if isinstance(found, torch.dtype) else None
