"""Films that pass through causal convolutions in chunks of frames: a frame sees itself and those before it."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

Memory = dict[nn.Module, torch.Tensor]
"""What each convolution saw last, for the next chunk of the same film. A new film starts with an empty one."""

LARGE = 1 << 24
"""Values of a chunk of frames; what is smaller is not where memory goes."""


class ChunkedConv3d(nn.Module):
    """A convolution of (B, C, F, H, W) that is padded in front of the first frame, never after the last.

    Before a film's first frame lie copies of it; before a later chunk, the frames that `memory` holds.

    Args:
        in_channels, out_channels: of the maps.
        kernel_size: in each direction, odd.
    """

    FRAMES = 2  # how many frames of a large chunk are padded and convolved at a time

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3) -> None:
        super().__init__()
        self.before = kernel_size - 1
        side = kernel_size // 2
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, padding=(0, side, side))

    def forward(self, film: torch.Tensor, memory: Memory) -> torch.Tensor:
        if not self.before:
            return self.conv(film)
        earlier = memory.get(self)
        if earlier is None:
            earlier = film[:, :, :1].expand(-1, -1, self.before, -1, -1)
        output = self._in_parts(earlier, film) if is_large(film) else self.conv(put_before(earlier, film))
        # A copy, so that the chunk itself can be freed.
        memory[self] = self._last(earlier, film).clone()
        return output

    def _last(self, earlier: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        """The frames that the next ones see."""
        if film.shape[2] < self.before:
            film = put_before(earlier, film)
        return film[:, :, -self.before :]

    def _in_parts(self, earlier: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        """The convolution a few frames at a time, so that the padded film never exists as a whole."""
        output: torch.Tensor | None = None
        for start in range(0, film.shape[2], self.FRAMES):
            frames = film[:, :, start : start + self.FRAMES]
            part = self.conv(put_before(earlier, frames))
            earlier = self._last(earlier, frames)
            output = room_for(part, film.shape[2]) if output is None else output
            output[:, :, start : start + self.FRAMES] = part
        assert output is not None, "a film without a frame"
        return output


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
    # torch has no pooling over time in half precision on a CPU. Halves are exact, so that this rounds once as well.
    return film[:, :, ::2] * 0.5 + film[:, :, 1::2] * 0.5


def double_frames(film: torch.Tensor) -> torch.Tensor:
    """Every frame twice; of an odd number, the first stays by itself."""
    odd = film.shape[2] % 2
    rest = film[:, :, odd:].repeat_interleave(2, dim=2)
    return torch.cat([film[:, :, :1], rest], dim=2) if odd else rest


def by_frame(layer: Callable[[torch.Tensor], torch.Tensor], film: torch.Tensor) -> torch.Tensor:
    """A layer for pictures (B, C, H, W), applied to each frame of (B, C, F, H, W).

    Those of large films go one by one, so that what a layer keeps in between never exists for the whole film.
    """
    if not is_large(film):
        pictures = layer(film.transpose(1, 2).flatten(0, 1))
        return pictures.unflatten(0, (film.shape[0], film.shape[2])).transpose(1, 2)
    output: torch.Tensor | None = None
    for index, frame in enumerate(film.unbind(2)):
        picture = layer(frame)
        output = room_for(picture.unsqueeze(2), film.shape[2]) if output is None else output
        output[:, :, index] = picture
    assert output is not None, "a film without a frame"
    return output


def is_large(film: torch.Tensor) -> bool:
    """Whether a film takes so much memory that it is better worked on in parts, where that is possible."""
    return film.numel() >= LARGE and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def room_for(part: torch.Tensor, frames: int) -> torch.Tensor:
    """An empty film of so many frames like `part` (B, C, F, H, W), in its memory format."""
    batch, channels, _, *sides = part.shape
    layout = torch.channels_last_3d if part.stride(1) == 1 and channels > 1 else torch.contiguous_format
    shape = (batch, channels, frames, *sides)
    return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=layout)
