"""`DDIMPipeline`: pictures from noise alone, in few steps."""

from typing import Any

import torch

from diffusion_core.randomness import Generators

from ..models.unets.unet_2d import UNet2DModel
from ..schedulers.base import Scheduler
from ..schedulers.ddim import DDIMScheduler
from .ddpm import ImagePipelineOutput, UnconditionalPipeline
from .loop import check_share


class DDIMPipeline(UnconditionalPipeline):
    """Draws pictures with the implicit sampler (Song et al. 2020, arXiv 2010.02502, equation 12).

    Args:
        unet: predicts the noise.
        scheduler: a `DDIMScheduler`, or another one whose config is taken for it.
    """

    def __init__(self, unet: UNet2DModel, scheduler: Scheduler) -> None:
        if scheduler is not None and not isinstance(scheduler, DDIMScheduler):
            scheduler = DDIMScheduler.from_config(scheduler.config)
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        generator: Generators | None = None,
        eta: float = 0.0,
        num_inference_steps: int = 50,
        use_clipped_model_output: bool | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draw pictures.

        Args:
            batch_size: how many.
            generator: where random numbers come from: one, or one for each picture.
            eta: share of fresh noise in each step; 0 is deterministic, 1 is like DDPM.
            num_inference_steps: more take longer and give better pictures.
            use_clipped_model_output: derive the noise from the clipped picture, as some models were trained for.
            output_type: "pil", "np" (N, H, W, C) or "pt" (N, C, H, W), both from 0 to 1.
            return_dict: return an output object rather than a tuple.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and the model has not been called.
            NumericalError: if the model gives values that are not finite.
        """
        check_share("eta", eta)
        options = {"eta": eta, "use_clipped_model_output": bool(use_clipped_model_output)}
        return self._draw(batch_size, generator, num_inference_steps, output_type, return_dict, **options)
