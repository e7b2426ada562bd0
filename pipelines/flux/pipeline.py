"""`FluxPipeline`: text to image."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.randomness import Generators

from ..arguments import refuse_adapters
from ..callbacks import Callback
from ..picture import Call
from ..tasks import FromNoise
from .base import LONGEST_TEXT, FluxAdapterBase, Prompts
from .output import FluxPipelineOutput


class FluxPipeline(FluxAdapterBase):
    """From a prompt to pictures with FLUX.1 (Black Forest Labs 2024), a flow over latents (Esser et al. 2024)."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        true_cfg_scale: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 28,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 3.5,
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
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            prompt_2: what T5 is told, if it is something else.
            negative_prompt: what not to draw: one text for all prompts, or one for each. It counts with
                `true_cfg_scale` above 1, and makes each step take twice as long.
            negative_prompt_2: what T5 is told of it, if it is something else.
            true_cfg_scale: how far to go from the negative prompt to the prompt; at 1 and below there is no such
                guidance.
            height: in pixels, a multiple of twice `vae_scale_factor`; 128 times `vae_scale_factor` by default.
            width: likewise.
            num_inference_steps: 28 for FLUX.1-dev, 4 for FLUX.1-schnell.
            sigmas: noise levels to take, falling from 1, before they are shifted; evenly spaced by default.
            guidance_scale: how closely the prompt is followed, told to models that were distilled with guidance
                (FLUX.1-dev); others take none.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: packed noise to start from, (pictures, tokens, channels).
            prompt_embeds, pooled_prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            ip_adapter_image, ip_adapter_image_embeds, negative_ip_adapter_image, negative_ip_adapter_image_embeds: must
                be None, as no adapter is loaded.
            negative_prompt_embeds, negative_pooled_prompt_embeds: likewise, in place of `negative_prompt`.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (packed latents).
            return_dict: return an output object rather than the tuple `(images,)`.
            joint_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            max_sequence_length: tokens that T5 sees of a prompt, from 1 to 512; FLUX.1-schnell was trained with 256.

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
            prompt_2=prompt_2,
            negative_prompt_2=negative_prompt_2,
            pooled_prompt_embeds=pooled_prompt_embeds,
            negative_pooled_prompt_embeds=negative_pooled_prompt_embeds,
            max_sequence_length=max_sequence_length,
        )
        call = Call(
            prompts,
            FromNoise(height, width, latents),
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
