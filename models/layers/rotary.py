"""Rotary position embeddings: queries and keys turn by angles that grow with their position (Su et al. 2021)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils._pytree import _register_namedtuple  # pyright: ignore[reportPrivateUsage]


class RotaryTable(NamedTuple):
    """Cosines and sines of the angles, each float32 and broadcastable to (B, S, H, D / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor


# So that a block that takes one can be exported and saved.
_register_namedtuple(RotaryTable, serialized_type_name=f"{__name__}.RotaryTable")


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
    return rotate((hidden_states,), table)[0]


def rotate(parts: Sequence[torch.Tensor], table: RotaryTable) -> list[torch.Tensor]:
    """`apply_rotary` to queries and keys. What has fewer tokens than the table has positions is the last of them."""
    turned: list[torch.Tensor] = []
    # Compilers fuse real arithmetic, and leave complex arithmetic as it is. Elsewhere one complex product takes
    # 0.5 ms rather than 9.8 ms (FLUX's queries, 1,152 tokens, one core with AVX-512).
    turns = None if torch.compiler.is_compiling() else torch.complex(table.cos, table.sin)
    for part in parts:
        pairs, last = part.float().reshape(*part.shape[:-1], -1, 2), slice(-part.shape[1], None)
        if turns is not None:
            pairs = torch.view_as_real(torch.view_as_complex(pairs) * turns[..., last, :, :])
        else:
            (even, odd), cos, sin = pairs.unbind(-1), table.cos[..., last, :, :], table.sin[..., last, :, :]
            pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        turned.append(pairs.flatten(-2).to(part.dtype))
    return turned
