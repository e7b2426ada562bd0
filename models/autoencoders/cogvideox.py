"""`AutoencoderKLCogVideoX`: the causal autoencoder of films of CogVideoX (Yang et al. 2024, section 2.1)."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_core.randomness import Generators

from ..base import Model
from ..layers.activations import activation_function
from ..layers.resnet import DoublingConv2d
from .chunks import ChunkedConv3d, Memory, by_frame, chunks_of, double_frames, halve_frames
from .distribution import DiagonalGaussianDistribution
from .outputs import AutoencoderKLOutput, DecoderOutput
from .tiling import Axis, TilingMixin, stride_for

_EPS = 1e-6  # of the norms before the last convolutions


class CogVideoXSpatialNorm3D(nn.Module):
    """A group norm whose scale and shift come from the latents at the same place (Zheng et al. 2022, section 3.1)."""

    def __init__(self, channels: int, latent_channels: int, groups: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(groups, channels, eps=_EPS)
        self.conv_y = ChunkedConv3d(latent_channels, channels, kernel_size=1)
        self.conv_b = ChunkedConv3d(latent_channels, channels, kernel_size=1)

    def forward(self, film: Tensor, latents: Tensor, memory: Memory) -> Tensor:
        # The convolutions see one place at a time, so they need not see it as often as the film repeats it: their
        # results are only spread over height and width while they are used, and are never as large as the film.
        scale, shift = (
            _over_frames(conv(latents, memory), film.shape[2])[..., :, None, :, None]
            for conv in (self.conv_y, self.conv_b)
        )
        rows, columns = latents.shape[-2:]
        normed = self.norm_layer(film)
        places = normed.unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.addcmul(shift, places, scale).flatten(-2).flatten(-3, -2)
        torch.addcmul(shift, places, scale, out=places)
        return normed


def _over_frames(latents: Tensor, frames: int) -> Tensor:
    """Latents repeated along time to so many frames; of an odd number, the first goes with the first."""
    if frames == latents.shape[2]:
        return latents
    odd = frames % 2
    rest = latents[:, :, odd:]
    rest = rest.repeat_interleave((frames - odd) // rest.shape[2], dim=2)
    return torch.cat([latents[:, :, :1], rest], dim=2) if odd else rest


class CogVideoXResnetBlock3D(nn.Module):
    """Two causal convolutions, each after a norm and an activation, added to the input.

    Args:
        in_channels, out_channels: of the maps.
        groups, eps: of the norms.
        act_fn: name of the activation.
        latent_channels: the norms take latents of so many channels, as in the decoder; None for plain norms.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        groups: int,
        eps: float,
        act_fn: str,
        latent_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.nonlinearity = activation_function(act_fn)

        def norm(channels: int) -> nn.Module:
            if latent_channels is None:
                return nn.GroupNorm(groups, channels, eps=eps)
            return CogVideoXSpatialNorm3D(channels, latent_channels, groups)

        self.norm1, self.norm2 = norm(in_channels), norm(out_channels)
        self.conv1 = ChunkedConv3d(in_channels, out_channels)
        self.conv2 = ChunkedConv3d(out_channels, out_channels)
        self.conv_shortcut = nn.Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, film: Tensor, latents: Tensor | None, memory: Memory) -> Tensor:
        # Names are given anew as soon as may be, since each tensor can take a gigabyte.
        hidden = self.conv1(self._activated(self.norm1, film, latents, memory), memory)
        hidden = self._activated(self.norm2, hidden, latents, memory)
        hidden = self.conv2(hidden, memory)
        return hidden.add_(film if self.conv_shortcut is None else self.conv_shortcut(film))

    def _activated(self, norm: nn.Module, film: Tensor, latents: Tensor | None, memory: Memory) -> Tensor:
        normed = norm(film) if latents is None else norm(film, latents, memory)
        return self.nonlinearity(normed, inplace=not torch.is_grad_enabled())


class _Downsample(nn.Module):
    """Half the height and width, and half the frames where asked for."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, film: Tensor, frames_too: bool) -> Tensor:
        return by_frame(self._halved, halve_frames(film) if frames_too else film)

    def _halved(self, frames: Tensor) -> Tensor:
        return self.conv(F.pad(frames, (0, 1, 0, 1)))


class _Upsample(nn.Module):
    """Twice the height and width, and twice the frames where asked for."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = DoublingConv2d(channels, channels, 3, padding=1)

    def forward(self, film: Tensor, frames_too: bool) -> Tensor:
        # The convolution sees one frame at a time, so repeated frames need not pass it twice.
        film = by_frame(self.conv, film)
        return double_frames(film) if frames_too else film


