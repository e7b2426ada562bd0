"""`LTXConditionPipeline`: pictures and films at places in time, and a text, to film; or a film to edit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators, randn_tensor

from ..callbacks import Callback
from ..film import Film
from ..latents import check_latents, spread
from ..loop import Steps, check_count, check_scale, check_share
from ..picture import Call, Tensors
from .base import LTXBase
from .output import LTXPipelineOutput
from .prompts import Prompts

# Latents along time of a film that are shown as tokens of their own where it joins; the others take the place of noise.
_PREFIX = 2
# Noise that half of the steps go through evenly, in small steps; the rest follows a parabola.
_LINEAR_SHARE = 0.025


@dataclass
class LTXVideoCondition:
    """A picture or a film that the result shows at a place in time.

    Args:
        image: the picture, or
        video: the film, as a list of PIL images, an array (F, H, W, C) or a tensor (F, C, H, W).
        frame_index: the frame of the result at which it is, or begins.
        strength: from 0 to 1, how closely it is followed.
    """

    image: Any = None
    video: Any = None
    frame_index: int = 0
    strength: float = 1.0


class LTXConditionPipeline(LTXBase):
    """From pictures and films to films that show them at places in time, with LTX-Video from 0.9.5 on; see `LTXBase`.

    What is at the start takes the place of noise in the latents; what comes later is shown as tokens besides, which are
    dropped in the end. No step moves what has a strength of 1.
    """

    _masks_text: ClassVar[bool] = True

    def __call__(
        self,
        conditions: LTXVideoCondition | list[LTXVideoCondition] | None = None,
        image: "ImageInput | None" = None,
        video: Any = None,
        frame_index: int | list[int] = 0,
        strength: float | list[float] = 1.0,
        denoise_strength: float = 1.0,
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
        image_cond_noise_scale: float = 0.15,
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
        max_sequence_length: int = 256,
    ) -> LTXPipelineOutput | tuple[Any]:
        """Make films.

        Args:
            conditions: what the films show, and where. In place of it:
            image: one picture or several, or
            video: one film or several,
            frame_index: the frame at which each of them is or begins,
            strength: and how closely it is followed, from 0 to 1. One number serves all.
            denoise_strength: from 0 to 1, how far to go from `latents`; so much of the steps is taken.
            prompt: what to show, one text or several.
            negative_prompt: what not to show: one text for all prompts, or one for each. Without guidance it is unused.
            height: in pixels, a multiple of 32 (of `size_multiple`).
            width: likewise.
            num_frames: of the film, 8 k + 1; others are rounded down, and the result says so in `rounded_from`.
            frame_rate: frames a second that the film is made for.
            num_inference_steps: more take longer and give better films.
            timesteps: timesteps of training to take, falling, in place of the family's.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            guidance_rescale: from 0 to 1, how far to bring back the spread of the unguided prediction.
            image_cond_noise_scale: how much noise conditions of strength 1 get, more of it in early steps. It helps
                films to move that start from a picture.
            num_videos_per_prompt: films for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each film. Film k of a list is the one that its
                generator makes alone. A generator on the CPU gives the same films on every device.
            latents: of films to edit, with `denoise_strength` below 1, as `output_type="latent"` gives them: (films,
                channels, f, height / scale, width / scale). At 1 they are noise to start from.
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
        found = listed(conditions, image, video, frame_index, strength)
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
            FilmWithConditions(found, height, width, num_frames, latents, denoise_strength),
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
                "image_cond_noise_scale": image_cond_noise_scale,
                "decode_timestep": decode_timestep,
                "decode_noise_scale": decode_noise_scale,
                "attention_kwargs": attention_kwargs,
            },
        )
        return self._draw(call)

    def _check(self, call: Call) -> int:
        check_scale("image_cond_noise_scale", call.state["image_cond_noise_scale"])
        return super()._check(call)

    def _schedule(self, call: Call) -> Tensors:
        """Noise levels that fall slowly at first, where films take shape."""
        if call.timesteps is not None:
            return {"timesteps": call.timesteps}
        levels = linear_quadratic_levels(check_count("num_inference_steps", call.num_inference_steps))
        return {"timesteps": [1000 * level for level in levels]}

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        seconds = tensors["places"].float()
        seconds[:, 0] /= self.frame_rate
        return {"places": {"video_coords": seconds}}

    def _times(self, timestep: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Conditions are told to be as noisy as they are, and no noisier than the film."""
        return torch.minimum(timestep.float(), 1000 * (1 - tensors["strengths"]))

    def _step(
        self, steps: Steps, index: int, prediction: torch.Tensor, tensors: Tensors, options: Tensors
    ) -> torch.Tensor:
        timestep, latents, strengths = steps.timesteps[index], tensors["latents"], tensors["strengths"]
        moved = steps.scheduler.step(
            -prediction,
            timestep,
            latents,
            **options,
            per_token_timesteps=self._times(timestep, tensors),
            return_dict=False,
        )[0]
        # Conditions wait until the film is as clean as they are.
        return torch.where((timestep / 1000 - 1e-6 < 1 - strengths)[..., None], moved, latents)

    def _decode(self, latents: torch.Tensor, call: Call) -> tuple[Any, ...]:
        tokens = math.prod(self._grid(*call.task.size))
        latents = latents[:, latents.shape[1] - tokens :]
        if call.output_type == "latent":
            return (self._unpack(latents, *call.task.size),)
        return super()._decode(latents, call)

    def _places(self, latents: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Frame, row and column of the tokens of latents (N, C, f, h, w) that begin at frame `first`: (1, 3, S)."""
        patch_t, patch = self._patch
        sizes = (latents.shape[2] // patch_t, latents.shape[3] // patch, latents.shape[4] // patch)
        ratio, side = self.vae_scale_factor_temporal, self.vae_scale_factor * patch
        frames, rows, columns = (torch.arange(size, device=latents.device) for size in sizes)
        # The first latent stands for one frame.
        frames = (frames * ratio * patch_t + 1 - ratio).clamp(min=0) + first
        grid = torch.meshgrid(frames, rows * side, columns * side, indexing="ij")
        return torch.stack(grid).flatten(1)[None]


class FilmWithConditions(Film):
    """What a call of `LTXConditionPipeline` starts from.

    Args:
        conditions: what the film shows, and where.
        height, width, num_frames: of the film.
        latents: of a film to edit, or noise.
        strength: the share of the steps that is taken.
    """

    def __init__(
        self,
        conditions: Sequence[LTXVideoCondition],
        height: int | None,
        width: int | None,
        num_frames: int | None,
        latents: torch.Tensor | None,
        strength: float,
    ) -> None:
        self.listed, self.asked, self.num_frames = conditions, (height, width), num_frames
        self.latents, self.share = latents, strength

    def prepare(self, pipe: Any, call: Call, batch: int) -> None:
        super().prepare(pipe, call, batch)
        check_share("denoise_strength", self.share)
        self.strength = None if self.share == 1 else self.share
        self.noise_scale = call.state["image_cond_noise_scale"]
        self.frames, self.rounded_from = pipe._length(self.num_frames)
        self.height, self.width = pipe._size(*self.asked, self.latents)
        if self.latents is not None:
            check_latents(self.latents, pipe._latent_shape(batch, *self.size))
        elif self.strength is not None:
            raise ValueError(f"denoise_strength={self.share} goes a part of the way from latents: pass these")
        if self.listed:
            pipe._check_present("vae", remedy="leave out image, video and conditions")
        self.pixels = [self._read(pipe, condition) for condition in self.listed]

    def _read(self, pipe: Any, condition: LTXVideoCondition) -> torch.Tensor:
        """The pixels (N, C, F, H, W) of a condition, as many frames as have room and fill latents."""
        check_share("strength", condition.strength)
        first, ratio = condition.frame_index, pipe.vae_scale_factor_temporal
        if not isinstance(first, int) or not 0 <= first < self.frames:
            raise ValueError(f"frame_index={first!r} must be a frame of the film, from 0 to {self.frames - 1}")
        if (condition.image is None) == (condition.video is None):
            raise ValueError("a condition is either an image or a video: pass one of them")
        if condition.video is None:
            pixels = pipe.video_processor.preprocess(condition.image, self.height, self.width).unsqueeze(2)
        else:
            pixels = pipe.video_processor.preprocess_video(condition.video, self.height, self.width)
            room = min(pixels.shape[2], self.frames - first)
            pixels = pixels[:, :, : 1 + (room - 1) // ratio * ratio]
            if first and 1 < pixels.shape[2] < 1 + (_PREFIX - 1) * ratio:
                raise ValueError(f"a video at frame_index={first} needs {1 + (_PREFIX - 1) * ratio} frames at least")
        spread(pixels, self.count, self.batch, "the picture or film of a condition")
        return pixels

    def start(self, pipe: Any, steps: Steps) -> Tensors:
        placed = {"device": pipe._execution_device, "dtype": pipe.latents_dtype}
        given = None if self.latents is None else self.latents.to(**placed)
        latents = given
        if given is None or self.strength is not None:
            latents = randn_tensor(pipe._latent_shape(self.batch, *self.size), generator=self.generator, **placed)
        if given is not None and self.strength is not None:
            latents = steps.scheduler.add_noise(given, latents, steps.timesteps[:1])
        assert latents is not None
        latents, frames = latents.clone(), latents.new_zeros(latents.shape[2])
        shown: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        for condition, pixels in zip(self.listed, self.pixels, strict=True):
            found = spread(self._encoded(pipe, pixels), self.count, self.batch, "image").to(**placed)
            shown += self._put(pipe, latents, frames, found, condition)
        # The tokens of a frame lie side by side.
        packed = pipe._pack(latents)
        strengths = frames.repeat_interleave(packed.shape[1] // len(frames)).expand(self.batch, -1)
        tokens = [pipe._pack(part) for part, _, _ in shown]
        beside = [part.new_full(part.shape[:2], share) for part, (_, _, share) in zip(tokens, shown, strict=True)]
        self.clean = torch.cat([*tokens, packed], dim=1)
        tensors = {
            "latents": self.clean,
            "strengths": torch.cat([*beside, strengths], dim=1),
            "places": torch.cat([*(places for _, places, _ in shown), pipe._places(latents)], dim=2),
        }
        return {**tensors, "latents": self._shaken(steps, 0, tensors)}

    def _put(
        self, pipe: Any, latents: torch.Tensor, frames: torch.Tensor, found: torch.Tensor, condition: LTXVideoCondition
    ) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        """Put latents of a condition into those of the film, and return what is shown beside them, where and how much.

        Args:
            latents: of the film, changed in place.
            frames: the strength of what each latent along time shows, changed in place.
        """
        first, share = condition.frame_index, condition.strength
        start, count = 0, found.shape[2]
        if first:
            start, count = first // pipe.vae_scale_factor_temporal + _PREFIX, max(count - _PREFIX, 0)
        if count:
            part = slice(start, start + count)
            latents[:, :, part] = torch.lerp(latents[:, :, part], found[:, :, found.shape[2] - count :], share)
            frames[part] = share
        if not first:
            return []
        found = found[:, :, : found.shape[2] - count]
        noise = randn_tensor(found.shape, generator=self.generator, device=found.device, dtype=found.dtype)
        return [(torch.lerp(noise, found, share), pipe._places(found, first), share)]

    def _shaken(self, steps: Steps, index: int, tensors: Tensors) -> torch.Tensor:
        """The latents before step `index`: conditions of strength 1 get noise by the square of the time."""
        latents = tensors["latents"]
        if not self.listed or not self.noise_scale > 0:
            return latents
        noise = randn_tensor(latents.shape, generator=self.generator, device=latents.device, dtype=latents.dtype)
        noised = self.clean + self.noise_scale * noise * (steps.timesteps[index] / 1000) ** 2
        return torch.where((tensors["strengths"] > 1 - 1e-6)[..., None], noised, latents)

    def blend(self, steps: Steps, index: int, tensors: Tensors) -> torch.Tensor:
        return self._shaken(steps, index + 1, tensors) if index + 1 < len(steps) else tensors["latents"]


def listed(conditions: Any, image: Any, video: Any, frame_index: Any, strength: Any) -> list[LTXVideoCondition]:
    """The conditions of a call, in whichever form they are given.

    Raises:
        ValueError: for more than one form, or lists of different lengths.
    """
    if conditions is not None:
        if image is not None or video is not None:
            raise ValueError("conditions exclude image and video: pass one of them")
        return [conditions] if isinstance(conditions, LTXVideoCondition) else list(conditions)
    if image is not None and video is not None:
        raise ValueError("image and video exclude each other: pass conditions to show both")
    given = image if video is None else video
    if given is None:
        return []
    several = isinstance(given, list | tuple)
    if video is not None and several:
        # A list of pictures is one film.
        several = isinstance(given[0], list | tuple) or getattr(given[0], "ndim", 0) == 4
    shown = list(given) if several else [given]
    lists = {"frame_index": frame_index, "strength": strength}
    for name, values in lists.items():
        lists[name] = list(values) if isinstance(values, list | tuple) else [values] * len(shown)
        if len(lists[name]) != len(shown):
            raise ValueError(f"{name} has {len(lists[name])} entries for {len(shown)} pictures or films")
    kind = "image" if video is None else "video"
    places = zip(lists["frame_index"], lists["strength"], strict=True)
    return [
        LTXVideoCondition(**{kind: one}, frame_index=index, strength=share)
        for one, (index, share) in zip(shown, places, strict=True)
    ]


def linear_quadratic_levels(count: int) -> list[float]:
    """Noise levels of LTX-Video from 0.9.5 on, from 1 down: a straight line over half of the steps, then a parabola.

    Both meet at 1 - 0.025 with the same slope, and the parabola reaches 0 after the last step (Polyak et al. 2024,
    arXiv 2410.13720, section 3.4.2).
    """
    if count < 2:
        return [1.0]
    half = count // 2
    rest, gap = count - half, half - _LINEAR_SHARE * count
    square, slope = gap / (half * rest**2), _LINEAR_SHARE / half - 2 * gap / rest**2
    way = [_LINEAR_SHARE * index / half for index in range(half)]
    way += [square * index**2 + slope * index + square * half**2 for index in range(half, count)]
    return [1.0 - part for part in way]
