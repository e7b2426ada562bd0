"""`StableDiffusionInpaintPipeline`: repaint the masked part of a picture after a prompt."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.images import ImageInput, VaeImageProcessor
from diffusion_core.randomness import Generators, randn_tensor

from ...models.autoencoders.asymmetric import AsymmetricAutoencoderKL
from ..callbacks import Callback
from ..latents import check_latents, encode_image, spread
from ..loop import Steps, check_share, plan_steps
from .base import Prompts, StableDiffusionBase, Tensors
from .canvas import Canvas, check_crop, make_canvas
from .output import StableDiffusionPipelineOutput


class StableDiffusionInpaintPipeline(StableDiffusionBase):
    """Repaints the part of a picture that is white in a mask.

    A UNet that was trained for it sees the mask and what surrounds it (9 input channels, for 4 of latents). For any
    other one, what lies outside of the mask is put back after every step, noised to its level (Lugmayr et al. 2022,
    arXiv 2201.09865, equation 8, without resampling).
    """

    _callback_tensor_inputs: ClassVar[list[str]] = [
        *StableDiffusionBase._callback_tensor_inputs,
        "mask",
        "masked_image_latents",
    ]
    _scheduler_settings: ClassVar[dict[str, Any]] = {
        **StableDiffusionBase._scheduler_settings,
        "skip_prk_steps": True,
    }

    @property
    def mask_processor(self) -> VaeImageProcessor:
        """Brings masks to the picture's size and to 0 and 1."""
        return VaeImageProcessor(
            vae_scale_factor=self.vae_scale_factor,
            vae_latent_channels=0,
            do_normalize=False,
            do_binarize=True,
            do_convert_grayscale=True,
        )

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        masked_image_latents: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 1.0,
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
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        long_prompt: str = "truncate",
    ) -> StableDiffusionPipelineOutput | tuple[Any, list[bool] | None]:
        """Repaint pictures.

        All arguments that are not listed are those of `StableDiffusionPipeline`.

        Args:
            prompt: what to paint, one text or several.
            image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them.
            mask_image: one mask for all, or one for each prompt; what is one half or lighter is painted.
            masked_image_latents: latents of the picture without the masked part, for UNets that see them; made of
                `image` by default.
            height: in pixels; the picture is brought to it. What the UNet was trained on by default.
            width: likewise.
            padding_mask_crop: enlarge the masked part with this many pixels around it, paint it at full size, and put
                it back into the picture. Takes one PIL image and mask, and gives PIL images.
            strength: from 0 to 1, how far to go from what was there; at 1 nothing of it shows.
            latents: noise to use, shape (pictures, channels, height / scale, width / scale).

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
        sees_mask = self._sees_mask()
        if padding_mask_crop is not None:
            check_crop(padding_mask_crop, image, mask_image, output_type)
        height, width = self._size(height, width)
        processors = (self.image_processor, self.mask_processor)
        canvas = make_canvas(processors, image, mask_image, height, width, padding_mask_crop, prompts.count(), batch)
        self._check_latents(canvas, latents, masked_image_latents, sees_mask)
        state = {"guidance_scale": guidance_scale, "guidance_rescale": 0.0, "clip_skip": clip_skip}
        with self.run(**state, num_timesteps=0) as run:
            device = self._execution_device
            steps = plan_steps(
                self.scheduler, num_inference_steps, device, timesteps=timesteps, sigmas=sigmas, strength=strength
            )
            tensors, truncated = self._text_tensors(prompts)
            whole = strength == 1.0
            clean = None if whole and sees_mask else self._image_latents(canvas, generator)
            shape = (batch, self.latent_channels, *canvas.size)
            noise = latents
            if noise is None:
                noise = randn_tensor(shape, generator=generator, device=device, dtype=self.unet.dtype)
            noise = noise.to(device, self.unet.dtype)
            if whole or clean is None:
                tensors["latents"] = noise * steps.scheduler.init_noise_sigma
            else:
                tensors["latents"] = steps.scheduler.add_noise(clean, noise, steps.timesteps[:1])
            tensors |= self._mask_tensors(canvas, masked_image_latents, generator)
            result = self._denoise(
                run,
                steps,
                tensors,
                callback,
                eta=eta,
                generator=generator,
                extend=_mask_channels if sees_mask else None,
                blend=None if sees_mask else _keep_outside(steps, clean, noise),
            )
            images, flagged = self._decode(result, output_type, generator, **self._conditions(canvas))
        if canvas.crop is not None:
            overlay: Any = self.image_processor.apply_overlay
            images = [overlay(mask_image, image, one, canvas.crop) for one in images]
        return self._result(images, flagged, truncated, return_dict)

    def _sees_mask(self) -> bool:
        """Whether the UNet takes mask and surroundings as input."""
        channels, latent = self.unet.config.in_channels, self.latent_channels
        if channels not in (latent, 2 * latent + 1):
            raise ValueError(
                f"the UNet has {channels} input channels; inpainting needs {latent}, or {2 * latent + 1} for latents, "
                f"mask and masked image"
            )
        return channels != latent

    def _check_latents(
        self,
        canvas: Canvas,
        latents: torch.Tensor | None,
        masked_image_latents: torch.Tensor | None,
        sees_mask: bool,
    ) -> None:
        """Refuse latents that do not fit the size, and a call that needs an autoencoder which is absent."""
        shape = (self.latent_channels, *canvas.size)
        if latents is not None:
            check_latents(latents, (canvas.batch, *shape))
        if masked_image_latents is not None:
            if not isinstance(masked_image_latents, torch.Tensor):
                raise TypeError(f"masked_image_latents must be a tensor, not {type(masked_image_latents).__name__}")
            canvas.for_each(masked_image_latents, "masked_image_latents")
            check_latents(masked_image_latents, (len(masked_image_latents), *shape), "masked_image_latents")
        if canvas.pixels.shape[1] != self.latent_channels:
            self._check_present("vae", remedy="pass latents as image, and masked_image_latents")
            return
        check_latents(canvas.pixels, (len(canvas.pixels), *shape), "image")
        if sees_mask and masked_image_latents is None:
            raise ValueError("image holds latents, which cannot be masked: pass masked_image_latents too")

    def _image_latents(self, canvas: Canvas, generator: Generators | None) -> torch.Tensor:
        """The latents of the pictures, one for each that is drawn."""
        pixels = canvas.pixels
        if pixels.shape[1] != self.latent_channels:
            pixels = self._encoded(pixels, canvas, generator)
        return canvas.for_each(pixels, "image").to(self._execution_device, self.unet.dtype)

    def _mask_tensors(
        self, canvas: Canvas, masked_image_latents: torch.Tensor | None, generator: Generators | None
    ) -> Tensors:
        """The mask at the size of latents, and the latents of what it leaves."""
        mask = torch.nn.functional.interpolate(canvas.mask, size=canvas.size)
        surroundings = masked_image_latents
        if surroundings is None and canvas.pixels.shape[1] != self.latent_channels:
            # Made even where the UNet does not see it: callbacks may, and the generator moves on alike in both cases.
            length = max(len(canvas.pixels), len(canvas.mask))
            kept = spread(canvas.mask, canvas.count, length, "mask_image") < 0.5
            surroundings = self._encoded(spread(canvas.pixels, canvas.count, length, "image") * kept, canvas, generator)
        tensors = {"mask": mask, "masked_image_latents": surroundings}
        placed = {"device": self._execution_device, "dtype": self.unet.dtype}
        return {
            name: None if value is None else canvas.for_each(value, name).to(**placed)
            for name, value in tensors.items()
        }

    def _encoded(self, pixels: torch.Tensor, canvas: Canvas, generator: Generators | None) -> torch.Tensor:
        """The latents of pictures; with a generator for each one that is drawn, also one picture for each."""
        if isinstance(generator, list):
            pixels = canvas.for_each(pixels, "image")
        return encode_image(self.vae, pixels.to(self._execution_device), generator=generator)

    def _conditions(self, canvas: Canvas) -> Tensors:
        """What a decoder that keeps the surroundings wants to see of them."""
        if not isinstance(self.vae, AsymmetricAutoencoderKL) or canvas.pixels.shape[1] == self.latent_channels:
            return {}
        tensors = {"image": canvas.pixels, "mask": canvas.mask}
        device = self._execution_device
        return {name: canvas.for_each(value, name).to(device) for name, value in tensors.items()}


def _mask_channels(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors["mask"], tensors["masked_image_latents"]]


def _keep_outside(steps: Steps, clean: torch.Tensor | None, noise: torch.Tensor) -> Callable[[int, Tensors], Any]:
    """After a step, put back what lies outside of the mask, at the noise level that the next step starts from."""

    def blend(index: int, tensors: Tensors) -> torch.Tensor:
        kept = clean
        if index + 1 < len(steps):
            kept = steps.scheduler.add_noise(clean, noise, steps.timesteps[index + 1 : index + 2])
        mask = tensors["mask"]
        return (1 - mask) * kept + mask * tensors["latents"]

    return blend
