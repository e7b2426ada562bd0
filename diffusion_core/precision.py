"""How precisely float32 is multiplied: a switch of torch, for the whole process."""

import torch

_CHOICES = ("highest", "high", "medium", "default")


def set_matmul_precision(precision: str) -> str:
    """Choose how float32 matrix products and convolutions are computed; models in half precision are not concerned.

    Nothing else in this library touches these switches, so `torch.backends.cuda.matmul.allow_tf32 = True` stays as
    it is set.

    Args:
        precision: "highest" with all 24 bits of float32; "high" with TensorFloat-32 where the device has it, whose
            inputs have 11 bits and whose sums have 24, as GPUs since Ampere have; "medium" also with bfloat16 inside,
            of 8 bits; "default" as torch starts: products "highest", convolutions of cuDNN "high".

    Returns:
        What held before: one of these, or that of torch for products where convolutions were set apart.

    Raises:
        ValueError: if it is none of these.
    """
    if precision not in _CHOICES:
        raise ValueError(f"precision={precision!r} is not known; choose of {', '.join(_CHOICES)}")
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    before = "default" if products == "highest" and convolutions else products
    torch.set_float32_matmul_precision("highest" if precision == "default" else precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    return before
