"""`StableDiffusionPipeline`: text to image."""

from collections.abc import Sequence
from typing import Any

import torch

from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..latents import check_latents, start_latents
from ..loop import check_share, plan_steps
from .base import Prompts, StableDiffusionBase
from .output import StableDiffusionPipelineOutput


class StableDiffusionPipeline(StableDiffusionBase):
    """From a prompt to pictures with latent diffusion (Rombach et al. 2022, arXiv 2112.10752)."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
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
        guidance_rescale: float = 0.0,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
    ) -> StableDiffusionPipelineOutput | tuple[Any, list[bool] | None]:
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            height: in pixels, a multiple of `vae_scale_factor`; what the UNet was trained on by default.
            width: likewise.
            num_inference_steps: more take longer and give better pictures.
            timesteps: the timesteps to take, falling, in place of the scheduler's choice.
            sigmas: noise levels to take, falling, in place of timesteps.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            negative_prompt: what not to draw: one text for all prompts, or one for each. Without guidance it is unused.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            eta: share of random noise in DDIM's steps, from 0 to 1.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: noise to start from, shape (pictures, channels, height / scale, width / scale).
            prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            negative_prompt_embeds: likewise, in place of `negative_prompt`.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(images, nsfw_content_detected)`.
            guidance_rescale: from 0 to 1, against overexposure at high guidance (arXiv 2305.08891, section 3.4).
            clip_skip: how many of the text encoder's last layers are left out.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            long_prompt: "truncate" cuts prompts that the text encoder does not take at once, and says so in
                `truncated_prompts`; "chunk" encodes them in parts.

        Raises:
            TypeError: for an argument of the wrong kind.
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
            NumericalError: if a model gives values that are not finite.
        """
        callback = self.step_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt=num_images_per_prompt,
            clip_skip=clip_skip,
            long_prompt=long_prompt,
        )
        batch = self._check(prompts, guidance_scale, eta, output_type, generator)
        check_share("guidance_rescale", guidance_rescale)
        shape = self._latent_shape(batch, height, width, latents)
        state = {"guidance_scale": guidance_scale, "guidance_rescale": guidance_rescale, "clip_skip": clip_skip}
        with self.run(**state, num_timesteps=0) as run:
            device = self._execution_device
            steps = plan_steps(self.scheduler, num_inference_steps, device, timesteps=timesteps, sigmas=sigmas)
            tensors, truncated = self._text_tensors(prompts)
            tensors["latents"] = start_latents(
                shape,
                steps.scheduler.init_noise_sigma,
                generator=generator,
                device=device,
                dtype=self.unet.dtype,
                latents=latents,
            )
            result = self._denoise(run, steps, tensors, callback, eta=eta, generator=generator)
            images, flagged = self._decode(result, output_type, generator)
        return self._result(images, flagged, truncated, return_dict)

    def _latent_shape(
        self, batch: int, height: int | None, width: int | None, latents: torch.Tensor | None
    ) -> tuple[int, int, int, int]:
        """The shape of the latents for a picture size, which `latents` must have if they are given."""
        height, width = self._size(height, width, latents)
        factor = self.vae_scale_factor
        shape = (batch, self.latent_channels, height // factor, width // factor)
        if latents is not None:
            check_latents(latents, shape)
        return shape
