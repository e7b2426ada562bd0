"""A familiar import path: offload, casting and step caches. They live in `diffusion_core.offload`."""

# pyright: reportMissingImports=false
from diffusion_core.offload.apply_caches import (
    FasterCacheConfig,
    SeaCacheConfig,
    TextKVCacheConfig,
    apply_first_block_cache,
    apply_mag_cache,
    apply_pyramid_attention_broadcast,
    apply_taylorseer_cache,
)
from diffusion_core.offload.casting import apply_layerwise_casting, remove_layerwise_casting
from diffusion_core.offload.chain_caches import FLUX_MAG_RATIOS, FirstBlockCacheConfig, MagCacheConfig
from diffusion_core.offload.feature_caches import PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusion_core.offload.group_offload import apply_group_offloading, remove_group_offloading

__all__ = [
    "FLUX_MAG_RATIOS",
    "FasterCacheConfig",
    "FirstBlockCacheConfig",
    "MagCacheConfig",
    "PyramidAttentionBroadcastConfig",
    "SeaCacheConfig",
    "TaylorSeerCacheConfig",
    "TextKVCacheConfig",
    "apply_first_block_cache",
    "apply_group_offloading",
    "apply_layerwise_casting",
    "apply_mag_cache",
    "apply_pyramid_attention_broadcast",
    "apply_taylorseer_cache",
    "remove_group_offloading",
    "remove_layerwise_casting",
]
