"""`UNetPipeline`: how the families whose denoiser is a UNet call it, with guidance and with what steers it."""

import torch

from .guidance import guidance_embedding, guide
from .picture import PicturePipeline, Tensors


class UNetPipeline(PicturePipeline):
    """Base of the pipelines of Stable Diffusion 1, 2 and XL."""

    def _guided(self, scale: float) -> bool:
        return scale > 1 and self.unet.config.time_cond_proj_dim is None

    def _scale_condition(self, latents: torch.Tensor) -> torch.Tensor | None:
        """The guidance scale as an input, for a UNet that was distilled to take it."""
        size = self.unet.config.time_cond_proj_dim
        if size is None:
            return None
        scales = torch.full((len(latents),), self.guidance_scale - 1.0, device=latents.device)
        return guidance_embedding(scales, size).to(latents.dtype)

    def _call_unet(
        self, index: int, timestep: torch.Tensor, sample: torch.Tensor, conditions: Tensors, tensors: Tensors
    ) -> torch.Tensor:
        """The guided prediction; `conditions` are the UNet's arguments besides sample and timestep."""
        guided = self.do_classifier_free_guidance
        sample = torch.cat([sample, sample]) if guided else sample
        residuals = self._residuals(index, timestep, sample, conditions, tensors)
        prediction = self.unet(sample, timestep, **conditions, **residuals, return_dict=False)[0]
        return guide(prediction, self.guidance_scale, self.guidance_rescale) if guided else prediction

    def _residuals(
        self, index: int, timestep: torch.Tensor, sample: torch.Tensor, conditions: Tensors, tensors: Tensors
    ) -> Tensors:
        """What is added inside the UNet, as its arguments; ControlNets override this."""
        return {}
