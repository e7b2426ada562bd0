"""`WanPipeline`: text to film."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.randomness import Generators

from ...models.autoencoders.wan import AutoencoderKLWan
from ...models.transformers.wan import WanTransformer3DModel
from ...schedulers.base import Scheduler
from ..callbacks import Callback
from ..film import FilmFromNoise, Prompts
from ..picture import Call
from .base import WanBase
from .output import WanPipelineOutput

if TYPE_CHECKING:
    from transformers import T5Tokenizer, UMT5EncoderModel


class WanPipeline(WanBase):
    """From a prompt to films with Wan 2.1 and 2.2; see `WanBase`.

    Args:
        tokenizer: from text to tokens.
        text_encoder: from tokens to embeddings.
        vae: between films and latents. None works where latents go in and out.
        scheduler: takes the steps along the flow.
        transformer: predicts the flow, in the first steps where there are two.
        transformer_2: predicts it in the later ones.
        boundary_ratio: from 0 to 1, the share of noise below which `transformer_2` predicts; None for never.
        expand_timesteps: each token is told its own time, as in Wan 2.2's 5B.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->transformer->transformer_2->vae"

    def __init__(
        self,
        tokenizer: "T5Tokenizer",
        text_encoder: "UMT5EncoderModel",
        vae: AutoencoderKLWan,
        scheduler: Scheduler,
        transformer: WanTransformer3DModel | None = None,
        transformer_2: WanTransformer3DModel | None = None,
        boundary_ratio: float | None = None,
        expand_timesteps: bool = False,
    ) -> None:
        self.register_modules(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=vae,
            scheduler=scheduler,
            transformer=transformer,
            transformer_2=transformer_2,
        )

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        guidance_scale_2: float | None = None,
        num_videos_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str | None = "np",
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 512,
    ) -> WanPipelineOutput | tuple[Any]:
        """Make films.

        Args:
            prompt: what to show, one text or several.
            negative_prompt: what not to show: one text for all prompts, or one for each. Without guidance it is unused.
            height: in pixels, a multiple of 16, of Wan 2.2's 5B of 32 (`size_multiple`).
            width: likewise.
            num_frames: of the film, 4 k + 1; of 4 k, 4 k + 2 and 4 k + 3 it has 4 k + 1 too, and the result says so in
                `rounded_from`.
            num_inference_steps: more take longer and give better films.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            guidance_scale_2: the same in the steps of `transformer_2`; as `guidance_scale` if None.
            num_videos_per_prompt: films for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each film. Film k of a list is the one that its
                generator makes alone. A generator on the CPU gives the same films on every device.
            latents: noise to start from, (films, channels, f, height / scale, width / scale).
            prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            negative_prompt_embeds: likewise, in place of `negative_prompt`.
            output_type: "pil" (lists of pictures), "np" (N, F, H, W, C), "pt" (N, F, C, H, W), both from 0 to 1, or
                "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(frames,)`.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            max_sequence_length: tokens for each prompt; what is longer is cut, and said in `truncated_prompts`.

        Raises:
            TypeError: for an argument of the wrong kind.
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
            NumericalError: if a model gives values that are not finite.
        """
        call = Call(
            Prompts(
                prompt,
                negative_prompt,
                prompt_embeds,
                negative_prompt_embeds,
                num_videos_per_prompt,
                max_sequence_length,
            ),
            FilmFromNoise(height, width, num_frames, latents),
            num_inference_steps,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={
                "guidance_scale": guidance_scale,
                "guidance_scale_2": guidance_scale_2,
                "attention_kwargs": attention_kwargs,
            },
        )
        return self._draw(call)
