"""What the three Stable Diffusion pipelines share: components, prompts, the denoising loop, decoding and checking."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.config import FrozenDict
from diffusion_core.images import VaeImageProcessor, check_output_type
from diffusion_core.logging import get_logger
from diffusion_core.randomness import Generators, check_generator

from ...models.autoencoders.kl import AutoencoderKL
from ...models.unets.unet_2d_condition import UNet2DConditionModel
from ...offload.engine import execution_device, execution_dtype
from ...schedulers.base import Scheduler
from ..base import Pipeline
from ..guidance import guidance_embedding, guide
from ..latents import check_size, decode_latents
from ..loop import Steps, check_count, check_scale, check_share, step_options, walk
from ..text import (
    as_prompts,
    check_clip_skip,
    check_long_prompt,
    check_negative,
    chunks_needed,
    count_prompts,
    encode_clip,
    repeat_for_images,
    token_limit,
)
from .output import StableDiffusionPipelineOutput

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer, CLIPVisionModelWithProjection

    from .safety import StableDiffusionSafetyChecker

logger = get_logger(__name__)

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """The arguments of a call that say what to draw; see there."""

    prompt: str | Sequence[str] | None
    negative_prompt: str | Sequence[str] | None = None
    prompt_embeds: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    num_images_per_prompt: int = 1
    clip_skip: int | None = None
    long_prompt: str = "truncate"

    def count(self) -> int:
        """The number of prompts, after all that can be told about them alone was checked."""
        count = count_prompts(self.prompt, self.prompt_embeds)
        check_negative(self.negative_prompt, self.negative_prompt_embeds, self.prompt_embeds, count)
        check_count("num_images_per_prompt", self.num_images_per_prompt)
        check_long_prompt(self.long_prompt)
        return count


class StableDiffusionBase(Pipeline):
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

    # ---- sizes ----

    @property
    def vae_scale_factor(self) -> int:
        """Pixels for each latent along one side: the autoencoder's, or what the config kept of it."""
        vae = self.__dict__.get("vae")
        return super().config.get("vae_scale_factor", 8) if vae is None else vae.spatial_compression_ratio

    @property
    def config(self) -> FrozenDict:
        """The content of `model_index.json`, with the scale of the autoencoder for use without one."""
        return FrozenDict({**super().config, "vae_scale_factor": self.vae_scale_factor})

    @property
    def latent_channels(self) -> int:
        """Channels of the latents, which the UNet's output has; its input may have more."""
        return self.unet.config.out_channels

    @property
    def image_processor(self) -> VaeImageProcessor:
        """Brings pictures to the autoencoder's range and sizes, and back."""
        return VaeImageProcessor(
            vae_scale_factor=self.vae_scale_factor,
            vae_latent_channels=self.latent_channels,
            do_convert_rgb=self.vae is None or self.vae.config.in_channels == 3,
        )

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the current call predicts with and without the prompt."""
        return self._guided(self.guidance_scale)

    def _guided(self, guidance_scale: float) -> bool:
        return guidance_scale > 1 and self.unet.config.time_cond_proj_dim is None

    def _default_size(self) -> tuple[int, int]:
        """Height and width in pixels that the UNet was trained on."""
        size = self.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return height * self.vae_scale_factor, width * self.vae_scale_factor

    def _size(self, height: int | None, width: int | None, latents: torch.Tensor | None = None) -> tuple[int, int]:
        """Height and width in pixels, checked; what is not given follows `latents`, then the UNet."""
        default_height, default_width = self._default_size()
        if isinstance(latents, torch.Tensor) and latents.ndim == 4:
            default_height, default_width = (side * self.vae_scale_factor for side in latents.shape[-2:])
        height, width = default_height if height is None else height, default_width if width is None else width
        check_size(height, width, self.vae_scale_factor)
        return height, width

    # ---- check ----

    def _check(
        self, prompts: Prompts, guidance_scale: float, eta: float, output_type: str | None, generator: Generators | None
    ) -> int:
        """Refuse arguments that do not make sense, before any model is called; return how many pictures are drawn."""
        batch = prompts.count() * prompts.num_images_per_prompt
        check_scale("guidance_scale", guidance_scale)
        check_share("eta", eta)
        check_clip_skip(prompts.clip_skip, self.text_encoder)
        check_output_type(output_type)
        check_generator(generator, batch, self._execution_device)
        if prompts.prompt is not None or (self._guided(guidance_scale) and prompts.negative_prompt_embeds is None):
            self._check_present("text_encoder", "tokenizer", remedy="pass prompt_embeds and negative_prompt_embeds")
        size = self.unet.config.cross_attention_dim
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            embeds = getattr(prompts, name)
            if embeds is not None and isinstance(size, int) and embeds.shape[-1] != size:
                raise ValueError(f"{name} has vectors of size {embeds.shape[-1]}, but the UNet takes size {size}")
        if output_type != "latent":
            self._check_present("vae", remedy="ask for output_type='latent'")
        return batch

    def _check_present(self, *names: str, remedy: str) -> None:
        """Refuse a call that needs a component which is absent."""
        absent = [name for name in names if getattr(self, name) is None]
        if absent:
            raise ValueError(f"this call needs {' and '.join(absent)}, which the pipeline does not have: {remedy}")

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
        if lora_scale is not None:
            raise ValueError("lora_scale has nothing to act on: the text encoder has no adapter")
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            clip_skip,
            long_prompt,
        )
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
            parts = {
                "device": device or execution_device(self.text_encoder),
                **self._parts([*texts, *others], given, prompts),
            }
            if texts:
                text = encode_clip(texts, self.tokenizer, self.text_encoder, skip=prompts.clip_skip, **parts)
                positive, truncated = text.embeds, text.truncated
            if others:
                # All layers count here even with `clip_skip`: so it is in the reference, and pictures depend on it.
                negative = encode_clip(others, self.tokenizer, self.text_encoder, **parts).embeds
        assert positive is not None
        return self._placed(positive, prompts, count, device), self._placed(negative, prompts, count, device), truncated

    def _placed(self, embeds: Any, prompts: Prompts, count: int, device: torch.device | None) -> Any:
        """Embeddings where and as the UNet takes them, one for each picture."""
        if embeds is None:
            return None
        dtype = embeds.dtype if self.unet is None else self.unet.dtype
        embeds = embeds.to(device=device or self._execution_device, dtype=dtype)
        embeds = embeds.expand(count, -1, -1) if len(embeds) == 1 else embeds
        return repeat_for_images(embeds, prompts.num_images_per_prompt)

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        """The tensors of the loop that come from the prompts, and what was cut from these."""
        positive, negative, truncated = self._encode(prompts, self.do_classifier_free_guidance)
        both = positive if negative is None else torch.cat([negative, positive])
        return {"prompt_embeds": both, "negative_prompt_embeds": negative}, truncated

    def _parts(self, texts: list[str], given: torch.Tensor | None, prompts: Prompts) -> dict[str, int | None]:
        """How texts are cut so that all get the same number of tokens, that of the embeddings that they go with."""
        limit = token_limit(self.tokenizer, self.text_encoder)
        if given is None:
            chunked = prompts.long_prompt == "chunk"
            return {"chunks": chunks_needed(texts, self.tokenizer, self.text_encoder) if chunked else 1}
        tokens = given.shape[1]
        if tokens <= limit:
            return {"length": tokens}
        if tokens % limit:
            raise ValueError(
                f"embeddings of {tokens} tokens go with no text, as the text encoder gives multiples of {limit}: "
                f"pass prompt_embeds and negative_prompt_embeds"
            )
        return {"chunks": tokens // limit}

    # ---- denoise ----

    def _denoise(
        self,
        run: Any,
        steps: Steps,
        tensors: Tensors,
        callback: Callable[..., Tensors],
        *,
        eta: float,
        generator: Generators | None,
        extend: Callable[[Tensors], list[torch.Tensor]] | None = None,
        blend: Callable[[int, Tensors], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Take all steps from `tensors["latents"]` and return the latents at their end.

        Args:
            run: the state of the call.
            steps: the steps to take.
            tensors: "latents", "prompt_embeds" (with guidance the negative ones first) and what else callbacks see.
            callback: called after each step with the step, the timestep and `tensors`; returns them, changed or not.
            eta: share of DDIM's noise.
            generator: for steps that draw.
            extend: more channels for the UNet's input.
            blend: what to make of the latents after a step.
        """
        options = step_options(steps.scheduler, eta=eta, generator=generator)
        condition = self._scale_condition(run.guidance_scale, tensors["latents"])
        for index, timestep in walk(self, run, steps):
            guided = self.do_classifier_free_guidance
            latents = tensors["latents"]
            sample = steps.scheduler.scale_model_input(latents, timestep)
            if extend is not None:
                sample = torch.cat([sample, *extend(tensors)], dim=1)
            prediction = self.unet(
                torch.cat([sample, sample]) if guided else sample,
                timestep,
                encoder_hidden_states=tensors["prompt_embeds"],
                timestep_cond=condition,
                return_dict=False,
            )[0]
            if guided:
                prediction = guide(prediction, run.guidance_scale, run.guidance_rescale)
            tensors["latents"] = steps.scheduler.step(prediction, timestep, latents, **options, return_dict=False)[0]
            if blend is not None:
                tensors["latents"] = blend(index, tensors)
            tensors = callback(index, timestep, **tensors)
        return tensors["latents"]

    def _scale_condition(self, guidance_scale: float, latents: torch.Tensor) -> torch.Tensor | None:
        """The guidance scale as an input, for a UNet that was distilled to take it."""
        size = self.unet.config.time_cond_proj_dim
        if size is None:
            return None
        scales = torch.full((len(latents),), guidance_scale - 1.0, device=latents.device)
        return guidance_embedding(scales, size).to(latents.dtype)

    # ---- decode ----

    def _decode(
        self, latents: torch.Tensor, output_type: str | None, generator: Generators | None, **conditions: Any
    ) -> tuple[Any, list[bool] | None]:
        """The pictures in the form asked for, and which of them the safety checker took out."""
        if output_type == "latent":
            return latents, None
        pixels = decode_latents(self.vae, latents, generator=generator, **conditions)
        flagged = self._judge(pixels)
        if flagged is not None and any(flagged):
            keep = torch.tensor([not flag for flag in flagged], device=pixels.device).view(-1, 1, 1, 1)
            pixels = torch.where(keep, pixels, -1.0)
            logger.warning("the safety checker took out %d of %d pictures; they are black", sum(flagged), len(flagged))
        return self.image_processor.postprocess(pixels, output_type=output_type), flagged

    def _judge(self, pixels: torch.Tensor) -> list[bool] | None:
        if self.safety_checker is None:
            return None
        pictures = self.image_processor.postprocess(pixels, output_type="pil")
        inputs = self.feature_extractor(pictures, return_tensors="pt").pixel_values
        inputs = inputs.to(execution_device(self.safety_checker), execution_dtype(self.safety_checker))
        return self.safety_checker(clip_input=inputs, images=pixels)[1]

    @staticmethod
    def _result(
        images: Any, flagged: list[bool] | None, truncated: list[str] | None, return_dict: bool
    ) -> StableDiffusionPipelineOutput | tuple[Any, list[bool] | None]:
        if not return_dict:
            return images, flagged
        return StableDiffusionPipelineOutput(images, flagged, truncated if truncated and any(truncated) else None)