class _Level(nn.Module):
    """Residual blocks at one resolution.

    Args:
        in_channels, out_channels: of the maps.
        layers: how many blocks.
        block: makes one of them.
        frames_too: the change of size after them is one of frames as well.
    """

    def __init__(
        self, in_channels: int, out_channels: int, layers: int, block: Callable[[int, int], nn.Module], frames_too: bool
    ) -> None:
        super().__init__()
        self.frames_too = frames_too
        widths = [in_channels] + [out_channels] * layers
        self.resnets = nn.ModuleList(block(*pair) for pair in pairwise(widths))

    def _blocks(self, film: Tensor, latents: Tensor | None, memory: Memory) -> Tensor:
        for resnet in self.resnets:
            film = resnet(film, latents, memory)
        return film


class CogVideoXDownBlock3D(_Level):
    """A level of the encoder; `halves` the size after its blocks."""

    def __init__(self, *level: Any, halves: bool) -> None:
        super().__init__(*level)
        self.downsamplers = nn.ModuleList([_Downsample(level[1])]) if halves else None

    def forward(self, film: Tensor, memory: Memory) -> Tensor:
        film = self._blocks(film, None, memory)
        return film if self.downsamplers is None else self.downsamplers[0](film, self.frames_too)


class CogVideoXUpBlock3D(_Level):
    """A level of the decoder; `doubles` the size after its blocks."""

    def __init__(self, *level: Any, doubles: bool) -> None:
        super().__init__(*level)
        self.upsamplers = nn.ModuleList([_Upsample(level[1])]) if doubles else None

    def forward(self, film: Tensor, latents: Tensor, memory: Memory) -> Tensor:
        film = self._blocks(film, latents, memory)
        return film if self.upsamplers is None else self.upsamplers[0](film, self.frames_too)


