"""What a call starts from: noise, a picture, or a picture with a mask. One object serves one call.

A task knows nothing of families: how latents are packed and which sizes fit, it asks the pipeline.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from diffusion_core.config import FrozenDict
from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators, randn_tensor

from ..models.autoencoders.asymmetric import AsymmetricAutoencoderKL
from .canvas import Canvas, check_crop, make_canvas
from .components import unwrap
from .latents import check_latents, encode_image, spread
from .loop import Steps, check_share

if TYPE_CHECKING:
    from .picture import Call, PicturePipeline

Tensors = dict[str, Any]


class Task:
    """Base of the tasks.

    Attributes:
        strength: the share of the steps that is taken; None for all.
        height: of the picture in pixels, known once `prepare` was called.
        width: likewise.
        count: how many prompts there are.
        batch: how many pictures are drawn.
        frame: how the image processor brings other pictures of the call to the same part of the scene.
    """

    strength: float | None = None
    frame: Mapping[str, Any] = FrozenDict()
    height: int
    width: int
    count: int
    batch: int
    generator: Generators | None

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width, and the frames of a film."""
        return self.height, self.width

    def tokens(self, side: int) -> int:
        """How many squares of `side` x `side` pixels the picture has."""
        return (self.height // side) * (self.width // side)

    def prepare(self, pipe: "PicturePipeline", call: "Call", batch: int) -> None:
        """Settle the size and refuse what does not make sense. No model is called."""
        self.count, self.batch, self.generator = call.prompts.count(), batch, call.generator

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        """The packed "latents" to denoise, and other tensors that callbacks may see."""
        raise TypeError(f"{type(self).__name__} must say what it starts from")

    def channels(self, tensors: Tensors) -> list[torch.Tensor]:
        """More channels for the denoiser's input."""
        return []

    def blend(self, steps: Steps, index: int, tensors: Tensors) -> torch.Tensor:
        """What to make of the latents after step `index`."""
        return tensors["latents"]

    def conditions(self, pipe: "PicturePipeline") -> Tensors:
        """What the decoder is given besides latents."""
        return {}

    def crop(self, pipe: "PicturePipeline", pixels: torch.Tensor) -> torch.Tensor:
        """What to make of the decoded pictures (N, C, H, W), from -1 to 1."""
        return pixels

    def finish(self, pipe: "PicturePipeline", images: Any) -> Any:
        """What to make of the pictures in the form that was asked for."""
        return images

    def _noise(self, pipe: "PicturePipeline", latents: torch.Tensor | None = None) -> torch.Tensor:
        """Packed noise of deviation 1 for all pictures, or `latents` in its place."""
        placed = {"device": pipe._execution_device, "dtype": pipe.latents_dtype}
        if latents is not None:
            return latents.to(**placed)
        shape = pipe._latent_shape(self.batch, *self.size)
        if pipe._draws_packed:
            return randn_tensor(pipe._packed_shape(shape), generator=self.generator, **placed)
        return pipe._pack(randn_tensor(shape, generator=self.generator, **placed))

    def _encoded(self, pipe: "PicturePipeline", pixels: torch.Tensor) -> torch.Tensor:
        """The latents (N, C, h, w) of pictures; with a generator for each one that is drawn, a picture for each too."""
        if isinstance(self.generator, list):
            # Each picture has its own random numbers, so also those of the encoder.
            pixels = spread(pixels, self.count, self.batch, "image")
        pixels = pixels.to(pipe._execution_device)
        return encode_image(pipe.vae, pixels, generator=self.generator, upcast=pipe._upcasts_vae())

    def _image_latents(self, pipe: "PicturePipeline", pixels: torch.Tensor) -> torch.Tensor:
        """The packed latents of pictures, which may be latents already, one for each picture that is drawn."""
        if pixels.shape[1] != pipe.latent_channels:
            pixels = self._encoded(pipe, pixels)
        pixels = spread(pixels, self.count, self.batch, "image")
        return pipe._pack(pixels.to(pipe._execution_device, pipe.latents_dtype))


class FromNoise(Task):
    """Text to image.

    Args:
        height: in pixels; what the denoiser was trained on by default.
        width: likewise.
        latents: noise to start from.
    """

    def __init__(self, height: int | None, width: int | None, latents: torch.Tensor | None = None) -> None:
        self.asked, self.latents = (height, width), latents

    def prepare(self, pipe: "PicturePipeline", call: "Call", batch: int) -> None:
        super().prepare(pipe, call, batch)
        self.height, self.width = pipe._size(*self.asked, self.latents)
        if self.latents is not None:
            shape = pipe._latent_shape(batch, *self.size)
            check_latents(self.latents, pipe._packed_shape(shape))

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        return {"latents": self._noise(pipe, self.latents) * steps.scheduler.init_noise_sigma}


class FromImage(Task):
    """Image to image: takes a picture part of the way to noise (SDEdit, Meng et al. 2021, arXiv 2108.01073).

    Args:
        image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them.
        strength: from 0 to 1, how far to go.
        size: height and width in pixels to bring the picture to; its own, rounded down, by default.
        noised: the image is latents that carry the noise of the first step already; all steps are taken.
        latents: packed and noisy, to start from in place of those of the picture.
    """

    def __init__(
        self,
        image: "ImageInput | None",
        strength: float,
        *,
        size: tuple[int | None, int | None] | None = None,
        noised: bool = False,
        latents: torch.Tensor | None = None,
    ) -> None:
        self.image, self.asked, self.noised, self.latents = image, size, noised, latents
        self.strength = None if noised else strength

    def prepare(self, pipe: "PicturePipeline", call: "Call", batch: int) -> None:
        super().prepare(pipe, call, batch)
        if not self.noised:
            check_share("strength", self.strength)
        if self.image is None:
            raise ValueError("image is missing: pass the picture to start from")
        height, width = (None, None) if self.asked is None else pipe._size(*self.asked)
        pixels = pipe.image_processor.preprocess(self.image, height, width)
        spread(pixels, self.count, batch, "image")
        self.height, self.width = pixels.shape[-2:]
        if pixels.shape[1] == pipe.latent_channels:
            self.height, self.width = (side * pipe.vae_scale_factor for side in pixels.shape[-2:])
        else:
            pipe._check_present("vae", remedy="pass latents as image")
        self.pixels = pixels
        if self.latents is not None:
            shape = pipe._latent_shape(batch, *self.size)
            check_latents(self.latents, pipe._packed_shape(shape))

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        if self.latents is not None:
            return {"latents": self._noise(pipe, self.latents)}
        clean = self._image_latents(pipe, self.pixels)
        if self.noised:
            return {"latents": clean}
        return {"latents": steps.scheduler.add_noise(clean, self._noise(pipe), steps.timesteps[:1])}


class Inpaint(Task):
    """Repaints what is white in a mask.

    A denoiser that was trained for it sees the mask and what surrounds it (9 input channels, for 4 of latents). For
    any other one, what lies outside of the mask is put back after every step, noised to its level (Lugmayr et al.
    2022, arXiv 2201.09865, equation 8, without resampling).

    Args:
        image: one picture for all, or one for each prompt; or latents as `output_type="latent"` gives them.
        mask_image: one mask for all, or one for each prompt; what is one half or lighter is painted.
        masked_image_latents: latents of the picture without the masked part; made of `image` by default.
        height: in pixels; the picture is brought to it. What the denoiser was trained on by default.
        width: likewise.
        padding_mask_crop: enlarge the masked part with this many pixels around it, and put it back in the end.
        strength: from 0 to 1, how far to go from what was there; at 1 nothing of it shows.
        latents: noise to use.
        noised: the image is latents that carry the noise of the first step already; all steps are taken.
    """

    canvas: Canvas

    def __init__(
        self,
        image: "ImageInput | None",
        mask_image: "ImageInput | None",
        masked_image_latents: torch.Tensor | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        padding_mask_crop: int | None = None,
        strength: float = 1.0,
        latents: torch.Tensor | None = None,
        noised: bool = False,
    ) -> None:
        self.image, self.mask_image, self.surroundings = image, mask_image, masked_image_latents
        self.asked, self.padding, self.latents = (height, width), padding_mask_crop, latents
        self.whole, self.noised = strength == 1.0, noised
        self.strength = None if noised else strength

    def prepare(self, pipe: "PicturePipeline", call: "Call", batch: int) -> None:
        super().prepare(pipe, call, batch)
        if not self.noised:
            check_share("strength", self.strength)
        self.sees_mask = pipe._sees_mask()
        if self.padding is not None:
            check_crop(self.padding, self.image, self.mask_image, call.output_type)
        self.height, self.width = pipe._size(*self.asked)
        self.canvas = make_canvas(
            (pipe.image_processor, pipe.mask_processor),
            self.image,
            self.mask_image,
            (self.height, self.width),
            self.padding,
            self.count,
            batch,
        )
        if self.canvas.crop is not None:
            self.frame = {"resize_mode": "fill", "crops_coords": self.canvas.crop}
        self._check_latents(pipe)

    def _check_latents(self, pipe: "PicturePipeline") -> None:
        """Refuse latents that do not fit the size, and a call that needs an autoencoder which is absent."""
        shape = pipe._latent_shape(self.batch, *self.size)
        if self.latents is not None:
            check_latents(self.latents, pipe._packed_shape(shape))
        given = self.surroundings
        if given is not None:
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"masked_image_latents must be a tensor, not {type(given).__name__}")
            self.canvas.for_each(given, "masked_image_latents")
            check_latents(given, (len(given), *shape[1:]), "masked_image_latents")
        pixels = self.canvas.pixels
        if pixels.shape[1] != pipe.latent_channels:
            pipe._check_present("vae", remedy="pass latents as image, and masked_image_latents")
            return
        check_latents(pixels, (len(pixels), *shape[1:]), "image")
        if self.sees_mask and given is None:
            raise ValueError("image holds latents, which cannot be masked: pass masked_image_latents too")

    def start(self, pipe: "PicturePipeline", steps: Steps) -> Tensors:
        skips_clean = self.whole and self.sees_mask and not self.noised
        self.clean = None if skips_clean else self._image_latents(pipe, self.canvas.pixels)
        self.noise = self._noise(pipe, self.latents)
        if self.noised:
            latents = self.clean
        elif self.whole or self.clean is None:
            latents = self.noise * steps.scheduler.init_noise_sigma
        else:
            latents = steps.scheduler.add_noise(self.clean, self.noise, steps.timesteps[:1])
        return {"latents": latents, **self._mask_tensors(pipe)}

    def _mask_tensors(self, pipe: "PicturePipeline") -> Tensors:
        """The mask at the size of latents, and the latents of what it leaves, both packed."""
        canvas, shape = self.canvas, pipe._latent_shape(self.batch, *self.size)
        mask = torch.nn.functional.interpolate(canvas.mask, size=shape[2:])
        surroundings = self.surroundings
        if surroundings is None and canvas.pixels.shape[1] != pipe.latent_channels:
            # Made even where the denoiser does not see it: callbacks may, and the generator moves on alike both times.
            length = max(len(canvas.pixels), len(canvas.mask))
            kept = spread(canvas.mask, canvas.count, length, "mask_image") < 0.5
            surroundings = self._encoded(pipe, spread(canvas.pixels, canvas.count, length, "image") * kept)
        placed = {"device": pipe._execution_device, "dtype": pipe.denoiser.dtype}
        if surroundings is not None:
            surroundings = pipe._pack(canvas.for_each(surroundings, "masked_image_latents").to(**placed))
        mask = pipe._pack_mask(canvas.for_each(mask, "mask").to(**placed))
        return {"mask": mask, "masked_image_latents": surroundings}

    def channels(self, tensors: Tensors) -> list[torch.Tensor]:
        return [tensors["mask"], tensors["masked_image_latents"]] if self.sees_mask else []

    def blend(self, steps: Steps, index: int, tensors: Tensors) -> torch.Tensor:
        """Put back what lies outside of the mask, at the noise level that the next step starts from."""
        if self.sees_mask:
            return tensors["latents"]
        kept, mask = self.clean, tensors["mask"]
        if index + 1 < len(steps):
            kept = steps.scheduler.add_noise(kept, self.noise, steps.timesteps[index + 1 : index + 2])
        return (1 - mask) * kept + mask * tensors["latents"]

    def conditions(self, pipe: "PicturePipeline") -> Tensors:
        """What a decoder that keeps the surroundings wants to see of them."""
        canvas = self.canvas
        if not isinstance(unwrap(pipe.vae), AsymmetricAutoencoderKL) or canvas.pixels.shape[1] == pipe.latent_channels:
            return {}
        tensors = {"image": canvas.pixels, "mask": canvas.mask}
        return {name: canvas.for_each(value, name).to(pipe._execution_device) for name, value in tensors.items()}

    def finish(self, pipe: "PicturePipeline", images: Any) -> Any:
        """Put a cropped part back into its picture."""
        crop = self.canvas.crop
        if crop is None:
            return images
        overlay: Any = pipe.image_processor.apply_overlay
        return [overlay(self.mask_image, self.image, one, crop) for one in images]
