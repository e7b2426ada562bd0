"""`HunyuanVideoPipeline`: text to film."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.randomness import Generators

from ...models.autoencoders.hunyuan_video import AutoencoderKLHunyuanVideo
from ...models.transformers.checks import check_attention_kwargs
from ...models.transformers.hunyuan_video import HunyuanVideoTransformer3DModel
from ...schedulers.base import Scheduler
from ..callbacks import Callback
from ..film import FilmFromNoise, FilmPipeline
from ..flow import flow_schedule
from ..picture import Call, Tensors
from ..text import as_prompts, encode_clip
from .output import HunyuanVideoPipelineOutput
from .prompts import DEFAULT_PROMPT_TEMPLATE, Prompts, encode_llama

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer, LlamaModel, LlamaTokenizer

_KINDS = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")


class HunyuanVideoPipeline(FilmPipeline):
    """From a prompt to films with HunyuanVideo.

    Of f latents along time come 4 f - 3 frames. The steps are computed in float32, whatever the transformer's dtype.

    Args:
        text_encoder: Llama, which gives a vector for each token.
        tokenizer: for Llama.
        transformer: predicts the flow.
        vae: between films and latents. None works where latents go in and out.
        scheduler: takes the steps along the flow.
        text_encoder_2: CLIP, which gives one vector for each prompt.
        tokenizer_2: for CLIP.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->text_encoder_2->transformer->vae"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds"]
    _output: ClassVar[type[Any]] = HunyuanVideoPipelineOutput
    # `guidance_scale` goes into the transformer, which was distilled with guidance.
    _scale_name: ClassVar[str] = "true_cfg_scale"

    def __init__(
        self,
        text_encoder: "LlamaModel",
        tokenizer: "LlamaTokenizer",
        transformer: HunyuanVideoTransformer3DModel,
        vae: AutoencoderKLHunyuanVideo,
        scheduler: Scheduler,
        text_encoder_2: "CLIPTextModel",
        tokenizer_2: "CLIPTokenizer",
    ) -> None:
        self.register_modules(
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=transformer,
            vae=vae,
            scheduler=scheduler,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
        )

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        height: int = 720,
        width: int = 1280,
        num_frames: int = 129,
        num_inference_steps: int = 50,
        sigmas: Sequence[float] | None = None,
        true_cfg_scale: float = 1.0,
        guidance_scale: float = 6.0,
        num_videos_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        prompt_template: Mapping[str, Any] = DEFAULT_PROMPT_TEMPLATE,
        max_sequence_length: int = 256,
    ) -> HunyuanVideoPipelineOutput | tuple[Any]:
        """Make films.

        Args:
            prompt: what to show, one text or several.
            prompt_2: the same for CLIP; `prompt` if None.
            negative_prompt: what not to show: one text for all prompts, or one for each. It counts with
                `true_cfg_scale` above 1.
            negative_prompt_2: the same for CLIP; `negative_prompt` if None.
            height: in pixels, a multiple of 16 (of `size_multiple`).
            width: likewise.
            num_frames: of the film, 4 k + 1; others are rounded down, and the result says so in `rounded_from`.
            num_inference_steps: more take longer and give better films.
            sigmas: noise levels to take, from 1 down, the end 0 left out, in place of evenly spaced ones.
            true_cfg_scale: how far to go away from `negative_prompt`; above 1 each step takes two predictions.
            guidance_scale: how closely the prompt is followed, as the transformer is told.
            num_videos_per_prompt: films for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each film. Film k of a list is the one that its
                generator makes alone. A generator on the CPU gives the same films on every device.
            latents: noise to start from, (films, channels, f, height / scale, width / scale).
            prompt_embeds, pooled_prompt_embeds, prompt_attention_mask: what `encode_prompt` made, in place of `prompt`.
            negative_prompt_embeds, negative_pooled_prompt_embeds, negative_prompt_attention_mask: likewise.
            output_type: "pil" (lists of pictures), "np" (N, F, H, W, C), "pt" (N, F, C, H, W), both from 0 to 1, or
                "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(frames,)`.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            prompt_template: {"template": the chat that the prompt is put into, at {}; "crop_start": how many of its
                tokens the transformer is not shown}.
            max_sequence_length: tokens for each prompt; what is longer is cut, and said in `truncated_prompts`.

        Raises:
            TypeError: for an argument of the wrong kind.
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
            NumericalError: if a model gives values that are not finite.
        """
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_videos_per_prompt,
            prompt_2,
            negative_prompt_2,
            pooled_prompt_embeds,
            negative_pooled_prompt_embeds,
            prompt_attention_mask,
            negative_prompt_attention_mask,
            prompt_template,
            max_sequence_length,
        )
        call = Call(
            prompts,
            FilmFromNoise(height, width, num_frames, latents),
            num_inference_steps,
            sigmas=sigmas,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={
                "guidance_scale": guidance_scale,
                # There must be something to be guided away from.
                "true_cfg_scale": true_cfg_scale if prompts.negative else 1.0,
                "attention_kwargs": attention_kwargs,
            },
        )
        return self._draw(call)

    # ---- sizes ----

    @property
    def fps(self) -> float:
        """Frames a second of the films that the transformer was trained on."""
        return 24

    @property
    def latents_dtype(self) -> torch.dtype:
        """What the steps are computed in."""
        return torch.float32

    def _default_size(self) -> tuple[int, int]:
        return 720, 1280

    def _default_frames(self) -> int:
        return 129

    # ---- check and encode ----

    @property
    def _embeds_of(self) -> int:
        return self.transformer.config.text_embed_dim

    def _check(self, call: Call) -> int:
        check_attention_kwargs(call.state["attention_kwargs"], "attention_kwargs")
        batch = super()._check(call)
        self._check_encoders(call, "text_encoder_2", "tokenizer_2", remedy="pass embeddings, pooled ones and masks")
        self._check_widths(call.prompts, pooled_prompt_embeds=self.transformer.config.pooled_projection_dim)
        return batch

    def encode_prompt(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        prompt: str | list[str] | None,
        prompt_2: str | list[str] | None = None,
        prompt_template: Mapping[str, Any] = DEFAULT_PROMPT_TEMPLATE,
        num_videos_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        max_sequence_length: int = 256,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode prompts, which `__call__` takes as `prompt_embeds`, `pooled_prompt_embeds` and a mask.

        Args:
            prompt: one text or several, for Llama.
            prompt_2: the same for CLIP; `prompt` if None.
            prompt_template: the chat that the prompt is put into, see `__call__`.
            num_videos_per_prompt: how often each prompt is repeated.
            prompt_embeds, pooled_prompt_embeds, prompt_attention_mask: take these in place of the texts.
            device: where to compute; the pipeline's device if None.
            dtype: of the embeddings; the transformer's if None.
            max_sequence_length: tokens for each prompt; shorter ones are padded, longer ones cut.

        Returns:
            Embeddings (prompts * num_videos_per_prompt, tokens, size), pooled ones (..., size), and which tokens count
            (..., tokens).
        """
        prompts = Prompts(
            prompt,
            None,
            prompt_embeds,
            None,
            num_videos_per_prompt,
            prompt_2,
            pooled_prompt_embeds=pooled_prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
            prompt_template=prompt_template,
            max_sequence_length=max_sequence_length,
        )
        with self.letting_go():
            tensors, _ = self._encode(prompts, False, device)
        embeds, pooled, mask = (tensors[kind] for kind in _KINDS)
        return (embeds, pooled, mask) if dtype is None else (embeds.to(dtype), pooled.to(dtype), mask)

    def _encode(
        self, prompts: Prompts, guided: bool, device: torch.device | None = None
    ) -> tuple[Tensors, list[str] | None]:
        """Embeddings, pooled ones and masks for each film, of negative prompts too if `guided`, and what was cut."""
        count, sides = prompts.count(), ["", "negative_"] if guided else [""]
        made = {f"{sign}{kind}": getattr(prompts, f"{sign}{kind}") for sign in sides for kind in _KINDS}
        asked = [sign for sign in sides if made[f"{sign}prompt_embeds"] is None]
        truncated = None
        if asked:
            texts: list[str] = []
            clip_texts: list[str] = []
            for sign in asked:
                first, second = getattr(prompts, f"{sign}prompt"), getattr(prompts, f"{sign}prompt_2")
                texts += as_prompts(first, count, f"{sign}prompt")
                clip_texts += as_prompts(second or first, count, f"{sign}prompt_2")
            # All texts at once, so that each encoder is needed once.
            length = prompts.max_sequence_length
            text = encode_llama(texts, self.tokenizer, self.text_encoder, prompts.prompt_template, length, device)
            pooled = encode_clip(clip_texts, self.tokenizer_2, self.text_encoder_2, device=device).pooled
            for index, sign in enumerate(asked):
                part = slice(index * count, (index + 1) * count)
                found = (text.embeds[part], pooled[part], text.mask[part])
                made |= {f"{sign}{kind}": value for kind, value in zip(_KINDS, found, strict=True)}
            truncated = text.truncated[:count] if asked[0] == "" else None
        return {name: self._per_picture(value, prompts, count, device) for name, value in made.items()}, truncated

    # ---- denoise ----

    def _schedule(self, call: Call) -> Tensors:
        height, width, frames = call.task.size
        step, tokens = self.size_multiple, self._latent_frames(frames) // self.transformer.config.patch_size_t
        tokens *= (height // step) * (width // step)
        return flow_schedule(self.scheduler, call.num_inference_steps, tokens, sigmas=call.sigmas, always=True)

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """The guidance scale as the transformer takes it, where it does."""
        if not self.transformer.config.guidance_embeds:
            return {"guidance": None}
        return {"guidance": tensors["prompt_embeds"].new_full((len(tensors["latents"]),), self.guidance_scale) * 1000}

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        prediction = self._flow("", timestep, sample, tensors)
        if not self.do_classifier_free_guidance or "negative_prompt_embeds" not in tensors:
            return prediction
        # One after the other: activations of two films at once would take twice the room.
        without = self._flow("negative_", timestep, sample, tensors)
        return without + self.true_cfg_scale * (prediction - without)

    def _flow(self, sign: str, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        embeds, pooled, mask = (tensors[f"{sign}{kind}"] for kind in _KINDS)
        return self.transformer(
            sample.to(self.transformer.dtype),
            timestep=timestep,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            pooled_projections=pooled,
            guidance=tensors["guidance"],
            attention_kwargs=self.attention_kwargs,
            return_dict=False,
        )[0].float()
