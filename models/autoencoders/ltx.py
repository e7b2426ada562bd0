"""`AutoencoderKLLTXVideo`: the autoencoder of LTX-Video (HaCohen et al. 2024, arXiv 2501.00103, section 2.1)."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_core.randomness import Generators, check_generator

from ..base import Model
from ..layers.embeddings import one_a_sample
from .distribution import DiagonalGaussianDistribution
from .ltx_blocks import (
    STEPS,
    LTXVideoCausalConv3d,
    LTXVideoDownBlock,
    LTXVideoMidBlock3d,
    LTXVideoUpBlock3d,
    TimeForBlocks,
    channel_norm,
    from_patches,
    to_patches,
)
from .outputs import AutoencoderKLOutput, DecoderOutput
from .tiling import Axis, TilingMixin

_OLD, _NEW = "LTXVideoDownBlock3D", "LTXVideo095DownBlock3D"
_MULTIPLIER = 1000.0  # the decoder is told times from 0 to 1, its embeddings take them from 0 to 1000


class LTXVideoEncoder3d(nn.Module):
    """A film (B, C, F, H, W) to means and log variances; see `AutoencoderKLLTXVideo` for the arguments."""

    def __init__(
        self,
        in_channels: int,
        latent_channels: int,
        block_out_channels: Sequence[int],
        down_block_types: Sequence[str],
        layers_per_block: Sequence[int],
        spatio_temporal_scaling: Sequence[bool],
        downsample_type: Sequence[str],
        patch_size: int,
        eps: float,
        is_causal: bool,
    ) -> None:
        super().__init__()
        levels = len(down_block_types)
        widths = [*block_out_channels, block_out_channels[-1]][: levels + 1]
        self.patch_size, self.repeats = patch_size, latent_channels
        self.conv_in = LTXVideoCausalConv3d(in_channels * patch_size**2, widths[0], is_causal=is_causal)
        self.down_blocks = nn.ModuleList()
        parts = zip(down_block_types, layers_per_block, spatio_temporal_scaling, downsample_type, strict=False)
        for (before, after), (block, layers, scales, kind) in zip(pairwise(widths), parts, strict=True):
            # Before 0.9.5 the kind is not read: all levels have convolutions.
            kind = (kind if block == _NEW else "conv") if scales else None
            self.down_blocks.append(LTXVideoDownBlock(before, after, layers, eps, is_causal, kind, block == _OLD))
        self.mid_block = LTXVideoMidBlock3d(widths[-1], layers_per_block[-1], eps, is_causal)
        self.conv_out = LTXVideoCausalConv3d(widths[-1], latent_channels + 1, is_causal=is_causal)

    def forward(self, film: Tensor) -> Tensor:
        film = self.conv_in(to_patches(film, self.patch_size))
        for level in self.down_blocks:
            film = level(film)
        moments = self.conv_out(F.silu(channel_norm(self.mid_block(film))))
        # One log variance serves all channels.
        means, variance = moments[:, :-1], moments[:, -1:]
        return torch.cat([means, variance.expand_as(means)], dim=1)


class LTXVideoDecoder3d(nn.Module):
    """Latents (B, C, f, h, w) to a film; see `AutoencoderKLLTXVideo` for the arguments."""

    def __init__(
        self,
        latent_channels: int,
        out_channels: int,
        block_out_channels: Sequence[int],
        layers_per_block: Sequence[int],
        spatio_temporal_scaling: Sequence[bool],
        inject_noise: Sequence[bool],
        upsample_residual: Sequence[bool],
        upsample_factor: Sequence[int],
        patch_size: int,
        eps: float,
        is_causal: bool,
        timestep_conditioning: bool,
    ) -> None:
        super().__init__()
        # Configs list all levels from the highest resolution on, the way of the encoder.
        widths, layers, factors = (list(each)[::-1] for each in (block_out_channels, layers_per_block, upsample_factor))
        flags = (spatio_temporal_scaling, inject_noise, upsample_residual)
        scaling, noise, residual = (list(each)[::-1] for each in flags)
        timed = timestep_conditioning
        self.patch_size = patch_size
        self.conv_in = LTXVideoCausalConv3d(latent_channels, widths[0], is_causal=is_causal)
        self.mid_block = LTXVideoMidBlock3d(widths[0], layers[0], eps, is_causal, noise[0], timed)
        self.up_blocks = nn.ModuleList()
        before = widths[0]
        for index, width in enumerate(widths):
            after = width // factors[index]
            self.up_blocks.append(
                LTXVideoUpBlock3d(
                    before,
                    after,
                    layers[index + 1],
                    eps,
                    is_causal,
                    noise[index + 1],
                    timed,
                    scaling[index],
                    residual[index],
                    factors[index],
                )
            )
            before = after
        self.conv_out = LTXVideoCausalConv3d(before, out_channels * patch_size**2, is_causal=is_causal)
        self.time_embedder = self.scale_shift_table = self.timestep_scale_multiplier = None
        if timed:
            self.timestep_scale_multiplier = nn.Parameter(torch.tensor(_MULTIPLIER))
            self.time_embedder = TimeForBlocks(2 * before)
            self.scale_shift_table = nn.Parameter(torch.randn(2, before) / before**0.5)

    def forward(self, latents: Tensor, temb: Tensor | None = None, generator: Generators | None = None) -> Tensor:
        time = None if self.timestep_scale_multiplier is None or temb is None else temb * self.timestep_scale_multiplier
        film = self.mid_block(self.conv_in(latents), time, generator)
        for level in self.up_blocks:
            film = level(film, time, generator)
        film = channel_norm(film)
        if self.time_embedder is not None and self.scale_shift_table is not None and time is not None:
            vectors = self.time_embedder(time, film).unflatten(1, (2, -1))
            shift, scale = (vectors + self.scale_shift_table[..., None, None, None]).unbind(1)
            film = film * (1 + scale) + shift
        return from_patches(self.conv_out(F.silu(film)), self.patch_size)


class AutoencoderKLLTXVideo(TilingMixin, Model):
    """Encodes films as a Gaussian over latents of 8 frames and 32 x 32 pixels, and decodes latents.

    From 0.9.1 on the decoder does the last denoising step: it is told how noisy its latents are. Latents are not
    normalised here; pipelines apply `latents_mean` and `latents_std`, which are stored with the weights.

    Args:
        in_channels, out_channels: of the films.
        latent_channels: of the latents.
        block_out_channels: width of each level of the encoder. Before 0.9.5 a level ends at the next one's width;
            from then on there is one more, that of the lowest resolution.
        down_block_types: "LTXVideoDownBlock3D", or "LTXVideo095DownBlock3D" from 0.9.5 on, for each level.
        decoder_block_out_channels: the same of the decoder, in the same order.
        layers_per_block, decoder_layers_per_block: residual blocks in each level, and at the lowest resolution.
        spatio_temporal_scaling, decoder_spatio_temporal_scaling: for each level, whether the film changes size.
        decoder_inject_noise: for each level of the decoder and the lowest resolution, whether its blocks add noise.
        downsample_type: for each "LTXVideo095DownBlock3D", what it halves: "spatial", "temporal", "spatiotemporal",
            or "conv" for all by a strided convolution.
        upsample_residual: for each level of the decoder, whether the change of size adds its input.
        upsample_factor: for each level of the decoder, by what its width is divided with the change of size.
        timestep_conditioning: whether the decoder is told a time, as from 0.9.1 on.
        patch_size: rows and columns of pixels that are folded into channels first.
        patch_size_t: the same of frames, which must be 1.
        resnet_norm_eps: of the norms before shortcuts.
        scaling_factor: a denoiser sees normalised latents times this.
        encoder_causal, decoder_causal: whether a frame sees no later ones.
        spatial_compression_ratio, temporal_compression_ratio: pixels and frames to a latent; None takes the patch
            and the levels for it.

    Raises:
        ValueError: if levels do not fit together.
    """

    _repeated_blocks: ClassVar[list[str]] = ["LTXVideoResnetBlock3d"]
    _no_split_modules: ClassVar[list[str] | None] = ["LTXVideoResnetBlock3d"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _entry_points = ("forward", "encode", "decode")

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        latent_channels: int = 128,
        block_out_channels: Sequence[int] = (128, 256, 512, 512),
        down_block_types: Sequence[str] = (_OLD,) * 4,
        decoder_block_out_channels: Sequence[int] = (128, 256, 512, 512),
        layers_per_block: Sequence[int] = (4, 3, 3, 3, 4),
        decoder_layers_per_block: Sequence[int] = (4, 3, 3, 3, 4),
        spatio_temporal_scaling: Sequence[bool] = (True, True, True, False),
        decoder_spatio_temporal_scaling: Sequence[bool] = (True, True, True, False),
        decoder_inject_noise: Sequence[bool] = (False,) * 5,
        downsample_type: Sequence[str] = ("conv",) * 4,
        upsample_residual: Sequence[bool] = (False,) * 4,
        upsample_factor: Sequence[int] = (1,) * 4,
        timestep_conditioning: bool = False,
        patch_size: int = 4,
        patch_size_t: int = 1,
        resnet_norm_eps: float = 1e-6,
        scaling_factor: float = 1.0,
        encoder_causal: bool = True,
        decoder_causal: bool = False,
        spatial_compression_ratio: int | None = None,
        temporal_compression_ratio: int | None = None,
    ) -> None:
        super().__init__()
        if patch_size_t != 1:
            raise ValueError(f"patch_size_t={patch_size_t} must be 1: frames are not folded into channels")
        _check_encoder(block_out_channels, down_block_types, layers_per_block, spatio_temporal_scaling, downsample_type)
        _check_decoder(
            decoder_block_out_channels,
            decoder_spatio_temporal_scaling,
            decoder_layers_per_block,
            decoder_inject_noise,
            upsample_residual,
            upsample_factor,
            timestep_conditioning,
        )
        self.encoder = LTXVideoEncoder3d(
            in_channels,
            latent_channels,
            block_out_channels,
            down_block_types,
            layers_per_block,
            spatio_temporal_scaling,
            downsample_type,
            patch_size,
            resnet_norm_eps,
            encoder_causal,
        )
        self.decoder = LTXVideoDecoder3d(
            latent_channels,
            out_channels,
            decoder_block_out_channels,
            decoder_layers_per_block,
            decoder_spatio_temporal_scaling,
            decoder_inject_noise,
            upsample_residual,
            upsample_factor,
            patch_size,
            resnet_norm_eps,
            decoder_causal,
            timestep_conditioning,
        )
        self.register_buffer("latents_mean", torch.zeros(latent_channels))
        self.register_buffer("latents_std", torch.ones(latent_channels))
        levels = sum(spatio_temporal_scaling)
        self.spatial_compression_ratio = spatial_compression_ratio or patch_size * 2**levels
        self.temporal_compression_ratio = temporal_compression_ratio or 2**levels
        self._declare_tiles(self._tiles())

    def _tiles(self) -> dict[str, Axis]:
        """Tiles of 512 x 512 pixels that share 64, and, where time is cut, of 16 frames that share 8."""
        pixels, frames = self.spatial_compression_ratio, self.temporal_compression_ratio
        tile, stride = (max(1, size // pixels) for size in (512, 448))
        return {
            "num_frames": Axis(-3, frames, *(max(1, size // frames) for size in (16, 8)), lead=1),
            "height": Axis(-2, pixels, tile, stride),
            "width": Axis(-1, pixels, tile, stride),
        }

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode films (B, in_channels, F, H, W) in [-1, 1] as a Gaussian over latents (B, latent_channels, f, h, w).

        The first frame is a latent by itself, each 8 frames after it are one; what does not fill one is left out.

        Raises:
            ValueError: if `x` is not a batch of such films, or its sides are no multiples of 32 (of
                `spatial_compression_ratio`).
        """
        self._check("x", x, self.config["in_channels"])
        ratio, unit = self.spatial_compression_ratio, self.temporal_compression_ratio
        if any(side % ratio for side in x.shape[-2:]):
            raise ValueError(f"x must have sides that are multiples of {ratio}, not {tuple(x.shape[-2:])}: resize it")
        x = x[:, :, : 1 + (x.shape[2] - 1) // unit * unit]
        posterior = DiagonalGaussianDistribution(self._in_parts(self.encoder, x, decode=False))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(
        self,
        z: Tensor,
        temb: Tensor | float | None = None,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[Tensor]:
        """Decode latents (B, latent_channels, f, h, w), not normalised, to films of about [-1, 1], 8 f - 7 frames.

        Args:
            z: the latents.
            temb: how noisy they are, from 0 to 1: one number, or one a film. Read with `timestep_conditioning`.
            return_dict: False for a plain tuple.
            generator: draws what blocks with `decoder_inject_noise` add: one, or one a film. None draws from torch's
                own.

        Raises:
            ValueError: if `z` is not a batch of such latents, if `temb` is missing or has another number of entries,
                and for generators that do not fit.
        """
        self._check("z", z, self.config["latent_channels"])
        times: Tensor | None = None
        if self.config["timestep_conditioning"]:
            if temb is None:
                raise ValueError("this decoder is told how noisy the latents are: pass temb, 0.0 for clean ones")
            times = one_a_sample(temb, z.shape[0], z.device)
        check_generator(generator, z.shape[0], z.device)
        if self.use_slicing and z.shape[0] > 1:
            samples = enumerate(z.split(1))
            parts = [self._decode(each, _time_for(times, i), _generator_for(generator, i)) for i, each in samples]
            sample = torch.cat(parts)
        else:
            sample = self._decode(z, times, generator)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(
        self,
        sample: Tensor,
        temb: Tensor | float | None = None,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[Tensor]:
        """Encode and decode films, through the mean of the latents or, with `sample_posterior`, a draw of them."""
        posterior = self.encode(sample, return_dict=False)[0]
        z = posterior.sample(generator) if sample_posterior else posterior.mode()
        return self.decode(z, temb, return_dict, generator)

    def _decode(self, z: Tensor, times: Tensor | None, generator: Generators | None) -> Tensor:
        return self._in_tiles(partial(self.decoder, temb=times, generator=generator), z, decode=True)

    def _check(self, argument: str, tensor: Tensor, channels: int) -> None:
        if tensor.dim() != 5:
            remedy = f"; add the batch with {argument}[None]" if tensor.dim() == 4 else ""
            expected = f"(batch, {channels}, frames, height, width)"
            raise ValueError(f"{argument} must be {expected}, not {tuple(tensor.shape)}{remedy}")
        if tensor.shape[1] != channels:
            raise ValueError(f"{argument} must have {channels} channels, not {tensor.shape[1]}: {tuple(tensor.shape)}")
        if not all(tensor.shape[2:]):
            raise ValueError(f"{argument} must have a frame of at least one pixel, not {tuple(tensor.shape)}")


def _time_for(times: Tensor | None, index: int) -> Tensor | None:
    return None if times is None else times[index : index + 1]


def _generator_for(generator: Generators | None, index: int) -> Generators | None:
    """The generator for one film of a batch; one that is not in a list serves all."""
    return generator[index : index + 1] if isinstance(generator, list) else generator


def _same_length(levels: int, of: str, **lists: Sequence[object]) -> None:
    for name, entries in lists.items():
        if len(entries) < levels:
            raise ValueError(f"{name} has {len(entries)} entries, but {of} needs {levels}")


def _check_encoder(
    widths: Sequence[int],
    types: Sequence[str],
    layers: Sequence[int],
    scaling: Sequence[bool],
    kinds: Sequence[str],
) -> None:
    unknown = sorted(set(types) - {_OLD, _NEW})
    if unknown:
        raise ValueError(f"down_block_types has {unknown}, which are unknown; {_OLD!r} and {_NEW!r} are known")
    levels, new = len(types), _NEW in types
    _same_length(levels + new, f"an encoder of {levels} down_block_types", block_out_channels=widths)
    _same_length(levels, f"an encoder of {levels} levels", spatio_temporal_scaling=scaling, downsample_type=kinds)
    _same_length(levels + 1, f"an encoder of {levels} levels", layers_per_block=layers)
    foreign = sorted(set(kinds) - set(STEPS))
    if foreign:
        raise ValueError(f"downsample_type has {foreign}, which are unknown; {sorted(STEPS)} are known")
    parts = zip(pairwise([*widths, widths[-1]]), types, scaling, kinds, strict=False)
    for (before, after), block, scales, kind in parts:
        if block == _NEW and before != after and (not scales or kind == "conv"):
            raise ValueError(
                f"block_out_channels changes from {before} to {after} at a level that cannot do it: give it "
                f"spatio_temporal_scaling and a downsample_type other than 'conv'"
            )


def _check_decoder(
    widths: Sequence[int],
    scaling: Sequence[bool],
    layers: Sequence[int],
    noise: Sequence[bool],
    residual: Sequence[bool],
    factors: Sequence[int],
    timed: bool,
) -> None:
    levels, of = len(widths), f"a decoder of {len(widths)} decoder_block_out_channels"
    _same_length(levels, of, decoder_spatio_temporal_scaling=scaling)
    _same_length(levels, of, upsample_residual=residual, upsample_factor=factors)
    _same_length(levels + 1, of, decoder_layers_per_block=layers, decoder_inject_noise=noise)
    before = widths[-1]
    for width, doubles, factor in zip(widths[::-1], scaling[::-1], factors[::-1], strict=False):
        after = width // factor
        if (before != after * factor and timed) or (not doubles and factor > 1):
            raise ValueError(
                f"decoder_block_out_channels={tuple(widths)} and upsample_factor={tuple(factors)} do not fit: a level "
                f"takes {before} channels, and would need {after * factor} and a change of size to give {after}"
            )
        before = after
