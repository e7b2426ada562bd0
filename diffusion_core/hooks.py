"""A familiar import path: offload for any module. It lives in `diffusion_core.offload`."""

from diffusion_core.offload.group_offload import apply_group_offloading, remove_group_offloading

__all__ = ["apply_group_offloading", "remove_group_offloading"]
