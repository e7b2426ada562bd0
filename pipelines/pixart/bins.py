"""The sizes that PixArt was trained on: 33 shapes of about the same area, from 1 to 4 up to 4 to 1."""

import torch
import torch.nn.functional as F

from ..picture import Call, PicturePipeline
from ..tasks import FromNoise

# Rows of cells and the columns that go with them; a square of 16 x 16 cells has the side that the model is made for.
_SHAPES = {
    8: (32, 29),
    9: (28, 27, 26),
    10: (25, 24),
    11: (23, 22, 21),
    12: (21, 20),
    13: (19, 18),
    14: (18, 17),
    15: (17, 16),
    16: (16, 15),
    17: (15, 14),
    18: (14, 13),
    19: (13,),
    20: (12,),
    21: (12,),
    22: (11,),
    23: (11,),
    24: (10,),
    25: (10,),
    27: (9,),
    32: (8,),
}
# The models for 2048 pixels know these besides.
_SHAPES_OF_2048 = {8: (31, 30), 26: (9,), 28: (9,), 29: (8,), 30: (8,), 31: (8,)}


def bins(side: int) -> list[tuple[int, int]]:
    """Heights and widths in pixels, from wide to high, for a model that was trained on squares of `side` pixels."""
    tables = [_SHAPES, _SHAPES_OF_2048] if side >= 2048 else [_SHAPES]
    shapes = [(rows, columns) for table in tables for rows, each in table.items() for columns in each]
    cell = side // 16
    return [(rows * cell, columns * cell) for rows, columns in sorted(shapes, key=lambda shape: shape[0] / shape[1])]


def nearest_bin(height: int, width: int, side: int) -> tuple[int, int]:
    """The height and width in pixels that the model was trained on, of the shape nearest to the one asked for.

    Args:
        height, width: what is asked for, in pixels.
        side: of the squares that the model was trained on.
    """
    # The shapes are told by their ratio with two decimals: so it is in the reference, and ties depend on it.
    return min(bins(side), key=lambda size: abs(round(size[0] / size[1], 2) - height / width))


class FromNoiseInBins(FromNoise):
    """Text to image of any size: draws at the nearest size that the model knows, then scales and crops."""

    def prepare(self, pipe: PicturePipeline, call: Call, batch: int) -> None:
        """Settle the size; the arguments are checked as for `FromNoise`."""
        default = pipe._default_size()
        height, width = (each or other for each, other in zip(self.asked, default, strict=True))
        for name, value in (("height", height), ("width", width)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of pixels")
        side, multiple = default[0], pipe.size_multiple
        if default[0] != default[1] or side % (16 * multiple):
            raise ValueError(
                f"use_resolution_binning=True needs a model made for squares of a multiple of {16 * multiple} pixels, "
                f"but this one is made for {default[0]} x {default[1]}: pass use_resolution_binning=False"
            )
        self.wanted = (height, width)
        self.asked = nearest_bin(height, width, side)
        super().prepare(pipe, call, batch)

    def crop(self, pipe: PicturePipeline, pixels: torch.Tensor) -> torch.Tensor:
        """Scale pictures (N, C, H, W) so that they cover what was asked for, and cut off what stands out."""
        drawn, (height, width) = pixels.shape[-2:], self.wanted
        if tuple(drawn) == self.wanted:
            return pixels
        scale = max(height / drawn[0], width / drawn[1])
        # A product that should be whole may fall short of it.
        size = [max(int(side * scale), wanted) for side, wanted in zip(drawn, self.wanted, strict=True)]
        pixels = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        top, left = (size[0] - height) // 2, (size[1] - width) // 2
        return pixels[..., top : top + height, left : left + width]
