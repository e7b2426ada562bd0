"""A familiar import path: what turns pictures into tensors and back."""

from diffusion_core.images import VaeImageProcessor

__all__ = ["VaeImageProcessor"]
