"""`FluxControlNetPipeline`: text to image, steered by pictures with ControlNets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ...models.autoencoders.kl import AutoencoderKL
from ...models.controlnet_flux import FluxControlNetModel
from ...models.multi_controlnet import FluxMultiControlNetModel
from ...models.transformers.flux import FluxTransformer2DModel
from ...schedulers.base import Scheduler
from ..arguments import refuse_adapters
from ..callbacks import Callback
from ..components import unwrap
from ..controlnet.control import Control
from ..loop import Steps
from ..picture import Call, Tensors
from ..tasks import FromNoise
from .base import LONGEST_TEXT, FluxAdapterBase, Prompts
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


@dataclass
class FluxControl(Control):
    """`Control`, with the kind of each picture for ControlNets that know several."""

    mode: Any = None

    def check(self, count: int, several: bool) -> None:
        super().check(count, several)
        self.mode = list(self.mode) if isinstance(self.mode, list | tuple) else [self.mode] * count
        if len(self.mode) != count:
            raise ValueError(f"control_mode has {len(self.mode)} entries for {count} ControlNets: pass one for each")

    def check_modes(self, nets: list[FluxControlNetModel]) -> None:
        """Refuse kinds that a ControlNet does not know."""
        for net, mode in zip(nets, self.mode, strict=True):
            known = net.config.num_mode
            if known is None and mode is not None:
                raise ValueError(f"control_mode={mode!r} must be None: this ControlNet knows one kind of pictures")
            if known is not None and (not isinstance(mode, int) or not 0 <= mode < known):
                raise ValueError(f"control_mode={mode!r} must be a whole number from 0 to {known - 1}")


class Steered(UnderControl):
    """`UnderControl`, for ControlNets that read latents of a picture each, or its pixels."""

    several: list[torch.Tensor]

    def prepare(self, pipe: "PicturePipeline", call: Call, batch: int) -> None:
        FromNoise.prepare(self, pipe, call, batch)
        self.several = [self._read(pipe, image) for image in call.state["control"].image]

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        controlnet = pipe.components["controlnet"]
        pictures = [
            self._image_latents(pipe, pixels)
            if net.input_hint_block is None
            else pixels.to(pipe._execution_device, net.dtype)
            for net, pixels in zip(nets_for(controlnet, len(self.several)), self.several, strict=True)
        ]
        control = pictures if isinstance(unwrap(controlnet), FluxMultiControlNetModel) else pictures[0]
        return {"control_image": control, **FromNoise.start(self, pipe, steps)}


def nets_for(controlnet: Any, pictures: int) -> list[FluxControlNetModel]:
    """The ControlNet for each picture: a single one, also as a list of one, serves for all."""
    net = unwrap(controlnet)
    nets = list(net.nets) if isinstance(net, FluxMultiControlNetModel) else [net]
    return nets * pictures if len(nets) == 1 else nets


class FluxControlNetPipeline(FluxAdapterBase):
    """Draws pictures that ControlNets steer by others, such as edges or a pose (Zhang et al. 2023).

    Args:
        controlnet: what steers, or a list of several that steer together.
        scheduler, vae, text_encoder, tokenizer, text_encoder_2, tokenizer_2, transformer: as for `FluxPipeline`.
        image_encoder, feature_extractor: likewise.
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
        controlnet: FluxControlNetModel | Sequence[FluxControlNetModel] | FluxMultiControlNetModel,
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
        feature_extractor: "CLIPImageProcessor | None" = None,
    ) -> None:
        several = isinstance(controlnet, list | tuple)
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
        self.register_modules(controlnet=FluxMultiControlNetModel(controlnet) if several else controlnet)

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
        control_guidance_start: float | list[float] = 0.0,
        control_guidance_end: float | list[float] = 1.0,
        control_image: "ImageInput | list[Any] | None" = None,
        control_mode: int | list[int | None] | None = None,
        controlnet_conditioning_scale: float | list[float] = 1.0,
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
            control_image: one picture for all, or one for each prompt; brought to `height` and `width`. With several
                ControlNets a list of such, one for each of them; with a list of one ControlNet any number.
            control_mode: which kind of picture it is, for a ControlNet that knows several ("union").
            controlnet_conditioning_scale: how strongly it steers. This and the two above can be lists, with an entry
                for each picture that steers.

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
        control = FluxControl(
            control_image,
            controlnet_conditioning_scale,
            guess_mode=False,
            start=control_guidance_start,
            end=control_guidance_end,
            mode=control_mode,
        )
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
            state={
                **self._state(prompts, guidance_scale, true_cfg_scale, joint_attention_kwargs),
                "control": control,
            },
        )
        refuse_adapters(
            ip_adapter_image=ip_adapter_image,
            ip_adapter_image_embeds=ip_adapter_image_embeds,
            negative_ip_adapter_image=negative_ip_adapter_image,
            negative_ip_adapter_image_embeds=negative_ip_adapter_image_embeds,
        )
        return self._draw(call)

    def _check(self, call: Call) -> int:
        batch, net = super()._check(call), unwrap(self.controlnet)
        self._check_present("controlnet", remedy="pass controlnet, or use FluxPipeline")
        if not isinstance(net, FluxControlNetModel | FluxMultiControlNetModel):
            raise ValueError(f"this call needs a FluxControlNetModel as controlnet, not {type(net).__name__}")
        control, several = call.state["control"], isinstance(net, FluxMultiControlNetModel)
        listed = several and isinstance(control.image, list | tuple)
        nets = nets_for(net, len(control.image) if listed else 1)
        control.check(len(nets), several)
        control.check_modes(nets)
        return batch

    def _plan(self, call: Call) -> Steps:
        steps = super()._plan(call)
        call.state["control"].plan(steps)
        return steps

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        count, device = len(tensors["latents"]), self._execution_device
        modes = [
            None if mode is None else torch.full((count, 1), mode, device=device) for mode in call.state["control"].mode
        ]
        takes_scale = nets_for(self.controlnet, 1)[0].config.guidance_embeds
        return {
            **super()._constants(call, tensors),
            "control_mode": modes if isinstance(unwrap(self.controlnet), FluxMultiControlNetModel) else modes[0],
            "control_guidance": torch.full((count,), self.guidance_scale, device=device) if takes_scale else None,
        }

    def _residuals(self, index: int, given: Tensors, tensors: Tensors) -> Tensors:
        strengths = self.control.strengths(index)
        if not any(strengths):
            return {}
        several = isinstance(unwrap(self.controlnet), FluxMultiControlNetModel)
        blocks, singles = self.controlnet(
            **{**given, "guidance": tensors["control_guidance"]},
            controlnet_cond=tensors["control_image"],
            controlnet_mode=tensors["control_mode"],
            conditioning_scale=strengths if several else strengths[0],
        )
        return {
            "controlnet_block_samples": blocks,
            "controlnet_single_block_samples": singles,
            "controlnet_blocks_repeat": nets_for(self.controlnet, 1)[0].input_hint_block is not None,
        }
