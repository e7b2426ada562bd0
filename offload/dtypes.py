"""Dtypes as people write them: "bfloat16", "torch.float16", "fp16"."""

import torch

_SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}


def parse_dtype(value: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """A dtype from its name; None and torch dtypes pass.

    Raises:
        ValueError: if there is no such floating-point dtype.
        TypeError: if it is neither a name nor a dtype. The message names `argument`.
    """
    found: object = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        found = getattr(torch, _SHORT.get(name, name), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{argument}={value!r} is no dtype of torch: write 'float32', 'float16' or 'bfloat16'")
    if found is None:
        return None
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{argument} must be a torch.dtype, its name or None, not {type(value).__name__}")
    if not found.is_floating_point:
        raise ValueError(f"{argument}={value!r} is not a floating-point dtype")
    return found
