"""Rotary position embeddings: queries and keys turn by angles that grow with their position (Su et al. 2021)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class RotaryTable(NamedTuple):
    """Cosines and sines of the angles, each float32 and broadcastable to (B, S, H, D / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_angles(positions: torch.Tensor, axes_dim: Sequence[int], theta: float = 10000.0) -> torch.Tensor:
    """Angles for positions on several axes (Su et al. 2021, equation 15, for each axis on its own channels).

    Args:
        positions: (..., S, axes), numbers of any kind; fractions and negative ones are fine.
        axes_dim: how many channels of a head turn with each axis, each even. Axis by axis, pair k of `dim` turns by
            position * theta ** (-2 k / dim).
        theta: the base of the frequencies.

    Returns:
        (..., S, sum(axes_dim) / 2), in float64 where the device has it: far positions need the digits.

    Raises:
        ValueError: if an entry of `axes_dim` is odd, or there is not one for each axis.
    """
    axes = positions.shape[-1]
    if axes != len(axes_dim):
        raise ValueError(f"positions have {axes} axes, but axes_dim={tuple(axes_dim)} names {len(axes_dim)}")
    if any(dim % 2 for dim in axes_dim):
        raise ValueError(f"axes_dim={tuple(axes_dim)} must be even numbers: channels turn in pairs")
    precise = torch.float32 if positions.device.type in ("mps", "npu") else torch.float64
    positions = positions.to(precise)
    parts: list[torch.Tensor] = []
    for axis, dim in enumerate(axes_dim):
        exponents = torch.arange(0, dim, 2, dtype=precise, device=positions.device) / dim
        parts.append(positions[..., axis, None] / theta**exponents)
    return torch.cat(parts, dim=-1)


def rotary_table(positions: torch.Tensor, axes_dim: Sequence[int], theta: float = 10000.0) -> RotaryTable:
    """The table for `apply_rotary`, (..., S, 1, sum(axes_dim) / 2), the same for all heads; see `rotary_angles`."""
    return table_of(rotary_angles(positions, axes_dim, theta))


def table_of(angles: torch.Tensor) -> RotaryTable:
    """The table for angles (..., S, D / 2), the same for all heads."""
    angles = angles.unsqueeze(-2)
    return RotaryTable(angles.cos().float(), angles.sin().float())


def apply_rotary(hidden_states: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Turn each pair of neighbouring channels by its angle (Su et al. 2021, equation 34).

    Args:
        hidden_states: queries or keys, (B, S, H, D).
        table: of tensors that broadcast to (B, S, H, D / 2).

    Returns:
        As `hidden_states`; computed in float32.
    """
    even, odd = hidden_states.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * table.cos - odd * table.sin, odd * table.cos + even * table.sin), dim=-1)
    return turned.flatten(-2).to(hidden_states.dtype)
