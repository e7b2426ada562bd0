"""Parts of autoencoders for videos that look at past frames only, so that a picture is a video of one frame.

The design of Wan 2.1 (Wan Team 2025, arXiv 2503.20314, section 4.1). A video has 1 + k n frames: the first is a latent
by itself, each k frames after it are one.

A video passes whole, or in chunks with a `Memory` that is empty before the first: one frame, then k n frames each.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ...offload.attention import DEFAULT, attention
from .chunks import Memory

Tensor = torch.Tensor


class CausalConv3d(nn.Conv3d):
    """A convolution over frames, height and width that sees frames up to its own; before the first all is zero.

    Args:
        in_channels, out_channels: of the features.
        kernel_size: frames, rows and columns, odd; the result is as large as the input.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, int, int]) -> None:
        super().__init__(in_channels, out_channels, kernel_size)
        frames, rows, columns = self.kernel_size
        self.past, self.sides = frames - 1, (rows // 2, columns // 2)

    def forward(self, input: Tensor, memory: Memory | None = None) -> Tensor:  # noqa: A002
        if memory is not None and self.past:
            return self._chunk(input, memory)
        if input.shape[2] == 1:
            # All but the newest slice of the kernel would see zeros.
            out = F.conv2d(input[:, :, 0], self.weight[:, :, -1], self.bias, padding=self.sides)
            return out[:, :, None]
        past = F.pad(input, (0, 0, 0, 0, self.past, 0)) if self.past else input
        return F.conv3d(past, self.weight, self.bias, padding=(0, *self.sides))

    def _chunk(self, chunk: Tensor, memory: Memory) -> Tensor:
        earlier = memory.get(self)
        seen = F.pad(chunk, (0, 0, 0, 0, self.past, 0)) if earlier is None else torch.cat([earlier, chunk], dim=2)
        # A copy, so that the chunk itself can be freed.
        memory[self] = seen[:, :, -self.past :].clone()
        return F.conv3d(seen, self.weight, self.bias, padding=(0, *self.sides))


class ChannelNorm(nn.Module):
    """RMS norm over the channels, dimension 1 (Zhang and Sennrich 2019).

    Args:
        channels: of the features.
        axes: how many dimensions follow the channels: 3 for videos, 2 for pictures.
    """

    def __init__(self, channels: int, axes: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *[1] * axes))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.normalize(hidden_states, dim=1) * hidden_states.shape[1] ** 0.5 * self.gamma


class CausalResidualBlock(nn.Module):
    """Two rounds of norm, SiLU and convolution, added to the input (He et al. 2016)."""

    def __init__(self, in_dim: int, out_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(in_dim)
        self.conv1 = CausalConv3d(in_dim, out_dim, 3)
        self.norm2 = ChannelNorm(out_dim)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = CausalConv3d(out_dim, out_dim, 3)
        self.conv_shortcut = CausalConv3d(in_dim, out_dim, 1) if in_dim != out_dim else None

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        shortcut = hidden_states if self.conv_shortcut is None else self.conv_shortcut(hidden_states)
        hidden_states = self.conv1(F.silu(self.norm1(hidden_states)), memory)
        return shortcut + self.conv2(self.dropout(F.silu(self.norm2(hidden_states))), memory)


class FrameAttention(nn.Module):
    """Attention of one head between the pixels of a frame, each frame by itself, added to the input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim_head, self.attention_settings = dim, DEFAULT
        self.norm = ChannelNorm(dim, axes=2)
        self.to_qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        """Attend; no frame sees another, so that `memory` is left alone."""
        frames = as_pictures(hidden_states)
        pixels = self.to_qkv(self.norm(frames)).flatten(2).mT.unsqueeze(2)
        attended = attention(*pixels.chunk(3, dim=3), settings=self.attention_settings).squeeze(2).mT
        return hidden_states + as_videos(self.proj(attended.reshape(frames.shape)), len(hidden_states))


class Downsample(nn.Module):
    """Halves height and width, and with `frames` also the frames after the first."""

    def __init__(self, dim: int, frames: bool) -> None:
        super().__init__()
        # The place in the list is part of the names in checkpoints.
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(dim, dim, 3, stride=2))
        self.time_conv = nn.Conv3d(dim, dim, (3, 1, 1), stride=(2, 1, 1)) if frames else None

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        hidden_states = as_videos(self.resample(as_pictures(hidden_states)), len(hidden_states))
        if self.time_conv is None:
            return hidden_states
        if memory is not None:
            last = memory.get(self)
            memory[self] = hidden_states[:, :, -1:].clone()
            if last is not None:
                return self.time_conv(torch.cat([last, hidden_states], dim=2))
        if hidden_states.shape[2] == 1:
            return hidden_states
        return torch.cat([hidden_states[:, :, :1], self.time_conv(hidden_states)], dim=2)


class Upsample(nn.Module):
    """Doubles height and width, and with `frames` doubles the frames after the first.

    Args:
        dim: channels.
        frames: whether frames are doubled.
        out_dim: channels of the result, half as many by default.
    """

    def __init__(self, dim: int, frames: bool, out_dim: int | None = None) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2.0, mode="nearest"), nn.Conv2d(dim, out_dim or dim // 2, 3, padding=1)
        )
        self.time_conv = CausalConv3d(dim, 2 * dim, (3, 1, 1)) if frames else None

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        if self.time_conv is not None:
            alone = 0 if memory is not None and self in memory else 1
            if memory is not None:
                memory[self] = hidden_states.new_empty(0)
            first, rest = hidden_states[:, :, :alone], hidden_states[:, :, alone:]
            # Each frame becomes two, which lie in the halves of the channels. The first frame is not seen by these.
            if rest.shape[2]:
                pairs = torch.stack(self.time_conv(rest, memory).chunk(2, dim=1), dim=3).flatten(2, 3)
                hidden_states = torch.cat([first, pairs], dim=2)
        return as_videos(self.resample(as_pictures(hidden_states)), len(hidden_states))


class MidBlock(nn.Module):
    """A residual block, attention, and a residual block at the lowest resolution."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([FrameAttention(dim)])
        self.resnets = nn.ModuleList(CausalResidualBlock(dim, dim, dropout) for _ in range(2))

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        first, second = self.resnets
        return second(self.attentions[0](first(hidden_states, memory)), memory)


class UpBlock(nn.Module):
    """Residual blocks, then a doubling of the sides unless it is the last level; `frames` is None there."""

    def __init__(self, in_dim: int, out_dim: int, layers: int, frames: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            CausalResidualBlock(in_dim if index == 0 else out_dim, out_dim, dropout) for index in range(layers)
        )
        self.upsamplers = None if frames is None else nn.ModuleList([Upsample(out_dim, frames)])

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        for block in self.resnets:
            hidden_states = block(hidden_states, memory)
        return hidden_states if self.upsamplers is None else self.upsamplers[0](hidden_states, memory)


def as_pictures(videos: Tensor) -> Tensor:
    """Videos (B, C, T, H, W) as pictures (B * T, C, H, W)."""
    return videos.transpose(1, 2).flatten(0, 1)


def as_videos(pictures: Tensor, count: int) -> Tensor:
    """The way back from `as_pictures`, for `count` videos."""
    return pictures.unflatten(0, (count, -1)).transpose(1, 2)
