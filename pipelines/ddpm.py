"""`DDPMPipeline`: pictures from noise alone, with the sampler of their training."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from diffusion_core.images import VaeImageProcessor, check_output_type
from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators, check_generator, randn_tensor

from ..models.unets.unet_2d import UNet2DModel
from ..schedulers.base import Scheduler
from .base import Pipeline
from .loop import check_count, plan_steps, step_options, walk


@dataclass
class ImagePipelineOutput(BaseOutput):
    """Pictures.

    Args:
        images: N pictures in the form that `output_type` asked for.
    """

    images: Any


class UnconditionalPipeline(Pipeline):
    """Base of pipelines that draw what a UNet was trained on, without a prompt."""

    model_cpu_offload_seq: ClassVar[str | None] = "unet"
    unet: UNet2DModel
    scheduler: Scheduler

    def _draw(
        self,
        batch_size: int,
        generator: Generators | None,
        num_inference_steps: int,
        output_type: str | None,
        return_dict: bool,
        **options: Any,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Check, draw noise, denoise, and bring the pictures to the form asked for; `options` go to every step."""
        check_output_type(output_type, ("pil", "np", "pt"))
        device = self._execution_device
        check_generator(generator, check_count("batch_size", batch_size), device)
        with self.run(num_timesteps=0) as run:
            steps = plan_steps(self.scheduler, num_inference_steps, device)
            size = self.unet.config.sample_size
            height, width = (size, size) if isinstance(size, int) else size
            shape = (batch_size, self.unet.config.in_channels, height, width)
            image = randn_tensor(shape, generator=generator, device=device, dtype=self.unet.dtype)
            image = image * steps.scheduler.init_noise_sigma
            options = {**step_options(steps.scheduler, generator=generator), **options}
            for _, timestep in walk(self, run, steps):
                sample = steps.scheduler.scale_model_input(image, timestep)
                prediction = self.unet(sample, timestep, return_dict=False)[0]
                image = steps.scheduler.step(prediction, timestep, image, return_dict=False, **options)[0]
            images = VaeImageProcessor().postprocess(image, output_type=output_type)
        return ImagePipelineOutput(images) if return_dict else (images,)


class DDPMPipeline(UnconditionalPipeline):
    """Draws pictures with the ancestral sampler (Ho et al. 2020, arXiv 2006.11239, algorithm 2).

    Args:
        unet: predicts the noise.
        scheduler: takes the steps.
    """

    def __init__(self, unet: UNet2DModel, scheduler: Scheduler) -> None:
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        generator: Generators | None = None,
        num_inference_steps: int = 1000,
        output_type: str | None = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draw pictures.

        Args:
            batch_size: how many.
            generator: where random numbers come from: one, or one for each picture.
            num_inference_steps: more take longer and give better pictures.
            output_type: "pil", "np" (N, H, W, C) or "pt" (N, C, H, W), both from 0 to 1.
            return_dict: return an output object rather than a tuple.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and the model has not been called.
            NumericalError: if the model gives values that are not finite.
        """
        return self._draw(batch_size, generator, num_inference_steps, output_type, return_dict)
