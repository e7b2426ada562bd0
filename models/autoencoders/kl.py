"""`AutoencoderKL`: the variational autoencoder of Stable Diffusion, SDXL, SD3, FLUX.1 and their kin."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from diffusion_core.randomness import Generators

from ...offload.memory_format import in_best_layout
from ..base import Model
from .distribution import DiagonalGaussianDistribution
from .outputs import AutoencoderKLOutput, DecoderOutput
from .tiling import TilingMixin, image_axes
from .vae import Decoder, Encoder, check_batch


class VariationalAutoencoder(TilingMixin, Model):
    """What the autoencoders of pictures that describe a Gaussian have in common: the encoder's side."""

    _repeated_blocks: ClassVar[list[str]] = ["ResnetBlock2D"]
    _no_split_modules: ClassVar[list[str] | None] = ["ResnetBlock2D", "Attention"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _entry_points = ("forward", "encode", "decode")

    encoder: Encoder
    quant_conv: nn.Conv2d | None

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent, in height and in width."""
        return 2 ** (len(self.encoder.down_blocks) - 1)

    def encode(
        self, x: torch.Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """Encode pictures (B, in_channels, H, W) in [-1, 1] as a Gaussian over latents (B, latent_channels, h, w).

        Sides that `spatial_compression_ratio` does not divide are rounded down.

        Raises:
            ValueError: if `x` is not a batch of such pictures.
        """
        posterior = self._posterior(x)
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def _posterior(self, x: torch.Tensor) -> DiagonalGaussianDistribution:
        check_batch("x", x, self.config.in_channels, self.spatial_compression_ratio)
        return DiagonalGaussianDistribution(self._in_parts(self._encode, x, decode=False))

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        moments = in_best_layout(self.encoder, x)
        return moments if self.quant_conv is None else self.quant_conv(moments)


class AutoencoderKL(VariationalAutoencoder):
    """Encodes pictures as a Gaussian over latents, and decodes latents (Rombach et al. 2022, section 3.1).

    Latents are neither scaled nor shifted here; pipelines apply `scaling_factor` and `shift_factor`, or `latents_mean`
    and `latents_std`.

    Args:
        in_channels, out_channels: of the pictures.
        down_block_types: a type a level, "DownEncoderBlock2D" or "AttnDownEncoderBlock2D".
        up_block_types: the same for the decoder, "UpDecoderBlock2D" or "AttnUpDecoderBlock2D".
        block_out_channels: width of each level; all but the last halve the picture.
        layers_per_block: residual blocks in a level of the encoder; the decoder has one more.
        act_fn: name of the activation.
        latent_channels: of the latents.
        norm_num_groups: groups of the norms; divides every width.
        sample_size: side of the pictures that the model was trained on, and of a tile by default.
        scaling_factor: a denoiser sees (latents - shift_factor) * scaling_factor, whose spread is about 1.
        shift_factor: see there; None is 0.
        latents_mean, latents_std: mean and spread by channel, for models that were trained with these.
        force_upcast: the model overflows in float16; pipelines then run it in float32.
        use_quant_conv, use_post_quant_conv: whether a 1x1 convolution follows the encoder and precedes the decoder.
        mid_block_add_attention: attention at the lowest resolution.

    Raises:
        ValueError: if levels, types and groups do not fit together.
    """

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        down_block_types: Sequence[str] = ("DownEncoderBlock2D",),
        up_block_types: Sequence[str] = ("UpDecoderBlock2D",),
        block_out_channels: Sequence[int] = (64,),
        layers_per_block: int = 1,
        act_fn: str = "silu",
        latent_channels: int = 4,
        norm_num_groups: int = 32,
        sample_size: int = 32,
        scaling_factor: float = 0.18215,
        shift_factor: float | None = None,
        latents_mean: Sequence[float] | None = None,
        latents_std: Sequence[float] | None = None,
        force_upcast: bool = True,
        use_quant_conv: bool = True,
        use_post_quant_conv: bool = True,
        mid_block_add_attention: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(
            in_channels,
            2 * latent_channels,
            down_block_types=down_block_types,
            block_out_channels=block_out_channels,
            layers_per_block=layers_per_block,
            act_fn=act_fn,
            norm_num_groups=norm_num_groups,
            mid_block_add_attention=mid_block_add_attention,
        )
        self.decoder = Decoder(
            latent_channels,
            out_channels,
            up_block_types=up_block_types,
            block_out_channels=block_out_channels,
            layers_per_block=layers_per_block,
            act_fn=act_fn,
            norm_num_groups=norm_num_groups,
            mid_block_add_attention=mid_block_add_attention,
        )
        self.quant_conv = nn.Conv2d(2 * latent_channels, 2 * latent_channels, 1) if use_quant_conv else None
        self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 1) if use_post_quant_conv else None
        self._declare_tiles(image_axes(sample_size, self.spatial_compression_ratio, overlap=0.25))

    def decode(
        self, z: torch.Tensor, return_dict: bool = True, generator: Generators | None = None
    ) -> DecoderOutput | tuple[torch.Tensor]:
        """Decode unscaled latents (B, latent_channels, h, w) to pictures of about [-1, 1].

        Args:
            z: the latents.
            return_dict: False for a plain tuple.
            generator: not used, since decoding draws nothing; autoencoders of other families use theirs.

        Raises:
            ValueError: if `z` is not a batch of such latents.
        """
        check_batch("z", z, self.config.latent_channels)
        sample = self._in_parts(self._decode, z, decode=True)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(
        self,
        sample: torch.Tensor,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[torch.Tensor]:
        """Encode and decode pictures, through the mean of the latents or, with `sample_posterior`, a draw of them."""
        posterior = self._posterior(sample)
        z = posterior.sample(generator) if sample_posterior else posterior.mode()
        return self.decode(z, return_dict=return_dict)

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return in_best_layout(self.decoder, z if self.post_quant_conv is None else self.post_quant_conv(z))