class CogVideoXMidBlock3D(nn.Module):
    """Two residual blocks at the lowest resolution."""

    def __init__(self, channels: int, block: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(block(channels, channels) for _ in range(2))

    def forward(self, film: Tensor, latents: Tensor | None, memory: Memory) -> Tensor:
        for resnet in self.resnets:
            film = resnet(film, latents, memory)
        return film


class CogVideoXEncoder3D(nn.Module):
    """A film (B, C, F, H, W) to means and log variances; see `AutoencoderKLCogVideoX` for the arguments."""

    def __init__(
        self,
        in_channels: int,
        latent_channels: int,
        widths: Sequence[int],
        layers: int,
        halvings: int,
        block: Callable[..., nn.Module],
        groups: int,
        act_fn: str,
    ) -> None:
        super().__init__()
        self.conv_in = ChunkedConv3d(in_channels, widths[0])
        self.down_blocks = nn.ModuleList(
            CogVideoXDownBlock3D(before, width, layers, block, index < halvings, halves=index < len(widths) - 1)
            for index, (before, width) in enumerate(zip([widths[0], *widths], widths, strict=False))
        )
        self.mid_block = CogVideoXMidBlock3D(widths[-1], block)
        self.norm_out = nn.GroupNorm(groups, widths[-1], eps=_EPS)
        self.conv_act = activation_function(act_fn)
        self.conv_out = ChunkedConv3d(widths[-1], 2 * latent_channels)

    def forward(self, film: Tensor, memory: Memory) -> Tensor:
        film = self.conv_in(film, memory)
        for level in self.down_blocks:
            film = level(film, memory)
        film = self.mid_block(film, None, memory)
        return self.conv_out(self.conv_act(self.norm_out(film), inplace=not torch.is_grad_enabled()), memory)


class CogVideoXDecoder3D(nn.Module):
    """Latents (B, C, f, h, w) to a film; see `AutoencoderKLCogVideoX` for the arguments."""

    def __init__(
        self,
        latent_channels: int,
        out_channels: int,
        widths: Sequence[int],
        layers: int,
        doublings: int,
        block: Callable[..., nn.Module],
        groups: int,
        act_fn: str,
    ) -> None:
        widths = widths[::-1]
        super().__init__()
        self.conv_in = ChunkedConv3d(latent_channels, widths[0])
        self.mid_block = CogVideoXMidBlock3D(widths[0], block)
        self.up_blocks = nn.ModuleList(
            CogVideoXUpBlock3D(before, width, layers + 1, block, index < doublings, doubles=index < len(widths) - 1)
            for index, (before, width) in enumerate(zip([widths[0], *widths], widths, strict=False))
        )
        self.norm_out = CogVideoXSpatialNorm3D(widths[-1], latent_channels, groups)
        self.conv_act = activation_function(act_fn)
        self.conv_out = ChunkedConv3d(widths[-1], out_channels)

    def forward(self, latents: Tensor, memory: Memory) -> Tensor:
        film = self.mid_block(self.conv_in(latents, memory), latents, memory)
        for level in self.up_blocks:
            film = level(film, latents, memory)
        normed = self.norm_out(film, latents, memory)
        return self.conv_out(self.conv_act(normed, inplace=not torch.is_grad_enabled()), memory)


class AutoencoderKLCogVideoX(TilingMixin, Model):
    """Encodes films as a Gaussian over latents, and decodes latents, a few frames at a time.

    The norms see one chunk of frames, so the chunks are a part of the model: 8 frames to encode, 2 latent frames to
    decode, and what does not divide evenly with the first. Latents are not scaled here; pipelines do that.

    Args:
        in_channels, out_channels: of the films.
        down_block_types, up_block_types: "CogVideoXDownBlock3D" and "CogVideoXUpBlock3D" for each level.
        block_out_channels: width of each level; all but the last halve height and width.
        latent_channels: of the latents.
        layers_per_block: residual blocks in a level of the encoder; the decoder has one more.
        act_fn: name of the activation.
        norm_eps: of the encoder's norms.
        norm_num_groups: groups of the norms; divides every width.
        temporal_compression_ratio: frames to a latent frame, a power of 2. The first frame is one by itself.
        sample_height, sample_width: of the films it was trained on; tiles are half as large by default.
        scaling_factor: a denoiser sees latents times this, or divided by it with `invert_scale_latents`.
        shift_factor, latents_mean, latents_std: of the latents, for pipelines.
        force_upcast: not needed by this model; kept for its configs.
        use_quant_conv, use_post_quant_conv: whether a 1x1x1 convolution follows the encoder and precedes the decoder.
        invert_scale_latents: see `scaling_factor`.

    Raises:
        ValueError: if levels, types and groups do not fit together.
    """

    _repeated_blocks: ClassVar[list[str]] = ["CogVideoXResnetBlock3D"]
    _no_split_modules: ClassVar[list[str] | None] = ["CogVideoXResnetBlock3D"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _entry_points = ("forward", "encode", "decode")

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        down_block_types: Sequence[str] = ("CogVideoXDownBlock3D",) * 4,
        up_block_types: Sequence[str] = ("CogVideoXUpBlock3D",) * 4,
        block_out_channels: Sequence[int] = (128, 256, 256, 512),
        latent_channels: int = 16,
        layers_per_block: int = 3,
        act_fn: str = "silu",
        norm_eps: float = 1e-6,
        norm_num_groups: int = 32,
        temporal_compression_ratio: float = 4,
        sample_height: int = 480,
        sample_width: int = 720,
        scaling_factor: float = 1.15258426,
        shift_factor: float | None = None,
        latents_mean: Sequence[float] | None = None,
        latents_std: Sequence[float] | None = None,
        force_upcast: bool = True,
        use_quant_conv: bool = False,
        use_post_quant_conv: bool = False,
        invert_scale_latents: bool = False,
    ) -> None:
        super().__init__()
        _check_levels(block_out_channels, down_block_types, up_block_types, norm_num_groups)
        times = _halvings(temporal_compression_ratio)

        def block(latents: int | None) -> Callable[[int, int], nn.Module]:
            def make(before: int, after: int) -> nn.Module:
                options = {"groups": norm_num_groups, "eps": norm_eps, "act_fn": act_fn, "latent_channels": latents}
                return CogVideoXResnetBlock3D(before, after, **options)

            return make

        shared = (layers_per_block, times)
        self.encoder = CogVideoXEncoder3D(
            in_channels, latent_channels, block_out_channels, *shared, block(None), norm_num_groups, act_fn
        )
        self.decoder = CogVideoXDecoder3D(
            latent_channels,
            out_channels,
            block_out_channels,
            *shared,
            block(latent_channels),
            norm_num_groups,
            act_fn,
        )
        self.quant_conv = nn.Conv3d(2 * latent_channels, 2 * latent_channels, 1) if use_quant_conv else None
        self.post_quant_conv = nn.Conv3d(latent_channels, latent_channels, 1) if use_post_quant_conv else None
        self.num_latent_frames_batch_size, self.num_sample_frames_batch_size = 2, 8
        self._declare_tiles(self._tiles(sample_height, sample_width, 2**times))

    def _tiles(self, height: int, width: int, frames: int) -> dict[str, Axis]:
        """Half of the trained size, with overlaps of a sixth and a fifth. Films are cut in time only if asked for."""
        ratio = self.spatial_compression_ratio
        rows, columns = (max(1, side // 2 // ratio) for side in (height, width))
        return {
            "num_frames": Axis(-3, frames, tile=1 << 20, stride=1 << 20, lead=1),
            "height": Axis(-2, ratio, rows, stride_for(rows, 1 / 6)),
            "width": Axis(-1, ratio, columns, stride_for(columns, 1 / 5)),
        }

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent, in height and in width."""
        return 2 ** (len(self.encoder.down_blocks) - 1)

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode films (B, in_channels, F, H, W) in [-1, 1] as a Gaussian over latents (B, latent_channels, f, h, w).

        Of 1 + 4 k frames come 1 + k latent frames.

        Raises:
            ValueError: if `x` is not a batch of such films.
        """
        _check_film("x", x, self.config.in_channels, self.spatial_compression_ratio)
        posterior = DiagonalGaussianDistribution(self._in_parts(self._encode, x, decode=False))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(
        self, z: Tensor, return_dict: bool = True, generator: Generators | None = None
    ) -> DecoderOutput | tuple[Tensor]:
        """Decode unscaled latents (B, latent_channels, f, h, w) to films of about [-1, 1].

        Args:
            z: the latents. Of 1 + k frames come 1 + 4 k; of an even number of frames, 4 times as many.
            return_dict: False for a plain tuple.
            generator: not used, since decoding draws nothing.

        Raises:
            ValueError: if `z` is not a batch of such latents.
        """
        _check_film("z", z, self.config.latent_channels)
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
        memory: Memory = {}
        parts = [self.encoder(part, memory) for part in chunks_of(film, self.num_sample_frames_batch_size)]
        moments = torch.cat(parts, dim=2)
        return moments if self.quant_conv is None else self.quant_conv(moments)

    def _decode(self, latents: Tensor) -> Tensor:
        memory: Memory = {}
        parts: list[Tensor] = []
        for part in chunks_of(latents, self.num_latent_frames_batch_size):
            part = part if self.post_quant_conv is None else self.post_quant_conv(part)
            parts.append(self.decoder(part, memory))
        return torch.cat(parts, dim=2)


def _halvings(ratio: float) -> int:
    times = int(math.log2(ratio)) if ratio >= 1 else -1
    if times < 0 or 2**times != ratio:
        raise ValueError(f"temporal_compression_ratio={ratio} must be a power of 2")
    return times


def _check_levels(widths: Sequence[int], down: Sequence[str], up: Sequence[str], groups: int) -> None:
    for name, types, known in (
        ("down_block_types", down, "CogVideoXDownBlock3D"),
        ("up_block_types", up, "CogVideoXUpBlock3D"),
    ):
        if len(types) != len(widths):
            raise ValueError(f"{name} has {len(types)} entries, block_out_channels {len(widths)}: one a level")
        unknown = sorted(set(types) - {known})
        if unknown:
            raise ValueError(f"{name} has {unknown}, which are unknown; {known!r} is known")
    odd = [width for width in widths if width % groups]
    if odd:
        raise ValueError(f"norm_num_groups={groups} does not divide block_out_channels {odd}")


def _check_film(argument: str, tensor: Tensor, channels: int, smallest: int = 1) -> None:
    """Refuse anything but a batch (B, channels, F, H, W) with sides of at least `smallest`."""
    if tensor.dim() != 5:
        remedy = f"; add the batch with {argument}[None]" if tensor.dim() == 4 else ""
        expected = f"(batch, {channels}, frames, height, width)"
        raise ValueError(f"{argument} must be {expected}, not {tuple(tensor.shape)}{remedy}")
    if tensor.shape[1] != channels:
        raise ValueError(f"{argument} must have {channels} channels, not {tensor.shape[1]}: {tuple(tensor.shape)}")
    if tensor.shape[2] < 1 or min(tensor.shape[-2:]) < smallest:
        raise ValueError(f"{argument} must have a frame and be at least {smallest} x {smallest}")
