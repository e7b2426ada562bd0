"""What the ControlNet pipelines of Stable Diffusion XL share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...models.autoencoders.kl import AutoencoderKL
from ...models.controlnet import ControlNetModel
from ...models.multi_controlnet import MultiControlNetModel
from ...models.unets.unet_2d_condition import UNet2DConditionModel
from ...schedulers.base import Scheduler
from ..picture import Tensors
from ..stable_diffusion_xl.base import StableDiffusionXLBase
from .control import ControlMixin

if TYPE_CHECKING:
    from transformers import (
        CLIPImageProcessor,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        CLIPVisionModelWithProjection,
    )


class StableDiffusionXLControlNetText(ControlMixin, StableDiffusionXLBase):
    """Base of the pipeline of Stable Diffusion XL with ControlNets that starts from noise.

    Args:
        controlnet: one ControlNet, or a list of several that steer together.
        vae, text_encoder, text_encoder_2, tokenizer, tokenizer_2, unet, scheduler, force_zeros_for_empty_prompt,
            add_watermarker, feature_extractor, image_encoder: as for `StableDiffusionXLPipeline`.
    """

    _optional_components: ClassVar[list[str]] = [
        "tokenizer",
        "tokenizer_2",
        "text_encoder",
        "text_encoder_2",
        "feature_extractor",
        "image_encoder",
    ]

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        text_encoder_2: "CLIPTextModelWithProjection",
        tokenizer: "CLIPTokenizer",
        tokenizer_2: "CLIPTokenizer",
        unet: UNet2DConditionModel,
        controlnet: ControlNetModel | Sequence[ControlNetModel] | MultiControlNetModel,
        scheduler: Scheduler,
        force_zeros_for_empty_prompt: bool = True,
        add_watermarker: bool | None = None,
        feature_extractor: "CLIPImageProcessor | None" = None,
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
    ) -> None:
        encoders = (text_encoder, text_encoder_2, tokenizer, tokenizer_2)
        settings = (image_encoder, feature_extractor, force_zeros_for_empty_prompt, add_watermarker)
        super().__init__(vae, *encoders, unet, scheduler, *settings)
        self.register_modules(controlnet=self._net(controlnet))

    def _text_tensors(self, prompts: Any) -> tuple[Tensors, list[str] | None]:
        tensors, truncated = super()._text_tensors(prompts)
        names = {"negative_prompt_embeds": "prompt_embeds", "negative_pooled_prompt_embeds": "add_text_embeds"}
        guided = self.do_classifier_free_guidance
        negative = {key: tensors[name].chunk(2)[0] if guided else None for key, name in names.items()}
        return {**tensors, **negative}, truncated

    def _constants(self, call: Any, tensors: Tensors) -> Tensors:
        found = super()._constants(call, tensors)
        time_ids = found["add_time_ids"].chunk(2)[0] if self.do_classifier_free_guidance else found["add_time_ids"]
        return {**found, "negative_add_time_ids": time_ids, "add_neg_time_ids": time_ids}


class StableDiffusionXLControlNetRedrawing(StableDiffusionXLControlNetText):
    """Base of the pipelines that start from a picture, and may hold a refiner."""

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        text_encoder_2: "CLIPTextModelWithProjection",
        tokenizer: "CLIPTokenizer",
        tokenizer_2: "CLIPTokenizer",
        unet: UNet2DConditionModel,
        controlnet: ControlNetModel | Sequence[ControlNetModel] | MultiControlNetModel,
        scheduler: Scheduler,
        requires_aesthetics_score: bool = False,
        force_zeros_for_empty_prompt: bool = True,
        add_watermarker: bool | None = None,
        feature_extractor: "CLIPImageProcessor | None" = None,
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
    ) -> None:
        encoders = (text_encoder, text_encoder_2, tokenizer, tokenizer_2)
        settings = (force_zeros_for_empty_prompt, add_watermarker, feature_extractor, image_encoder)
        super().__init__(vae, *encoders, unet, controlnet, scheduler, *settings)
