"""`StableDiffusion3Img2ImgPipeline`: a picture and a prompt to a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call
from ..tasks import FromImage
from .base import StableDiffusion3Base
from .output import StableDiffusion3PipelineOutput
from .prompts import Prompts


class StableDiffusion3Img2ImgPipeline(StableDiffusion3Base):
    """Takes a picture part of the way to noise and denoises it with a prompt (SDEdit, Meng et al. 2021, 2108.01073)."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        prompt_3: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        image: "ImageInput | None" = None,
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
        output_type: str | None = "pil",
        ip_adapter_image: Any = None,
        ip_adapter_image_embeds: Any = None,
        return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 256,
        mu: float | None = None,
    ) -> StableDiffusion3PipelineOutput | tuple[Any]:
        """Draw pictures after a picture.

        All arguments that are not listed are those of `StableDiffusion3Pipeline`.

        Args:
            height: in pixels; the picture is brought to it. What the transformer was trained on by default.
            width: likewise.
            image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them.
            strength: from 0 to 1, how far to go from the picture. Only this share of the steps is taken, rounded up.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.
            latents: noisy latents to start from in place of those of `image`.

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
            FromImage(image, strength, size=(height, width), latents=latents),
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
