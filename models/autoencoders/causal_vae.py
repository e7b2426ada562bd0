"""What the autoencoders of Wan 2.1 and Qwen-Image share: encoder, decoder, and the way between videos and latents."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_core.randomness import Generators

from ..base import Model
from .causal import CausalConv3d, CausalResidualBlock, ChannelNorm, Downsample, FrameAttention, MidBlock, UpBlock
from .causal_residual import ResidualDown, ResidualUp
from .chunks import Memory
from .distribution import DiagonalGaussianDistribution
from .outputs import AutoencoderKLOutput, DecoderOutput
from .tiling import TilingMixin

Tensor = torch.Tensor
# Latents are normalised by these; they are part of the published model.
MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
TILE, OVERLAP = 256, 0.25


class CausalEncoder(nn.Module):
    """Videos (B, C, T, H, W) to features of latents.

    Args:
        channels: of the videos.
        dim: width of the first level.
        z_dim: channels of the result.
        dim_mult: width of each level, as a multiple of `dim`; all but the last halve the sides.
        num_res_blocks: residual blocks in a level.
        attn_scales: shares of the sides at which attention follows each of these blocks.
        halve_frames: for each level but the last, whether it halves the frames too.
        dropout: probability, in training.
        residual: whether levels have shortcuts, as in Wan 2.2's 5B; these have no attention.
    """

    def __init__(
        self,
        channels: int,
        dim: int,
        z_dim: int,
        dim_mult: Sequence[int],
        num_res_blocks: int,
        attn_scales: Sequence[float],
        halve_frames: Sequence[bool],
        dropout: float,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.conv_in = CausalConv3d(channels, dim, 3)
        blocks: list[nn.Module] = []
        width = dim
        for level, factor in enumerate(dim_mult):
            if residual:
                frames = [*halve_frames, None][level]
                blocks.append(ResidualDown(width, dim * factor, num_res_blocks, frames, dropout))
                width = dim * factor
                continue
            for _ in range(num_res_blocks):
                blocks.append(CausalResidualBlock(width, dim * factor, dropout))
                width = dim * factor
                if 0.5**level in attn_scales:
                    blocks.append(FrameAttention(width))
            if level < len(dim_mult) - 1:
                blocks.append(Downsample(width, halve_frames[level]))
        self.down_blocks = nn.ModuleList(blocks)
        self.mid_block = MidBlock(width, dropout)
        self.norm_out = ChannelNorm(width)
        self.conv_out = CausalConv3d(width, z_dim, 3)

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        hidden_states = self.conv_in(hidden_states, memory)
        for block in self.down_blocks:
            hidden_states = block(hidden_states, memory)
        return self.conv_out(F.silu(self.norm_out(self.mid_block(hidden_states, memory))), memory)


class CausalDecoder(nn.Module):
    """Latents (B, z_dim, t, h, w) to videos; the arguments are those of `CausalEncoder`, levels in the same order."""

    def __init__(
        self,
        channels: int,
        dim: int,
        z_dim: int,
        dim_mult: Sequence[int],
        num_res_blocks: int,
        halve_frames: Sequence[bool],
        dropout: float,
        residual: bool = False,
    ) -> None:
        super().__init__()
        factors, doubles = list(dim_mult)[::-1], [*list(halve_frames)[::-1], None]
        width = dim * factors[0]
        self.conv_in = CausalConv3d(z_dim, width, 3)
        self.mid_block = MidBlock(width, dropout)
        self.up_blocks = nn.ModuleList()
        for factor, frames in zip(factors, doubles, strict=True):
            level = ResidualUp if residual else UpBlock
            self.up_blocks.append(level(width, dim * factor, num_res_blocks + 1, frames, dropout))
            width = dim * factor if residual or frames is None else dim * factor // 2
        self.norm_out = ChannelNorm(width)
        self.conv_out = CausalConv3d(width, channels, 3)

    def forward(self, hidden_states: Tensor, memory: Memory | None = None) -> Tensor:
        hidden_states = self.mid_block(self.conv_in(hidden_states, memory), memory)
        for block in self.up_blocks:
            hidden_states = block(hidden_states, memory)
        return self.conv_out(F.silu(self.norm_out(hidden_states)), memory)


class CausalAutoencoder(TilingMixin, Model):
    """What autoencoders of this design share; a class makes the encoder, the decoder and two 1x1x1 convolutions."""

    _repeated_blocks: ClassVar[list[str]] = ["CausalResidualBlock"]
    _no_split_modules: ClassVar[list[str] | None] = [
        "CausalResidualBlock",
        "FrameAttention",
        "ResidualDown",
        "ResidualUp",
    ]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _entry_points = ("forward", "encode", "decode")

    encoder: CausalEncoder
    decoder: CausalDecoder
    quant_conv: CausalConv3d
    post_quant_conv: CausalConv3d

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent, in height and in width."""
        return 2 ** len(self.config["temperal_downsample"])

    @property
    def temporal_compression_ratio(self) -> int:
        """Frames to a latent, after the first frame, which is one by itself."""
        return 2 ** sum(self.config["temperal_downsample"])

    @property
    def _film_channels(self) -> int:
        """Channels of the films, of pixels."""
        return self.encoder.conv_in.in_channels

    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode videos (B, channels, T, H, W) in [-1, 1] as a Gaussian over latents (B, z_dim, t, h, w).

        Frames after the first that do not fill a latent are left out; sides that do not are rounded down.

        Raises:
            ValueError: if `x` is not a batch of such videos.
        """
        posterior = self._posterior(x)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(
        self, z: Tensor, return_dict: bool = True, generator: Generators | None = None
    ) -> DecoderOutput | tuple[Tensor]:
        """Decode latents (B, z_dim, t, h, w) to videos in [-1, 1], of 1 + `temporal_compression_ratio` (t - 1) frames.

        Args:
            z: the latents.
            return_dict: False for a plain tuple.
            generator: not used, since decoding draws nothing.

        Raises:
            ValueError: if `z` is not a batch of such latents.
        """
        _check_videos("z", z, self.post_quant_conv.in_channels)
        sample = self._in_parts(self._decode, z, decode=True).clamp(-1.0, 1.0)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(
        self,
        sample: Tensor,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[Tensor]:
        """Encode and decode videos, through the mean of the latents or, with `sample_posterior`, a draw of them."""
        posterior = self._posterior(sample)
        z = posterior.sample(generator) if sample_posterior else posterior.mode()
        return self.decode(z, return_dict=return_dict)

    def _posterior(self, x: Tensor) -> DiagonalGaussianDistribution:
        _check_videos("x", x, self._film_channels, self.spatial_compression_ratio)
        frames, unit = x.shape[2], self.temporal_compression_ratio
        x = x[:, :, : 1 + (frames - 1) // unit * unit]
        return DiagonalGaussianDistribution(self._in_parts(self._encode, x, decode=False))

    def _encode(self, x: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(x))

    def _decode(self, z: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(z))


def check_levels(dim_mult: Sequence[int], temperal_downsample: Sequence[bool]) -> None:
    """Refuse `temperal_downsample` without an entry for each level but the last."""
    if len(temperal_downsample) != len(dim_mult) - 1:
        raise ValueError(
            f"temperal_downsample={tuple(temperal_downsample)} must have one entry for each level of "
            f"dim_mult={tuple(dim_mult)} but the last"
        )


def _check_videos(argument: str, tensor: Tensor, channels: int, smallest: int = 1) -> None:
    """Refuse anything but a batch (B, channels, T, H, W) with sides of at least `smallest`."""
    if tensor.dim() != 5:
        remedy = f"; a picture is a video of one frame, {argument}[:, :, None]" if tensor.dim() == 4 else ""
        raise ValueError(
            f"{argument} must be (batch, {channels}, frames, height, width), not {tuple(tensor.shape)}{remedy}"
        )
    if tensor.shape[1] != channels:
        raise ValueError(f"{argument} must have {channels} channels, not {tensor.shape[1]}: {tuple(tensor.shape)}")
    if not tensor.shape[2]:
        raise ValueError(f"{argument} must have at least one frame, not the shape {tuple(tensor.shape)}")
    if min(tensor.shape[3:]) < smallest:
        raise ValueError(f"{argument} must be at least {smallest} x {smallest}, not {tuple(tensor.shape[3:])}")
