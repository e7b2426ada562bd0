"""`AutoencoderKLHunyuanVideo`: the causal autoencoder of films of HunyuanVideo (Kong et al. 2024, arXiv 2412.03603)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_core.randomness import Generators

from ...offload.attention import attention
from ..base import Model
from ..layers.activations import get_activation
from ..layers.attention import Attention
from .distribution import DiagonalGaussianDistribution
from .outputs import AutoencoderKLOutput, DecoderOutput
from .tiling import Axis, TilingMixin

_EPS = 1e-6  # of all norms
_DOWN, _UP = "HunyuanVideoDownBlock3D", "HunyuanVideoUpBlock3D"
Step = tuple[int, int, int]


class HunyuanVideoCausalConv3d(nn.Module):
    """A convolution of films that sees no later frames; what lies outside is the nearest pixel inside.

    Args:
        in_channels, out_channels: of the maps.
        kernel_size: in each direction, odd.
        stride: along time, height and width.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3, stride: Step = (1, 1, 1)) -> None:
        super().__init__()
        side = kernel_size // 2
        self.edges = (side, side, side, side, kernel_size - 1, 0)
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, stride)

    def forward(self, film: Tensor) -> Tensor:
        return self.conv(F.pad(film, self.edges, mode="replicate") if any(self.edges) else film)


class HunyuanVideoResnetBlockCausal3D(nn.Module):
    """Two rounds of norm, activation and convolution, added to the input."""

    def __init__(self, in_channels: int, out_channels: int, groups: int, act_fn: str) -> None:
        super().__init__()
        self.nonlinearity = get_activation(act_fn)
        self.norm1 = nn.GroupNorm(groups, in_channels, eps=_EPS)
        self.conv1 = HunyuanVideoCausalConv3d(in_channels, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=_EPS)
        self.conv2 = HunyuanVideoCausalConv3d(out_channels, out_channels)
        changes = in_channels != out_channels
        self.conv_shortcut = HunyuanVideoCausalConv3d(in_channels, out_channels, 1) if changes else None

    def forward(self, film: Tensor) -> Tensor:
        hidden = self.conv1(self.nonlinearity(self.norm1(film)))
        hidden = self.conv2(self.nonlinearity(self.norm2(hidden)))
        return hidden + (film if self.conv_shortcut is None else self.conv_shortcut(film))


