"""`AutoencoderTiny`: the small, fast autoencoders TAESD, TAESDXL, TAESD3, TAEF1 and TAEF2.

Distilled from the large ones by Ollin Boer Bohan (github.com/madebyollin/taesd): 3x3 convolutions and ReLU only.
"""

import os
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from diffusion_core.errors import KeyMismatchError
from diffusion_core.randomness import Generators

from ..base import Model
from ..layers.activations import get_activation
from .outputs import AutoencoderTinyOutput, DecoderOutput
from .tiling import TilingMixin, image_axes
from .vae import check_batch

_POOL_GROUPS, _POOL_EXPANSION = 4, 4


class AutoencoderTinyBlock(nn.Module):
    """Three 3x3 convolutions around which the input is added back.

    With `pool`, a wide group norm over the whole picture acts first, so that every pixel learns about all of it.
    """

    def __init__(self, channels: int, act_fn: str, pool: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), get_activation(act_fn)]
        self.conv = nn.Sequential(*layers[:-1])
        self.fuse = nn.ReLU()
        self.pool: nn.Module | None = None
        if pool:
            wide = _POOL_EXPANSION * channels
            self.pool = nn.Sequential(
                nn.Conv2d(channels, wide, 1, bias=False),
                nn.GroupNorm(_POOL_GROUPS, wide),
                get_activation(act_fn),
                nn.Conv2d(wide, channels, 1, bias=False),
            )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.pool is not None:
            hidden_states = hidden_states + self.pool(hidden_states)
        return self.fuse(self.conv(hidden_states) + hidden_states)


