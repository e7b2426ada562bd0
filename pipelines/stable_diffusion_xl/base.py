"""What the Stable Diffusion XL pipelines share: two text encoders, conditions on sizes, a way shared with a refiner."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...models.autoencoders.kl import AutoencoderKL
from ...models.unets.unet_2d_condition import UNet2DConditionModel
from ...schedulers.base import Scheduler
from ..arguments import refuse_adapters
from ..loop import Steps
from ..picture import Call, Tensors
from ..text import check_clip_skip
from ..unet import UNetPipeline
from .output import StableDiffusionXLPipelineOutput
from .prompts import Encoded, Prompts, encode

if TYPE_CHECKING:
    from transformers import (
        CLIPImageProcessor,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        CLIPVisionModelWithProjection,
    )

Size = tuple[int, int]


@dataclass(frozen=True)
class Conditions:
    """What the UNet is told besides the prompt (Podell et al. 2023, section 2.2). Sizes are (height, width) in pixels.

    Attributes:
        original_size: of the picture in training before it was scaled: small ones look blurred.
        crops_coords_top_left: what was cut off above and at the left: (0, 0) centers things.
        target_size: of the picture in training.
        negative_original_size, negative_crops_coords_top_left, negative_target_size: the same for the prediction
            without the prompt.
        aesthetic_score, negative_aesthetic_score: how beautiful, for refiners.
        keeps_crops: negative sizes alone leave the negative crops as those of the prompt.
    """

    original_size: Size | None = None
    crops_coords_top_left: Size = (0, 0)
    target_size: Size | None = None
    negative_original_size: Size | None = None
    negative_crops_coords_top_left: Size = (0, 0)
    negative_target_size: Size | None = None
    aesthetic_score: float = 6.0
    negative_aesthetic_score: float = 2.5
    keeps_crops: bool = True

    def rows(self, size: Size, scored: bool) -> list[list[float]]:
        """The numbers for the prediction without the prompt, and for the one with it.

        Args:
            size: of the picture that is drawn, for what is not given.
            scored: the UNet takes a score in place of the target size.
        """
        original, target = self.original_size or size, self.target_size or size
        crops, sized = self.negative_crops_coords_top_left, self.negative_original_size or self.negative_target_size
        if tuple(crops) == (0, 0) and not scored and (self.keeps_crops or not sized):
            crops = self.crops_coords_top_left
        last = [self.aesthetic_score] if scored else target
        negative_last = [self.negative_aesthetic_score] if scored else self.negative_target_size or target
        return [
            [*(self.negative_original_size or original), *crops, *negative_last],
            [*original, *self.crops_coords_top_left, *last],
        ]

    def check(self) -> None:
        """Refuse what are not pairs of whole numbers."""
        for name in ("original_size", "crops_coords_top_left", "target_size"):
            for key in (name, f"negative_{name}"):
                pair = getattr(self, key)
                if pair is None and not name.startswith("crops"):
                    continue
                if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(x, int) for x in pair):
                    raise ValueError(f"{key}={pair!r} must be a pair of whole numbers: (height, width) or (top, left)")


@dataclass(frozen=True)
class XLCall(Call):
    """A call with what Stable Diffusion XL takes besides.

    Attributes:
        conditions: what the UNet is told besides the prompt.
        denoising_start: the share of the whole way that another model has gone already.
        denoising_end: where to leave the rest to another model.
    """

    conditions: Conditions = Conditions()
    denoising_start: float | None = None
    denoising_end: float | None = None


class StableDiffusionXLBase(UNetPipeline):
    """Base of the pipelines of Stable Diffusion XL.

    Args:
        vae: between pictures and latents. None works where latents go in and out.
        text_encoder: the first encoder; None for refiners, which have the second only.
        text_encoder_2: the second encoder, whose pooled result counts too. Both may be None where embeddings are given.
        tokenizer: for `text_encoder`.
        tokenizer_2: for `text_encoder_2`.
        unet: predicts the noise.
        scheduler: takes the steps.
        image_encoder: not used by the pipeline; kept for checkpoints and extensions that have it.
        feature_extractor: likewise.
        requires_aesthetics_score: whether the UNet takes a score in place of the target size, as refiners do.
        force_zeros_for_empty_prompt: take zeros where there is no negative prompt.
        add_watermarker: must not be True: no watermark is made.

    Raises:
        ValueError: if a watermark is asked for.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->text_encoder_2->image_encoder->unet->vae"
    _optional_components: ClassVar[list[str]] = [
        "tokenizer",
        "tokenizer_2",
        "text_encoder",
        "text_encoder_2",
        "image_encoder",
        "feature_extractor",
    ]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds", "add_text_embeds", "add_time_ids"]
    _output: ClassVar[type[Any]] = StableDiffusionXLPipelineOutput

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        text_encoder_2: "CLIPTextModelWithProjection",
        tokenizer: "CLIPTokenizer",
        tokenizer_2: "CLIPTokenizer",
        unet: UNet2DConditionModel,
        scheduler: Scheduler,
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
        feature_extractor: "CLIPImageProcessor | None" = None,
        force_zeros_for_empty_prompt: bool = True,
        add_watermarker: bool | None = None,
    ) -> None:
        if add_watermarker:
            raise ValueError("add_watermarker=True is not supported: no watermark is made; leave it out")
        self.register_modules(
            vae=vae,
            text_encoder=text_encoder,
            text_encoder_2=text_encoder_2,
            tokenizer=tokenizer,
            tokenizer_2=tokenizer_2,
            unet=unet,
            scheduler=scheduler,
            image_encoder=image_encoder,
            feature_extractor=feature_extractor,
        )

    # ---- check ----

    def _encoders(self) -> list[tuple[Any, Any]]:
        """The tokenizers and encoders that are there."""
        pairs = [(self.tokenizer, self.text_encoder), (self.tokenizer_2, self.text_encoder_2)]
        return [pair for pair in pairs if pair[1] is not None]

    def _check(self, call: Any) -> int:
        batch, prompts = super()._check(call), call.prompts
        call.conditions.check()
        check_parts(call.denoising_start, call.denoising_end)
        guided = self._guided(call.state["guidance_scale"])
        self._check_text(prompts, guided)
        self._check_widths(prompts, prompt_embeds=self.unet.config.cross_attention_dim)
        self._check_conditions(prompts)
        return batch

    def _check_text(self, prompts: Prompts, guided: bool) -> None:
        """Refuse a call that has texts to encode and nothing to do it with, or skips more layers than there are."""
        for _, encoder in self._encoders():
            check_clip_skip(prompts.clip_skip, encoder)
        zeros = self.config["force_zeros_for_empty_prompt"]
        empty = prompts.negative_prompt is None and prompts.negative_prompt_2 is None
        needs_negative = guided and prompts.negative_prompt_embeds is None and not (zeros and empty)
        if prompts.prompt is None and not needs_negative:
            return
        remedy = "pass prompt_embeds, pooled_prompt_embeds and their negative ones"
        self._check_present("text_encoder_2", "tokenizer_2", remedy=remedy)
        if self.text_encoder is not None:
            self._check_present("tokenizer", remedy=remedy)

    def _check_conditions(self, prompts: Prompts) -> None:
        """Refuse a UNet that takes another number of conditions than there are."""
        config, scored = self.unet.config, self._scored()
        if config.addition_embed_type != "text_time":
            raise ValueError(
                f"the UNet's addition_embed_type is {config.addition_embed_type!r}; this pipeline needs 'text_time', "
                f"as the UNets of Stable Diffusion XL have"
            )
        given = prompts.pooled_prompt_embeds
        if given is None and self.text_encoder_2 is None:
            return
        pooled = self.text_encoder_2.config.projection_dim if given is None else given.shape[-1]
        numbers = 5 if scored else 6
        wanted, have = config.projection_class_embeddings_input_dim, config.addition_time_embed_dim * numbers + pooled
        if wanted != have:
            raise ValueError(
                f"the UNet takes {wanted} values of pooled text and sizes, but gets {pooled} and {numbers} x "
                f"{config.addition_time_embed_dim}: check requires_aesthetics_score={scored} and text_encoder_2"
            )

    def _scored(self) -> bool:
        return bool(self.config.get("requires_aesthetics_score", False))

    # ---- encode ----

    @torch.no_grad()
    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        prompt_2: str | list[str] | None = None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        lora_scale: float | None = None,
        clip_skip: int | None = None,
        long_prompt: str = "truncate",
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """Encode prompts, which `__call__` takes as embeddings.

        Args:
            prompt: one text or several.
            prompt_2: for the second encoder, if it is to read something else.
            device: where to compute; the pipeline's device if None.
            num_images_per_prompt: how often each prompt is repeated.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            negative_prompt: what the pictures should not show: one text for all, or one for each.
            negative_prompt_2: for the second encoder, if it is to read something else.
            prompt_embeds, pooled_prompt_embeds: take these in place of `prompt`.
            negative_prompt_embeds, negative_pooled_prompt_embeds: take these in place of `negative_prompt`.
            lora_scale: must be None, as no adapter is loaded.
            clip_skip: how many layers before the last but one are left out for the prompt.
            long_prompt: "truncate" cuts what the encoders do not take at once; "chunk" encodes it in parts.

        Returns:
            `prompt_embeds`, `negative_prompt_embeds` (prompts * num_images_per_prompt, tokens, size), and
            `pooled_prompt_embeds`, `negative_pooled_prompt_embeds` (prompts * num_images_per_prompt, size); the
            negative ones are None without guidance.
        """
        refuse_adapters(lora_scale=lora_scale)
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
            clip_skip=clip_skip,
            long_prompt=long_prompt,
        )
        prompts.count()
        self._check_text(prompts, do_classifier_free_guidance)
        with self.letting_go():
            positive, negative = self._encode(prompts, do_classifier_free_guidance, device)
        none = (None, None) if negative is None else (negative.embeds, negative.pooled)
        return positive.embeds, none[0], positive.pooled, none[1]

    def _encode(
        self, prompts: Prompts, guided: bool, device: torch.device | None = None
    ) -> tuple[Encoded, Encoded | None]:
        """The prompts and the negative ones, an entry for each picture."""
        count, zeros = prompts.count(), self.config["force_zeros_for_empty_prompt"]

        def placed(one: Encoded | None) -> Any:
            if one is None:
                return None
            embeds, pooled = (self._per_picture(each, prompts, count, device) for each in one[:2])
            return one._replace(embeds=embeds, pooled=pooled)

        positive, negative = encode(prompts, count, self._encoders(), guided, zeros, device)
        return placed(positive), placed(negative)

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        positive, negative = self._encode(prompts, self.do_classifier_free_guidance)
        both = [positive] if negative is None else [negative, positive]
        tensors = {
            "prompt_embeds": torch.cat([one.embeds for one in both]),
            "add_text_embeds": torch.cat([one.pooled for one in both]),
        }
        return tensors, positive.truncated

    # ---- denoise ----

    def _plan(self, call: Any) -> Steps:
        return between(super()._plan(call), call.denoising_start, call.denoising_end)

    def _constants(self, call: Any, tensors: Tensors) -> Tensors:
        """Sizes as the UNet takes them, and the guidance scale, for a UNet that was distilled to take it."""
        latents = tensors["latents"]
        placed = {"device": latents.device, "dtype": tensors["prompt_embeds"].dtype}
        rows = call.conditions.rows((call.task.height, call.task.width), self._scored())
        numbers = torch.tensor(rows if self.do_classifier_free_guidance else rows[1:], **placed)
        return {
            "add_time_ids": numbers.repeat_interleave(len(latents), dim=0),
            "timestep_cond": self._scale_condition(latents),
        }

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        conditions = {
            "encoder_hidden_states": tensors["prompt_embeds"],
            "timestep_cond": tensors["timestep_cond"],
            "added_cond_kwargs": {"text_embeds": tensors["add_text_embeds"], "time_ids": tensors["add_time_ids"]},
        }
        return self._call_unet(index, timestep, sample, conditions, tensors)


