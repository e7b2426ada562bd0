"""`WanVideoToVideoPipeline`: a film, and a text, to film."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.randomness import Generators

from ...models.autoencoders.wan import AutoencoderKLWan
from ...models.transformers.wan import WanTransformer3DModel
from ...schedulers.base import Scheduler
from ..callbacks import Callback
from ..film import FilmFromFilm, FilmPipeline, Prompts
from ..latents import encode_image
from ..picture import Call
from .base import WanBase
from .output import WanPipelineOutput

if TYPE_CHECKING:
    from transformers import T5Tokenizer, UMT5EncoderModel


class WanVideoToVideoPipeline(WanBase):
    """From a film to films that follow it and a prompt, with Wan 2.1; see `WanBase`.

    Args:
        tokenizer: from text to tokens.
        text_encoder: from tokens to embeddings.
        transformer: predicts the flow.
        vae: between films and latents.
        scheduler: takes the steps along the flow.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->transformer->vae"
    _optional_components: ClassVar[list[str]] = []

    def __init__(
        self,
        tokenizer: "T5Tokenizer",
        text_encoder: "UMT5EncoderModel",
        transformer: WanTransformer3DModel,
        vae: AutoencoderKLWan,
        scheduler: Scheduler,
    ) -> None:
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae, scheduler=scheduler
        )

    def __call__(
        self,
        video: Any = None,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int = 480,
        width: int = 832,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        guidance_scale: float = 5.0,
        strength: float = 0.8,
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
            video: one film for all prompts, or one for each, as lists of PIL images, arrays (F, H, W, C) or tensors
                (F, C, H, W). Of other than 4 k + 1 frames the last are left out, and the result says so.
            prompt: what to show, one text or several.
            negative_prompt: what not to show: one text for all prompts, or one for each. Without guidance it is unused.
            height: in pixels, a multiple of `size_multiple`; the film is brought to it.
            width: likewise.
            num_inference_steps: more take longer and give better films.
            timesteps: timesteps of training to take, falling, in place of the scheduler's choice.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            strength: from 0 to 1, how far to go from the film; so much of the steps is taken.
            num_videos_per_prompt: films for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each film. Film k of a list is the one that its
                generator makes alone. A generator on the CPU gives the same films on every device.
            latents: in place of `video`, noisy, to start from, (films, channels, f, height / scale, width / scale).
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
            FilmFromMiddle(video, strength, height, width, latents),
            num_inference_steps,
            timesteps,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={"guidance_scale": guidance_scale, "guidance_scale_2": None, "attention_kwargs": attention_kwargs},
        )
        return self._draw(call)

    def _fitting(self, num_frames: int) -> int:
        """The end of a film that does not fill a latent is left out: no frame can be added."""
        return FilmPipeline._fitting(self, num_frames)


class FilmFromMiddle(FilmFromFilm):
    """Film to film, from the middle of what the encoder gives: nothing of it is drawn."""

    def _encoded(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return encode_image(pipe.vae, pixels.to(pipe._execution_device), draw=False)
