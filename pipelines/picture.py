"""`PicturePipeline`: what all families that draw pictures share. A call is checked, its steps are taken, then decoded.

A pipeline's `__call__` packs its arguments into a `Call`, with a task of `tasks.py` (`FromNoise`, `FromImage`,
`Inpaint`), and hands it to `_draw`, which returns the result. What differs between families they state by overriding:

    _denoiser               the component that predicts, "unet" or "transformer"
    _output                 the class of the result; `_decode` gives its first fields, `truncated_prompts` is its last
    latent_channels, size_multiple, _default_size()
    _check(call)            refuse arguments (call super); returns how many pictures are drawn
    _text_tensors(prompts)  encode: the tensors that come from the prompts, one entry a picture, and what was cut
    _constants(call, tensors)  more tensors for the loop that depend on size or settings
    _schedule(call)         what the scheduler's `set_timesteps` is given, such as sigmas and `mu`
    _pack, _unpack, _packed_shape, _pack_mask   if the denoiser takes latents in another shape than (N, C, h, w)
    _predict(index, timestep, sample, tensors)  call the denoiser; returns the guided prediction

During a call `self.guidance_scale` and all else in `call.state` can be read as attributes (see `Pipeline.run`).
`call.task.height` and `.width` are the picture's size in pixels, known once the task is prepared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from diffusion_core.config import FrozenDict
from diffusion_core.images import VaeImageProcessor, check_output_type
from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators, check_generator

from .arguments import check_old_arguments, with_old_form
from .callbacks import Callback
from .latents import check_size, decode_latents
from .loop import Steps, check_scale, check_share, plan_steps, step_options, walk
from .prompts import PromptedPipeline
from .prompts import Prompts as Prompts  # families extend it
from .tasks import Task

Tensors = dict[str, Any]


@dataclass
class PictureOutput(BaseOutput):
    """Pictures, and what is to be known about them.

    Args:
        images: N pictures in the form that `output_type` asked for.
        truncated_prompts: for each prompt, the end that the text encoder did not see, "" if it saw all; None if all
            prompts were seen whole.
    """

    images: Any
    truncated_prompts: list[str] | None = None


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a pipeline.

    Attributes:
        prompts: what to draw.
        task: what to start from.
        num_inference_steps, timesteps, sigmas: as for `plan_steps`.
        eta: share of random noise in DDIM's steps.
        generator: where random numbers come from.
        output_type, return_dict: the form of the result.
        callback_on_step_end, callback_on_step_end_tensor_inputs: as for `StepCallback`.
        state: what the pipeline and its callbacks can read, and change, during the call: "guidance_scale" and others.
        kwargs: arguments of old, as for `check_old_arguments`.
    """

    prompts: Any
    task: Task
    num_inference_steps: int | None = None
    timesteps: Sequence[float] | None = None
    sigmas: Sequence[float] | None = None
    eta: float = 0.0
    generator: Generators | None = None
    output_type: str | None = "pil"
    return_dict: bool = True
    callback_on_step_end: Callback | None = None
    callback_on_step_end_tensor_inputs: Sequence[str] | None = None
    state: Tensors = field(default_factory=dict)
    kwargs: Tensors = field(default_factory=dict)