class StableDiffusionXLRedrawing(StableDiffusionXLBase):
    """Base of the pipelines that start from a picture, and may hold a refiner."""

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        text_encoder_2: "CLIPTextModelWithProjection",
        tokenizer: "CLIPTokenizer",
        tokenizer_2: "CLIPTokenizer",
        unet: UNet2DConditionModel,
        scheduler: Scheduler,
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
        feature_extractor: "CLIPImageProcessor | None" = None,
        requires_aesthetics_score: bool = False,
        force_zeros_for_empty_prompt: bool = True,
        add_watermarker: bool | None = None,
    ) -> None:
        super().__init__(
            vae,
            text_encoder,
            text_encoder_2,
            tokenizer,
            tokenizer_2,
            unet,
            scheduler,
            image_encoder,
            feature_extractor,
            force_zeros_for_empty_prompt,
            add_watermarker,
        )


def check_parts(start: float | None, end: float | None) -> None:
    """Refuse shares of the way that are no numbers from 0 to 1, or leave nothing between them."""
    for name, value in (("denoising_start", start), ("denoising_end", end)):
        if value is not None and (not isinstance(value, float | int) or not 0 <= value <= 1):
            raise ValueError(f"{name}={value!r} must be a number from 0 to 1")
    if start is not None and end is not None and start >= end:
        raise ValueError(f"denoising_start={start} must be less than denoising_end={end}")


def between(steps: Steps, start: float | None, end: float | None) -> Steps:
    """The steps of a whole run that lie between two shares of the noise of training (Balaji et al. 2022, 2211.01324).

    A model that starts at 0.8 takes the steps that one which ends at 0.8 has left, for the same number of steps.

    Raises:
        ValueError: if no step lies between.
    """
    trained, chosen, order = steps.scheduler.config.num_train_timesteps, steps.timesteps, steps.scheduler.order
    if start is not None:
        left = int((chosen < round(trained - start * trained)).sum())
        if order == 2 and left % 2 == 0:
            # A step of two calls begins with the second of a pair of equal timesteps.
            left += 1
        skipped = len(chosen) - left
        chosen = chosen[skipped:]
        steps.scheduler.set_begin_index(skipped)
    whole = len(chosen)
    if end is not None and 0 < end < 1:
        chosen = chosen[: int((chosen >= round(trained - end * trained)).sum())]
    if len(chosen) == 0:
        raise ValueError(
            f"no step lies between denoising_start={start} and denoising_end={end}: raise num_inference_steps"
        )
    if len(chosen) == len(steps):
        return steps
    return Steps(steps.scheduler, chosen, -(-len(chosen) // order), left=whole - len(chosen))
