"""`FluxInpaintPipeline`: repaint the masked part of a picture after a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..arguments import refuse_adapters
from ..callbacks import Callback
from ..picture import Call
from ..tasks import Inpaint
from .base import LONGEST_TEXT, FluxAdapterBase, Prompts
from .output import FluxPipelineOutput


class FluxInpaintPipeline(FluxAdapterBase):
    """Repaints the part of a picture that is white in a mask, with a model that was trained for text to image.

    What lies outside of the mask is put back after every step, noised to its level (Lugmayr et al. 2022, arXiv
    2201.09865, equation 8, without resampling). `FluxFillPipeline` is for models that were trained to see the mask.
    """

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        true_cfg_scale: float = 1.0,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        masked_image_latents: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 0.6,
        num_inference_steps: int = 28,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.0,
        num_images_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        ip_adapter_image: Any = None,
        ip_adapter_image_embeds: Any = None,
        negative_ip_adapter_image: Any = None,
        negative_ip_adapter_image_embeds: Any = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = LONGEST_TEXT,
    ) -> FluxPipelineOutput | tuple[Any]:
        """Repaint pictures.

        All arguments that are not listed are those of `FluxPipeline`.

        Args:
            image: one picture for all, or one for each prompt; or latents (N, C, h, w) before they are packed.
            mask_image: one mask for all, or one for each prompt; what is one half or lighter is painted.
            masked_image_latents: latents (N, C, h, w) of the picture without the masked part. The transformer does not
                see them; callbacks of subclasses may.
            height: in pixels; the picture is brought to it. 128 times `vae_scale_factor` by default.
            width: likewise.
            padding_mask_crop: enlarge the masked part with this many pixels around it, paint it at full size, and put
                it back into the picture. Takes one PIL image and mask, and gives PIL images.
            strength: from 0 to 1, how far to go from what was there; at 1 nothing of it shows.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.
            latents: packed noise to use.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
        """
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            prompt_2=prompt_2,
            negative_prompt_2=negative_prompt_2,
            pooled_prompt_embeds=pooled_prompt_embeds,
            negative_pooled_prompt_embeds=negative_pooled_prompt_embeds,
            max_sequence_length=max_sequence_length,
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
        # A flow may be entered below its full noise, by `sigmas`; then the picture shows even if all steps are taken.
        task.whole = False
        call = Call(
            prompts,
            task,
            num_inference_steps,
            sigmas=sigmas,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state=self._state(prompts, guidance_scale, true_cfg_scale, joint_attention_kwargs),
        )
        refuse_adapters(
            ip_adapter_image=ip_adapter_image,
            ip_adapter_image_embeds=ip_adapter_image_embeds,
            negative_ip_adapter_image=negative_ip_adapter_image,
            negative_ip_adapter_image_embeds=negative_ip_adapter_image_embeds,
        )
        return self._draw(call)
