"""`StableDiffusionXLControlNetInpaintPipeline`: repaint the masked part, steered by ControlNets."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..stable_diffusion_xl.base import Conditions, Size, XLCall
from ..stable_diffusion_xl.output import StableDiffusionXLPipelineOutput
from ..stable_diffusion_xl.prompts import Prompts
from ..tasks import Inpaint
from .base_xl import StableDiffusionXLControlNetRedrawing
from .control import Control


class StableDiffusionXLControlNetInpaintPipeline(StableDiffusionXLControlNetRedrawing):
    """Repaints masked parts of pictures, steered by control pictures."""

    _control_name: ClassVar[str] = "control_image"
    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->text_encoder_2->unet->vae"
    _optional_components: ClassVar[list[str]] = [
        "tokenizer",
        "tokenizer_2",
        "text_encoder",
        "text_encoder_2",
        "image_encoder",
        "feature_extractor",
    ]
    _callback_tensor_inputs: ClassVar[list[str]] = [
        "latents",
        "prompt_embeds",
        "negative_prompt_embeds",
        "add_text_embeds",
        "add_time_ids",
        "negative_pooled_prompt_embeds",
        "add_neg_time_ids",
        "mask",
        "masked_image_latents",
        "control_image",
    ]

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        control_image: Any = None,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 0.9999,
        num_inference_steps: int = 50,
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
        controlnet_conditioning_scale: float | list[float] = 1.0,
        guess_mode: bool = False,
        control_guidance_start: float | list[float] = 0.0,
        control_guidance_end: float | list[float] = 1.0,
        guidance_rescale: float = 0.0,
        original_size: Size | None = None,
        crops_coords_top_left: Size = (0, 0),
        target_size: Size | None = None,
        aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
        **kwargs: Any,
    ) -> StableDiffusionXLPipelineOutput | tuple[Any, ...]:
        """Draw steered pictures.

        All arguments that are not listed are those of `StableDiffusionXLInpaintPipeline`.

        Args:
            control_image: the picture that steers, one for all prompts or one for each; with several ControlNets a list
                of such, one for each of them. Values run from 0 to 1.
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
        task = Inpaint(
            image,
            mask_image,
            height=height,
            width=width,
            padding_mask_crop=padding_mask_crop,
            strength=strength,
            latents=latents,
            noised=denoising_start is not None,
        )
        conditions = Conditions(
            original_size=original_size,
            crops_coords_top_left=crops_coords_top_left,
            target_size=target_size,
            aesthetic_score=aesthetic_score,
            negative_aesthetic_score=negative_aesthetic_score,
        )
        state = {
            "guidance_scale": guidance_scale,
            "guidance_rescale": guidance_rescale,
            "clip_skip": clip_skip,
            "control": control,
        }
        call = XLCall(
            prompts,
            task,
            num_inference_steps,
            eta=eta,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state=state,
            conditions=conditions,
            denoising_start=denoising_start,
            denoising_end=denoising_end,
            kwargs=kwargs,
        )
        return self._draw(call)
