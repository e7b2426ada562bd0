"""`StableDiffusion3InpaintPipeline`: repaints part of a picture after a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call
from ..tasks import Inpaint
from .base import StableDiffusion3Base
from .output import StableDiffusion3PipelineOutput
from .prompts import Prompts


class StableDiffusion3InpaintPipeline(StableDiffusion3Base):
    """Repaints what is white in a mask, and puts the rest back after every step; see `tasks.Inpaint`."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        prompt_3: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        masked_image_latents: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 0.6,
        num_inference_steps: int = 50,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.0,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        negative_prompt_3: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        ip_adapter_image: Any = None,
        ip_adapter_image_embeds: Any = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 256,
        mu: float | None = None,
    ) -> StableDiffusion3PipelineOutput | tuple[Any]:
        """Repaint pictures.

        All arguments that are not listed are those of `StableDiffusion3Pipeline`.

        Args:
            image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them.
            mask_image: one mask for all, or one for each prompt; what is one half or lighter is painted.
            masked_image_latents: latents of the picture without the masked part; made of `image` by default.
            height: in pixels; the picture is brought to it. What the transformer was trained on by default.
            width: likewise.
            padding_mask_crop: enlarge the masked part with this many pixels around it, and put it back in the end.
            strength: from 0 to 1, how far to go from what was there; at 1 nothing of it shows. Only this share of the
                steps is taken, rounded up.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.
            latents: noise to use, shape (pictures, channels, height / scale, width / scale).

        Raises:
            TypeError: for an argument of the wrong kind.
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
            NumericalError: if a model gives values that are not finite.
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
            prompt_3=prompt_3,
            negative_prompt_3=negative_prompt_3,
            max_sequence_length=max_sequence_length,
        )
        call = Call(
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
            ),
            num_inference_steps,
            sigmas=sigmas,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state=self._state(
                guidance_scale, clip_skip, mu, joint_attention_kwargs, ip_adapter_image, ip_adapter_image_embeds
            ),
        )
        return self._draw(call)
