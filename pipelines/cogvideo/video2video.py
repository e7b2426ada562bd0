"""`CogVideoXVideoToVideoPipeline`: a film, and a text, to film."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..film import FilmFromFilm, Prompts
from ..picture import Call
from .base import CogVideoXBase
from .output import CogVideoXPipelineOutput


class CogVideoXVideoToVideoPipeline(CogVideoXBase):
    """From a film to films that follow it and a prompt, with CogVideoX 2B, 5B and 1.5; see `CogVideoXBase`."""

    def __call__(
        self,
        video: Any = None,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        strength: float = 0.8,
        guidance_scale: float = 6,
        use_dynamic_cfg: bool = False,
        num_videos_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 226,
    ) -> CogVideoXPipelineOutput | tuple[Any]:
        """Make films.

        Args:
            video: one film for all prompts, or one for each, as lists of PIL images, arrays (F, H, W, C) or tensors
                (F, C, H, W). Of other than 8 k + 1 or 8 k frames, the result says so in `rounded_from`.
            prompt: what to show, one text or several.
            negative_prompt: what not to show: one text for all prompts, or one for each. Without guidance it is unused.
            height: in pixels, a multiple of `size_multiple`; what the transformer was trained on by default.
            width: likewise.
            num_inference_steps: more take longer and give better films.
            timesteps: timesteps of training to take, falling, in place of the scheduler's choice.
            strength: from 0 to 1, how far to go from the film; so much of the steps is taken.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            use_dynamic_cfg: vary the scale from step to step, as the published films were made.
            num_videos_per_prompt: films for each prompt; they follow one another in the result.
            eta: without effect with CogVideoX's schedulers.
            generator: where random numbers come from: one, or one for each film. Film k of a list is the one that its
                generator makes alone. A generator on the CPU gives the same films on every device.
            latents: in place of `video`, noisy, to start from, (films, f, channels, height / scale, width / scale).
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
            FilmFromFilm(video, strength, height, width, latents),
            num_inference_steps,
            timesteps,
            eta=eta,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={
                "guidance_scale": guidance_scale,
                "use_dynamic_cfg": use_dynamic_cfg,
                "attention_kwargs": attention_kwargs,
            },
        )
        return self._draw(call)
