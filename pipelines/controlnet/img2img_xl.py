"""`StableDiffusionXLControlNetImg2ImgPipeline`: a picture to a picture, steered by ControlNets."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..stable_diffusion_xl.base import Conditions, Size, XLCall
from ..stable_diffusion_xl.output import StableDiffusionXLPipelineOutput
from ..stable_diffusion_xl.prompts import Prompts
from ..tasks import FromImage
from .base_xl import StableDiffusionXLControlNetRedrawing
from .control import Control


class StableDiffusionXLControlNetImg2ImgPipeline(StableDiffusionXLControlNetRedrawing):
    """Draws pictures after pictures, steered by control pictures."""

    _control_name: ClassVar[str] = "control_image"
    _callback_tensor_inputs: ClassVar[list[str]] = [
        "latents",
        "prompt_embeds",
        "negative_prompt_embeds",
        "add_text_embeds",
        "add_time_ids",
        "negative_pooled_prompt_embeds",
        "add_neg_time_ids",
        "control_image",
    ]

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        control_image: Any = None,
        height: int | None = None,
        width: int | None = None,
        strength: float = 0.8,
        num_inference_steps: int = 50,
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
        controlnet_conditioning_scale: float | list[float] = 0.8,
        guess_mode: bool = False,
        control_guidance_start: float | list[float] = 0.0,
        control_guidance_end: float | list[float] = 1.0,
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
        """Draw steered pictures.

        All arguments that are not listed are those of `StableDiffusionXLImg2ImgPipeline`.

        Args:
            control_image: the picture that steers, one for all prompts or one for each; with several ControlNets a list
                of such, one for each of them. Values run from 0 to 1.
            height: in pixels; the control picture is brought to it, and `image` too. Its own by default.
            width: likewise.
            controlnet_conditioning_scale: the strength, or a list with one for each ControlNet.
            guess_mode: let the control picture count more than the prompt: it steers only the prediction with the
                prompt, and that the more the deeper the layer. Works with an empty prompt at a scale of 3 to 5.
            control_guidance_start, control_guidance_end: from which share of the steps to which the control picture
                steers, from 0 to 1, or lists with one for each ControlNet.

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
        control = Control(
            control_image, controlnet_conditioning_scale, guess_mode, control_guidance_start, control_guidance_end
        )
        size = self._control_size(control_image, height, width)
        conditions = Conditions(
            original_size=original_size,
            crops_coords_top_left=crops_coords_top_left,
            target_size=target_size,
            negative_original_size=negative_original_size,
            negative_crops_coords_top_left=negative_crops_coords_top_left,
            negative_target_size=negative_target_size,
            aesthetic_score=aesthetic_score,
            negative_aesthetic_score=negative_aesthetic_score,
        )
        state = {
            "guidance_scale": guidance_scale,
            "guidance_rescale": 0.0,
            "clip_skip": clip_skip,
            "control": control,
        }
        call = XLCall(
            prompts,
            FromImage(image, strength, size=size, latents=latents),
            num_inference_steps,
            eta=eta,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state=state,
            conditions=conditions,
            kwargs=kwargs,
        )
        return self._draw(call)