class FrameCausalAttention(Attention):
    """Attention of one head between the pixels of films, which see their own frame and those before it."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__(channels, heads=1, dim_head=channels, bias=True, norm_num_groups=groups, eps=_EPS)

    def forward(self, film: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        frames, pixels = film.shape[2], film.shape[3] * film.shape[4]
        tokens = self._normalize(film.flatten(2).mT, maps=False)
        query, key, value = (each[:, :, None] for each in self._project(tokens, tokens))
        parts: list[Tensor] = []
        # Frame by frame, no mask is needed, of which the square of all pixels would be the size.
        for index, part in enumerate(query.split(pixels, dim=1)):
            seen = pixels * (index + 1)
            parts.append(attention(part, key[:, :seen], value[:, :seen], settings=self.attention_settings))
        attended = torch.cat(parts, dim=1) if frames > 1 else parts[0]
        return film + self.to_out[0](attended.flatten(2)).mT.reshape(film.shape)


class HunyuanVideoMidBlock3D(nn.Module):
    """Two residual blocks at the lowest resolution, with attention between them."""

    def __init__(self, channels: int, groups: int, act_fn: str, attends: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList([FrameCausalAttention(channels, groups) if attends else nn.Identity()])
        self.resnets = nn.ModuleList(
            HunyuanVideoResnetBlockCausal3D(channels, channels, groups, act_fn) for _ in range(2)
        )

    def forward(self, film: Tensor) -> Tensor:
        first, second = self.resnets
        return second(self.attentions[0](first(film)))


class _Downsample(nn.Module):
    """Fewer frames, rows and columns by a convolution with strides."""

    def __init__(self, channels: int, step: Step) -> None:
        super().__init__()
        self.conv = HunyuanVideoCausalConv3d(channels, channels, stride=step)

    def forward(self, film: Tensor) -> Tensor:
        return self.conv(film)


class _Upsample(nn.Module):
    """More frames, rows and columns by repetition; the first frame stays by itself."""

    def __init__(self, channels: int, step: Step) -> None:
        super().__init__()
        self.step = step
        self.conv = HunyuanVideoCausalConv3d(channels, channels)

    def forward(self, film: Tensor) -> Tensor:
        longer = F.interpolate(film, scale_factor=self.step)
        return self.conv(longer[:, :, self.step[0] - 1 :])


class _Level(nn.Module):
    """Residual blocks at one resolution.

    Args:
        in_channels, out_channels: of the maps.
        layers: how many blocks.
        groups, act_fn: of these.
        step: frames, rows and columns that become one, or that one becomes, after them.
    """

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int, act_fn: str, step: Step) -> None:
        super().__init__()
        widths = [in_channels, *[out_channels] * layers]
        self.resnets = nn.ModuleList(
            HunyuanVideoResnetBlockCausal3D(*pair, groups, act_fn) for pair in pairwise(widths)
        )
        self.changes = step != (1, 1, 1)

    def _blocks(self, film: Tensor) -> Tensor:
        for resnet in self.resnets:
            film = resnet(film)
        return film


class HunyuanVideoDownBlock3D(_Level):
    """A level of the encoder."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int, act_fn: str, step: Step) -> None:
        super().__init__(in_channels, out_channels, layers, groups, act_fn, step)
        self.downsamplers = nn.ModuleList([_Downsample(out_channels, step)]) if self.changes else None

    def forward(self, film: Tensor) -> Tensor:
        film = self._blocks(film)
        return film if self.downsamplers is None else self.downsamplers[0](film)


class HunyuanVideoUpBlock3D(_Level):
    """A level of the decoder."""

    def __init__(self, in_channels: int, out_channels: int, layers: int, groups: int, act_fn: str, step: Step) -> None:
        super().__init__(in_channels, out_channels, layers, groups, act_fn, step)
        self.upsamplers = nn.ModuleList([_Upsample(out_channels, step)]) if self.changes else None

    def forward(self, film: Tensor) -> Tensor:
        film = self._blocks(film)
        return film if self.upsamplers is None else self.upsamplers[0](film)


class HunyuanVideoEncoder3D(nn.Module):
    """A film (B, C, F, H, W) to means and log variances; see `AutoencoderKLHunyuanVideo` for the arguments."""

    def __init__(
        self,
        in_channels: int,
        latent_channels: int,
        widths: Sequence[int],
        layers: int,
        act_fn: str,
        groups: int,
        steps: Sequence[Step],
        attends: bool,
    ) -> None:
        super().__init__()
        self.conv_in = HunyuanVideoCausalConv3d(in_channels, widths[0])
        self.down_blocks = nn.ModuleList(
            HunyuanVideoDownBlock3D(before, after, layers, groups, act_fn, step)
            for (before, after), step in zip(pairwise([widths[0], *widths]), steps, strict=True)
        )
        self.mid_block = HunyuanVideoMidBlock3D(widths[-1], groups, act_fn, attends)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=_EPS)
        self.conv_act = get_activation("silu")
        self.conv_out = HunyuanVideoCausalConv3d(widths[-1], 2 * latent_channels)

    def forward(self, film: Tensor) -> Tensor:
        film = self.conv_in(film)
        for level in self.down_blocks:
            film = level(film)
        return self.conv_out(self.conv_act(self.conv_norm_out(self.mid_block(film))))


