"""`FluxFillPipeline`: repaint the masked part of a picture with a model that sees mask and picture."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..latents import check_latents
from ..loop import Steps, check_share
from ..picture import Call, Tensors
from ..tasks import Inpaint
from .base import LONGEST_TEXT, FluxBase, Prompts
from .output import FluxPipelineOutput

if TYPE_CHECKING:
    from ..picture import PicturePipeline


class Fill(Inpaint):
    """`Inpaint` for a transformer that is shown the masked picture's latents and every pixel of the mask.

    `masked_image_latents` stands for both, packed and joined, in place of `image` and `mask_image`.
    """

    def prepare(self, pipe: "PicturePipeline", call: Call, batch: int) -> None:
        if self.surroundings is None:
            super().prepare(pipe, call, batch)
            return
        if self.image is not None or self.mask_image is not None:
            raise ValueError("masked_image_latents stands for image and mask_image: pass either it or them")
        if not self.whole:
            raise ValueError(
                f"strength={self.strength} needs the image to start from, but masked_image_latents is given"
            )
        self.count, self.batch, self.generator = call.prompts.count(), batch, call.generator
        self.height, self.width = pipe._size(*self.asked)
        count, tokens, channels = pipe._packed_shape(pipe._latent_shape(batch, self.height, self.width))
        if self.latents is not None:
            check_latents(self.latents, (count, tokens, channels))
        check_latents(
            self.surroundings, (count, tokens, pipe.denoiser.config.in_channels - channels), "masked_image_latents"
        )

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        if self.surroundings is not None:
            noise = self._noise(pipe, self.latents)
            return {"latents": noise, "masked_image_latents": self.surroundings.to(noise)}
        clean = self._image_latents(pipe, self.canvas.pixels)
        noise = self._noise(pipe, self.latents)
        return {"latents": steps.scheduler.add_noise(clean, noise, steps.timesteps[:1]), **self._mask_tensors(pipe)}

    def _mask_tensors(self, pipe: "PicturePipeline") -> Tensors:
        pixels, canvas = super()._mask_tensors(pipe), self.canvas
        # A latent stands for a square of pixels, each with its own mask, as channels.
        mask = F.pixel_unshuffle(canvas.for_each(canvas.mask, "mask_image"), pipe.vae_scale_factor)
        surroundings = pixels["masked_image_latents"]
        return {"masked_image_latents": torch.cat([surroundings, pipe._pack(mask).to(surroundings)], dim=-1)}

    def channels(self, tensors: Tensors) -> list[torch.Tensor]:
        return []

    def blend(self, steps: Steps, index: int, tensors: Tensors) -> torch.Tensor:
        return tensors["latents"]

    def conditions(self, pipe: "PicturePipeline") -> Tensors:
        return {}

    def finish(self, pipe: "PicturePipeline", images: Any) -> Any:
        return images


class FluxFillPipeline(FluxBase):
    """Repaints or extends pictures with FLUX.1-Fill, which sees the mask and what surrounds it."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        image: "ImageInput | None" = None,
        mask_image: "ImageInput | None" = None,
        masked_image_latents: torch.Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        strength: float = 1.0,
        num_inference_steps: int = 50,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 30.0,
        num_images_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
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
            image: one picture for all, or one for each prompt.
            mask_image: one mask for all, or one for each prompt; what is one half or lighter is painted.
            masked_image_latents: packed latents of the masked picture with the packed mask behind them, (pictures,
                tokens, channels), in place of `image` and `mask_image`.
            height: in pixels; the picture is brought to it. 128 times `vae_scale_factor` by default.
            width: likewise.
            strength: from 0 to 1, how far to go from what was there; at 1 nothing of it shows under the mask.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.
            latents: packed noise to use.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
        """
        check_share("strength", strength)
        prompts = Prompts(
            prompt,
            prompt_embeds=prompt_embeds,
            num_images_per_prompt=num_images_per_prompt,
            prompt_2=prompt_2,
            pooled_prompt_embeds=pooled_prompt_embeds,
            max_sequence_length=max_sequence_length,
        )
        task = Fill(
            image, mask_image, masked_image_latents, height=height, width=width, strength=strength, latents=latents
        )
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
            state=self._state(prompts, guidance_scale, kwargs=joint_attention_kwargs),
        )
        return self._draw(call)

    @property
    def _condition_channels(self) -> int:
        return 4 * (self.latent_channels + self.vae_scale_factor**2)

    def _sees_mask(self) -> bool:
        return True

    def _shown(self, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return torch.cat([sample, tensors["masked_image_latents"]], dim=2)
