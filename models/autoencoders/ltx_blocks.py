"""Parts of LTX-Video's autoencoder (HaCohen et al. 2024, arXiv 2501.00103, section 2.1)."""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_core.randomness import Generators, randn_tensor

from ..layers.adaln_single import TimestepSizeEmbeddings

_EPS = 1e-8  # of the norms over channels, which have no weights
_EMBED = 4  # vectors that modulate a residual block: shift and scale before each of its convolutions


def channel_norm(film: Tensor) -> Tensor:
    """RMS norm over the channels, dimension 1, without weights (Zhang and Sennrich 2019)."""
    mean_square = film.square().mean(dim=1, keepdim=True, dtype=torch.float32)
    return film * torch.rsqrt(mean_square + _EPS).to(film.dtype)


def to_patches(film: Tensor, size: int) -> Tensor:
    """(B, C, F, H, W) to (B, C * size * size, F, H / size, W / size); within a patch, columns come before rows."""
    return film.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def from_patches(patches: Tensor, size: int) -> Tensor:
    """The way back from `to_patches`."""
    parts = patches.unflatten(1, (-1, size, size)).permute(0, 1, 4, 5, 3, 6, 2)
    return parts.flatten(-2).flatten(-3, -2)


def fold(film: Tensor, step: Sequence[int]) -> Tensor:
    """Move `step` neighbouring frames, rows and columns into the channels, of which there are then so many times."""
    frames, rows, columns = step
    parts = film.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).unflatten(2, (-1, frames))
    return parts.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)


def unfold(film: Tensor, step: Sequence[int]) -> Tensor:
    """The way back from `fold`."""
    parts = film.unflatten(1, (-1, *step)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return parts.flatten(-2).flatten(-3, -2).flatten(2, 3)


class LTXVideoCausalConv3d(nn.Module):
    """A convolution of films whose first and last frame are repeated where it looks past the ends.

    Args:
        in_channels, out_channels: of the maps.
        kernel_size: in each direction, odd.
        stride: in each direction.
        is_causal: see no later frames; all that is repeated is then the first frame.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1, is_causal: bool = True
    ) -> None:
        super().__init__()
        side = kernel_size // 2
        self.ends = (kernel_size - 1, 0) if is_causal else (side, side)
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, stride, padding=(0, side, side))

    def forward(self, film: Tensor) -> Tensor:
        return self.conv(F.pad(film, (0, 0, 0, 0, *self.ends), mode="replicate") if any(self.ends) else film)


class LTXVideoResnetBlock3d(nn.Module):
    """Two rounds of norm, SiLU and convolution, added to the input.

    Args:
        in_channels, out_channels: of the maps.
        eps: of the norm before the shortcut, where the numbers of channels differ.
        is_causal: see `LTXVideoCausalConv3d`.
        inject_noise: add noise after each convolution, the same to all channels but for learned factors (Karras et
            al. 2019, section 2), and the same to all frames.
        timestep_conditioning: shift and scale after each norm as told by the time.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        eps: float,
        is_causal: bool,
        inject_noise: bool = False,
        timestep_conditioning: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = LTXVideoCausalConv3d(in_channels, out_channels, is_causal=is_causal)
        self.conv2 = LTXVideoCausalConv3d(out_channels, out_channels, is_causal=is_causal)
        self.norm3 = self.conv_shortcut = None
        if in_channels != out_channels:
            self.norm3 = nn.LayerNorm(in_channels, eps=eps)
            self.conv_shortcut = LTXVideoCausalConv3d(in_channels, out_channels, 1)

        def factors() -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(out_channels, 1, 1)) if inject_noise else None

        self.per_channel_scale1, self.per_channel_scale2 = factors(), factors()
        self.scale_shift_table = (
            nn.Parameter(torch.randn(_EMBED, in_channels) / in_channels**0.5) if timestep_conditioning else None
        )

    def forward(self, film: Tensor, temb: Tensor | None = None, generator: Generators | None = None) -> Tensor:
        """Transform (B, C, F, H, W).

        Args:
            temb: (B, 4 * in_channels, 1, 1, 1), where the block is told the time.
            generator: draws the noise.
        """
        hidden, vectors = channel_norm(film), (None,) * _EMBED
        if self.scale_shift_table is not None and temb is not None:
            table = self.scale_shift_table[..., None, None, None]
            vectors = (temb.unflatten(1, (_EMBED, -1)) + table).unbind(1)
        shift1, scale1, shift2, scale2 = vectors
        hidden = self.conv1(F.silu(_modulate(hidden, shift1, scale1)))
        hidden = channel_norm(_with_noise(hidden, self.per_channel_scale1, generator))
        hidden = self.conv2(F.silu(_modulate(hidden, shift2, scale2)))
        hidden = _with_noise(hidden, self.per_channel_scale2, generator)
        if self.norm3 is not None and self.conv_shortcut is not None:
            film = self.conv_shortcut(self.norm3(film.movedim(1, -1)).movedim(-1, 1))
        return hidden + film


