"""`StableDiffusionImg2ImgPipeline`: a picture and a prompt to a picture."""

from collections.abc import Sequence
from typing import Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators, randn_tensor

from ..callbacks import Callback
from ..latents import encode_image, spread
from ..loop import check_share, plan_steps
from .base import Prompts, StableDiffusionBase
from .output import StableDiffusionPipelineOutput


class StableDiffusionImg2ImgPipeline(StableDiffusionBase):
    """Takes a picture part of the way to noise and denoises it with a prompt (SDEdit, Meng et al. 2021, 2108.01073)."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        strength: float = 0.8,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.5,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generators | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
    ) -> StableDiffusionPipelineOutput | tuple[Any, list[bool] | None]:
        """Draw pictures after a picture.

        All arguments that are not listed are those of `StableDiffusionPipeline`.

        Args:
            prompt: what to draw, one text or several.
            image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them. Sizes
                are rounded down to multiples of `vae_scale_factor`.
            strength: from 0 to 1, how far to go from the picture. Only this share of the steps is taken; at 1 the
                picture still shows through in schedules that do not end in pure noise.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
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
        check_share("strength", strength)
        pixels = self._pixels(image, prompts.count(), batch)
        state = {"guidance_scale": guidance_scale, "guidance_rescale": 0.0, "clip_skip": clip_skip}
        with self.run(**state, num_timesteps=0) as run:
            device = self._execution_device
            steps = plan_steps(
                self.scheduler, num_inference_steps, device, timesteps=timesteps, sigmas=sigmas, strength=strength
            )
            tensors, truncated = self._text_tensors(prompts)
            clean = self._image_latents(pixels, prompts.count(), batch, generator)
            noise = randn_tensor(clean.shape, generator=generator, device=device, dtype=clean.dtype)
            tensors["latents"] = steps.scheduler.add_noise(clean, noise, steps.timesteps[:1])
            result = self._denoise(run, steps, tensors, callback, eta=eta, generator=generator)
            images, flagged = self._decode(result, output_type, generator)
        return self._result(images, flagged, truncated, return_dict)

    def _pixels(self, image: "ImageInput | None", count: int, batch: int) -> torch.Tensor:
        """The pictures as a tensor, checked to go with `count` prompts."""
        if image is None:
            raise ValueError("image is missing: pass the picture to start from")
        pixels = self.image_processor.preprocess(image)
        spread(pixels, count, batch, "image")
        if pixels.shape[1] != self.latent_channels:
            self._check_present("vae", remedy="pass latents as image")
        return pixels

    def _image_latents(
        self, pixels: torch.Tensor, count: int, batch: int, generator: Generators | None
    ) -> torch.Tensor:
        """The latents of the pictures, one for each that is drawn."""
        pixels = pixels.to(self._execution_device)
        if isinstance(generator, list):
            # Each picture has its own random numbers, so also those of the encoder.
            pixels = spread(pixels, count, batch, "image")
        if pixels.shape[1] != self.latent_channels:
            pixels = encode_image(self.vae, pixels, generator=generator)
        return spread(pixels, count, batch, "image").to(self.unet.dtype)
