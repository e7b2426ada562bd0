"""Levels of the autoencoder of Wan 2.2's 5B: what they resize is added to the same, resized without weights.

Wan Team 2025, https://github.com/Wan-Video/Wan2.2; such shortcuts are those of Chen et al. 2024 (DC-AE, arXiv
2410.10733, section 3.2). Films pass whole or in chunks, as `causal.py` says.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .causal import CausalResidualBlock, Downsample, Upsample
from .chunks import Memory

Tensor = torch.Tensor


class AverageDown(nn.Module):
    """Takes blocks of frames and pixels as channels, and means of neighbouring channels until `out_dim` are left.

    Args:
        in_dim, out_dim: channels before and after.
        frames, side: size of a block. Where frames do not fill blocks, zeros come before the first.

    Raises:
        ValueError: if the channels of a block do not divide into `out_dim`.
    """

    def __init__(self, in_dim: int, out_dim: int, frames: int, side: int) -> None:
        super().__init__()
        if in_dim * frames * side**2 % out_dim:
            raise ValueError(f"{in_dim} channels in blocks of {frames}x{side}x{side} do not divide into {out_dim}")
        self.out_dim, self.frames, self.side = out_dim, frames, side

    def forward(self, film: Tensor) -> Tensor:
        film = F.pad(film, (0, 0, 0, 0, -film.shape[2] % self.frames, 0))
        blocks = film.unflatten(4, (-1, self.side)).unflatten(3, (-1, self.side)).unflatten(2, (-1, self.frames))
        # (B, C, t, frames, h, side, w, side) to (B, out_dim, C * block / out_dim, t, h, w)
        channels = blocks.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4).unflatten(1, (self.out_dim, -1))
        return channels.mean(dim=2)


class RepeatUp(nn.Module):
    """Repeats channels and takes them as blocks of frames and pixels; the way back from `AverageDown`.

    Args:
        in_dim, out_dim: channels before and after.
        frames, side: size of a block. Of a film's first block, only the last frame is kept.

    Raises:
        ValueError: if the channels do not divide into blocks of `out_dim`.
    """

    def __init__(self, in_dim: int, out_dim: int, frames: int, side: int) -> None:
        super().__init__()
        if out_dim * frames * side**2 % in_dim:
            raise ValueError(f"{in_dim} channels do not become {out_dim} in blocks of {frames}x{side}x{side}")
        self.repeats = out_dim * frames * side**2 // in_dim
        self.block = frames, side

    def forward(self, film: Tensor, first: bool) -> Tensor:
        """Enlarge a film, or a chunk of one; `first` says whether it starts with the film's first frame."""
        frames, side = self.block
        blocks = film.repeat_interleave(self.repeats, dim=1).unflatten(1, (-1, frames, side, side))
        film = blocks.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return film[:, :, frames - 1 :] if first else film


class ResidualDown(nn.Module):
    """Residual blocks, then a halving of the sides unless it is the last level; `frames` is None there."""

    def __init__(self, in_dim: int, out_dim: int, layers: int, frames: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            CausalResidualBlock(in_dim if index == 0 else out_dim, out_dim, dropout) for index in range(layers)
        )
        self.downsampler = None if frames is None else Downsample(out_dim, frames)
        self.avg_shortcut = AverageDown(in_dim, out_dim, 2 if frames else 1, 1 if frames is None else 2)

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        shortcut = self.avg_shortcut(hidden_states)
        for block in self.resnets:
            hidden_states = block(hidden_states, memory)
        if self.downsampler is not None:
            hidden_states = self.downsampler(hidden_states, memory)
        return hidden_states + shortcut


class ResidualUp(nn.Module):
    """Residual blocks, then a doubling of the sides unless it is the last level; `frames` is None there."""

    def __init__(self, in_dim: int, out_dim: int, layers: int, frames: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            CausalResidualBlock(in_dim if index == 0 else out_dim, out_dim, dropout) for index in range(layers)
        )
        self.upsampler = None if frames is None else Upsample(out_dim, frames, out_dim)
        self.avg_shortcut = None if frames is None else RepeatUp(in_dim, out_dim, 2 if frames else 1, 2)

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        before = hidden_states
        for block in self.resnets:
            hidden_states = block(hidden_states, memory)
        if self.upsampler is None or self.avg_shortcut is None:
            return hidden_states
        first = memory is None or self not in memory
        if memory is not None:
            memory[self] = hidden_states.new_empty(0)
        return self.upsampler(hidden_states, memory) + self.avg_shortcut(before, first)
