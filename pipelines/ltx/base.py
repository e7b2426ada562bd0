"""What the LTX pipelines share: components, text, packed latents, guidance, and one call of the transformer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.randomness import randn_tensor

from ...models.autoencoders.ltx import AutoencoderKLLTXVideo
from ...models.transformers.checks import check_attention_kwargs
from ...models.transformers.ltx import LTXVideoTransformer3DModel
from ...schedulers.base import Scheduler
from ..film import FilmPipeline
from ..flow import flow_schedule
from ..guidance import guide
from ..latents import decode_latents, to_vae_scale
from ..loop import check_share
from ..picture import Call, Tensors
from ..text import as_prompts
from ..text_t5 import encode_t5
from .output import LTXPipelineOutput
from .prompts import Prompts

if TYPE_CHECKING:
    from transformers import T5EncoderModel, T5Tokenizer

Share = float | Sequence[float] | None


class LTXBase(FilmPipeline):
    """Base of the pipelines of LTX-Video. Latents are tokens (N, f * h * w, C), frame by frame, row by row.

    Of f latents along time come 8 f - 7 frames. The steps are computed in float32, whatever the transformer's dtype.

    Args:
        scheduler: takes the steps along the flow.
        vae: between films and latents. None works where latents go in and out.
        text_encoder: from tokens to embeddings.
        tokenizer: from text to tokens.
        transformer: predicts the flow.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->transformer->vae"
    _output: ClassVar[type[Any]] = LTXPipelineOutput
    _usual_scale: ClassVar[int] = 32
    _usual_frame_scale: ClassVar[int] = 8
    # Whether T5 does not see padding either.
    _masks_text: ClassVar[bool] = False

    def __init__(
        self,
        scheduler: Scheduler,
        vae: AutoencoderKLLTXVideo,
        text_encoder: "T5EncoderModel",
        tokenizer: "T5Tokenizer",
        transformer: LTXVideoTransformer3DModel,
    ) -> None:
        self.register_modules(
            scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
        )

    # ---- sizes and shapes ----

    @property
    def fps(self) -> float:
        """Frames a second of the films that the transformer was trained on."""
        return 25

    @property
    def latents_dtype(self) -> torch.dtype:
        """What the steps are computed in."""
        return torch.float32

    @property
    def _patch(self) -> tuple[int, int]:
        """Latents of a token along time, and along each side."""
        config = self.transformer.config
        return config.patch_size_t, config.patch_size

    @property
    def latent_channels(self) -> int:
        """Channels of the latents, before they are packed."""
        frames, side = self._patch
        return self.transformer.config.in_channels // (frames * side * side)

    def _default_size(self) -> tuple[int, int]:
        return 512, 704

    def _default_frames(self) -> int:
        return 161

    def _grid(self, height: int, width: int, frames: int) -> tuple[int, int, int]:
        """How many tokens a film has along time, height and width."""
        patch_t, patch = self._patch
        _, _, latents, rows, columns = self._latent_shape(1, height, width, frames)
        return latents // patch_t, rows // patch, columns // patch

    def _packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        patch_t, patch = self._patch
        batch, channels, frames, rows, columns = shape
        tokens = (frames // patch_t) * (rows // patch) * (columns // patch)
        return batch, tokens, channels * patch_t * patch * patch

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        patch_t, patch = self._patch
        parts = latents.unflatten(4, (-1, patch)).unflatten(3, (-1, patch)).unflatten(2, (-1, patch_t))
        # (N, C, f, pt, h, p, w, p) to (N, f, h, w, C, pt, p, p)
        return parts.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def _unpack(self, latents: torch.Tensor, height: int, width: int, frames: int = 1) -> torch.Tensor:
        patch_t, patch = self._patch
        parts = latents.unflatten(2, (-1, patch_t, patch, patch)).unflatten(1, self._grid(height, width, frames))
        return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)

    # ---- check ----

    @property
    def _embeds_of(self) -> int:
        return self.transformer.config.caption_channels

    def _check(self, call: Call) -> int:
        check_attention_kwargs(call.state["attention_kwargs"], "attention_kwargs")
        batch, rate = super()._check(call), call.state["frame_rate"]
        if not isinstance(rate, int | float) or not 0 < rate < float("inf"):
            raise ValueError(f"frame_rate={rate!r} must be a number of frames a second, more than 0")
        for name in ("decode_timestep", "decode_noise_scale"):
            values = call.state[name]
            for value in values if isinstance(values, Sequence) else [0.0 if values is None else values]:
                check_share(name, value)
            if isinstance(values, Sequence) and len(values) not in (1, call.prompts.count(), batch):
                raise ValueError(f"{name} has {len(values)} entries for {call.prompts.count()} prompts: pass one each")
        return batch

    # ---- encode ----

    def encode_prompt(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        max_sequence_length: int = 128,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Encode prompts, which `__call__` takes as `prompt_embeds`, `negative_prompt_embeds` and their masks.

        Args:
            prompt: one text or several.
            negative_prompt: one text for all prompts, or one for each; "" if None.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            num_videos_per_prompt: how often each prompt is repeated.
            prompt_embeds, prompt_attention_mask: take these in place of `prompt`.
            negative_prompt_embeds, negative_prompt_attention_mask: take these in place of `negative_prompt`.
            max_sequence_length: tokens for each prompt; shorter ones are padded, longer ones cut.
            device: where to compute; the pipeline's device if None.
            dtype: of the embeddings; the transformer's if None.

        Returns:
            Embeddings (prompts * num_videos_per_prompt, tokens, size) and masks (..., tokens) of the prompts, then
            those of the negative prompts, None without guidance.
        """
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_videos_per_prompt,
            max_sequence_length,
            prompt_attention_mask,
            negative_prompt_attention_mask,
        )
        with self.letting_go():
            made, _ = self._encode(prompts, do_classifier_free_guidance, device)
        embeds, negative = (
            each if each is None or dtype is None else each.to(dtype)
            for each in (made["prompt_embeds"], made["negative_prompt_embeds"])
        )
        mask, negative_mask = made["prompt_attention_mask"], made["negative_prompt_attention_mask"]
        assert embeds is not None and mask is not None
        return embeds, mask, negative, negative_mask

    def _encode(
        self, prompts: Any, guided: bool, device: torch.device | None = None
    ) -> tuple[Tensors, list[str] | None]:
        count, truncated = prompts.count(), None
        made: Tensors = {}
        for name in ("prompt", "negative_prompt"):
            embeds, mask = getattr(prompts, f"{name}_embeds"), getattr(prompts, f"{name}_attention_mask")
            if name == "negative_prompt" and not guided:
                embeds = mask = None
            elif embeds is None:
                texts, given = as_prompts(getattr(prompts, name), count, name), made.get("prompt_embeds")
                # Both go through the transformer together.
                length = prompts.max_sequence_length if given is None else given.shape[1]
                text = encode_t5(
                    texts, self.tokenizer, self.text_encoder, length=length, masked=self._masks_text, device=device
                )
                embeds, mask = text.embeds, text.mask
                truncated = text.truncated if name == "prompt" else truncated
            made[f"{name}_embeds"] = self._per_picture(embeds, prompts, count, device)
            made[f"{name}_attention_mask"] = self._per_picture(mask, prompts, count, device)
        return made, truncated

    def _text_tensors(self, prompts: Any) -> tuple[Tensors, list[str] | None]:
        """With guidance, "prompt_embeds" are those of the negative prompts and then those of the prompts."""
        tensors, truncated = super()._text_tensors(prompts)
        if tensors["negative_prompt_embeds"] is not None:
            for name in ("prompt_embeds", "prompt_attention_mask"):
                tensors[name] = torch.cat([tensors[f"negative_{name}"], tensors[name]])
        return tensors, truncated

    # ---- denoise ----

    def _schedule(self, call: Call) -> Tensors:
        frames, rows, columns = self._grid(*call.task.size)
        schedule = flow_schedule(self.scheduler, call.num_inference_steps, frames * rows * columns, always=True)
        return schedule if call.timesteps is None else {**schedule, "sigmas": None, "timesteps": call.timesteps}

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """Where the tokens lie: the film's size in tokens, and what a latent is worth in seconds and pixels."""
        side = float(self.vae_scale_factor)
        sizes = dict(zip(("num_frames", "height", "width"), self._grid(*call.task.size), strict=True))
        scale = (self.vae_scale_factor_temporal / self.frame_rate, side, side)
        return {"places": {**sizes, "rope_interpolation_scale": scale}}

    def _times(self, timestep: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """How noisy the transformer is told the films (N,), or their tokens (N, S), to be."""
        return timestep.expand(len(tensors["latents"]))

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        guided, times = self.do_classifier_free_guidance, self._times(timestep, tensors)
        prediction = self.transformer(
            (torch.cat([sample, sample]) if guided else sample).to(self.transformer.dtype),
            encoder_hidden_states=tensors["prompt_embeds"],
            timestep=torch.cat([times, times]) if guided else times,
            encoder_attention_mask=tensors["prompt_attention_mask"],
            **tensors["places"],
            attention_kwargs=self.attention_kwargs,
            return_dict=False,
        )[0].float()
        return guide(prediction, self.guidance_scale, self.guidance_rescale) if guided else prediction

    # ---- decode ----

    def _pixels(self, latents: torch.Tensor, call: Call) -> torch.Tensor:
        """From 0.9.1 on the decoder takes the last step: its latents are noised a little, and it is told a time."""
        latents = self._unpack(latents, *call.task.size).to(self.transformer.dtype)
        latents = to_vae_scale(self.vae, latents)
        conditions: Tensors = {}
        if self.vae.config["timestep_conditioning"]:
            batch, count = len(latents), call.prompts.count()
            times = call.state["decode_timestep"]
            scales = call.state["decode_noise_scale"]
            noise = randn_tensor(latents.shape, call.generator, latents.device, latents.dtype)
            share = _for_each(times if scales is None else scales, count, batch, latents)[:, None, None, None, None]
            latents = (1 - share) * latents + share * noise
            conditions["temb"] = _for_each(times, count, batch, latents)
        return decode_latents(self.vae, latents, generator=call.generator, scaled=True, **conditions)


def _for_each(values: Any, count: int, batch: int, like: torch.Tensor) -> torch.Tensor:
    """One number for all, or one for each prompt or film, as one for each film (batch,)."""
    numbers = torch.tensor(values, device=like.device, dtype=like.dtype).reshape(-1)
    return numbers.repeat_interleave(batch // len(numbers))