class PicturePipeline(PromptedPipeline):
    """Base of the pipelines that draw pictures; the top of this file says what a family overrides."""

    # The argument that says how far to go from the prediction without the prompt to the one with it.
    _scale_name: ClassVar[str] = "guidance_scale"
    _output: ClassVar[type[Any]] = PictureOutput
    # Compute in float32 from the start where a float16 autoencoder's config asks for it with `force_upcast`.
    _upcasts: ClassVar[bool] = True
    # A share of the steps that is no whole number: Stable Diffusion 1 and XL round it down, flow models round it up.
    _rounds_strength_up: ClassVar[bool] = False
    # Noise is drawn as latents (N, C, h, w) and packed, or, if this is set, in the shape that the denoiser takes.
    _draws_packed: ClassVar[bool] = False
    # The axis of packed latents along which a task adds channels.
    _channel_axis: ClassVar[int] = 1
    # Pixels for each latent along one side, for a pipeline that never had an autoencoder.
    _usual_scale: ClassVar[int] = 8

    # ---- sizes ----

    @property
    def vae_scale_factor(self) -> int:
        """Pixels for each latent along one side: the autoencoder's, or what the config kept of it."""
        vae = self.__dict__.get("vae")
        return (
            super().config.get("vae_scale_factor", self._usual_scale) if vae is None else vae.spatial_compression_ratio
        )

    @property
    def config(self) -> FrozenDict:
        """The content of `model_index.json`, with the scale of the autoencoder for use without one."""
        return FrozenDict({**super().config, "vae_scale_factor": self.vae_scale_factor})

    @property
    def latent_channels(self) -> int:
        """Channels of the latents, which the denoiser's output has; its input may have more."""
        return self.denoiser.config.out_channels

    @property
    def latents_dtype(self) -> torch.dtype:
        """What the steps are computed in: the denoiser's dtype, unless the family keeps more digits."""
        return self.denoiser.dtype

    @property
    def size_multiple(self) -> int:
        """Height and width of pictures are multiples of this."""
        return self.vae_scale_factor

    @property
    def image_processor(self) -> VaeImageProcessor:
        """Brings pictures to the autoencoder's range and sizes, and back."""
        return VaeImageProcessor(
            vae_scale_factor=self.size_multiple,
            vae_latent_channels=self.latent_channels,
            do_convert_rgb=self.vae is None or self.vae.config.in_channels == 3,
        )

    @property
    def mask_processor(self) -> VaeImageProcessor:
        """Brings masks to the picture's size and to 0 and 1."""
        return VaeImageProcessor(
            vae_scale_factor=self.size_multiple,
            vae_latent_channels=0,
            do_normalize=False,
            do_binarize=True,
            do_convert_grayscale=True,
        )

    def _default_size(self) -> tuple[int, int]:
        """Height and width in pixels that the denoiser was trained on."""
        size = self.denoiser.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return height * self.vae_scale_factor, width * self.vae_scale_factor

    def _size(self, height: int | None, width: int | None, latents: torch.Tensor | None = None) -> tuple[int, int]:
        """Height and width in pixels, checked; what is not given follows `latents`, then the denoiser."""
        default_height, default_width = self._default_size()
        if isinstance(latents, torch.Tensor) and latents.ndim in (4, 5):
            default_height, default_width = (side * self.vae_scale_factor for side in latents.shape[-2:])
        height, width = default_height if height is None else height, default_width if width is None else width
        check_size(height, width, self.size_multiple)
        return height, width

    def _latent_shape(self, batch: int, height: int, width: int) -> tuple[int, ...]:
        """The shape (N, C, h, w) of latents, before they are packed, for a picture size."""
        factor = self.vae_scale_factor
        return batch, self.latent_channels, height // factor, width // factor

    # ---- the shape that the denoiser takes ----

    def _packed_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What `_pack` makes of latents of this shape, and what a user's `latents` must have."""
        return shape

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (N, C, h, w) in the shape that the denoiser takes."""
        return latents

    def _unpack(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """The way back from `_pack`, for a picture of `height` and `width` pixels."""
        return latents

    def _pack_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask (N, 1, h, w) in a shape that can be multiplied with packed latents."""
        return mask

    # ---- check ----

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the current call predicts with and without the prompt."""
        return self._guided(getattr(self, self._scale_name))

    def _guided(self, scale: float) -> bool:
        return scale > 1

    def _check(self, call: Call) -> int:
        """Refuse arguments that do not make sense, before any model is called; return how many pictures are drawn."""
        batch = call.prompts.count() * call.prompts.num_images_per_prompt
        for name in ("guidance_scale", "true_cfg_scale"):
            check_scale(name, call.state.get(name, 1.0))
        check_share("guidance_rescale", call.state.get("guidance_rescale", 0.0))
        check_share("eta", call.eta)
        check_output_type(call.output_type)
        check_generator(call.generator, batch, self._execution_device)
        check_old_arguments(call.kwargs)
        if call.output_type != "latent":
            self._check_present("vae", remedy="ask for output_type='latent'")
        return batch

    def _check_encoders(self, call: Call, *names: str, remedy: str) -> None:
        """Refuse a call that has texts to encode, and lacks one of the components `names` to do it with."""
        prompts = call.prompts
        negative = self._guided(call.state[self._scale_name]) and prompts.negative_prompt_embeds is None
        if prompts.prompt is not None or negative:
            self._check_present(*names, remedy=remedy)

    def _check_widths(self, prompts: Any, **sizes: Any) -> None:
        """Refuse embeddings of other sizes than the denoiser takes, those of negative prompts too."""
        for kind, size in sizes.items():
            for name in (kind, f"negative_{kind}"):
                embeds = getattr(prompts, name)
                if embeds is not None and isinstance(size, int) and embeds.shape[-1] != size:
                    raise ValueError(
                        f"{name} has vectors of size {embeds.shape[-1]}, the {self._denoiser} takes size {size}"
                    )

    def _check_present(self, *names: str, remedy: str) -> None:
        """Refuse a call that needs a component which is absent."""
        absent = [name for name in names if getattr(self, name) is None]
        if absent:
            raise ValueError(f"this call needs {' and '.join(absent)}, which the pipeline does not have: {remedy}")

    def _sees_mask(self) -> bool:
        """Whether the denoiser takes mask and surroundings as more channels of its input when inpainting."""
        channels, latent = self.denoiser.config.in_channels, self.latent_channels
        if channels not in (latent, 2 * latent + 1):
            raise ValueError(
                f"the {self._denoiser} has {channels} input channels; inpainting needs {latent}, or {2 * latent + 1} "
                f"for latents, mask and masked image"
            )
        return channels != latent

    # ---- one call ----

    @torch.no_grad()
    def _draw(self, call: Call) -> Any:
        """Do what `call` says and return the result in the form it asks for."""
        callback = self.step_callback(call.callback_on_step_end, call.callback_on_step_end_tensor_inputs)
        self._prepare(call, self._check(call))
        task = call.task
        with self.run(**call.state, num_timesteps=0) as run:
            steps = self._plan(call)
            callback = with_old_form(callback, steps, **call.kwargs)
            tensors, truncated = self._text_tensors(call.prompts)
            tensors |= task.start(self, steps)
            tensors |= self._constants(call, tensors)
            latents = self._denoise(run, call, steps, tensors, callback)
            images, *more = self._decode(latents, call)
        parts = (task.finish(self, images), *more)
        cut = truncated if truncated and any(truncated) else None
        return self._result(parts, cut, call) if call.return_dict else parts

    def _result(self, parts: tuple[Any, ...], truncated: list[str] | None, call: Call) -> Any:
        """The output object of what `_decode` gave and what was cut from the prompts."""
        return self._output(*parts, truncated)

    def _prepare(self, call: Call, batch: int) -> None:
        """Settle the size and make tensors of pictures. No model is called."""
        call.task.prepare(self, call, batch)

    def _plan(self, call: Call) -> Steps:
        """The steps to take."""
        return plan_steps(
            self.scheduler,
            call.num_inference_steps,
            self._execution_device,
            strength=call.task.strength,
            round_up=self._rounds_strength_up,
            **self._schedule(call),
        )

    def _schedule(self, call: Call) -> Tensors:
        """The timesteps or sigmas that the call asks for, and what else the scheduler's `set_timesteps` takes."""
        return {"timesteps": call.timesteps, "sigmas": call.sigmas}

    def _text_tensors(self, prompts: Any) -> tuple[Tensors, list[str] | None]:
        """The tensors of the loop that come from the prompts, and what was cut from these."""
        raise TypeError(f"{type(self).__name__} must say how prompts become tensors")

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """Tensors that `_predict` needs besides the prompts' and the latents."""
        return {}

    def _denoise(
        self, run: Any, call: Call, steps: Steps, tensors: Tensors, callback: Callable[..., Tensors]
    ) -> torch.Tensor:
        """Take all steps from `tensors["latents"]` and return the latents at their end."""
        options = step_options(steps.scheduler, eta=call.eta, generator=call.generator)
        for index, timestep in walk(self, run, steps):
            latents = tensors["latents"]
            sample = steps.scheduler.scale_model_input(latents, timestep)
            more = call.task.channels(tensors)
            prediction = self._predict(
                index, timestep, torch.cat([sample, *more], dim=self._channel_axis) if more else sample, tensors
            )
            tensors["latents"] = self._step(steps, index, prediction, tensors, options)
            tensors["latents"] = call.task.blend(steps, index, tensors)
            tensors = callback(index, timestep, **tensors)
        return tensors["latents"]

    def _step(
        self, steps: Steps, index: int, prediction: torch.Tensor, tensors: Tensors, options: Tensors
    ) -> torch.Tensor:
        """The latents after step `index`; `options` are what the scheduler's `step` takes besides."""
        step, timestep = steps.scheduler.step, steps.timesteps[index]
        return step(prediction, timestep, tensors["latents"], **options, return_dict=False)[0]

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The guided prediction for one step.

        Args:
            index: of the step, from 0.
            timestep: without axes.
            sample: the latents as the scheduler scales them for the model, and what the task adds to their channels.
            tensors: of the loop.
        """
        raise TypeError(f"{type(self).__name__} must say how its {self._denoiser} is called")

    def _decode(self, latents: torch.Tensor, call: Call) -> tuple[Any, ...]:
        """The pictures in the form asked for, and what else the result has before `truncated_prompts`."""
        if call.output_type == "latent":
            return (latents,)
        return (self.image_processor.postprocess(self._pixels(latents, call), output_type=call.output_type),)

    def _pixels(self, latents: torch.Tensor, call: Call) -> torch.Tensor:
        """What the autoencoder makes of packed latents: (N, C, H, W) from -1 to 1."""
        task = call.task
        pixels = decode_latents(
            self.vae,
            self._unpack(latents, *task.size),
            generator=call.generator,
            upcast=self._upcasts_vae(),
            **task.conditions(self),
        )
        return task.crop(self, pixels)

    def _upcasts_vae(self) -> bool:
        return self._upcasts and bool(self.vae.config.get("force_upcast"))
