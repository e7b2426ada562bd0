"""Blocks of the score models of Song et al. 2021 (NCSN++): beside the features runs a picture.

Going down, a smaller and smaller copy of the input is projected into the features; going up, a picture is drawn from
the features at each size and enlarged to the next. Both are resampled by a small smoothing filter.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import BlockSpec, joined


def _smoothing(like: Tensor, gain: float) -> Tensor:
    """The filter (1, 3, 3, 1) x (1, 3, 3, 1) that sums to `gain`, one copy for each channel of `like`."""
    line = torch.tensor([1.0, 3.0, 3.0, 1.0], device=like.device, dtype=like.dtype)
    return (torch.outer(line, line) * (gain / 64)).expand(like.shape[1], 1, 4, 4)


class FirDownsample2D(nn.Module):
    """Smooth and drop every second pixel, without weights: (B, C, H, W) to (B, C, H/2, W/2) (Karras et al. 2020)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = _smoothing(hidden_states, gain=1)
        return F.conv2d(hidden_states, weight, stride=2, padding=1, groups=hidden_states.shape[1])


class FirUpsample2D(nn.Module):
    """Insert zeros between the pixels and smooth, without weights: (B, C, H, W) to (B, C, 2H, 2W)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = _smoothing(hidden_states, gain=4)
        return F.conv_transpose2d(hidden_states, weight, stride=2, padding=1, groups=hidden_states.shape[1])


def _groups(channels: int) -> int:
    """Groups of a norm over `channels`: 32, or fewer so that a group has four channels."""
    return min(channels // 4, 32)


class SkipDownBlock2D(nn.Module):
    """Residual blocks, then one that halves; the picture is halved too and projected into the features."""

    has_cross_attention = False
    attends = False

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        scale, out_channels = 2**0.5, spec.out_channels
        if self.attends:
            self.attentions = nn.ModuleList(spec.attention(32, scale) for _ in range(spec.layers))
        self.resnets = nn.ModuleList(
            spec.resnet(width, groups=_groups(width), groups_out=_groups(out_channels), output_scale_factor=scale)
            for width in spec.widths
        )
        self.resnet_down = self.downsamplers = self.skip_conv = None
        if spec.resample:
            groups = _groups(out_channels)
            self.resnet_down = spec.resnet(
                out_channels, groups=groups, output_scale_factor=scale, use_in_shortcut=True, down=True
            )
            self.resnet_down.resample = FirDownsample2D()
            self.downsamplers = nn.ModuleList([FirDownsample2D()])
            self.skip_conv = nn.Conv2d(spec.image_channels, out_channels, 1)

    def forward(self, hidden_states: Tensor, temb: Tensor, picture: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """As `DownBlock2D`, with the picture (B, image_channels, H, W) going in and out, halved."""
        skips = []
        attentions = self.attentions if self.attends else [None] * len(self.resnets)
        for resnet, attention in zip(self.resnets, attentions, strict=True):
            hidden_states = resnet(hidden_states, temb)
            if attention is not None:
                hidden_states = attention(hidden_states)
            skips.append(hidden_states)
        if self.downsamplers is not None and self.resnet_down is not None and self.skip_conv is not None:
            picture = self.downsamplers[0](picture)
            hidden_states = self.skip_conv(picture) + self.resnet_down(hidden_states, temb)
            skips.append(hidden_states)
        return hidden_states, skips, picture


class AttnSkipDownBlock2D(SkipDownBlock2D):
    """As `SkipDownBlock2D`, with self-attention over pixels after each residual block."""

    attends = True


class SkipUpBlock2D(nn.Module):
    """Residual blocks, each told a skip; a picture is drawn from the features, then a residual block doubles."""

    has_cross_attention = False
    attends = False

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        scale, out_channels = 2**0.5, spec.out_channels
        groups = _groups(out_channels)
        if self.attends:
            self.attentions = nn.ModuleList([spec.attention(32, scale)])
        self.resnets = nn.ModuleList(
            spec.resnet(width, groups=self._groups_of_input(width, skip), groups_out=groups, output_scale_factor=scale)
            for width, skip in zip(spec.widths, spec.skip_channels, strict=True)
        )
        self.upsampler = FirUpsample2D()
        self.resnet_up = self.skip_conv = self.skip_norm = None
        self.act = nn.SiLU()
        if spec.resample:
            self.resnet_up = spec.resnet(
                out_channels, groups=groups, output_scale_factor=scale, use_in_shortcut=True, up=True
            )
            self.resnet_up.resample = FirUpsample2D()
            self.skip_conv = nn.Conv2d(out_channels, spec.image_channels, 3, padding=1)
            self.skip_norm = nn.GroupNorm(groups, out_channels, eps=spec.eps)

    @staticmethod
    def _groups_of_input(width: int, skip: int) -> int:
        return _groups(width)

    def forward(
        self, hidden_states: Tensor, skips: Sequence[Tensor], temb: Tensor, picture: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `UpBlock2D`, with the picture so far (None at first) going in and out, doubled and drawn upon."""
        for resnet, skip in zip(self.resnets, skips, strict=True):
            hidden_states = resnet(joined(hidden_states, skip), temb)
        if self.attends:
            hidden_states = self.attentions[0](hidden_states)
        if picture is not None:
            picture = self.upsampler(picture)
        if self.resnet_up is not None and self.skip_conv is not None and self.skip_norm is not None:
            drawn = self.skip_conv(self.act(self.skip_norm(hidden_states)))
            picture = drawn if picture is None else picture + drawn
            hidden_states = self.resnet_up(hidden_states, temb)
        return hidden_states, picture


class AttnSkipUpBlock2D(SkipUpBlock2D):
    """As `SkipUpBlock2D`, with self-attention over pixels after the residual blocks."""

    attends = True

    @staticmethod
    def _groups_of_input(width: int, skip: int) -> int:
        # A slip that trained checkpoints depend on: only the skip's share of the channels is divided by four.
        return min(width - skip + skip // 4, 32)
