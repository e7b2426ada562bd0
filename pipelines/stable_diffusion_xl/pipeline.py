"""`StableDiffusionXLPipeline`: text to image."""

from collections.abc import Sequence
from typing import Any

import torch

from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..tasks import FromNoise
from .base import Conditions, Size, StableDiffusionXLBase, XLCall
from .output import StableDiffusionXLPipelineOutput
from .prompts import Prompts


class StableDiffusionXLPipeline(StableDiffusionXLBase):
    """From a prompt to pictures with latent diffusion at about 1024 pixels (Podell et al. 2023, arXiv 2307.01952)."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
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
        guidance_rescale: float = 0.0,
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
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            prompt_2: what the second text encoder reads, if it is something else.
            height: in pixels, a multiple of `vae_scale_factor`; what the UNet was trained on by default.
            width: likewise.
            num_inference_steps: more take longer and give better pictures.
            timesteps: the timesteps to take, falling, in place of the scheduler's choice.
            sigmas: noise levels to take, falling, in place of timesteps.
            denoising_end: from 0 to 1, after which share of the way to stop, for a refiner to go on from
                `output_type="latent"` with the same `denoising_start`.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            negative_prompt: what not to draw: one text for all prompts, or one for each. Without guidance it is unused.
            negative_prompt_2: what the second text encoder reads, if it is something else.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            eta: share of random noise in DDIM's steps, from 0 to 1.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: noise to start from, shape (pictures, channels, height / scale, width / scale).
            prompt_embeds, pooled_prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            negative_prompt_embeds, negative_pooled_prompt_embeds: likewise, in place of `negative_prompt`.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(images,)`.
            guidance_rescale: from 0 to 1, against overexposure at high guidance (arXiv 2305.08891, section 3.4).
            original_size, crops_coords_top_left, target_size: what the UNet is told about sizes, as (height, width)
                and (top, left) in pixels; the picture's own size, uncropped, by default.
            negative_original_size, negative_crops_coords_top_left, negative_target_size: the same for the prediction
                without the prompt. If all are left out, it is told what the other one is.
            clip_skip: how many of the text encoders' layers before the last but one are left out.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            long_prompt: "truncate" cuts prompts that the text encoders do not take at once, and says so in
                `truncated_prompts`; "chunk" encodes them in parts.
            kwargs: `callback` and `callback_steps`, callbacks of the older form `f(step, timestep, latents)`, which are
                called after every so many steps; and arguments of adapters, which must be None.

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
            long_prompt,
        )
        conditions = Conditions(
            original_size,
            crops_coords_top_left,
            target_size,
            negative_original_size,
            negative_crops_coords_top_left,
            negative_target_size,
            keeps_crops=False,
        )
        call = XLCall(
            prompts,
            FromNoise(height, width, latents),
            num_inference_steps,
            timesteps,
            sigmas,
            eta,
            generator,
            output_type,
            return_dict,
            callback_on_step_end,
            callback_on_step_end_tensor_inputs,
            {"guidance_scale": guidance_scale, "guidance_rescale": guidance_rescale, "clip_skip": clip_skip},
            conditions=conditions,
            denoising_end=denoising_end,
            kwargs=kwargs,
        )
        return self._draw(call)
