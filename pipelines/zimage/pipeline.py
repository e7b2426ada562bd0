"""`ZImagePipeline`: text to image."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call
from ..tasks import FromNoise
from .base import ZImageBase
from .prompts import LONGEST_TEXT, Embeds, Prompts, ZImagePipelineOutput


class ZImagePipeline(ZImageBase):
    """From a prompt to pictures with Z-Image (Z-Image team 2025, arXiv 2511.22699)."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 5.0,
        cfg_normalization: bool | float = False,
        cfg_truncation: float = 1.0,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: Embeds | None = None,
        negative_prompt_embeds: Embeds | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = LONGEST_TEXT,
    ) -> ZImagePipelineOutput | tuple[Any]:
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            height: in pixels, a multiple of `size_multiple`; 1024 by default.
            width: likewise.
            num_inference_steps: 50 for Z-Image, 8 for Z-Image-Turbo.
            sigmas: noise levels to take, falling from 1, before they are shifted; evenly spaced by default.
            guidance_scale: how far to go on from the negative prompt beyond the prompt; 0 for no guidance, as
                Z-Image-Turbo needs it. Other pipelines count from the negative prompt on, so this one is less by 1.
            cfg_normalization: with True or 1.0 the guided prediction is no longer than the one with the prompt, with
                other numbers that many times as long; False leaves it as it is.
            cfg_truncation: from 0 to 1, the share of the flow after which guidance ends.
            negative_prompt: what not to draw: one text for all prompts, or one for each. Without guidance it is unused.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: noise to start from, shape (pictures, channels, height / scale, width / scale).
            prompt_embeds: what `encode_prompt` made, in place of `prompt`: a tensor (tokens, size) for each prompt.
            negative_prompt_embeds: likewise, in place of `negative_prompt`.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(images,)`.
            joint_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            max_sequence_length: tokens for each prompt with its chat, from 1 to 512; what is longer is cut, and said
                in `truncated_prompts`.

        Raises:
            TypeError: for an argument of the wrong kind.
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
            NumericalError: if a model gives values that are not finite.
        """
        texts = (prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        call = Call(
            Prompts(*texts, num_images_per_prompt, max_sequence_length),
            FromNoise(height, width, latents),
            num_inference_steps,
            sigmas=sigmas,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={
                "guidance_scale": guidance_scale,
                "cfg_normalization": cfg_normalization,
                "cfg_truncation": cfg_truncation,
                "joint_attention_kwargs": joint_attention_kwargs,
                "guided_steps": None,
            },
        )
        return self._draw(call)
