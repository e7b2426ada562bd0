"""Normalisations by the names that configs use."""

from torch import nn


def make_norm(kind: str | None, size: int, eps: float, affine: bool = True) -> nn.Module | None:
    """A norm over the last dimension, of `size` entries; None for None.

    Args:
        kind: "layer_norm" (Ba et al. 2016), "rms_norm" (Zhang and Sennrich 2019), or None.
        size: length of the last dimension.
        eps: added to the variance, or to the mean square.
        affine: whether the norm has learned scales (and shifts).

    Raises:
        ValueError: for another `kind`.
    """
    if kind is None:
        return None
    if kind == "layer_norm":
        return nn.LayerNorm(size, eps=eps, elementwise_affine=affine)
    if kind == "rms_norm":
        return nn.RMSNorm(size, eps=eps, elementwise_affine=affine)
    raise ValueError(f'unknown norm {kind!r}; known are "layer_norm", "rms_norm" and None')
