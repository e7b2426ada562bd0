"""`StableDiffusionInpaintPipeline`: repaint the masked part of a picture after a prompt."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call
from ..tasks import Inpaint
from .base import Prompts, StableDiffusionBase
from .output import StableDiffusionPipelineOutput


class StableDiffusionInpaintPipeline(StableDiffusionBase):
    """Repaints the part of a picture that is white in a mask.

    A UNet that was trained for it sees the mask and what surrounds it (9 input channels, for 4 of latents). For any
    other one, what lies outside of the mask is put back after every step, noised to its level (Lugmayr et al. 2022,
    arXiv 2201.09865, equation 8, without resampling).
    """

    _callback_tensor_inputs: ClassVar[list[str]] = [
        *StableDiffusionBase._callback_tensor_inputs,
        "mask",
        "masked_image_latents",
    ]
    _scheduler_settings: ClassVar[dict[str, Any]] = {
        **StableDiffusionBase._scheduler_settings,
        "skip_prk_steps": True,
    }

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        masked_image_latents: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 1.0,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.5,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
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
        """Repaint pictures.

        All arguments that are not listed are those of `StableDiffusionPipeline`.

        Args:
            prompt: what to paint, one text or several.
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
            clip_skip=clip_skip,
            long_prompt=long_prompt,
        )
        task = Inpaint(
            image,
            mask_image,
            masked_image_latents,
            height=height,
            width=width,
            padding_mask_crop=padding_mask_crop,
            strength=strength,
            latents=latents,
        )
        call = Call(
            prompts,
            task,
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
