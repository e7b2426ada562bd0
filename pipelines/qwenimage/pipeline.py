"""`QwenImagePipeline`: text to image."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.logging import get_logger
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call, PictureOutput
from ..tasks import FromNoise
from .base import QwenImageBase
from .prompts import Prompts

logger = get_logger(__name__)


class QwenImagePipeline(QwenImageBase):
    """From a prompt to pictures with Qwen-Image, a flow over latents that a language model's states condition.

    Wu et al. 2025, arXiv 2508.02324.
    """

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        true_cfg_scale: float = 4.0,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds_mask: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 512,
    ) -> PictureOutput | tuple[Any]:
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            negative_prompt: what not to draw: one text for all prompts, or one for each. Without one, " " at least,
                there is no guidance.
            true_cfg_scale: how far to go from the negative prompt to the prompt; at 1 and below there is no guidance.
            height: in pixels, a multiple of twice `vae_scale_factor`; 128 times `vae_scale_factor` by default.
            width: likewise.
            num_inference_steps: more take longer and give better pictures.
            sigmas: noise levels to take, falling from 1, before they are shifted; evenly spaced by default.
            guidance_scale: not used: no published model was distilled with guidance.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: packed noise to start from, (pictures, tokens, channels).
            prompt_embeds, prompt_embeds_mask: what `encode_prompt` made, in place of `prompt`.
            negative_prompt_embeds, negative_prompt_embeds_mask: likewise, in place of `negative_prompt`.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (packed latents).
            return_dict: return an output object rather than the tuple `(images,)`.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            max_sequence_length: tokens for each prompt, from 1 to 1024; what is longer is cut, and said in
                `truncated_prompts`.

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
            prompt_embeds_mask,
            negative_prompt_embeds_mask,
            max_sequence_length,
        )
        if guidance_scale is not None:
            logger.warning("guidance_scale=%s has no effect with this model; see true_cfg_scale", guidance_scale)
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
            state={
                "guidance_scale": 1.0,
                # Guidance needs something to be guided away from.
                "true_cfg_scale": true_cfg_scale if prompts.negative else 1.0,
                "attention_kwargs": attention_kwargs,
            },
        )
        return self._draw(call)
