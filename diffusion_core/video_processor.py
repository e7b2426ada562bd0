"""A familiar import path: what turns films into tensors and back."""

from diffusion_core.videos import VideoProcessor

__all__ = ["VideoProcessor"]
