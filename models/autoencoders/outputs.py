"""What autoencoders return."""

from dataclasses import dataclass

import torch

from diffusion_core.outputs import BaseOutput

from .distribution import DiagonalGaussianDistribution


@dataclass
class AutoencoderKLOutput(BaseOutput):
    """The distribution of the latents; `.sample()` or `.mode()` gives latents."""

    latent_dist: DiagonalGaussianDistribution


@dataclass
class AutoencoderTinyOutput(BaseOutput):
    """Latents of shape (B, C, H, W)."""

    latents: torch.Tensor


@dataclass
class DecoderOutput(BaseOutput):
    """Decoded samples, a picture (B, C, H, W) in [-1, 1] or a video, and the codebook loss where there is one."""

    sample: torch.Tensor
    commit_loss: torch.Tensor | None = None
