"""What the Stable Diffusion 3 pipelines share: components, prompts, the schedule, one call of the transformer."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...models.autoencoders.kl import AutoencoderKL
from ...models.transformers.checks import check_attention_kwargs
from ...models.transformers.sd3 import SD3Transformer2DModel
from ...schedulers.base import Scheduler
from ..arguments import refuse_adapters
from ..flow import image_shift, one_a_sample
from ..guidance import guide
from ..loop import check_scale
from ..picture import Call, PicturePipeline, Tensors
from ..stable_diffusion_xl.prompts import Encoded
from ..text import check_clip_skip
from .output import StableDiffusion3PipelineOutput
from .prompts import Encoders, Prompts, encode

if TYPE_CHECKING:
    from transformers import (
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        SiglipImageProcessor,
        SiglipVisionModel,
        T5EncoderModel,
        T5Tokenizer,
    )

_KINDS = ("prompt_embeds", "pooled_prompt_embeds")


class StableDiffusion3Base(PicturePipeline):
    """Base of the pipelines of Stable Diffusion 3 and 3.5.

    Args:
        transformer: predicts the flow.
        scheduler: takes the steps along the flow.
        vae: between pictures and latents. None works where latents go in and out.
        text_encoder: the first CLIP.
        tokenizer: for `text_encoder`.
        text_encoder_2: the second CLIP.
        tokenizer_2: for `text_encoder_2`.
        text_encoder_3: T5, most of the memory of all encoders; with None pictures follow long prompts less closely.
        tokenizer_3: for `text_encoder_3`.
        image_encoder, feature_extractor: not used by the pipeline; kept for checkpoints and extensions that have them.
    """

    model_cpu_offload_seq: ClassVar[str | None] = (
        "text_encoder->text_encoder_2->text_encoder_3->image_encoder->transformer->vae"
    )
    _optional_components: ClassVar[list[str]] = ["image_encoder", "feature_extractor"]
    _callback_tensor_inputs: ClassVar[list[str]] = [
        "latents",
        "prompt_embeds",
        "negative_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ]
    _denoiser: ClassVar[str] = "transformer"
    _output: ClassVar[type[Any]] = StableDiffusion3PipelineOutput
    _rounds_strength_up: ClassVar[bool] = True
    # The configs ask for float32, but this autoencoder computes well in bfloat16, as the checkpoints are used.
    _upcasts: ClassVar[bool] = False

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        scheduler: Scheduler,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModelWithProjection",
        tokenizer: "CLIPTokenizer",
        text_encoder_2: "CLIPTextModelWithProjection",
        tokenizer_2: "CLIPTokenizer",
        text_encoder_3: "T5EncoderModel | None",
        tokenizer_3: "T5Tokenizer | None",
        image_encoder: "SiglipVisionModel | None" = None,
        feature_extractor: "SiglipImageProcessor | None" = None,
    ) -> None:
        self.register_modules(
            transformer=transformer,
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            text_encoder_3=text_encoder_3,
            tokenizer_3=tokenizer_3,
            image_encoder=image_encoder,
            feature_extractor=feature_extractor,
        )

    @classmethod
    def component_arguments(cls) -> dict[str, bool]:
        """As for all pipelines; T5 is not required."""
        return {**super().component_arguments(), "text_encoder_3": False, "tokenizer_3": False}

    @property
    def size_multiple(self) -> int:
        """Height and width of pictures are multiples of this, so that patches divide the latents."""
        return self.vae_scale_factor * self.transformer.config.patch_size

    # ---- check ----

    def _state(
        self,
        guidance_scale: float,
        clip_skip: int | None,
        mu: float | None,
        joint_attention_kwargs: Mapping[str, Any] | None,
        ip_adapter_image: Any,
        ip_adapter_image_embeds: Any,
    ) -> Tensors:
        """What can be read and changed during a call."""
        refuse_adapters(ip_adapter_image=ip_adapter_image, ip_adapter_image_embeds=ip_adapter_image_embeds)
        check_attention_kwargs(joint_attention_kwargs)
        return {
            "guidance_scale": guidance_scale,
            "clip_skip": clip_skip,
            "mu": mu,
            "joint_attention_kwargs": joint_attention_kwargs,
            "skip_guidance_layers": None,
        }

    def _check(self, call: Call) -> int:
        batch, prompts = super()._check(call), call.prompts
        check_clip_skip(prompts.clip_skip, self.text_encoder)
        self._check_schedule(call)
        names = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
        self._check_encoders(call, *names, remedy="pass embeddings and pooled ones")
        if self.text_encoder_3 is not None:
            self._check_encoders(call, "tokenizer_3", remedy="set text_encoder_3 to None too, or load both")
        config = self.transformer.config
        sizes = (config.joint_attention_dim, config.pooled_projection_dim)
        self._check_widths(prompts, **dict(zip(_KINDS, sizes, strict=True)))
        return batch

    def _check_schedule(self, call: Call) -> None:
        mu = call.state["mu"]
        if mu is None:
            return
        check_scale("mu", mu)
        if "mu" not in inspect.signature(self.scheduler.set_timesteps).parameters:
            raise ValueError(f"mu={mu} has nothing to act on: {type(self.scheduler).__name__} does not shift by it")

    # ---- encode ----

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        prompt_2: str | list[str] | None,
        prompt_3: str | list[str] | None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        negative_prompt_3: str | list[str] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        clip_skip: int | None = None,
        max_sequence_length: int = 256,
        lora_scale: float | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Encode prompts, which `__call__` takes as `prompt_embeds`, `pooled_prompt_embeds` and the negative ones.

        Args:
            prompt: one text or several.
            prompt_2: the same for the second CLIP; `prompt` if None.
            prompt_3: the same for T5; `prompt` if None.
            device: where to compute, and where the result lies; the pipeline's devices if None.
            num_images_per_prompt: how often each prompt is repeated.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            negative_prompt, negative_prompt_2, negative_prompt_3: what the pictures should not show; "" if None.
            prompt_embeds, negative_prompt_embeds, pooled_prompt_embeds, negative_pooled_prompt_embeds: take these in
                place of the texts.
            clip_skip: how many of the CLIPs' last layers are left out for the prompt, besides the last.
            max_sequence_length: tokens of T5, from 1 to 512.
            lora_scale: must be None, as no adapter is loaded.

        Returns:
            Embeddings (prompts * num_images_per_prompt, tokens, size), negative ones, pooled ones (..., size), and
            negative pooled ones; the negative ones are None without guidance.
        """
        refuse_adapters(lora_scale=lora_scale)
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            prompt_2,
            negative_prompt_2,
            pooled_prompt_embeds,
            negative_pooled_prompt_embeds,
            clip_skip,
            prompt_3=prompt_3,
            negative_prompt_3=negative_prompt_3,
            max_sequence_length=max_sequence_length,
        )
        check_clip_skip(clip_skip, self.text_encoder)
        with self.letting_go():
            positive, *more = self._encode(prompts, do_classifier_free_guidance, device)
        negative = (more[0].embeds, more[0].pooled) if more else (None, None)
        return positive.embeds, negative[0], positive.pooled, negative[1]

    def _encode(self, prompts: Prompts, guided: bool, device: torch.device | None = None) -> list[Encoded]:
        """The embeddings for each picture, and those of the negative prompts if `guided`."""
        count = prompts.count()
        encoders = Encoders(
            [(self.tokenizer, self.text_encoder), (self.tokenizer_2, self.text_encoder_2)],
            None if self.text_encoder_3 is None else (self.tokenizer_3, self.text_encoder_3),
            self._text_size(),
        )
        found = encode(prompts, count, encoders, ["", "negative_"] if guided else [""], device)

        def placed(embeds: torch.Tensor) -> torch.Tensor:
            return self._per_picture(embeds, prompts, count, device)

        return [Encoded(placed(each.embeds), placed(each.pooled), each.truncated) for each in found]

    def _text_size(self) -> int:
        """The width of embeddings: what the transformer takes, or T5 gives in a pipeline that only encodes."""
        if self.transformer is not None:
            return self.transformer.config.joint_attention_dim
        self._check_present("text_encoder_3", remedy="load it, or the transformer, to know the width of embeddings")
        return self.text_encoder_3.config.d_model

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        positive, *negative = self._encode(prompts, self.do_classifier_free_guidance)
        both = [*negative, positive]
        return {
            "prompt_embeds": torch.cat([each.embeds for each in both]),
            "pooled_prompt_embeds": torch.cat([each.pooled for each in both]),
            "negative_prompt_embeds": negative[0].embeds if negative else None,
            "negative_pooled_prompt_embeds": negative[0].pooled if negative else None,
        }, positive.truncated

    # ---- denoise ----

    def _schedule(self, call: Call) -> Tensors:
        config, mu = self.scheduler.config, call.state["mu"]
        if mu is None and config.get("use_dynamic_shifting"):
            mu = image_shift(config, call.task.tokens(self.size_multiple))
        return {"sigmas": call.sigmas, **({} if mu is None else {"mu": mu})}

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        text, pooled = (tensors[name] for name in _KINDS)
        if not self.do_classifier_free_guidance:
            return self._flow(timestep, sample, text, pooled)
        prediction = self._flow(timestep, torch.cat([sample, sample]), text, pooled)
        guided = guide(prediction, self.guidance_scale)
        if not self._skips_layers(index):
            return guided
        # Away from what a model without these layers would draw, as from what no prompt asks for.
        count = len(sample)
        weak = self._flow(timestep, sample, text[-count:], pooled[-count:], self.skip_guidance_layers)
        return guided + self.skip_layer_guidance_scale * (prediction[-count:] - weak)

    def _skips_layers(self, index: int) -> bool:
        """Whether the step is among those with skip-layer guidance."""
        if self.skip_guidance_layers is None:
            return False
        steps = -(-self.num_timesteps // self.scheduler.order)
        return steps * self.skip_layer_guidance_start < index < steps * self.skip_layer_guidance_stop

    def _flow(
        self,
        timestep: torch.Tensor,
        sample: torch.Tensor,
        text: torch.Tensor,
        pooled: torch.Tensor,
        skip_layers: Sequence[int] | None = None,
    ) -> torch.Tensor:
        return self.transformer(
            hidden_states=sample,
            timestep=one_a_sample(timestep, len(sample)),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            joint_attention_kwargs=self.joint_attention_kwargs,
            skip_layers=skip_layers,
            return_dict=False,
        )[0]
