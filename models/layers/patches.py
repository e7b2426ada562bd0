"""Latents to tokens: patches with fixed positions, and back."""

import torch
from torch import nn

from ...offload.runs import once

Tensor = torch.Tensor


def sincos_1d(positions: Tensor, channels: int) -> Tensor:
    """Sines, then cosines, of positions (N,) at channels / 2 frequencies (Vaswani et al. 2017, section 3.5)."""
    steps = torch.arange(channels // 2, dtype=positions.dtype, device=positions.device)
    angles = positions[:, None] * 10000.0 ** (-steps / (channels // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(
    height: int,
    width: int,
    channels: int,
    *,
    base_size: int | None = None,
    interpolation_scale: float = 1.0,
    device: torch.device | None = None,
) -> Tensor:
    """Positions of a grid: half of the channels tell the column, half the row (DiT, Peebles and Xie 2023).

    Args:
        height, width: rows and columns of the grid.
        channels: length of an embedding, a multiple of 4.
        base_size: the coordinates run from 0 to this, whatever the grid; None counts rows and columns.
        interpolation_scale: the coordinates are divided by it.

    Returns:
        Shape (1, height * width, channels), float32.
    """
    exact = torch.float32 if device is not None and device.type == "mps" else torch.float64

    def axis(count: int) -> Tensor:
        step = (base_size or count) / count / interpolation_scale
        return sincos_1d(torch.arange(count, dtype=exact, device=device) * step, channels // 2).float()

    columns = axis(width)[None].expand(height, -1, -1)
    rows = axis(height)[:, None].expand(-1, width, -1)
    return torch.cat([columns, rows], dim=2).reshape(1, height * width, channels)


class PatchEmbed(nn.Module):
    """Latents (B, C, H, W) to tokens (B, H / p * W / p, embed_dim), with positions added.

    Args:
        height: rows of the latents that the model was trained for, of which the positions span the patches.
        patch_size: p, height and width of a patch.
        in_channels: channels of the latents.
        embed_dim: channels of a token, a multiple of 4.
        interpolation_scale: see `sincos_2d`.
        pos_embed_max_size: the positions are a table of so many rows and columns that belongs to the checkpoint, of
            which the middle is used (Esser et al. 2024, section 5.3). None: the table is computed for the size of the
            latents, spanning the same range at every size (Chen et al. 2024).

    Raises:
        ValueError: if the channels are not a multiple of 4; from `forward`, for sizes that the patches do not divide
            or that exceed the table.
    """

    def __init__(
        self,
        height: int,
        patch_size: int,
        in_channels: int,
        embed_dim: int,
        *,
        interpolation_scale: float = 1.0,
        pos_embed_max_size: int | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % 4:
            raise ValueError(f"{embed_dim} channels a token are not a multiple of 4: sines and cosines of two axes")
        self.patch_size, self.embed_dim = patch_size, embed_dim
        self.base_size, self.interpolation_scale = height // patch_size, interpolation_scale
        self.pos_embed_max_size = pos_embed_max_size
        self.proj = nn.Conv2d(in_channels, embed_dim, patch_size, stride=patch_size)
        if pos_embed_max_size is not None:
            self.register_buffer("pos_embed", self._positions(pos_embed_max_size, pos_embed_max_size))

    def forward(self, latent: Tensor) -> Tensor:
        rows, columns = patch_grid(latent, self.patch_size)
        tokens = self.proj(latent).flatten(2).transpose(1, 2)
        if self.pos_embed_max_size is None:
            positions = once(self._positions, rows, columns, latent.device)
        else:
            positions = self._middle(rows, columns, self.pos_embed_max_size)
        return (tokens + positions).to(tokens.dtype)

    def _positions(self, rows: int, columns: int, device: torch.device | None = None) -> Tensor:
        return sincos_2d(
            rows,
            columns,
            self.embed_dim,
            base_size=self.base_size,
            interpolation_scale=self.interpolation_scale,
            device=device,
        )

    def _middle(self, rows: int, columns: int, size: int) -> Tensor:
        if rows > size or columns > size:
            limit = size * self.patch_size
            raise ValueError(
                f"latents of {rows * self.patch_size} x {columns * self.patch_size} (height x width) exceed the "
                f"positions that this model has: at most {limit} x {limit} (pos_embed_max_size={size})"
            )
        top, left = (size - rows) // 2, (size - columns) // 2
        table = self.get_buffer("pos_embed").reshape(size, size, self.embed_dim)
        return table[top : top + rows, left : left + columns].reshape(1, rows * columns, self.embed_dim)


def patch_grid(latent: Tensor, patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches in latents (B, C, H, W).

    Raises:
        ValueError: if the patches do not divide the latents.
    """
    height, width = latent.shape[-2:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"latents of {height} x {width} (height x width) do not part into patches of {patch_size}")
    return height // patch_size, width // patch_size


def from_patches(tokens: Tensor, rows: int, columns: int, patch_size: int) -> Tensor:
    """Tokens (B, rows * columns, p * p * C), channels last within a patch, to maps (B, C, rows * p, columns * p)."""
    patches = tokens.reshape(tokens.shape[0], rows, columns, patch_size, patch_size, -1)
    return patches.permute(0, 5, 1, 3, 2, 4).reshape(tokens.shape[0], -1, rows * patch_size, columns * patch_size)
