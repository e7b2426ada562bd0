"""Films that pass through causal convolutions in chunks of frames: a frame sees itself and those before it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

Memory = dict[nn.Module, torch.Tensor]
"""What each convolution saw last, for the next chunk of the same film. A new film starts with an empty one."""


class ChunkedConv3d(nn.Module):
    """A convolution of (B, C, F, H, W) that is padded in front of the first frame, never after the last.

    Before a film's first frame lie copies of it; before a later chunk, the frames that `memory` holds.

    Args:
        in_channels, out_channels: of the maps.
        kernel_size: in each direction, odd.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        self.before = kernel_size - 1
        side = kernel_size // 2
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, padding=(0, side, side))

    def forward(self, film: torch.Tensor, memory: Memory) -> torch.Tensor:
        if self.before:
            earlier = memory.get(self)
            if earlier is None:
                earlier = film[:, :, :1].expand(-1, -1, self.before, -1, -1)
            film = put_before(earlier, film)
            # A copy, so that the chunk itself can be freed.
            memory[self] = film[:, :, -self.before :].clone()
        return self.conv(film)


def put_before(earlier: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
    """Frames `earlier` than a film's and then these, in the film's memory format: `torch.cat` would lose it."""
    count = earlier.shape[2]
    longer = F.pad(film, (0, 0, 0, 0, count, 0))
    longer[:, :, :count] = earlier
    return longer


def chunks_of(film: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Parts of `size` frames; the first has the rest besides, which an even division leaves."""
    frames = film.shape[2]
    first = min(size + frames % size, frames)
    yield film[:, :, :first]
    for start in range(first, frames, size):
        yield film[:, :, start : start + size]


def halve_frames(film: torch.Tensor) -> torch.Tensor:
    """The means of pairs of frames; of an odd number, the first stays by itself."""
    # The mean of the first frame with itself is the first frame, to the bit.
    film = put_before(film[:, :, :1], film) if film.shape[2] % 2 else film
    return F.avg_pool3d(film, (2, 1, 1))


def double(film: torch.Tensor, frames_too: bool) -> torch.Tensor:
    """Twice the height and width by repetition, and twice the frames; of an odd number, the first stays by itself."""
    if not frames_too or film.shape[2] == 1:
        return F.interpolate(film, scale_factor=(1, 2, 2))
    odd = film.shape[2] % 2
    rest = F.interpolate(film[:, :, odd:], scale_factor=2)
    return torch.cat([F.interpolate(film[:, :, :1], scale_factor=(1, 2, 2)), rest], dim=2) if odd else rest


def by_frame(layer: nn.Module, film: torch.Tensor) -> torch.Tensor:
    """A layer for pictures (B, C, H, W), applied to each frame of (B, C, F, H, W)."""
    pictures = layer(film.transpose(1, 2).flatten(0, 1))
    return pictures.unflatten(0, (film.shape[0], film.shape[2])).transpose(1, 2)
