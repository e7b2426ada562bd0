"""`AutoencoderKLQwenImage`: the variational autoencoder of Qwen-Image."""

from collections.abc import Sequence

from .causal import CausalConv3d
from .causal_vae import MEAN, OVERLAP, STD, TILE, CausalAutoencoder, CausalDecoder, CausalEncoder, check_levels
from .tiling import image_axes


class AutoencoderKLQwenImage(CausalAutoencoder):
    """Encodes videos, of which a picture is one with a single frame, as a Gaussian over latents, and decodes latents.

    The architecture of Wan 2.1 (Wan Team 2025, arXiv 2503.20314, section 4.1), with a decoder trained for pictures (Wu
    et al. 2025, arXiv 2508.02324, section 2.3). Latents are not normalised here; pipelines apply `latents_mean` and
    `latents_std`.

    Args:
        base_dim: width of the first level.
        z_dim: channels of the latents.
        dim_mult: width of each level, as a multiple of `base_dim`; all but the last halve the sides.
        num_res_blocks: residual blocks in a level of the encoder; the decoder has one more.
        attn_scales: shares of the sides at which the encoder has attention, besides that at the lowest resolution.
        temperal_downsample: (sic) for each level but the last, whether it halves the frames after the first.
        dropout: probability, in training.
        input_channels: of the videos.
        latents_mean, latents_std: mean and spread of the latents by channel.

    Raises:
        ValueError: if `temperal_downsample` has not one entry for each level but the last.
    """

    def __init__(
        self,
        base_dim: int = 96,
        z_dim: int = 16,
        dim_mult: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        attn_scales: Sequence[float] = (),
        temperal_downsample: Sequence[bool] = (False, True, True),
        dropout: float = 0.0,
        input_channels: int = 3,
        latents_mean: Sequence[float] = MEAN,
        latents_std: Sequence[float] = STD,
    ) -> None:
        super().__init__()
        check_levels(dim_mult, temperal_downsample)
        self.encoder = CausalEncoder(
            input_channels, base_dim, 2 * z_dim, dim_mult, num_res_blocks, attn_scales, temperal_downsample, dropout
        )
        self.quant_conv = CausalConv3d(2 * z_dim, 2 * z_dim, 1)
        self.post_quant_conv = CausalConv3d(z_dim, z_dim, 1)
        self.decoder = CausalDecoder(
            input_channels, base_dim, z_dim, dim_mult, num_res_blocks, temperal_downsample, dropout
        )
        self._declare_tiles(image_axes(TILE, self.spatial_compression_ratio, OVERLAP))