class HunyuanVideoDecoder3D(nn.Module):
    """Latents (B, C, f, h, w) to a film; see `AutoencoderKLHunyuanVideo` for the arguments."""

    def __init__(
        self,
        latent_channels: int,
        out_channels: int,
        widths: Sequence[int],
        layers: int,
        act_fn: str,
        groups: int,
        steps: Sequence[Step],
        attends: bool,
    ) -> None:
        super().__init__()
        widths = widths[::-1]
        self.conv_in = HunyuanVideoCausalConv3d(latent_channels, widths[0])
        self.mid_block = HunyuanVideoMidBlock3D(widths[0], groups, act_fn, attends)
        self.up_blocks = nn.ModuleList(
            HunyuanVideoUpBlock3D(before, after, layers + 1, groups, act_fn, step)
            for (before, after), step in zip(pairwise([widths[0], *widths]), steps, strict=True)
        )
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], eps=_EPS)
        self.conv_act = get_activation("silu")
        self.conv_out = HunyuanVideoCausalConv3d(widths[-1], out_channels)

    def forward(self, latents: Tensor) -> Tensor:
        film = self.mid_block(self.conv_in(latents))
        for level in self.up_blocks:
            film = level(film)
        return self.conv_out(self.conv_act(self.conv_norm_out(film)))


