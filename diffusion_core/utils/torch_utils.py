"""A familiar import path: random numbers."""

from diffusion_core.randomness import randn_tensor

__all__ = ["randn_tensor"]
