"""FreeU: better pictures from a trained UNet by weighing its features and its skips (Si et al. 2023)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FreeU:
    """What one up block does.

    Attributes:
        backbone: factor of the first half of the channels of the features ("b"), 1 or more.
        skip: factor of the lowest frequencies of the skips ("s"), 0 to 1.
    """

    backbone: float
    skip: float

    def __call__(self, features: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh features (B, C, H, W) and a skip of the same size, before the block joins them."""
        half = features.shape[1] // 2
        features = torch.cat([features[:, :half] * self.backbone, features[:, half:]], dim=1)
        return features, scale_low_frequencies(skip, self.skip)


def scale_low_frequencies(maps: Tensor, scale: float) -> Tensor:
    """Multiply the four frequencies of height and width nearest to zero, -1 and 0 of each, by `scale`.

    Args:
        maps: (B, C, H, W); computed in float32 where the dtype has fewer bits.
        scale: the factor.
    """
    spectrum = torch.fft.fft2(maps.float() if maps.dtype in (torch.float16, torch.bfloat16) else maps)
    height, width = maps.shape[2:]
    weights = torch.ones(height, width, dtype=spectrum.real.dtype, device=maps.device)
    for row in (0, -1):
        for column in (0, -1):
            weights[row, column] = scale
    return torch.fft.ifft2(spectrum * weights).real.to(maps.dtype)
