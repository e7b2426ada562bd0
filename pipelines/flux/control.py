"""`FluxControlPipeline`: a prompt and a picture of edges or depths to a picture."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..latents import spread
from ..loop import Steps
from ..picture import Call, Tensors
from ..tasks import FromNoise
from .base import LONGEST_TEXT, FluxBase, Prompts
from .output import FluxPipelineOutput

if TYPE_CHECKING:
    from ..picture import PicturePipeline


class UnderControl(FromNoise):
    """`FromNoise`, with a picture to follow."""

    def __init__(
        self,
        control_image: "ImageInput | None",
        height: int | None,
        width: int | None,
        latents: torch.Tensor | None = None,
    ) -> None:
        super().__init__(height, width, latents)
        self.control_image = control_image

    def prepare(self, pipe: "PicturePipeline", call: Call, batch: int) -> None:
        super().prepare(pipe, call, batch)
        self.pixels = self._read(pipe, self.control_image)

    def _read(self, pipe: "PicturePipeline", image: Any) -> torch.Tensor:
        """A picture as a tensor, one for each that is drawn."""
        if image is None:
            raise ValueError("control_image is missing: pass the picture of edges or depths to follow")
        pixels = pipe.image_processor.preprocess(image, self.height, self.width)
        # One for each that is drawn, each with random numbers of its own in the encoder.
        pixels = spread(pixels, self.count, self.batch, "control_image")
        if pixels.shape[1] != pipe.latent_channels:
            pipe._check_present("vae", remedy="pass latents as control_image")
        return pixels

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        control = self._image_latents(pipe, self.pixels)
        return {"control_image": control, **super().start(pipe, steps)}


class FluxControlPipeline(FluxBase):
    """Draws pictures that follow edges (FLUX.1-Canny) or depths (FLUX.1-Depth), which the model is shown."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        control_image: "ImageInput | None" = None,
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
        output_type: str | None = "pil",
        return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = LONGEST_TEXT,
    ) -> FluxPipelineOutput | tuple[Any]:
        """Draw pictures that follow a picture.

        All arguments that are not listed are those of `FluxPipeline`.

        Args:
            control_image: one picture for all, or one for each prompt; brought to `height` and `width`.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
        """
        prompts = Prompts(
            prompt,
            prompt_embeds=prompt_embeds,
            num_images_per_prompt=num_images_per_prompt,
            prompt_2=prompt_2,
            pooled_prompt_embeds=pooled_prompt_embeds,
            max_sequence_length=max_sequence_length,
        )
        call = Call(
            prompts,
            UnderControl(control_image, height, width, latents),
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
        return 4 * self.latent_channels

    def _shown(self, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return torch.cat([sample, tensors["control_image"]], dim=2)