def _modulate(film: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    return film if shift is None or scale is None else film * (1 + scale) + shift


def _with_noise(film: Tensor, factors: Tensor | None, generator: Generators | None) -> Tensor:
    """Noise (H, W), times a factor for each channel, added to all frames; one draw a film where there is a list."""
    if factors is None:
        return film
    count = len(generator) if isinstance(generator, list) else 1
    noise = randn_tensor((count, *film.shape[-2:]), generator, film.device, film.dtype)
    return film + (noise[:, None] * factors)[:, :, None]


class LTXVideoDownsampler3d(nn.Module):
    """Fewer frames, rows or columns: folded into the channels, of a convolution and of the input's own means.

    Args:
        in_channels, out_channels: of the maps.
        step: frames, rows and columns that become one.
        is_causal: see `LTXVideoCausalConv3d`.
    """

    def __init__(self, in_channels: int, out_channels: int, step: Sequence[int], is_causal: bool) -> None:
        super().__init__()
        self.step = tuple(step)
        self.group = in_channels * prod(step) // out_channels
        self.conv = LTXVideoCausalConv3d(in_channels, out_channels // prod(step), is_causal=is_causal)

    def forward(self, film: Tensor) -> Tensor:
        # The first frame is a latent by itself: it is repeated to fill one.
        film = F.pad(film, (0, 0, 0, 0, self.step[0] - 1, 0), mode="replicate") if self.step[0] > 1 else film
        means = fold(film, self.step).unflatten(1, (-1, self.group)).mean(dim=2)
        return fold(self.conv(film), self.step) + means


class LTXVideoUpsampler3d(nn.Module):
    """Twice the frames, rows and columns, unfolded from the channels of a convolution.

    Args:
        in_channels: of the maps; the result has `upscale_factor` times fewer.
        residual: add the input, unfolded and repeated in the same way.
        upscale_factor: see `in_channels`.
        is_causal: see `LTXVideoCausalConv3d`.
    """

    step = (2, 2, 2)

    def __init__(self, in_channels: int, residual: bool, upscale_factor: int, is_causal: bool) -> None:
        super().__init__()
        self.repeats = prod(self.step) // upscale_factor if residual else 0
        channels = in_channels * prod(self.step) // upscale_factor
        self.conv = LTXVideoCausalConv3d(in_channels, channels, is_causal=is_causal)

    def forward(self, film: Tensor) -> Tensor:
        # What comes before the first frame is dropped, so that k latents give 2 k - 1 frames.
        longer = unfold(self.conv(film), self.step)[:, :, 1:]
        if not self.repeats:
            return longer
        return longer + unfold(film, self.step)[:, :, 1:].repeat(1, self.repeats, 1, 1, 1)


class TimeForBlocks(TimestepSizeEmbeddings):
    """Times (B,) to vectors (B, channels, 1, 1, 1) for films."""

    def forward(self, timestep: Tensor, film: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(timestep, film.dtype)[..., None, None, None]


class LTXVideoDownBlock(nn.Module):
    """Residual blocks, and a smaller film after them; used for both kinds of levels.

    Args:
        in_channels, out_channels: of the maps.
        layers: how many residual blocks.
        eps, is_causal: see `LTXVideoResnetBlock3d`.
        kind: how the film gets smaller, see `AutoencoderKLLTXVideo`; None where it does not.
        widens: reach `out_channels` by a residual block at the end, as the levels before 0.9.5.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        layers: int,
        eps: float,
        is_causal: bool,
        kind: str | None,
        widens: bool,
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            LTXVideoResnetBlock3d(in_channels, in_channels, eps, is_causal) for _ in range(layers)
        )
        self.downsamplers = self.conv_out = None
        if kind == "conv":
            self.downsamplers = nn.ModuleList([LTXVideoCausalConv3d(in_channels, in_channels, 3, 2, is_causal)])
        elif kind is not None:
            down = LTXVideoDownsampler3d(in_channels, out_channels, STEPS[kind], is_causal)
            self.downsamplers = nn.ModuleList([down])
        if widens and in_channels != out_channels:
            self.conv_out = LTXVideoResnetBlock3d(in_channels, out_channels, eps, is_causal)

    def forward(self, film: Tensor) -> Tensor:
        for resnet in self.resnets:
            film = resnet(film)
        film = film if self.downsamplers is None else self.downsamplers[0](film)
        return film if self.conv_out is None else self.conv_out(film)


STEPS = {"conv": (2, 2, 2), "spatial": (1, 2, 2), "temporal": (2, 1, 1), "spatiotemporal": (2, 2, 2)}
"""Frames, rows and columns that become one, by the kind of a level that makes films smaller."""


class LTXVideoMidBlock3d(nn.Module):
    """Residual blocks at the lowest resolution; arguments as in `LTXVideoResnetBlock3d`."""

    def __init__(
        self, channels: int, layers: int, eps: float, is_causal: bool, noise: bool = False, timed: bool = False
    ) -> None:
        super().__init__()
        self.time_embedder = TimeForBlocks(_EMBED * channels) if timed else None
        self.resnets = nn.ModuleList(
            LTXVideoResnetBlock3d(channels, channels, eps, is_causal, noise, timed) for _ in range(layers)
        )

    def forward(self, film: Tensor, time: Tensor | None = None, generator: Generators | None = None) -> Tensor:
        temb = None if self.time_embedder is None or time is None else self.time_embedder(time, film)
        for resnet in self.resnets:
            film = resnet(film, temb, generator)
        return film


class LTXVideoUpBlock3d(nn.Module):
    """A larger film, and residual blocks after it.

    Args:
        in_channels, out_channels: of the maps.
        layers: how many residual blocks.
        eps, is_causal, noise, timed: see `LTXVideoResnetBlock3d`.
        doubles: whether the film gets larger.
        residual, factor: see `LTXVideoUpsampler3d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        layers: int,
        eps: float,
        is_causal: bool,
        noise: bool,
        timed: bool,
        doubles: bool,
        residual: bool,
        factor: int,
    ) -> None:
        super().__init__()
        before = out_channels * factor
        self.conv_in = LTXVideoResnetBlock3d(in_channels, before, eps, is_causal) if in_channels != before else None
        self.time_embedder = TimeForBlocks(_EMBED * out_channels) if timed else None
        self.upsamplers = nn.ModuleList([LTXVideoUpsampler3d(before, residual, factor, is_causal)]) if doubles else None
        self.resnets = nn.ModuleList(
            LTXVideoResnetBlock3d(out_channels, out_channels, eps, is_causal, noise, timed) for _ in range(layers)
        )

    def forward(self, film: Tensor, time: Tensor | None = None, generator: Generators | None = None) -> Tensor:
        film = film if self.conv_in is None else self.conv_in(film)
        film = film if self.upsamplers is None else self.upsamplers[0](film)
        temb = None if self.time_embedder is None or time is None else self.time_embedder(time, film)
        for resnet in self.resnets:
            film = resnet(film, temb, generator)
        return film
