"""What the three Stable Diffusion pipelines share: components, prompts, the denoising loop, decoding and checking."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.logging import get_logger

from ...models.autoencoders.kl import AutoencoderKL
from ...models.unets.unet_2d_condition import UNet2DConditionModel
from ...offload.engine import execution_device, execution_dtype
from ...schedulers.base import Scheduler
from .. import prompts as shared
from ..arguments import refuse_adapters
from ..picture import Call, Tensors
from ..text import (
    as_prompts,
    check_clip_skip,
    check_long_prompt,
    encode_clip,
    parts_for,
)
from ..unet import UNetPipeline
from .output import StableDiffusionPipelineOutput

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer, CLIPVisionModelWithProjection

    from .safety import StableDiffusionSafetyChecker

logger = get_logger(__name__)


@dataclass(frozen=True)
class Prompts(shared.Prompts):
    """The arguments of a call that say what to draw; see there."""

    clip_skip: int | None = None
    long_prompt: str = "truncate"

    def count(self) -> int:
        """The number of prompts, after all that can be told about them alone was checked."""
        check_long_prompt(self.long_prompt)
        return super().count()


class StableDiffusionBase(UNetPipeline):
    """Base of the pipelines of Stable Diffusion 1 and 2.

    Args:
        vae: between pictures and latents. None works where latents go in and out; then the pipeline's config says how
            many pixels a latent stands for.
        text_encoder: from tokens to embeddings.
        tokenizer: from text to tokens.
        unet: predicts the noise.
        scheduler: takes the steps. It is replaced by a copy where its config does not fit latents: these are not
            clipped, and timesteps count from 1.
        safety_checker: takes out pictures that are not to be shown, if there is one.
        feature_extractor: prepares pictures for the safety checker.
        image_encoder: not used by the pipeline; kept for checkpoints and extensions that have it.
        requires_safety_checker: whether the checkpoint wants a checker; a note in its config.

    Raises:
        ValueError: if there is a safety checker without a feature extractor.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->image_encoder->unet->vae"
    _optional_components: ClassVar[list[str]] = ["safety_checker", "feature_extractor", "image_encoder"]
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["safety_checker"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds", "negative_prompt_embeds"]
    _output: ClassVar[type[Any]] = StableDiffusionPipelineOutput
    # These checkpoints compute in float16 unless they overflow, whatever their configs say.
    _upcasts: ClassVar[bool] = False
    # Config entries that schedulers need for latents, in place of their defaults.
    _scheduler_settings: ClassVar[dict[str, Any]] = {"steps_offset": 1, "clip_sample": False}

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        tokenizer: "CLIPTokenizer",
        unet: UNet2DConditionModel,
        scheduler: Scheduler,
        safety_checker: "StableDiffusionSafetyChecker | None",
        feature_extractor: "CLIPImageProcessor | None",
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
        requires_safety_checker: bool = True,
    ) -> None:
        if safety_checker is not None and feature_extractor is None:
            raise ValueError("a safety_checker needs a feature_extractor: pass both, or safety_checker=None")
        self.register_modules(
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=unet,
            scheduler=self._fitting(scheduler),
            safety_checker=safety_checker,
            feature_extractor=feature_extractor,
            image_encoder=image_encoder,
        )

    def _fitting(self, scheduler: Any) -> Any:
        """The scheduler, or a copy of it with the settings that latents need."""
        if scheduler is None:
            return None
        config = scheduler.config
        wrong = {key: value for key, value in self._scheduler_settings.items() if config.get(key, value) != value}
        if not wrong:
            return scheduler
        logger.info("%s is used with %s, which Stable Diffusion needs", type(scheduler).__name__, wrong)
        return type(scheduler).from_config(config, **wrong)

    # ---- check ----

    def _check(self, call: Call) -> int:
        batch, prompts = super()._check(call), call.prompts
        check_clip_skip(prompts.clip_skip, self.text_encoder)
        remedy = "pass prompt_embeds and negative_prompt_embeds"
        self._check_encoders(call, "text_encoder", "tokenizer", remedy=remedy)
        self._check_widths(prompts, prompt_embeds=self.unet.config.cross_attention_dim)
        return batch

    # ---- encode ----

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        device: torch.device | None,
        num_images_per_prompt: int,
        do_classifier_free_guidance: bool,
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        lora_scale: float | None = None,
        clip_skip: int | None = None,
        long_prompt: str = "truncate",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode prompts, which `__call__` takes as `prompt_embeds` and `negative_prompt_embeds`.

        Args:
            prompt: one text or several.
            device: where to compute; the pipeline's device if None.
            num_images_per_prompt: how often each prompt is repeated.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            negative_prompt: what the pictures should not show: one text for all, or one for each; "" if None.
            prompt_embeds: take these in place of `prompt`.
            negative_prompt_embeds: take these in place of `negative_prompt`.
            lora_scale: must be None, as no adapter is loaded.
            clip_skip: how many of the text encoder's last layers are left out for the prompt.
            long_prompt: "truncate" cuts what the encoder does not take at once; "chunk" encodes it in parts.

        Returns:
            Both embeddings, shape (prompts * num_images_per_prompt, tokens, size); the second is None without guidance.
        """
        refuse_adapters(lora_scale=lora_scale)
        embeds = (prompt_embeds, negative_prompt_embeds)
        prompts = Prompts(prompt, negative_prompt, *embeds, num_images_per_prompt, clip_skip, long_prompt)
        check_clip_skip(clip_skip, self.text_encoder)
        with self.letting_go():
            return self._encode(prompts, do_classifier_free_guidance, device)[:2]

    def _encode(
        self, prompts: Prompts, guided: bool, device: torch.device | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[str] | None]:
        """The embeddings for each picture, those of the negative prompts if `guided`, and what was cut from prompts."""
        count = prompts.count()
        positive, negative, truncated = prompts.prompt_embeds, None, None
        texts = as_prompts(prompts.prompt, count) if positive is None else []
        others: list[str] = []
        if guided:
            negative = prompts.negative_prompt_embeds
            others = as_prompts(prompts.negative_prompt, count, "negative_prompt") if negative is None else []
        if texts or others:
            given = positive if positive is not None else negative
            encoders = [(self.tokenizer, self.text_encoder)]
            parts: Tensors = parts_for([*texts, *others], given, prompts.long_prompt, encoders)
            parts["device"] = device or execution_device(self.text_encoder)
            if texts:
                text = encode_clip(texts, self.tokenizer, self.text_encoder, skip=prompts.clip_skip, **parts)
                positive, truncated = text.embeds, text.truncated
            if others:
                # All layers count here even with `clip_skip`: so it is in the reference, and pictures depend on it.
                negative = encode_clip(others, self.tokenizer, self.text_encoder, **parts).embeds
        assert positive is not None
        positive, negative = (self._per_picture(each, prompts, count, device) for each in (positive, negative))
        return positive, negative, truncated

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        """The tensors of the loop that come from the prompts, and what was cut from these."""
        positive, negative, truncated = self._encode(prompts, self.do_classifier_free_guidance)
        both = positive if negative is None else torch.cat([negative, positive])
        return {"prompt_embeds": both, "negative_prompt_embeds": negative}, truncated

    # ---- denoise ----

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        return {"timestep_cond": self._scale_condition(tensors["latents"])}

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        conditions = {"encoder_hidden_states": tensors["prompt_embeds"], "timestep_cond": tensors["timestep_cond"]}
        return self._call_unet(index, timestep, sample, conditions, tensors)

    # ---- decode ----

    def _decode(self, latents: torch.Tensor, call: Call) -> tuple[Any, ...]:
        """The pictures in the form asked for, and which of them the safety checker took out."""
        if call.output_type == "latent":
            return latents, None
        pixels = self._pixels(latents, call)
        flagged = self._judge(pixels)
        if flagged is not None and any(flagged):
            keep = torch.tensor([not flag for flag in flagged], device=pixels.device).view(-1, 1, 1, 1)
            pixels = torch.where(keep, pixels, -1.0)
            logger.warning("the safety checker took out %d of %d pictures; they are black", sum(flagged), len(flagged))
        return self.image_processor.postprocess(pixels, output_type=call.output_type), flagged

    def _judge(self, pixels: torch.Tensor) -> list[bool] | None:
        if self.safety_checker is None:
            return None
        pictures = self.image_processor.postprocess(pixels, output_type="pil")
        inputs = self.feature_extractor(pictures, return_tensors="pt").pixel_values
        inputs = inputs.to(execution_device(self.safety_checker), execution_dtype(self.safety_checker))
        return self.safety_checker(clip_input=inputs, images=pixels)[1]
