"""A familiar import path: offload and casting for any module. They live in `diffusion_core.offload`."""

# pyright: reportMissingImports=false
from diffusion_core.offload.casting import apply_layerwise_casting, remove_layerwise_casting
from diffusion_core.offload.group_offload import apply_group_offloading, remove_group_offloading

__all__ = [
    "apply_group_offloading",
    "apply_layerwise_casting",
    "remove_group_offloading",
    "remove_layerwise_casting",
]
