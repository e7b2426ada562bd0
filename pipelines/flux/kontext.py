"""`FluxKontextPipeline`: edit a picture as a prompt says."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..arguments import refuse_adapters
from ..callbacks import Callback
from ..latents import encode_image, spread
from ..loop import Steps, check_count
from ..picture import Call, Tensors
from ..tasks import FromNoise
from .base import LONGEST_TEXT, FluxAdapterBase, Prompts, token_ids
from .output import FluxPipelineOutput

if TYPE_CHECKING:
    from ..picture import PicturePipeline

# Width and height that the model was trained with; pictures to edit are brought to the nearest in shape.
TRAINED_SIZES = [
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
]


class Edit(FromNoise):
    """`FromNoise`, beside a picture to edit.

    Args:
        image: one picture for all, or one for each prompt; None draws from the prompt alone.
        height: with `width` the shape of the result.
        width: likewise.
        latents: packed noise to start from.
        max_area: pixels of the result.
        auto_resize: bring `image` to one of `TRAINED_SIZES`; else its own size is rounded down.
    """

    def __init__(
        self,
        image: "ImageInput | None",
        height: int | None,
        width: int | None,
        latents: torch.Tensor | None,
        max_area: int,
        auto_resize: bool,
    ) -> None:
        super().__init__(height, width, latents)
        self.image, self.max_area, self.auto_resize = image, max_area, auto_resize
        self.pixels: torch.Tensor | None = None

    def prepare(self, pipe: "PicturePipeline", call: Call, batch: int) -> None:
        check_count("max_area", self.max_area)
        height, width = pipe._size(*self.asked)
        shape, multiple = width / height, pipe.size_multiple
        self.asked = tuple(
            max(round((self.max_area * ratio) ** 0.5) // multiple, 1) * multiple for ratio in (1 / shape, shape)
        )
        super().prepare(pipe, call, batch)
        if self.image is None:
            return
        processor = pipe.image_processor
        self.pixels = pixels = processor.preprocess(self.image, *self._image_size(pipe))
        spread(pixels, self.count, batch, "image")
        if pixels.shape[1] != pipe.latent_channels:
            pipe._check_present("vae", remedy="pass latents as image")

    def _image_size(self, pipe: "PicturePipeline") -> tuple[int, int]:
        """Height and width to bring the picture to."""
        first: Any = self.image[0] if isinstance(self.image, list | tuple) else self.image
        height, width = pipe.image_processor.get_default_height_width(first)
        if not self.auto_resize or not height:
            return height, width
        shape, multiple = width / height, pipe.size_multiple
        width, height = min(TRAINED_SIZES, key=lambda size: (abs(shape - size[0] / size[1]), size))
        return height // multiple * multiple, width // multiple * multiple

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        tensors = super().start(pipe, steps)
        if self.pixels is None:
            return tensors
        device, pixels = pipe._execution_device, self.pixels
        if pixels.shape[1] != pipe.latent_channels:
            pixels = encode_image(pipe.vae, pixels.to(device), upcast=pipe._upcasts_vae(), draw=False)
        pixels = spread(pixels, self.count, self.batch, "image").to(device, pipe.denoiser.dtype)
        rows, columns = (side // 2 for side in pixels.shape[-2:])
        return {
            **tensors,
            "image_latents": pipe._pack(pixels),
            "shown_ids": token_ids(rows, columns, picture=1, device=device),
        }


class FluxKontextPipeline(FluxAdapterBase):
    """Edits pictures with FLUX.1-Kontext, which sees the picture's tokens behind those it denoises (2506.15742)."""

    def __call__(
        self,
        image: "ImageInput | None" = None,
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
        max_area: int = 1024**2,
        _auto_resize: bool = True,
    ) -> FluxPipelineOutput | tuple[Any]:
        """Edit pictures.

        All arguments that are not listed are those of `FluxPipeline`.

        Args:
            image: one picture for all, or one for each prompt; or latents (N, C, h, w) before they are packed. None
                draws from the prompt alone.
            prompt: what to change, one text or several.
            height: with `width` the shape of the result, which has `max_area` pixels, rounded down to multiples of
                twice `vae_scale_factor`.
            width: likewise.
            max_area: height times width of the result, in pixels.
            _auto_resize: bring `image` to the size nearest in shape that the model was trained with.

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
            Edit(image, height, width, latents, max_area, _auto_resize),
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

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        made = super()._constants(call, tensors)
        if "shown_ids" in tensors:
            made["image_ids"] = torch.cat([made["image_ids"], tensors["shown_ids"]])
        return made

    def _shown(self, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return torch.cat([sample, tensors["image_latents"]], dim=1) if "image_latents" in tensors else sample
