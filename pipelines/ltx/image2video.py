"""`LTXImageToVideoPipeline`: a first frame, and a text, to film."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..film import FilmFromImage, FilmFromNoise
from ..latents import spread
from ..loop import Steps
from ..picture import Call, Tensors
from .base import LTXBase
from .output import LTXPipelineOutput
from .prompts import Prompts


class LTXImageToVideoPipeline(LTXBase):
    """From a picture to films that start with it, with LTX-Video; see `LTXBase` for the components.

    The first frame stays as it is: the transformer is told that its tokens are without noise, and no step moves them.
    """

    def __call__(
        self,
        image: "ImageInput | None" = None,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int = 512,
        width: int = 704,
        num_frames: int = 161,
        frame_rate: float = 25,
        num_inference_steps: int = 50,
        timesteps: Sequence[int] | None = None,
        guidance_scale: float = 3,
        guidance_rescale: float = 0.0,
        num_videos_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        decode_timestep: float | list[float] = 0.0,
        decode_noise_scale: float | list[float] | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 128,
    ) -> LTXPipelineOutput | tuple[Any]:
        """Make films.

        Args:
            image: the first frame, one picture for all prompts, or one for each; it is brought to the size of the film.
            prompt: what to show, one text or several.
            negative_prompt: what not to show: one text for all prompts, or one for each. Without guidance it is unused.
            height: in pixels, a multiple of 32 (of `size_multiple`).
            width: likewise.
            num_frames: of the film, 8 k + 1; others are rounded down, and the result says so in `rounded_from`.
            frame_rate: frames a second that the film is made for.
            num_inference_steps: more take longer and give better films.
            timesteps: timesteps of training to take, falling, in place of evenly spaced noise levels.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            guidance_rescale: from 0 to 1, how far to bring back the spread of the unguided prediction.
            num_videos_per_prompt: films for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each film. Film k of a list is the one that its
                generator makes alone. A generator on the CPU gives the same films on every device.
            latents: to start from, packed: (films, tokens, channels of a token). Those of the first frame are a
                picture's, without noise; all others are noise. `image` is not read then.
            prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            prompt_attention_mask: which of these tokens count, as `encode_prompt` gives it.
            negative_prompt_embeds, negative_prompt_attention_mask: likewise, in place of `negative_prompt`.
            decode_timestep: from 0 to 1, how noisy a decoder from 0.9.1 on is told the latents to be: for all, or a
                list with one for each prompt or film. Decoders before that do not read it.
            decode_noise_scale: from 0 to 1, how noisy they are made; as `decode_timestep` if None.
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
                prompt_attention_mask,
                negative_prompt_attention_mask,
            ),
            FilmAfterImage(image, height, width, num_frames, latents),
            num_inference_steps,
            timesteps,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={
                "guidance_scale": guidance_scale,
                "guidance_rescale": guidance_rescale,
                "frame_rate": frame_rate,
                "decode_timestep": decode_timestep,
                "decode_noise_scale": decode_noise_scale,
                "attention_kwargs": attention_kwargs,
            },
        )
        return self._draw(call)

    def _image_tensors(self, task: FilmFromImage, pixels: torch.Tensor) -> Tensors:
        """The tokens of the first frame."""
        latents = spread(task._encoded(self, pixels.unsqueeze(2)), task.count, task.batch, "image")
        return {"first": self._pack(latents.to(self._execution_device, self.latents_dtype))}

    def _times(self, timestep: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """No noise for the tokens of the first frame."""
        return timestep * tensors["noisy"]

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """Besides, which tokens are noisy, (N, S)."""
        constants, latents = super()._constants(call, tensors), tensors["latents"]
        _, rows, columns = self._grid(*call.task.size)
        noisy = latents.new_ones(latents.shape[:2])
        noisy[:, : rows * columns] = 0
        return {**constants, "noisy": noisy, "kept": rows * columns}

    def _step(
        self, steps: Steps, index: int, prediction: torch.Tensor, tensors: Tensors, options: Tensors
    ) -> torch.Tensor:
        kept, latents = tensors["kept"], tensors["latents"]
        moved = super()._step(steps, index, prediction[:, kept:], {**tensors, "latents": latents[:, kept:]}, options)
        return torch.cat([latents[:, :kept], moved], dim=1)


class FilmAfterImage(FilmFromImage):
    """Image to film, where the picture's latents are the first of the film's."""

    # Nothing joins the channels of the transformer's input.
    shown: tuple[str, ...] = ()

    def prepare(self, pipe: Any, call: Call, batch: int) -> None:
        if self.image is None and self.latents is not None:
            FilmFromNoise.prepare(self, pipe, call, batch)
            return
        super().prepare(pipe, call, batch)

    def start(self, pipe: Any, steps: Steps) -> Tensors:
        if self.latents is not None:
            return {"latents": self._noise(pipe, self.latents)}
        # The picture is encoded before noise is drawn, so that a seed gives the film of the reference.
        first = pipe._image_tensors(self, self.pixels)["first"]
        latents = self._noise(pipe)
        return {"latents": torch.cat([first, latents[:, first.shape[1] :]], dim=1)}
