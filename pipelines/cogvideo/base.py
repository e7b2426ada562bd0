"""What the CogVideoX pipelines share: components, text, positions, guidance, and one call of the transformer."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...models.autoencoders.cogvideox import AutoencoderKLCogVideoX
from ...models.transformers.checks import check_attention_kwargs
from ...models.transformers.cogvideox import CogVideoXTransformer3DModel
from ...schedulers.cogvideox import CogVideoXScheduler
from ...schedulers.dpm_cogvideox import CogVideoXDPMScheduler
from ..film import FilmPipeline
from ..guidance import guide
from ..loop import Steps
from ..picture import Call, Tensors
from ..text_t5 import encode_t5
from .output import CogVideoXPipelineOutput
from .positions import rotary_positions

if TYPE_CHECKING:
    from transformers import T5EncoderModel, T5Tokenizer

# What the image-to-video checkpoints of version 1.5 are told of the motion in a film; they know no other value.
OFS = 2.0


class CogVideoXBase(FilmPipeline):
    """Base of the pipelines of CogVideoX. Latents are (N, f, C, h, w).

    Of f latents along time come 4 f - 3 frames if f is odd, 4 f if it is even: the autoencoder works on two latents at
    a time, and on three at the start where they are odd. So films have 8 k + 1 or 8 k frames, 49 for one.

    Args:
        tokenizer: from text to tokens.
        text_encoder: from tokens to embeddings.
        vae: between films and latents. None works where latents go in and out.
        transformer: predicts.
        scheduler: takes the steps.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->transformer->vae"
    _output: ClassVar[type[Any]] = CogVideoXPipelineOutput
    _draws_packed: ClassVar[bool] = True
    _channel_axis: ClassVar[int] = 2
    _frame_axis: ClassVar[int] = 1

    def __init__(
        self,
        tokenizer: "T5Tokenizer",
        text_encoder: "T5EncoderModel",
        vae: AutoencoderKLCogVideoX,
        transformer: CogVideoXTransformer3DModel,
        scheduler: CogVideoXScheduler,
    ) -> None:
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
        )

    # ---- sizes ----

    def _default_size(self) -> tuple[int, int]:
        config, factor = self.transformer.config, self.vae_scale_factor
        return config.sample_height * factor, config.sample_width * factor

    @property
    def fps(self) -> float:
        """Frames a second of the films that the transformer was trained on: 16 for version 1.5, 8 for those before."""
        return 8 if self.transformer.config.patch_size_t is None else 16

    def _film_frames(self, latents: int) -> int:
        ratio = self.vae_scale_factor_temporal
        return ratio * latents - (ratio - 1) * (latents % 2)

    def _patch_frames(self) -> int:
        """Latents along time in a patch."""
        return self.transformer.config.patch_size_t or 1

    def _latent_shape(self, batch: int, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """With latents before the first frame, as many as patches need to be whole, which are not decoded."""
        batch, channels, latents, *sides = super()._latent_shape(batch, height, width, frames)
        return batch, channels, latents + -latents % self._patch_frames(), *sides

    def _packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        batch, channels, frames, *sides = shape
        return batch, frames, channels, *sides

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        latents = latents.transpose(1, 2)
        extra = -latents.shape[1] % self._patch_frames()
        return torch.cat([latents[:, :1]] * extra + [latents], dim=1)

    def _unpack(self, latents: torch.Tensor, height: int, width: int, frames: int = 1) -> torch.Tensor:
        return latents[:, latents.shape[1] - self._latent_frames(frames) :].transpose(1, 2)

    # ---- check ----

    @property
    def _embeds_of(self) -> int:
        return self.transformer.config.text_embed_dim

    def _prepare(self, call: Call, batch: int) -> None:
        super()._prepare(call, batch)
        size, trained = (call.task.height, call.task.width), self._default_size()
        if self.transformer.config.use_learned_positional_embeddings and size != trained:
            raise ValueError(
                f"height={size[0]} and width={size[1]} must be {trained[0]} and {trained[1]}: the transformer has "
                "learned positions for this size alone"
            )

    def _check(self, call: Call) -> int:
        check_attention_kwargs(call.state["attention_kwargs"], "attention_kwargs")
        batch, config, prompts = super()._check(call), self.transformer.config, call.prompts
        longest, length = config.max_text_seq_length, prompts.max_sequence_length
        if config.use_learned_positional_embeddings and prompts.prompt is not None and length > longest:
            raise ValueError(f"max_sequence_length={length} exceeds the {longest} tokens that the transformer knows")
        return batch

    # ---- encode ----

    def _embed(
        self, texts: Sequence[str], length: int, device: torch.device | None
    ) -> tuple[torch.Tensor, list[str] | None]:
        text = encode_t5(texts, self.tokenizer, self.text_encoder, length=length, device=device)
        return text.embeds, text.truncated

    def _text_tensors(self, prompts: Any) -> tuple[Tensors, list[str] | None]:
        """With guidance, "prompt_embeds" are those of the negative prompts and then those of the prompts."""
        tensors, truncated = super()._text_tensors(prompts)
        if tensors["negative_prompt_embeds"] is not None:
            both = [tensors["negative_prompt_embeds"], tensors["prompt_embeds"]]
            tensors["prompt_embeds"] = torch.cat(both)
        return tensors, truncated

    # ---- denoise ----

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """Positions of patches, where these are rotary, and what else the transformer takes."""
        config, latents = self.transformer.config, tensors["latents"]
        ofs = None if config.ofs_embed_dim is None else latents.new_full((1,), OFS)
        if not config.use_rotary_positional_embeddings:
            return {"rotary": None, "ofs": ofs}
        patch = config.patch_size
        _, frames, _, rows, columns = latents.shape
        grid = frames // self._patch_frames(), rows // patch, columns // patch
        trained = config.sample_height // patch, config.sample_width // patch
        rotary = rotary_positions(
            grid, trained if config.patch_size_t is None else None, config.attention_head_dim, latents.device
        )
        return {"rotary": rotary, "ofs": ofs}

    def _denoise(
        self, run: Any, call: Call, steps: Steps, tensors: Tensors, callback: Callable[..., Tensors]
    ) -> torch.Tensor:
        if self.use_dynamic_cfg:
            factors = [dynamic_factor(timestep, steps.count) for timestep in steps.timesteps.tolist()]
            tensors = {**tensors, "factors": factors}
        return super()._denoise(run, call, steps, tensors, callback)

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        guided = self.do_classifier_free_guidance
        prediction = self.transformer(
            torch.cat([sample, sample]) if guided else sample,
            encoder_hidden_states=tensors["prompt_embeds"],
            timestep=timestep,
            ofs=tensors["ofs"],
            image_rotary_emb=tensors["rotary"],
            attention_kwargs=self.attention_kwargs,
            return_dict=False,
        )[0].float()
        if not guided:
            return prediction
        scale = self.guidance_scale
        return guide(prediction, 1 + scale * tensors["factors"][index] if "factors" in tensors else scale)

    def _step(
        self, steps: Steps, index: int, prediction: torch.Tensor, tensors: Tensors, options: Tensors
    ) -> torch.Tensor:
        """The DPM scheduler is handed what it predicted in the step before."""
        if not isinstance(steps.scheduler, CogVideoXDPMScheduler):
            return super()._step(steps, index, prediction, tensors, options)
        before = steps.timesteps[index - 1] if index else None
        latents, tensors["original"] = steps.scheduler.step(
            prediction,
            tensors.get("original"),
            steps.timesteps[index],
            before,
            tensors["latents"],
            **options,
            return_dict=False,
        )
        return latents


def dynamic_factor(timestep: float, steps: int) -> float:
    """What the guidance scale is multiplied with at a timestep, from 0 to 1, before 1 is added (`use_dynamic_cfg`).

    The published formula is a cosine that rises over the steps, but its makers filled in timesteps of training, from
    999 down to 0, for steps. The films that they show, and those of the reference, are made so; we do the same.
    """
    return (1 - math.cos(math.pi * ((steps - timestep) / steps) ** 5.0)) / 2
