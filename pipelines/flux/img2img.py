"""`FluxImg2ImgPipeline`: a picture and a prompt to a picture."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..arguments import refuse_adapters
from ..callbacks import Callback
from ..latents import check_latents
from ..loop import Steps
from ..picture import Call
from ..tasks import FromImage
from .base import LONGEST_TEXT, FluxAdapterBase, Prompts
from .output import FluxPipelineOutput

if TYPE_CHECKING:
    from ..picture import PicturePipeline


class FromImageOrLatents(FromImage):
    """`FromImage`, or from packed latents that carry the noise of the first step already."""

    def __init__(
        self,
        image: "ImageInput | None",
        strength: float,
        size: tuple[int | None, int | None],
        latents: torch.Tensor | None,
    ) -> None:
        super().__init__(image, strength, size=size)
        self.latents = latents

    def prepare(self, pipe: "PicturePipeline", call: Call, batch: int) -> None:
        super().prepare(pipe, call, batch)
        if self.latents is not None:
            check_latents(self.latents, pipe._packed_shape(pipe._latent_shape(batch, self.height, self.width)))

    def start(self, pipe: "PicturePipeline", steps: Steps) -> dict[str, Any]:
        return super().start(pipe, steps) if self.latents is None else {"latents": self._noise(pipe, self.latents)}


class FluxImg2ImgPipeline(FluxAdapterBase):
    """Takes a picture part of the way to noise and denoises it with a prompt (SDEdit, Meng et al. 2021, 2108.01073)."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        true_cfg_scale: float = 1.0,
        image: "ImageInput | None" = None,
        height: int | None = None,
        width: int | None = None,
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
        """Draw pictures after a picture.

        All arguments that are not listed are those of `FluxPipeline`.

        Args:
            image: one picture for all, or one for each prompt; or latents (N, C, h, w) before they are packed.
            height: in pixels; the picture is brought to it. 128 times `vae_scale_factor` by default.
            width: likewise.
            strength: from 0 to 1, how far to go from the picture. Only this share of the steps is taken, rounded up.
            num_inference_steps: the steps of the whole way, of which `strength` takes its share.
            latents: packed latents to start from in place of the noised picture.

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
        call = Call(
            prompts,
            FromImageOrLatents(image, strength, (height, width), latents),
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
