"""`AutoencoderKLWan`: the causal autoencoder of films of Wan 2.1 (Wan Team 2025, arXiv 2503.20314, section 4.1).

Also that of Wan 2.2's 5B (https://github.com/Wan-Video/Wan2.2), which sees films in patches: a square of pixels is one
pixel of more channels, to the encoder and to the decoder.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .causal import CausalConv3d
from .causal_vae import MEAN, OVERLAP, STD, TILE, CausalAutoencoder, CausalDecoder, CausalEncoder, check_levels
from .chunks import Memory
from .tiling import Axis, image_axes


class AutoencoderKLWan(CausalAutoencoder):
    """Encodes films as a Gaussian over latents, and decodes latents, a latent frame at a time.

    What a step takes does not grow with the film; what convolutions saw last is kept from one step to the next, so
    that the result is that of the whole film. Latents are not normalised here; pipelines apply `latents_mean` and
    `latents_std`.

    Args:
        base_dim: width of the encoder's first level.
        decoder_base_dim: the same of the decoder; None for `base_dim`.
        z_dim: channels of the latents.
        dim_mult: width of each level, as a multiple of these; all but the last halve the sides.
        num_res_blocks: residual blocks in a level of the encoder; the decoder has one more.
        attn_scales: shares of the sides at which the encoder has attention, besides that at the lowest resolution.
        temperal_downsample: (sic) for each level but the last, whether it halves the frames after the first.
        dropout: probability, in training.
        latents_mean, latents_std: mean and spread of the latents by channel.
        is_residual: whether levels have shortcuts, as in Wan 2.2's 5B; there `attn_scales` has no effect.
        in_channels, out_channels: of the films, times `patch_size` squared.
        patch_size: pixels to a side of a patch, as in Wan 2.2's 5B; None for 1.
        scale_factor_temporal, scale_factor_spatial: frames and pixels to a latent, for pipelines; the model's own
            follow from `temperal_downsample` and `patch_size`.

    Raises:
        ValueError: if levels, or channels and patches, do not fit together.
    """

    def __init__(
        self,
        base_dim: int = 96,
        decoder_base_dim: int | None = None,
        z_dim: int = 16,
        dim_mult: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        attn_scales: Sequence[float] = (),
        temperal_downsample: Sequence[bool] = (False, True, True),
        dropout: float = 0.0,
        latents_mean: Sequence[float] = MEAN,
        latents_std: Sequence[float] = STD,
        is_residual: bool = False,
        in_channels: int = 3,
        out_channels: int = 3,
        patch_size: int | None = None,
        scale_factor_temporal: int | None = 4,
        scale_factor_spatial: int | None = 8,
    ) -> None:
        super().__init__()
        self.patch = 1 if patch_size is None else patch_size
        for argument, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if self.patch < 1 or channels % self.patch**2:
                raise ValueError(
                    f"{argument}={channels} must be the films' channels times patch_size={patch_size} squared"
                )
        check_levels(dim_mult, temperal_downsample)
        self.encoder = CausalEncoder(
            in_channels,
            base_dim,
            2 * z_dim,
            dim_mult,
            num_res_blocks,
            attn_scales,
            temperal_downsample,
            dropout,
            is_residual,
        )
        self.quant_conv = CausalConv3d(2 * z_dim, 2 * z_dim, 1)
        self.post_quant_conv = CausalConv3d(z_dim, z_dim, 1)
        self.decoder = CausalDecoder(
            out_channels,
            decoder_base_dim or base_dim,
            z_dim,
            dim_mult,
            num_res_blocks,
            temperal_downsample,
            dropout,
            is_residual,
        )
        # Films are cut in time only if asked for: memory does not need it.
        frames = Axis(-3, self.temporal_compression_ratio, tile=1 << 20, stride=1 << 20, lead=1)
        self._declare_tiles({"num_frames": frames, **image_axes(TILE, self.spatial_compression_ratio, OVERLAP)})

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels to a latent, in height and in width."""
        # Not by `super()`, whose properties torch.compile does not follow.
        return 2 ** len(self.config["temperal_downsample"]) * self.patch

    @property
    def _film_channels(self) -> int:
        return self.encoder.conv_in.in_channels // self.patch**2

    def _encode(self, x: Tensor) -> Tensor:
        memory: Memory = {}
        # Convolutions leave out what does not fill a latent, but patches and shortcuts cannot.
        height, width = (side - side % self.spatial_compression_ratio for side in x.shape[3:])
        x = x[..., :height, :width]
        first, rest = x[:, :, :1], x[:, :, 1:]
        chunks = [first, *(rest.split(self.temporal_compression_ratio, dim=2) if rest.shape[2] else ())]
        features = [self.encoder(into_patches(chunk, self.patch), memory) for chunk in chunks]
        return self.quant_conv(torch.cat(features, dim=2))

    def _decode(self, z: Tensor) -> Tensor:
        memory: Memory = {}
        frames = self.post_quant_conv(z).split(1, dim=2)
        return torch.cat([out_of_patches(self.decoder(frame, memory), self.patch) for frame in frames], dim=2)


def into_patches(film: Tensor, size: int) -> Tensor:
    """Films (B, C, T, H, W) as (B, C * size^2, T, H / size, W / size); within a channel, column by column."""
    if size == 1:
        return film
    blocks = film.unflatten(4, (-1, size)).unflatten(3, (-1, size))
    return blocks.permute(0, 1, 6, 4, 2, 3, 5).flatten(1, 3)


def out_of_patches(patches: Tensor, size: int) -> Tensor:
    """The way back from `into_patches`."""
    if size == 1:
        return patches
    blocks = patches.unflatten(1, (-1, size, size))
    return blocks.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
