"""`StableDiffusionImg2ImgPipeline`: a picture and a prompt to a picture."""

from collections.abc import Sequence
from typing import Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call
from ..tasks import FromImage
from .base import Prompts, StableDiffusionBase
from .output import StableDiffusionPipelineOutput


class StableDiffusionImg2ImgPipeline(StableDiffusionBase):
    """Takes a picture part of the way to noise and denoises it with a prompt (SDEdit, Meng et al. 2021, 2108.01073)."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        strength: float = 0.8,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.5,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generators | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
        **kwargs: Any,
    ) -> StableDiffusionPipelineOutput | tuple[Any, list[bool] | None]:
        """Draw pictures after a picture.

        All arguments that are not listed are those of `StableDiffusionPipeline`.

        Args:
            prompt: what to draw, one text or several.
            image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them. Sizes
                are rounded down to multiples of `vae_scale_factor`.
            strength: from 0 to 1, how far to go from the picture. Only this share of the steps is taken; at 1 the
                picture still shows through in schedules that do not end in pure noise.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
        """
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            clip_skip=clip_skip,
            long_prompt=long_prompt,
        )
        call = Call(
            prompts,
            FromImage(image, strength),
            num_inference_steps,
            timesteps,
            sigmas,
            eta=eta,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={"guidance_scale": guidance_scale, "guidance_rescale": 0.0, "clip_skip": clip_skip},
            kwargs=kwargs,
        )
        return self._draw(call)