class AutoencoderKLHunyuanVideo(TilingMixin, Model):
    """Encodes films as a Gaussian over latents, and decodes latents, a few frames at a time.

    Longer films are cut in time without being asked for (`use_framewise_encoding`, `use_framewise_decoding`), as the
    published films were made. Latents are not scaled here; pipelines do that.

    Args:
        in_channels, out_channels: of the films.
        latent_channels: of the latents.
        down_block_types, up_block_types: "HunyuanVideoDownBlock3D" and "HunyuanVideoUpBlock3D" for each level.
        block_out_channels: width of each level.
        layers_per_block: residual blocks in a level of the encoder; the decoder has one more.
        act_fn: name of the activation.
        norm_num_groups: groups of the norms; divides every width.
        scaling_factor: a denoiser sees latents times this.
        spatial_compression_ratio: pixels to a latent, in height and in width, a power of 2.
        temporal_compression_ratio: frames to a latent, after the first, which is one by itself; a power of 2.
        mid_block_add_attention: whether there is attention at the lowest resolution.

    Raises:
        ValueError: if levels, types, groups and ratios do not fit together.
    """

    _repeated_blocks: ClassVar[list[str]] = ["HunyuanVideoResnetBlockCausal3D"]
    _no_split_modules: ClassVar[list[str] | None] = ["HunyuanVideoResnetBlockCausal3D", "FrameCausalAttention"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _entry_points = ("forward", "encode", "decode")

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        latent_channels: int = 16,
        down_block_types: Sequence[str] = (_DOWN,) * 4,
        up_block_types: Sequence[str] = (_UP,) * 4,
        block_out_channels: Sequence[int] = (128, 256, 512, 512),
        layers_per_block: int = 2,
        act_fn: str = "silu",
        norm_num_groups: int = 32,
        scaling_factor: float = 0.476986,
        spatial_compression_ratio: int = 8,
        temporal_compression_ratio: int = 4,
        mid_block_add_attention: bool = True,
    ) -> None:
        super().__init__()
        _check_levels(block_out_channels, down_block_types, up_block_types, norm_num_groups)
        self.spatial_compression_ratio = spatial_compression_ratio
        self.temporal_compression_ratio = temporal_compression_ratio
        steps = level_steps(len(block_out_channels), spatial_compression_ratio, temporal_compression_ratio)
        shared = (block_out_channels, layers_per_block, act_fn, norm_num_groups, steps, mid_block_add_attention)
        self.encoder = HunyuanVideoEncoder3D(in_channels, latent_channels, *shared)
        self.decoder = HunyuanVideoDecoder3D(latent_channels, out_channels, *shared)
        self.quant_conv = nn.Conv3d(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = nn.Conv3d(latent_channels, latent_channels, 1)
        self._declare_tiles(self._tiles(), framewise=True)

    def _tiles(self) -> dict[str, Axis]:
        """Tiles of 16 frames that share 4; with tiling, of 256 x 256 pixels that share 64."""
        pixels, frames = self.spatial_compression_ratio, self.temporal_compression_ratio
        tile, stride = (max(1, size // pixels) for size in (256, 192))
        return {
            "num_frames": Axis(-3, frames, *(max(1, size // frames) for size in (16, 12)), lead=1),
            "height": Axis(-2, pixels, tile, stride),
            "width": Axis(-1, pixels, tile, stride),
        }

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode films (B, in_channels, F, H, W) in [-1, 1] as a Gaussian over latents (B, latent_channels, f, h, w).

        The first frame is a latent by itself, each 4 frames after it are one; what does not fill one is left out.

        Raises:
            ValueError: if `x` is not a batch of such films, or its sides are no multiples of 8 (of
                `spatial_compression_ratio`).
        """
        _check_film("x", x, self.config["in_channels"])
        ratio = self.spatial_compression_ratio
        if any(side % ratio for side in x.shape[-2:]):
            raise ValueError(f"x must have sides that are multiples of {ratio}, not {tuple(x.shape[-2:])}: resize it")
        posterior = DiagonalGaussianDistribution(self._in_parts(self._encode, x, decode=False))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(
        self, z: Tensor, return_dict: bool = True, generator: Generators | None = None
    ) -> DecoderOutput | tuple[Tensor]:
        """Decode unscaled latents (B, latent_channels, f, h, w) to films of about [-1, 1], 4 f - 3 frames.

        Args:
            z: the latents.
            return_dict: False for a plain tuple.
            generator: not used, since decoding draws nothing.

        Raises:
            ValueError: if `z` is not a batch of such latents.
        """
        _check_film("z", z, self.config["latent_channels"])
        sample = self._in_parts(self._decode, z, decode=True)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(
        self,
        sample: Tensor,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[Tensor]:
        """Encode and decode films, through the mean of the latents or, with `sample_posterior`, a draw of them."""
        posterior = self.encode(sample, return_dict=False)[0]
        z = posterior.sample(generator) if sample_posterior else posterior.mode()
        return self.decode(z, return_dict=return_dict)

    def _encode(self, film: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(film))

    def _decode(self, latents: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latents))


def level_steps(levels: int, spatial: int, temporal: int) -> list[Step]:
    """How many frames, rows and columns become one after each level, or one becomes after each of the decoder's.

    The sides change after the first levels, the frames after the last but one and those before it.
    """
    counts: list[int] = []
    for name, ratio in (("spatial", spatial), ("temporal", temporal)):
        times = ratio.bit_length() - 1
        if ratio < 1 or 2**times != ratio or times >= levels:
            raise ValueError(f"{name}_compression_ratio={ratio} must be a power of 2 up to {2 ** (levels - 1)}")
        counts.append(times)
    sides = [2 if index < counts[0] else 1 for index in range(levels)]
    frames = [2 if levels - 1 - counts[1] <= index < levels - 1 else 1 for index in range(levels)]
    return [(step, side, side) for step, side in zip(frames, sides, strict=True)]


def _check_levels(widths: Sequence[int], down: Sequence[str], up: Sequence[str], groups: int) -> None:
    for name, types, known in (("down_block_types", down, _DOWN), ("up_block_types", up, _UP)):
        if len(types) != len(widths) or set(types) - {known}:
            raise ValueError(
                f"{name}={tuple(types)} must be {known!r} for each of the {len(widths)} block_out_channels"
            )
    odd = [width for width in widths if width % groups]
    if odd:
        raise ValueError(f"norm_num_groups={groups} does not divide block_out_channels {odd}")


def _check_film(argument: str, tensor: Tensor, channels: int) -> None:
    if tensor.dim() != 5:
        remedy = f"; add the batch with {argument}[None]" if tensor.dim() == 4 else ""
        expected = f"(batch, {channels}, frames, height, width)"
        raise ValueError(f"{argument} must be {expected}, not {tuple(tensor.shape)}{remedy}")
    if tensor.shape[1] != channels:
        raise ValueError(f"{argument} must have {channels} channels, not {tensor.shape[1]}: {tuple(tensor.shape)}")
    if not all(tensor.shape[2:]):
        raise ValueError(f"{argument} must have a frame of at least one pixel, not {tuple(tensor.shape)}")
