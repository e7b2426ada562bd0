"""`AutoencoderKLWan`: the causal autoencoder of films of Wan 2.1 (Wan Team 2025, arXiv 2503.20314, section 4.1)."""

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
        is_residual: must be False: levels with shortcuts, as in Wan 2.2's 5B, are not taken.
        in_channels, out_channels: of the films.
        patch_size: must be None: films in patches, as in Wan 2.2's 5B, are not taken.
        scale_factor_temporal, scale_factor_spatial: frames and pixels to a latent, for pipelines; the model's own
            follow from `temperal_downsample`.

    Raises:
        ValueError: if levels do not fit together, and for Wan 2.2's 5B.
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
        if is_residual or patch_size not in (None, 1):
            raise ValueError(
                f"is_residual={is_residual} and patch_size={patch_size} are not supported: take the autoencoder of Wan "
                "2.1 or of Wan 2.2 A14B, which have False and None"
            )
        check_levels(dim_mult, temperal_downsample)
        self.encoder = CausalEncoder(
            in_channels, base_dim, 2 * z_dim, dim_mult, num_res_blocks, attn_scales, temperal_downsample, dropout
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
        )
        # Films are cut in time only if asked for: memory does not need it.
        frames = Axis(-3, self.temporal_compression_ratio, tile=1 << 20, stride=1 << 20, lead=1)
        self._declare_tiles({"num_frames": frames, **image_axes(TILE, self.spatial_compression_ratio, OVERLAP)})

    def _encode(self, x: Tensor) -> Tensor:
        memory: Memory = {}
        first, rest = x[:, :, :1], x[:, :, 1:]
        chunks = [first, *(rest.split(self.temporal_compression_ratio, dim=2) if rest.shape[2] else ())]
        return self.quant_conv(torch.cat([self.encoder(chunk, memory) for chunk in chunks], dim=2))

    def _decode(self, z: Tensor) -> Tensor:
        memory: Memory = {}
        frames = self.post_quant_conv(z).split(1, dim=2)
        return torch.cat([self.decoder(frame, memory) for frame in frames], dim=2)
