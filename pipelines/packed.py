"""`PackedPipeline`: a denoiser that takes 2 x 2 latents as a token and steps along a flow, as FLUX.1 and Qwen-Image."""

from typing import ClassVar

import torch

from .flow import flow_schedule
from .latents import pack_latents, unpack_latents
from .picture import Call, PicturePipeline, Tensors

# Latents for each side of the pictures that the models were trained on.
DEFAULT_SIDE = 128


class PackedPipeline(PicturePipeline):
    """Base of the pipelines of FLUX.1 and Qwen-Image, which are guided by `true_cfg_scale`."""

    _denoiser: ClassVar[str] = "transformer"
    _scale_name: ClassVar[str] = "true_cfg_scale"
    # Lay out noise levels also for solvers that know how to space those of flows.
    _spaces_steps: ClassVar[bool] = False

    @property
    def size_multiple(self) -> int:
        """Height and width of pictures are multiples of this, since 2 x 2 latents make a token."""
        return 2 * self.vae_scale_factor

    def _default_size(self) -> tuple[int, int]:
        return DEFAULT_SIDE * self.vae_scale_factor, DEFAULT_SIDE * self.vae_scale_factor

    def _packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        count, channels, height, width = shape
        return count, (height // 2) * (width // 2), 4 * channels

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        return pack_latents(latents)

    def _unpack(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return unpack_latents(latents, height // self.vae_scale_factor, width // self.vae_scale_factor)

    def _pack_mask(self, mask: torch.Tensor) -> torch.Tensor:
        return pack_latents(mask.expand(-1, self.latent_channels, -1, -1))

    def _schedule(self, call: Call) -> Tensors:
        tokens, count = call.task.tokens(self.size_multiple), call.num_inference_steps
        return flow_schedule(self.scheduler, count, tokens, sigmas=call.sigmas, always=self._spaces_steps)