class EncoderTiny(nn.Module):
    """Pictures in [-1, 1] to latents: a strided convolution between one stage and the next."""

    def __init__(
        self, in_channels: int, out_channels: int, channels: int, blocks: Sequence[int], act_fn: str, pool: bool
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1)]
        for stage, count in enumerate(blocks):
            if stage:
                layers.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1, bias=False))
            pooled = pool and stage == len(blocks) - 1
            layers += [AutoencoderTinyBlock(channels, act_fn, pooled) for _ in range(count)]
        layers.append(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The authors trained on pictures in [0, 1].
        return self.layers((x + 1) / 2)


class DecoderTiny(nn.Module):
    """Latents to pictures in [-1, 1]: an enlargement and a convolution between one stage and the next."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        channels: int,
        blocks: Sequence[int],
        act_fn: str,
        pool: bool,
        scale: int,
        upsample_fn: str,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1), get_activation(act_fn)]
        for stage, count in enumerate(blocks):
            if stage:
                layers.append(nn.Upsample(scale_factor=scale, mode=upsample_fn))
                layers.append(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
            layers += [AutoencoderTinyBlock(channels, act_fn, pool and stage == 0) for _ in range(count)]
        layers.append(nn.Conv2d(channels, out_channels, 3, padding=1))
        self.layers = nn.Sequential(*layers)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        # Latents are softly held within [-3, 3], where those of real pictures lie.
        return self.layers(torch.tanh(z / 3) * 3) * 2 - 1


class AutoencoderTiny(TilingMixin, Model):
    """A deterministic autoencoder in the latent space of a larger one, for previews and for little memory.

    Latents come as the large model's denoiser sees them, so the default `scaling_factor` is 1.

    Args:
        in_channels, out_channels: of the pictures.
        encoder_block_out_channels, decoder_block_out_channels: width of each stage; all stages have the same.
        act_fn: name of the activation inside blocks; each block ends with ReLU.
        upsample_fn: interpolation between the decoder's stages, a mode of `torch.nn.Upsample`.
        latent_channels: of the latents.
        upsampling_scaling_factor: enlargement between the decoder's stages. The encoder halves between its stages.
        num_encoder_blocks, num_decoder_blocks: residual blocks in each stage.
        latent_magnitude, latent_shift: latents in [-latent_magnitude, latent_magnitude] are the numbers in [0, 1] of
            `scale_latents`.
        force_upcast: overflows in float16; it does not, so False.
        scaling_factor, shift_factor: as in `AutoencoderKL`.
        mid_block_pool: group norms over the whole picture in the blocks of lowest resolution, as TAEF2 has them. Not
            an option of the reference.

    Raises:
        ValueError: if stages and blocks do not fit together, or encoder and decoder differ in their ratio.
    """

    derived_config = ("block_out_channels",)
    _repeated_blocks: ClassVar[list[str]] = ["AutoencoderTinyBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["AutoencoderTinyBlock"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = [r"pool\.1"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _entry_points = ("forward", "encode", "decode")
    _paste_tiles = True

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        encoder_block_out_channels: Sequence[int] = (64, 64, 64, 64),
        decoder_block_out_channels: Sequence[int] = (64, 64, 64, 64),
        act_fn: str = "relu",
        upsample_fn: str = "nearest",
        latent_channels: int = 4,
        upsampling_scaling_factor: int = 2,
        num_encoder_blocks: Sequence[int] = (1, 3, 3, 3),
        num_decoder_blocks: Sequence[int] = (3, 3, 3, 1),
        latent_magnitude: float = 3,
        latent_shift: float = 0.5,
        force_upcast: bool = False,
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
        mid_block_pool: bool = False,
    ) -> None:
        super().__init__()
        _check_stages("encoder", encoder_block_out_channels, num_encoder_blocks)
        _check_stages("decoder", decoder_block_out_channels, num_decoder_blocks)
        ratio = 2 ** (len(num_encoder_blocks) - 1)
        if upsampling_scaling_factor ** (len(num_decoder_blocks) - 1) != ratio:
            raise ValueError(
                f"the encoder reduces by {ratio}, but upsampling_scaling_factor={upsampling_scaling_factor} over "
                f"{len(num_decoder_blocks)} stages enlarges by "
                f"{upsampling_scaling_factor ** (len(num_decoder_blocks) - 1)}; make them equal"
            )
        self.encoder = EncoderTiny(
            in_channels, latent_channels, encoder_block_out_channels[0], num_encoder_blocks, act_fn, mid_block_pool
        )
        self.decoder = DecoderTiny(
            latent_channels,
            out_channels,
            decoder_block_out_channels[0],
            num_decoder_blocks,
            act_fn,
            mid_block_pool,
            upsampling_scaling_factor,
            upsample_fn,
        )
        # Pipelines of the reference read their compression ratio from the length of this entry.
        self.register_to_config(block_out_channels=decoder_block_out_channels)
        self._declare_tiles(image_axes(512, ratio, overlap=0.125, rounds_up=True))

    @classmethod
    def from_taesd(
        cls, encoder_path: str | os.PathLike[str], decoder_path: str | os.PathLike[str]
    ) -> "AutoencoderTiny":
        """Make a model in float32 from the two safetensors files that TAESD's author publishes for each variant.

        Raises:
            CheckpointError: if a file is not there, not safetensors, or not of this architecture.
        """
        from .taesd import load_taesd

        config, weights = load_taesd(encoder_path, decoder_path)
        try:
            model = cls(**config)
            model.load_state_dict(weights)
        except (ValueError, RuntimeError) as error:
            raise KeyMismatchError(
                f"{os.fspath(encoder_path)} and {os.fspath(decoder_path)} do not fit together: {error}"
            ) from error
        return model.eval()

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent, in height and in width."""
        return 2 ** (len(self.config.num_encoder_blocks) - 1)

    def scale_latents(self, x: torch.Tensor) -> torch.Tensor:
        """Raw latents to [0, 1], for storage as a picture; what lies outside `latent_magnitude` is clamped."""
        return x.div(2 * self.config.latent_magnitude).add(self.config.latent_shift).clamp(0, 1)

    def unscale_latents(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers in [0, 1] back to raw latents."""
        return x.sub(self.config.latent_shift).mul(2 * self.config.latent_magnitude)

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> AutoencoderTinyOutput | tuple[torch.Tensor]:
        """Encode pictures (B, in_channels, H, W) in [-1, 1] to latents (B, latent_channels, h, w).

        Sides that `spatial_compression_ratio` does not divide are rounded up.

        Raises:
            ValueError: if `x` is not a batch of such pictures.
        """
        latents = self._latents(x)
        return AutoencoderTinyOutput(latents=latents) if return_dict else (latents,)

    def decode(
        self, x: torch.Tensor, generator: Generators | None = None, return_dict: bool = True
    ) -> DecoderOutput | tuple[torch.Tensor]:
        """Decode latents (B, latent_channels, h, w) to pictures of about [-1, 1]; `generator` is not used.

        Raises:
            ValueError: if `x` is not a batch of such latents.
        """
        check_batch("x", x, self.config.latent_channels)
        sample = self._in_parts(self.decoder, x, decode=True)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(self, sample: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
        """Encode pictures, store the latents in bytes, read them back and decode. No gradient reaches the encoder."""
        latents = self._latents(sample)
        stored = self.scale_latents(latents).mul(255).round().to(torch.uint8)
        restored = self.unscale_latents(stored.to(latents.dtype) / 255)
        return self.decode(restored, return_dict=return_dict)

    def _latents(self, x: torch.Tensor) -> torch.Tensor:
        check_batch("x", x, self.config.in_channels)
        return self._in_parts(self.encoder, x, decode=False)


def _check_stages(part: str, widths: Sequence[int], blocks: Sequence[int]) -> None:
    if not widths or len(widths) != len(blocks):
        raise ValueError(
            f"{part}_block_out_channels has {len(widths)} entries and num_{part}_blocks {len(blocks)}; give one each"
        )
    if len(set(widths)) > 1:
        raise ValueError(f"{part}_block_out_channels={tuple(widths)}: all stages must have the same width")
