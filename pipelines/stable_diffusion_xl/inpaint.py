"""`StableDiffusionXLInpaintPipeline`: repaint the masked part of a picture after a prompt."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..tasks import Inpaint
from .base import Conditions, Size, StableDiffusionXLRedrawing, XLCall
from .output import StableDiffusionXLPipelineOutput
from .prompts import Prompts


class StableDiffusionXLInpaintPipeline(StableDiffusionXLRedrawing):
    """Repaints the part of a picture that is white in a mask; see `Inpaint` for the two ways to do so."""

    _callback_tensor_inputs: ClassVar[list[str]] = [
        *StableDiffusionXLRedrawing._callback_tensor_inputs,
        "mask",
        "masked_image_latents",
    ]

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        masked_image_latents: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 0.9999,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
        denoising_start: float | None = None,
        denoising_end: float | None = None,
        guidance_scale: float = 7.5,
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
        """Repaint pictures.

        All arguments that are not listed are those of `StableDiffusionXLPipeline` and
        `StableDiffusionXLImg2ImgPipeline`.

        Args:
            image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them.
            mask_image: one mask for all, or one for each prompt; what is one half or lighter is painted.
            masked_image_latents: latents of the picture without the masked part, for UNets that see them; made of
                `image` by default.
            height: in pixels; the picture is brought to it. What the UNet was trained on by default.
            width: likewise.
            padding_mask_crop: enlarge the masked part with this many pixels around it, paint it at full size, and put
                it back into the picture. Takes one PIL image and mask, and gives PIL images.
            strength: from 0 to 1, how far to go from what was there; at 1 nothing of it shows.
            latents: noise to use, shape (pictures, channels, height / scale, width / scale).

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
            Inpaint(
                image,
                mask_image,
                masked_image_latents,
                height=height,
                width=width,
                padding_mask_crop=padding_mask_crop,
                strength=strength,
                latents=latents,
                noised=denoising_start is not None,
            ),
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
