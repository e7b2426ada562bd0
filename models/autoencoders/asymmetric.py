"""`AsymmetricAutoencoderKL`: a larger decoder that keeps what an inpainting mask leaves alone."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_core.randomness import Generators

from .kl import VariationalAutoencoder
from .outputs import DecoderOutput
from .tiling import image_axes
from .vae import Decoder, Encoder, check_batch

_CONDITION_LEVELS = 5


class MaskConditionEncoder(nn.Module):
    """Features of the kept part of a picture at five depths: twice at full size, then halved three times."""

    def __init__(self, in_channels: int, first: int, last: int) -> None:
        super().__init__()
        widths = [min(first * 2**level, last) for level in range(_CONDITION_LEVELS - 1)] + [last]
        before = [in_channels, *widths]
        self.layers = nn.ModuleList(
            nn.Conv2d(before[level], width, 3, padding=1)
            if level < 2
            else nn.Conv2d(before[level], width, 4, stride=2, padding=1)
            for level, width in enumerate(widths)
        )

    def forward(self, picture: torch.Tensor) -> list[torch.Tensor]:
        features = []
        for layer in self.layers:
            picture = layer(picture)
            features.append(picture)
            picture = F.relu(picture)
        return features


class MaskConditionDecoder(Decoder):
    """The decoder of `AutoencoderKL`, into which features of the kept part flow before every level and at the end."""

    def __init__(
        self, in_channels: int, out_channels: int, *, block_out_channels: Sequence[int], **levels: object
    ) -> None:
        super().__init__(in_channels, out_channels, block_out_channels=block_out_channels, **levels)  # type: ignore[arg-type]
        self.condition_encoder = MaskConditionEncoder(out_channels, block_out_channels[0], block_out_channels[-1])

    def forward(
        self, sample: torch.Tensor, image: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if image is None or mask is None:
            return super().forward(sample)
        features = self.condition_encoder((1 - mask) * image)
        sample = self.mid_block(self.conv_in(sample))
        for block in self.up_blocks:
            sample = block(_merge(sample, features, mask))
        sample = _merge(sample, features, mask)
        return self._to_pixels(sample)


class AsymmetricAutoencoderKL(VariationalAutoencoder):
    """An autoencoder for inpainting (Zhu et al. 2023, "Designing a better asymmetric VQGAN for Stable Diffusion").

    The latents are those of `AutoencoderKL`. Given the picture and the mask, the decoder redraws only what is masked.

    Args:
        in_channels, out_channels: of the pictures.
        down_block_types, up_block_types, act_fn, latent_channels, norm_num_groups, sample_size, scaling_factor: as in
            `AutoencoderKL`.
        down_block_out_channels, layers_per_down_block: width of each level of the encoder and its residual blocks.
        up_block_out_channels, layers_per_up_block: the same for the decoder, widths in the encoder's order. It has one
            residual block more.

    Raises:
        ValueError: if levels, types and groups do not fit together.
    """

    derived_config = ("block_out_channels", "force_upcast")

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        down_block_types: Sequence[str] = ("DownEncoderBlock2D",),
        down_block_out_channels: Sequence[int] = (64,),
        layers_per_down_block: int = 1,
        up_block_types: Sequence[str] = ("UpDecoderBlock2D",),
        up_block_out_channels: Sequence[int] = (64,),
        layers_per_up_block: int = 1,
        act_fn: str = "silu",
        latent_channels: int = 4,
        norm_num_groups: int = 32,
        sample_size: int = 32,
        scaling_factor: float = 0.18215,
    ) -> None:
        super().__init__()
        if len(down_block_types) != len(up_block_types):
            raise ValueError(
                f"down_block_types has {len(down_block_types)} levels and up_block_types {len(up_block_types)}; the "
                f"decoder must enlarge by what the encoder reduces"
            )
        self.encoder = Encoder(
            in_channels,
            2 * latent_channels,
            down_block_types=down_block_types,
            block_out_channels=down_block_out_channels,
            layers_per_block=layers_per_down_block,
            act_fn=act_fn,
            norm_num_groups=norm_num_groups,
        )
        self.decoder = MaskConditionDecoder(
            latent_channels,
            out_channels,
            up_block_types=up_block_types,
            block_out_channels=up_block_out_channels,
            layers_per_block=layers_per_up_block,
            act_fn=act_fn,
            norm_num_groups=norm_num_groups,
        )
        self.quant_conv = nn.Conv2d(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 1)
        # What pipelines read of any autoencoder's config.
        self.register_to_config(block_out_channels=up_block_out_channels, force_upcast=False)
        self._declare_tiles(image_axes(sample_size, self.spatial_compression_ratio, overlap=0.25))

    def decode(
        self,
        z: torch.Tensor,
        generator: Generators | None = None,
        image: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> DecoderOutput | tuple[torch.Tensor]:
        """Decode unscaled latents (B, latent_channels, h, w), keeping `image` where `mask` is 0.

        Args:
            z: the latents.
            generator: not used.
            image: the picture (B, out_channels, H, W) in [-1, 1], of the size of the result; taken with `mask` only.
            mask: (B or 1, 1, H, W), 1 where the picture is to be redrawn.
            return_dict: False for a plain tuple.

        Raises:
            ValueError: if shapes do not fit, or there is a mask but no picture.
        """
        check_batch("z", z, self.config.latent_channels)
        if mask is None:
            sample = self._in_parts(self._decode, z, decode=True)
        else:
            image, mask = self._condition(z, image, mask)
            sample = self._in_parts(self._decode, z, image, mask, decode=True)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(
        self,
        sample: torch.Tensor,
        mask: torch.Tensor | None = None,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: Generators | None = None,
    ) -> DecoderOutput | tuple[torch.Tensor]:
        """Encode and decode pictures; with a mask, what it leaves alone comes from the pictures themselves."""
        posterior = self._posterior(sample)
        z = posterior.sample(generator) if sample_posterior else posterior.mode()
        return self.decode(z, image=sample, mask=mask, return_dict=return_dict)

    def _decode(self, z: torch.Tensor, *condition: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(z), *condition)

    def _condition(
        self, z: torch.Tensor, image: torch.Tensor | None, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picture and mask, checked and with the batch size and dtype of `z`."""
        if image is None:
            raise ValueError("a mask needs the picture that it masks: pass `image` too")
        height, width = (size * self.spatial_compression_ratio for size in z.shape[-2:])
        for argument, tensor, channels in (("image", image, self.config.out_channels), ("mask", mask, 1)):
            if tensor.dim() != 4 or tensor.shape[0] not in (1, len(z)) or tensor.shape[1:] != (channels, height, width):
                raise ValueError(f"{argument} must be {(len(z), channels, height, width)}, not {tuple(tensor.shape)}")
        batch = (len(z), -1, -1, -1)
        return image.to(z.dtype).expand(batch), mask.to(z.dtype).expand(batch)


def _merge(sample: torch.Tensor, features: list[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """The decoder's features where the mask is 1, and the picture's where it is 0."""
    # Several depths can have one shape; the deepest is the one that the released weights were trained with.
    kept = next((feature for feature in reversed(features) if feature.shape == sample.shape), None)
    if kept is None:
        raise ValueError(
            f"up_block_out_channels gives features {tuple(sample.shape)} where the picture's have "
            f"{[tuple(feature.shape) for feature in features]}: with a mask, widths must double from level to level"
        )
    mask = F.interpolate(mask, size=sample.shape[-2:], mode="nearest")
    return sample * mask + kept * (1 - mask)
