"""`StableDiffusionControlNetInpaintPipeline`: repaint the masked part, steered by ControlNets."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call
from ..stable_diffusion.base import Prompts
from ..stable_diffusion.output import StableDiffusionPipelineOutput
from ..tasks import Inpaint
from .base import StableDiffusionControlNetBase
from .control import Control


class StableDiffusionControlNetInpaintPipeline(StableDiffusionControlNetBase):
    """Repaints masked parts of pictures, steered by control pictures."""

    _control_name: ClassVar[str] = "control_image"
    _callback_tensor_inputs: ClassVar[list[str]] = [
        *StableDiffusionControlNetBase._callback_tensor_inputs,
        "control_image",
        "mask",
        "masked_image_latents",
    ]

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        control_image: Any = None,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 1.0,
        num_inference_steps: int = 50,
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
        controlnet_conditioning_scale: float | list[float] = 0.5,
        guess_mode: bool = False,
        control_guidance_start: float | list[float] = 0.0,
        control_guidance_end: float | list[float] = 1.0,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
        **kwargs: Any,
    ) -> StableDiffusionPipelineOutput | tuple[Any, list[bool] | None]:
        """Draw steered pictures.

        All arguments that are not listed are those of `StableDiffusionInpaintPipeline`.

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
        )
        state = {
            "guidance_scale": guidance_scale,
            "guidance_rescale": 0.0,
            "clip_skip": clip_skip,
            "control": control,
        }
        call = Call(
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
            kwargs=kwargs,
        )
        return self._draw(call)
