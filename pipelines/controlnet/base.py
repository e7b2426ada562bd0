"""What the ControlNet pipelines of Stable Diffusion 1 and 2 share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...models.autoencoders.kl import AutoencoderKL
from ...models.controlnet import ControlNetModel
from ...models.multi_controlnet import MultiControlNetModel
from ...models.unets.unet_2d_condition import UNet2DConditionModel
from ...schedulers.base import Scheduler
from ..stable_diffusion.base import StableDiffusionBase
from .control import ControlMixin

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer, CLIPVisionModelWithProjection

    from ..stable_diffusion.safety import StableDiffusionSafetyChecker


class StableDiffusionControlNetBase(ControlMixin, StableDiffusionBase):
    """Base of the pipelines of Stable Diffusion 1 and 2 with ControlNets.

    Args:
        controlnet: one ControlNet, or a list of several that steer together.
        vae, text_encoder, tokenizer, unet, scheduler, safety_checker, feature_extractor, image_encoder,
            requires_safety_checker: as for `StableDiffusionPipeline`.
    """

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        tokenizer: "CLIPTokenizer",
        unet: UNet2DConditionModel,
        controlnet: ControlNetModel | Sequence[ControlNetModel] | MultiControlNetModel,
        scheduler: Scheduler,
        safety_checker: "StableDiffusionSafetyChecker | None",
        feature_extractor: "CLIPImageProcessor | None",
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
        requires_safety_checker: bool = True,
    ) -> None:
        parts: tuple[Any, ...] = (safety_checker, feature_extractor, image_encoder, requires_safety_checker)
        super().__init__(vae, text_encoder, tokenizer, unet, scheduler, *parts)
        self.register_modules(controlnet=self._net(controlnet))
