"""`StableDiffusionXLImg2ImgPipeline`: a picture and a prompt to a picture; also the refiner."""

from collections.abc import Sequence
from typing import Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..tasks import FromImage
from .base import Conditions, Size, StableDiffusionXLRedrawing, XLCall
from .output import StableDiffusionXLPipelineOutput
from .prompts import Prompts


class StableDiffusionXLImg2ImgPipeline(StableDiffusionXLRedrawing):
    """Takes a picture part of the way to noise and denoises it with a prompt (SDEdit, Meng et al. 2021, 2108.01073).

    With `denoising_start` it goes on from latents that another model has left: so a refiner is used.
    """

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        strength: float = 0.3,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
        denoising_start: float | None = None,
        denoising_end: float | None = None,
        guidance_scale: float = 5.0,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        guidance_rescale: float = 0.0,
        original_size: Size | None = None,
        crops_coords_top_left: Size = (0, 0),
        target_size: Size | None = None,
        negative_original_size: Size | None = None,
        negative_crops_coords_top_left: Size = (0, 0),
        negative_target_size: Size | None = None,
        aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
        **kwargs: Any,
    ) -> StableDiffusionXLPipelineOutput | tuple[Any, ...]:
        """Draw pictures after a picture.

        All arguments that are not listed are those of `StableDiffusionXLPipeline`.

        Args:
            image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them. Sizes
                are rounded down to multiples of `vae_scale_factor`.
            strength: from 0 to 1, how far to go from the picture. Only this share of the steps is taken.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.
            denoising_start: from 0 to 1, the share of the way that `image`, mostly latents, has come already. No noise
                is added then, and `strength` is not used.
            latents: noisy latents to start from in place of those of `image`, whose size they must have.
            aesthetic_score: how beautiful the picture is to be, for UNets that were trained on it.
            negative_aesthetic_score: the same for the prediction without the prompt.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
        """
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            prompt_2,
            negative_prompt_2,
            pooled_prompt_embeds,
            negative_pooled_prompt_embeds,
            clip_skip,
            long_prompt,
        )
        conditions = Conditions(
            original_size,
            crops_coords_top_left,
            target_size,
            negative_original_size,
            negative_crops_coords_top_left,
            negative_target_size,
            aesthetic_score,
            negative_aesthetic_score,
        )
        call = XLCall(
            prompts,
            FromImage(image, strength, noised=denoising_start is not None, latents=latents),
            num_inference_steps,
            timesteps,
            sigmas,
            eta,
            generator,
            output_type,
            return_dict,
            callback_on_step_end,
            callback_on_step_end_tensor_inputs,
            {"guidance_scale": guidance_scale, "guidance_rescale": guidance_rescale, "clip_skip": clip_skip},
            conditions=conditions,
            denoising_start=denoising_start,
            denoising_end=denoising_end,
            kwargs=kwargs,
        )
        return self._draw(call)
