"""`FluxControlNetPipeline`: text to image, steered by a picture with a ControlNet."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ...models.autoencoders.kl import AutoencoderKL
from ...models.controlnet_flux import FluxControlNetModel
from ...models.transformers.flux import FluxTransformer2DModel
from ...schedulers.base import Scheduler
from ..callbacks import Callback
from ..loop import Steps, check_scale, check_share
from ..picture import Call, Tensors
from ..tasks import FromNoise
from .base import LONGEST_TEXT, FluxAdapterBase, Prompts, refuse_image_prompts
from .control import UnderControl
from .output import FluxPipelineOutput

if TYPE_CHECKING:
    from transformers import (
        CLIPImageProcessor,
        CLIPTextModel,
        CLIPTokenizer,
        CLIPVisionModelWithProjection,
        T5EncoderModel,
        T5Tokenizer,
    )

    from ..picture import PicturePipeline


class Steered(UnderControl):
    """`UnderControl`, for a ControlNet that reads latents of the picture, or its pixels."""

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        net: Any = pipe.components["controlnet"]
        if net.input_hint_block is None:
            return super().start(pipe, steps)
        pixels = self.pixels.to(pipe._execution_device, net.dtype)
        return {"control_image": pixels, **FromNoise.start(self, pipe, steps)}


class FluxControlNetPipeline(FluxAdapterBase):
    """Draws pictures that a ControlNet steers by another one, such as edges or a pose (Zhang et al. 2023).

    Args:
        controlnet: what steers.
        scheduler, vae, text_encoder, tokenizer, text_encoder_2, tokenizer_2, transformer: as for `FluxPipeline`.
        image_encoder, feature_extractor: likewise.

    Raises:
        TypeError: if `controlnet` is a list: one ControlNet is taken.
    """

    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds", "control_image"]

    def __init__(
        self,
        scheduler: Scheduler,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        tokenizer: "CLIPTokenizer",
        text_encoder_2: "T5EncoderModel",
        tokenizer_2: "T5Tokenizer",
        transformer: FluxTransformer2DModel,
        controlnet: FluxControlNetModel,
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
        feature_extractor: "CLIPImageProcessor | None" = None,
    ) -> None:
        if isinstance(controlnet, list | tuple):
            raise TypeError("controlnet is a list, but FluxControlNetPipeline takes one FluxControlNetModel")
        super().__init__(
            scheduler,
            vae,
            text_encoder,
            tokenizer,
            text_encoder_2,
            tokenizer_2,
            transformer,
            image_encoder,
            feature_extractor,
        )
        self.register_modules(controlnet=controlnet)

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        true_cfg_scale: float = 1.0,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 28,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.0,
        control_guidance_start: float = 0.0,
        control_guidance_end: float = 1.0,
        control_image: "ImageInput | None" = None,
        control_mode: int | None = None,
        controlnet_conditioning_scale: float = 1.0,
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
        """Draw pictures that another one steers.

        All arguments that are not listed are those of `FluxPipeline`.

        Args:
            control_guidance_start, control_guidance_end: from which share of the steps to which it steers, 0 to 1.
            control_image: one picture for all, or one for each prompt; brought to `height` and `width`.
            control_mode: which kind of picture it is, for a ControlNet that knows several ("union").
            controlnet_conditioning_scale: how strongly it steers.

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
        control = {
            "control_guidance_start": control_guidance_start,
            "control_guidance_end": control_guidance_end,
            "control_mode": control_mode,
            "controlnet_conditioning_scale": controlnet_conditioning_scale,
        }
        call = Call(
            prompts,
            Steered(control_image, height, width, latents),
            num_inference_steps,
            sigmas=sigmas,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={**self._state(prompts, guidance_scale, true_cfg_scale, joint_attention_kwargs), **control},
        )
        refuse_image_prompts(
            ip_adapter_image, ip_adapter_image_embeds, negative_ip_adapter_image, negative_ip_adapter_image_embeds
        )
        return self._draw(call)

    def _check(self, call: Call) -> int:
        batch, state = super()._check(call), call.state
        self._check_present("controlnet", remedy="pass controlnet, or use FluxPipeline")
        check_scale("controlnet_conditioning_scale", state["controlnet_conditioning_scale"])
        names = ("control_guidance_start", "control_guidance_end")
        for name in names:
            check_share(name, state[name])
        start, end = (state[name] for name in names)
        if start >= end:
            raise ValueError(f"control_guidance_start={start} must be less than control_guidance_end={end}")
        modes, mode = self.controlnet.config.num_mode, state["control_mode"]
        if modes is None and mode is not None:
            raise ValueError(f"control_mode={mode!r} must be None: this ControlNet knows one kind of pictures")
        if modes is not None and (not isinstance(mode, int) or not 0 <= mode < modes):
            raise ValueError(f"control_mode={mode!r} must be a whole number from 0 to {modes - 1}")
        return batch

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        count, device = len(tensors["latents"]), self._execution_device
        config, mode = self.controlnet.config, self.control_mode
        scales = torch.full((count,), self.guidance_scale, device=device) if config.guidance_embeds else None
        return {
            **super()._constants(call, tensors),
            "control_mode": None if mode is None else torch.full((count, 1), mode, device=device),
            "control_guidance": scales,
        }

    def _residuals(self, index: int, given: Tensors, tensors: Tensors) -> Tensors:
        steps = self.num_timesteps
        if index / steps < self.control_guidance_start or (index + 1) / steps > self.control_guidance_end:
            return {}
        blocks, singles = self.controlnet(
            **{**given, "guidance": tensors["control_guidance"]},
            controlnet_cond=tensors["control_image"],
            controlnet_mode=tensors["control_mode"],
            conditioning_scale=self.controlnet_conditioning_scale,
        )
        return {
            "controlnet_block_samples": blocks,
            "controlnet_single_block_samples": singles,
            "controlnet_blocks_repeat": self.controlnet.input_hint_block is not None,
        }
