"""`StableDiffusionXLControlNetPipeline`: text to image, steered by ControlNets."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..stable_diffusion_xl.base import Conditions, Size, XLCall
from ..stable_diffusion_xl.output import StableDiffusionXLPipelineOutput
from ..stable_diffusion_xl.prompts import Prompts
from ..tasks import FromNoise
from .base_xl import StableDiffusionXLControlNetText
from .control import Control


class StableDiffusionXLControlNetPipeline(StableDiffusionXLControlNetText):
    """Draws pictures that are steered by control pictures, such as edges, depth or a pose."""

    _callback_tensor_inputs: ClassVar[list[str]] = [
        "latents",
        "prompt_embeds",
        "negative_prompt_embeds",
        "add_text_embeds",
        "add_time_ids",
        "negative_pooled_prompt_embeds",
        "negative_add_time_ids",
        "image",
    ]

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        image: Any = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
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
        original_size: Size | None = None,
        crops_coords_top_left: Size = (0, 0),
        target_size: Size | None = None,
        negative_original_size: Size | None = None,
        negative_crops_coords_top_left: Size = (0, 0),
        negative_target_size: Size | None = None,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
        **kwargs: Any,
    ) -> StableDiffusionXLPipelineOutput | tuple[Any, ...]:
        """Draw steered pictures.

        All arguments that are not listed are those of `StableDiffusionXLPipeline`.

        Args:
            image: the picture that steers, one for all prompts or one for each; with several ControlNets a list
                of such, one for each of them. Values run from 0 to 1.
            height: in pixels; the control picture is brought to it. Its own by default.
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
            image, controlnet_conditioning_scale, guess_mode, control_guidance_start, control_guidance_end
        )
        size = self._control_size(image, height, width)
        conditions = Conditions(
            original_size=original_size,
            crops_coords_top_left=crops_coords_top_left,
            target_size=target_size,
            negative_original_size=negative_original_size,
            negative_crops_coords_top_left=negative_crops_coords_top_left,
            negative_target_size=negative_target_size,
            keeps_crops=False,
        )
        state = {
            "guidance_scale": guidance_scale,
            "guidance_rescale": 0.0,
            "clip_skip": clip_skip,
            "control": control,
        }
        call = XLCall(
            prompts,
            FromNoise(*size, latents),
            num_inference_steps,
            timesteps,
            sigmas,
            eta,
            generator,
            output_type,
            return_dict,
            callback_on_step_end,
            callback_on_step_end_tensor_inputs,
            state,
            conditions=conditions,
            denoising_end=denoising_end,
            kwargs=kwargs,
        )
        return self._draw(call)
