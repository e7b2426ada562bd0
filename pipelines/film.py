"""`FilmPipeline`: what all families that make films share, on top of `PicturePipeline`.

A call's task is one of these, `FilmFromNoise`, `FilmFromImage` or `FilmFromFilm`. Latents are (N, C, f, h, w), or what
`_pack` makes of them. Besides what `picture.py` lists, a family may override:

    fps                      frames a second of the films that the denoiser was trained on
    _default_frames()        how many frames a film has if the call does not say
    _latent_frames(frames)   how many latents along time stand for so many frames
    _film_frames(latents)    how many frames so many latents along time become
    _fitting(num_frames)     how many frames a film gets that is asked to have `num_frames`
    _packed_shape, _pack, _unpack     if the denoiser takes latents in another shape
    _embed(texts, length, device)     how prompts are read: embeddings, and what was cut from each
    _image_tensors(task, pixels)      what the denoiser is shown of a first frame; `_shown` names what joins its input
    _embeds_of               the size of the vectors of text that the denoiser takes

During a call `call.task.height`, `.width` and `.frames` are the film's size, known once the task is prepared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from diffusion_core.config import FrozenDict
from diffusion_core.images import ImageInput
from diffusion_core.logging import get_logger
from diffusion_core.outputs import BaseOutput
from diffusion_core.videos import VideoProcessor

from . import prompts
from .latents import check_latents, spread
from .loop import Steps, check_count, check_share
from .picture import Call, PicturePipeline, Tensors
from .tasks import FromNoise, Task
from .text import as_prompts

logger = get_logger(__name__)

Size = tuple[int | None, int | None]


@dataclass
class FilmOutput(BaseOutput):
    """Films, and what is to be known about them.

    Args:
        frames: N films in the form that `output_type` asked for: lists of PIL images, an array (N, F, H, W, C), a
            tensor (N, F, C, H, W), or latents.
        truncated_prompts: for each prompt, the end that the text encoder did not see, "" if it saw all; None if all
            prompts were seen whole.
        rounded_from: the `num_frames` that was asked for, if the family does not make films of just so many frames
            and `frames` has another number; None otherwise.
    """

    frames: Any
    truncated_prompts: list[str] | None = None
    rounded_from: int | None = None


@dataclass(frozen=True)
class Prompts(prompts.Prompts):
    """The arguments of a call that say what to show. `num_images_per_prompt` is the number of films for each."""

    max_sequence_length: int = 226

    _repeats: ClassVar[str] = "num_videos_per_prompt"

    def count(self) -> int:
        count = super().count()
        check_count("max_sequence_length", self.max_sequence_length)
        return count


class FilmPipeline(PicturePipeline):
    """Base of the pipelines that make films; the top of this file says what a family overrides."""

    _denoiser: ClassVar[str] = "transformer"
    _output: ClassVar[type[Any]] = FilmOutput
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds", "negative_prompt_embeds"]
    # Configs of films' autoencoders ask for float32 by habit; what overflows in float16 computes again anyway.
    _upcasts: ClassVar[bool] = False
    # The tensors of `_image_tensors` that join the channels of the denoiser's input.
    _shown: ClassVar[tuple[str, ...]] = ()
    # The axis of time in packed latents that have one.
    _frame_axis: ClassVar[int] = 2
    # Frames for each latent along time, for a pipeline that never had an autoencoder.
    _usual_frame_scale: ClassVar[int] = 4

    # ---- sizes ----

    @property
    def vae_scale_factor_spatial(self) -> int:
        """Pixels for each latent along one side."""
        return self.vae_scale_factor

    @property
    def vae_scale_factor_temporal(self) -> int:
        """Frames for each latent along time, past the first frame: the autoencoder's, or what the config kept of it."""
        vae = self.__dict__.get("vae")
        if vae is None:
            return super().config.get("vae_scale_factor_temporal", self._usual_frame_scale)
        ratio = getattr(vae, "temporal_compression_ratio", None) or vae.config.temporal_compression_ratio
        return int(ratio)

    @property
    def config(self) -> FrozenDict:
        """The content of `model_index.json`, with the scales of the autoencoder for use without one."""
        return FrozenDict({**super().config, "vae_scale_factor_temporal": self.vae_scale_factor_temporal})

    @property
    def size_multiple(self) -> int:
        """Height and width are multiples of this, since patches of latents make a token."""
        patch = self.denoiser.config.get("patch_size", 1)
        return self.vae_scale_factor * (patch if isinstance(patch, int) else patch[-1])

    @property
    def video_processor(self) -> VideoProcessor:
        """Brings pictures and films to the autoencoder's range and sizes, and back."""
        return VideoProcessor(vae_scale_factor=self.size_multiple, vae_latent_channels=0, do_convert_rgb=True)

    @property
    def image_processor(self) -> VideoProcessor:
        """The same; where a component has this name, it goes before."""
        return self.video_processor

    @property
    def fps(self) -> float:
        """Frames a second of the films that the denoiser was trained on, and so of what it makes."""
        return 8

    def _default_frames(self) -> int:
        """How many frames the denoiser was trained on."""
        return self.denoiser.config.sample_frames

    def _latent_frames(self, frames: int) -> int:
        """How many latents along time stand for `frames`; the first frame is one by itself."""
        return (frames - 1) // self.vae_scale_factor_temporal + 1

    def _film_frames(self, latents: int) -> int:
        """How many frames the autoencoder makes of so many latents along time."""
        return (latents - 1) * self.vae_scale_factor_temporal + 1

    def _fitting(self, num_frames: int) -> int:
        """How many frames a film gets that is asked to have `num_frames`; by default this rounds down."""
        return self._film_frames(self._latent_frames(num_frames))

    def _length(self, num_frames: int | None) -> tuple[int, int | None]:
        """The number of frames, and what was asked for if it is another number."""
        asked = check_count("num_frames", self._default_frames() if num_frames is None else num_frames)
        frames = self._fitting(asked)
        if frames == asked:
            return frames, None
        logger.warning("num_frames=%d does not fit %s: the film has %d frames", asked, type(self).__name__, frames)
        return frames, asked

    def _latent_shape(self, batch: int, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """The shape (N, C, f, h, w) of latents, before they are packed, for a film's size."""
        batch, channels, rows, columns = super()._latent_shape(batch, height, width)
        return batch, channels, self._latent_frames(frames), rows, columns

    def _unpack(self, latents: torch.Tensor, height: int, width: int, frames: int = 1) -> torch.Tensor:
        """The way back from `_pack`, to the latents of a film of `frames` of `height` x `width` pixels."""
        return latents

    # ---- check ----

    @property
    def _embeds_of(self) -> int:
        """The size of the vectors of text that the denoiser takes."""
        raise TypeError(f"{type(self).__name__} must say which text its {self._denoiser} takes")

    def _check(self, call: Call) -> int:
        batch = super()._check(call)
        remedy = "pass prompt_embeds and negative_prompt_embeds"
        self._check_encoders(call, "text_encoder", "tokenizer", remedy=remedy)
        self._check_widths(call.prompts, prompt_embeds=self._embeds_of)
        return batch

    # ---- encode ----

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        max_sequence_length: int = 226,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode prompts, which `__call__` takes as `prompt_embeds` and `negative_prompt_embeds`.

        Args:
            prompt: one text or several.
            negative_prompt: one text for all prompts, or one for each; "" if None.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            num_videos_per_prompt: how often each prompt is repeated.
            prompt_embeds: take these in place of `prompt`.
            negative_prompt_embeds: take these in place of `negative_prompt`.
            max_sequence_length: tokens for each prompt; shorter ones are padded, longer ones cut.
            device: where to compute; the pipeline's device if None.
            dtype: of the result; the denoiser's if None.

        Returns:
            Embeddings (prompts * num_videos_per_prompt, tokens, size) of the prompts, and those of the negative
            prompts, None without guidance.
        """
        prompts = Prompts(
            prompt, negative_prompt, prompt_embeds, negative_prompt_embeds, num_videos_per_prompt, max_sequence_length
        )
        with self.letting_go():
            tensors, _ = self._encode(prompts, do_classifier_free_guidance, device)
        embeds, negative = (
            value if value is None or dtype is None else value.to(dtype)
            for value in (tensors["prompt_embeds"], tensors["negative_prompt_embeds"])
        )
        assert embeds is not None
        return embeds, negative

    def _encode(
        self, prompts: Any, guided: bool, device: torch.device | None = None
    ) -> tuple[Tensors, list[str] | None]:
        """Embeddings for each film, of the negative prompts too if `guided`, and what was cut from the prompts."""
        count, truncated = prompts.count(), None
        made: Tensors = {}
        for name in ("prompt", "negative_prompt"):
            embeds = getattr(prompts, f"{name}_embeds") if guided or name == "prompt" else None
            if embeds is None and (guided or name == "prompt"):
                texts = as_prompts(getattr(prompts, name), count, name)
                embeds, cut = self._embed(texts, prompts.max_sequence_length, device)
                truncated = cut if name == "prompt" else truncated
            made[f"{name}_embeds"] = self._per_picture(embeds, prompts, count, device)
        return made, truncated

    def _embed(
        self, texts: Sequence[str], length: int, device: torch.device | None
    ) -> tuple[torch.Tensor, list[str] | None]:
        """The embeddings (N, tokens, size) of N texts, and the end of each that was cut."""
        raise TypeError(f"{type(self).__name__} must say how it reads prompts")

    def _text_tensors(self, prompts: Any) -> tuple[Tensors, list[str] | None]:
        return self._encode(prompts, self.do_classifier_free_guidance)

    def _image_tensors(self, task: "FilmFromImage", pixels: torch.Tensor) -> Tensors:
        """What the denoiser is shown of a first frame (N, C, H, W), an entry for each film."""
        raise TypeError(f"{type(self).__name__} does not start from a picture")

    # ---- decode ----

    def _decode(self, latents: torch.Tensor, call: Call) -> tuple[Any, ...]:
        if call.output_type == "latent":
            return (latents,)
        return (self.video_processor.postprocess_video(self._pixels(latents, call), output_type=call.output_type),)

    def _result(self, parts: tuple[Any, ...], truncated: list[str] | None, call: Call) -> Any:
        task: Any = call.task
        return self._output(*parts, truncated, task.rounded_from)


class Film(Task):
    """What a call that makes a film starts from.

    Attributes:
        frames: of the film, known once `prepare` was called.
        rounded_from: the number that was asked for, where it is another one.
    """

    frames: int
    rounded_from: int | None = None

    @property
    def size(self) -> tuple[int, ...]:
        return self.height, self.width, self.frames


class FilmFromNoise(Film, FromNoise):
    """Text to film.

    Args:
        height: in pixels; what the denoiser was trained on by default.
        width: likewise.
        num_frames: likewise; see `FilmPipeline._fitting`.
        latents: noise to start from, packed.
    """

    def __init__(
        self, height: int | None, width: int | None, num_frames: int | None, latents: torch.Tensor | None = None
    ) -> None:
        super().__init__(height, width, latents)
        self.num_frames = num_frames

    def prepare(self, pipe: Any, call: Call, batch: int) -> None:
        self.frames, self.rounded_from = pipe._length(self.num_frames)
        super().prepare(pipe, call, batch)


class FilmFromImage(FilmFromNoise):
    """Image to film: the picture is the first frame, which the denoiser is shown in the family's way.

    Args:
        image: one picture for all, or one for each prompt.
        height, width, num_frames, latents: as for `FilmFromNoise`; the picture is brought to this size.
    """

    def __init__(
        self,
        image: "ImageInput | None",
        height: int | None,
        width: int | None,
        num_frames: int | None,
        latents: torch.Tensor | None = None,
    ) -> None:
        super().__init__(height, width, num_frames, latents)
        self.image = image

    def prepare(self, pipe: Any, call: Call, batch: int) -> None:
        super().prepare(pipe, call, batch)
        if self.image is None:
            raise ValueError("image is missing: pass the picture that the film starts with")
        pipe._check_present("vae", remedy="it has to encode the image")
        self.pixels = pipe.video_processor.preprocess(self.image, self.height, self.width)
        spread(self.pixels, self.count, batch, "image")

    def start(self, pipe: Any, steps: Steps) -> Tensors:
        # The picture is encoded before noise is drawn, so that a seed gives the film of the reference.
        shown = pipe._image_tensors(self, self.pixels)
        self.shown = pipe._shown
        return {**shown, **super().start(pipe, steps)}

    def channels(self, tensors: Tensors) -> list[torch.Tensor]:
        return [tensors[name] for name in self.shown]


class FilmFromFilm(Film):
    """Film to film: takes a film part of the way to noise (SDEdit, Meng et al. 2021, arXiv 2108.01073).

    Args:
        video: one film for all, or one for each prompt; a frame count that does not fit is cut at its end.
        strength: from 0 to 1, how far to go.
        height: in pixels, to bring the film to; what the denoiser was trained on by default.
        width: likewise.
        latents: packed and noisy, to start from in place of those of the film.
    """

    def __init__(
        self, video: Any, strength: float, height: int | None, width: int | None, latents: torch.Tensor | None = None
    ) -> None:
        self.video, self.strength, self.asked, self.latents = video, strength, (height, width), latents

    def prepare(self, pipe: Any, call: Call, batch: int) -> None:
        super().prepare(pipe, call, batch)
        check_share("strength", self.strength)
        if (self.video is None) == (self.latents is None):
            wrong = "video is missing" if self.video is None else "video and latents exclude each other"
            raise ValueError(f"{wrong}: pass the film to start from, or latents")
        self.height, self.width = pipe._size(*self.asked, self.latents)
        if self.latents is not None:
            self.frames = pipe._film_frames(self.latents.shape[pipe._frame_axis])
            check_latents(self.latents, pipe._packed_shape(pipe._latent_shape(batch, *self.size)))
            return
        pipe._check_present("vae", remedy="pass latents in place of video")
        pixels = pipe.video_processor.preprocess_video(self.video, self.height, self.width)
        self.frames, self.rounded_from = pipe._length(pixels.shape[2])
        self.pixels = pixels[:, :, : self.frames]
        spread(self.pixels, self.count, batch, "video")

    def start(self, pipe: Any, steps: Steps) -> Tensors:
        if self.latents is not None:
            return {"latents": self._noise(pipe, self.latents) * steps.scheduler.init_noise_sigma}
        clean = self._image_latents(pipe, self.pixels)
        return {"latents": steps.scheduler.add_noise(clean, self._noise(pipe), steps.timesteps[:1])}
