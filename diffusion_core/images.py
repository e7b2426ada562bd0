"""Pictures on their way in and out: PIL images, numpy arrays and tensors, and the sizes that a model takes.

    PIL image       any mode, 8 bits a channel
    numpy array     (N, H, W, C), floats from 0 to 1 (or uint8)
    tensor          (N, C, H, W), floats from 0 to 1, or from -1 to 1 as models see them (or uint8)

`VaeImageProcessor` joins these; the functions above it are its parts. PIL is imported only where a picture is touched.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import torch

from diffusion_core.config import ConfigMixin
from diffusion_core.errors import NumericalError
from diffusion_core.logging import get_logger

if TYPE_CHECKING:
    from PIL.Image import Image

logger = get_logger(__name__)

OneImage: TypeAlias = "Image | np.ndarray[Any, Any] | torch.Tensor"
ImageInput: TypeAlias = "OneImage | Sequence[OneImage]"
ResizeMode: TypeAlias = Literal["default", "fill", "crop"]
OUTPUT_TYPES = ("pil", "np", "pt", "latent")
_RESAMPLING = {
    "nearest": "NEAREST",
    "linear": "BILINEAR",
    "bilinear": "BILINEAR",
    "bicubic": "BICUBIC",
    "lanczos": "LANCZOS",
}
_Array = TypeVar("_Array", "np.ndarray[Any, Any]", torch.Tensor)


def load_image(
    image: "str | os.PathLike[str] | Image", convert_method: "Callable[[Image], Image] | None" = None
) -> "Image":
    """Open a picture, turned upright by its EXIF note, as RGB.

    Args:
        image: a path, an http(s) address, or an open PIL image.
        convert_method: what to apply in place of the change to RGB.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file or the answer is no picture.
    """
    import PIL.Image
    import PIL.ImageOps

    if isinstance(image, str | os.PathLike):
        name = os.fspath(image)
        try:
            opened = PIL.Image.open(download(name) if name.startswith(("http://", "https://")) else name)
            opened.load()
        except PIL.UnidentifiedImageError:
            raise ValueError(f"image={name!r} is not a picture that PIL can read") from None
    elif isinstance(image, PIL.Image.Image):
        opened = image
    else:
        raise TypeError(f"image must be a path, an http(s) address or a PIL image, not {type(image).__name__}")
    upright = PIL.ImageOps.exif_transpose(opened)
    return convert_method(upright) if convert_method is not None else upright.convert("RGB")


def download(url: str) -> Any:
    """The content behind an address, as an open file in memory."""
    import io
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"User-Agent": "diffusion-core"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return io.BytesIO(answer.read())
    except urllib.error.URLError as error:
        raise ValueError(f"image={url!r} could not be fetched: {error}") from error


def make_image_grid(images: "Sequence[Image]", rows: int, cols: int, resize: int | None = None) -> "Image":
    """One picture with `images` in reading order, each first made `resize` x `resize` if given.

    Raises:
        ValueError: unless there are exactly `rows * cols` images, all of one size.
    """
    import PIL.Image

    if len(images) != rows * cols or not images:
        raise ValueError(f"rows x cols = {rows} x {cols} needs {rows * cols} images (one at least), got {len(images)}")
    if resize is not None:
        images = [image.resize((resize, resize)) for image in images]
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise ValueError(f"images have different sizes {sorted(sizes)}: pass `resize` to make them one")
    width, height = images[0].size
    grid = PIL.Image.new("RGB", (cols * width, rows * height))
    for index, image in enumerate(images):
        grid.paste(image, (index % cols * width, index // cols * height))
    return grid


def pil_to_numpy(images: "Sequence[Image] | Image") -> "np.ndarray[Any, Any]":
    """PIL images of one size and mode to an array (N, H, W, C) of float32 from 0 to 1; (N, H, W) for gray ones."""
    several = images if isinstance(images, Sequence) else [images]
    return np.stack([np.asarray(image).astype(np.float32) / 255.0 for image in several])


def numpy_to_pt(images: "np.ndarray[Any, Any]") -> torch.Tensor:
    """An array (N, H, W, C), or (N, H, W) for gray images, to a tensor (N, C, H, W)."""
    if images.ndim == 3:
        images = images[..., None]
    return torch.from_numpy(images.transpose(0, 3, 1, 2))


def pt_to_numpy(images: torch.Tensor) -> "np.ndarray[Any, Any]":
    """A tensor (N, C, H, W) to an array (N, H, W, C) of float32."""
    return images.detach().cpu().permute(0, 2, 3, 1).float().numpy()


def numpy_to_pil(images: "np.ndarray[Any, Any]") -> "list[Image]":
    """An array (N, H, W, C) or (H, W, C) with values from 0 to 1 to PIL images; one channel gives gray ones."""
    import PIL.Image

    if images.ndim == 3:
        images = images[None]
    bytes_ = (images * 255).round().astype(np.uint8)
    return [PIL.Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image) for image in bytes_]


def pt_to_pil(images: torch.Tensor) -> "list[Image]":
    """A tensor (N, C, H, W) with values from -1 to 1, as models give them, to PIL images."""
    return numpy_to_pil(pt_to_numpy(VaeImageProcessor.denormalize(images)))


def check_output_type(output_type: str | None, allowed: Sequence[str] = OUTPUT_TYPES) -> None:
    """Refuse an output type that nothing produces, before anything is computed."""
    if output_type not in allowed:
        raise ValueError(f"output_type={output_type!r} is unknown: choose one of {list(allowed)}")


def require_finite(values: torch.Tensor, what: str, remedy: str) -> None:
    """Raise `NumericalError` if anything in `values` is infinite or not a number: such a picture would be black.

    Args:
        values: what was computed. The check waits for it, so it belongs behind the last step.
        what: the name of the values in the message.
        remedy: what the user can do.
    """
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise NumericalError(f"{bad} of {values.numel()} values of the {what} are not finite: {remedy}")


class VaeImageProcessor(ConfigMixin):
    """Turns pictures into the tensors that an autoencoder takes, and its tensors into pictures.

    Args:
        do_resize: change sizes to what is asked, rounded down to multiples of `vae_scale_factor`.
        vae_scale_factor: pixels for each latent along one side.
        vae_latent_channels: a tensor with this many channels is taken for latents and passes through unchanged.
        resample: how PIL images are resized: "lanczos", "bicubic", "bilinear" or "nearest".
        reducing_gap: PIL's faster two-step reduction, if set.
        do_normalize: bring pixels to the range from -1 to 1.
        do_binarize: turn values into 0 or 1 at one half, as for masks.
        do_convert_rgb: turn every PIL image into RGB.
        do_convert_grayscale: turn every PIL image into gray, as for masks.

    Raises:
        ValueError: if both conversions are asked for, or `resample` is unknown.
    """

    config_name = "preprocessor_config.json"

    def __init__(
        self,
        do_resize: bool = True,
        vae_scale_factor: int = 8,
        vae_latent_channels: int = 4,
        resample: str = "lanczos",
        reducing_gap: int | None = None,
        do_normalize: bool = True,
        do_binarize: bool = False,
        do_convert_rgb: bool = False,
        do_convert_grayscale: bool = False,
    ) -> None:
        if do_convert_rgb and do_convert_grayscale:
            raise ValueError("do_convert_rgb and do_convert_grayscale exclude each other: set one of them")
        if resample not in _RESAMPLING:
            raise ValueError(f"resample={resample!r} is unknown: choose one of {sorted(_RESAMPLING)}")

    numpy_to_pil = staticmethod(numpy_to_pil)
    pil_to_numpy = staticmethod(pil_to_numpy)
    numpy_to_pt = staticmethod(numpy_to_pt)
    pt_to_numpy = staticmethod(pt_to_numpy)

    @staticmethod
    def normalize(images: _Array) -> _Array:
        """Values from 0 to 1 to values from -1 to 1."""
        return cast(_Array, 2.0 * images - 1.0)

    @staticmethod
    def denormalize(images: _Array) -> _Array:
        """Values from -1 to 1 to values from 0 to 1, cut off outside."""
        scaled = images * 0.5 + 0.5
        return cast(_Array, scaled.clamp(0, 1) if isinstance(scaled, torch.Tensor) else np.clip(scaled, 0, 1))

    @staticmethod
    def convert_to_rgb(image: "Image") -> "Image":
        """A PIL image as RGB; transparency is dropped."""
        return image.convert("RGB")

    @staticmethod
    def convert_to_grayscale(image: "Image") -> "Image":
        """A PIL image as gray."""
        return image.convert("L")

    @staticmethod
    def blur(image: "Image", blur_factor: int = 4) -> "Image":
        """Soften a PIL image with a Gaussian of radius `blur_factor` pixels, as for the edge of a mask."""
        import PIL.ImageFilter

        return image.filter(PIL.ImageFilter.GaussianBlur(blur_factor))

    @staticmethod
    def binarize(image: _Array) -> _Array:
        """0 below one half, 1 from there on."""
        if isinstance(image, torch.Tensor):
            return (image >= 0.5).to(image.dtype)
        return cast(_Array, (image >= 0.5).astype(image.dtype))

    @staticmethod
    def get_crop_region(mask_image: "Image", width: int, height: int, pad: int = 0) -> tuple[int, int, int, int]:
        """The part of a picture to inpaint at full resolution: the mask's bounding box in the shape `width` : `height`.

        Args:
            mask_image: white where something is to be painted.
            width: of the picture that the region is enlarged to.
            height: likewise.
            pad: pixels of surroundings to keep on each side.

        Returns:
            (left, upper, right, lower) in pixels of `mask_image`, inside of it. The shape is met unless the mask image
            is too small for it.

        Raises:
            ValueError: if the mask is black everywhere.
        """
        box = mask_image.convert("L").getbbox()
        if box is None:
            raise ValueError("mask_image is black everywhere, so there is nothing to inpaint")
        left, upper = max(box[0] - pad, 0), max(box[1] - pad, 0)
        right, lower = min(box[2] + pad, mask_image.width), min(box[3] + pad, mask_image.height)
        wanted, found = width / height, (right - left) / (lower - upper)
        if found > wanted:
            upper, lower = _widen(upper, lower, (right - left) / wanted, mask_image.height)
        else:
            left, right = _widen(left, right, (lower - upper) * wanted, mask_image.width)
        return left, upper, right, lower

    def get_default_height_width(
        self, image: "Image | np.ndarray[Any, Any] | torch.Tensor", height: int | None = None, width: int | None = None
    ) -> tuple[int, int]:
        """The size to work at: what is given, or the image's, rounded down to multiples of `vae_scale_factor`.

        Raises:
            ValueError: if nothing would be left.
        """
        if isinstance(image, torch.Tensor):
            own_height, own_width = image.shape[-2:]
        elif isinstance(image, np.ndarray):
            own_height, own_width = image.shape[-3:-1] if image.ndim > 2 else image.shape
        else:
            own_width, own_height = image.size
        factor = self.config.vae_scale_factor
        height, width = int(height or own_height), int(width or own_width)
        if min(height, width) < factor:
            raise ValueError(
                f"image has height {height} and width {width}, but {factor} pixels are the least: pass a larger one; "
                "tensors have the axes (N, C, H, W), arrays (N, H, W, C)"
            )
        return height - height % factor, width - width % factor

    def resize(self, image: Any, height: int, width: int, resize_mode: str = "default") -> Any:
        """Change the size of one PIL image, or of a batch as array (N, H, W, C) or tensor (N, C, H, W).

        Args:
            image: what to resize; arrays and tensors by the nearest pixel.
            height: in pixels.
            width: in pixels.
            resize_mode: for PIL images: "default" stretches; "fill" keeps the shape and repeats the edges around it;
                "crop" keeps the shape and cuts off what stands out.
        """
        if resize_mode not in ("default", "fill", "crop"):
            raise ValueError(f"resize_mode={resize_mode!r} is unknown: choose 'default', 'fill' or 'crop'")
        if isinstance(image, np.ndarray):
            return pt_to_numpy(self.resize(numpy_to_pt(image), height, width))
        if isinstance(image, torch.Tensor):
            return torch.nn.functional.interpolate(image, size=(height, width))
        if resize_mode != "default":
            return _fit(image, width, height, fill=resize_mode == "fill")
        from PIL.Image import Resampling

        method = Resampling[_RESAMPLING[self.config.resample]]
        return image.resize((width, height), resample=method, reducing_gap=self.config.reducing_gap)

    def preprocess(
        self,
        image: ImageInput,
        height: int | None = None,
        width: int | None = None,
        resize_mode: str = "default",
        crops_coords: tuple[int, int, int, int] | None = None,
    ) -> torch.Tensor:
        """Bring one picture or several to a tensor (N, C, height, width).

        Args:
            image: a PIL image, array or tensor, or a list of one kind. Floats run from 0 to 1; a tensor with values
                below 0 is taken as already from -1 to 1; integers run from 0 to 255. A tensor with
                `vae_latent_channels` channels is taken for latents and returned as it is.
            height: in pixels, the first image's by default; rounded down to a multiple of `vae_scale_factor`.
            width: likewise.
            resize_mode: as for `resize`.
            crops_coords: (left, upper, right, lower) to cut from PIL images first.

        Raises:
            TypeError: if `image` holds anything else, or a mixture.
            ValueError: if `image` is empty, its parts don't fit together, or floats are far outside of their range.
        """
        images = _as_list(image)
        if isinstance(images[0], np.ndarray | torch.Tensor):
            pixels = self._stack(images)
            if isinstance(images[0], torch.Tensor) and pixels.shape[1] == self.config.vae_latent_channels:
                return pixels
            height, width = self.get_default_height_width(pixels, height, width)
            if self.config.do_resize and tuple(pixels.shape[-2:]) != (height, width):
                pixels = self.resize(pixels, height, width)
        else:
            pixels = self._from_pil(images, height, width, resize_mode, crops_coords)
        if pixels.dtype == torch.uint8:
            pixels = pixels.float() / 255.0
        if self.config.do_normalize:
            low, high = (float(bound) for bound in pixels.aminmax())
            if not math.isfinite(low) or not math.isfinite(high):
                raise ValueError("image holds values that are not finite (NaN or infinity)")
            if high > 2.0:
                raise ValueError(
                    f"image has values up to {high:g}: floats must run from 0 to 1; convert 0..255 to uint8"
                )
            if low >= 0.0:
                pixels = self.normalize(pixels)
        return self.binarize(pixels) if self.config.do_binarize else pixels

    def _from_pil(
        self, images: "list[Image]", height: int | None, width: int | None, mode: str, crop: Any
    ) -> torch.Tensor:
        if crop is not None:
            images = [image.crop(crop) for image in images]
        # Palettes cannot be interpolated, so these images change first; for all others the size comes first.
        images = [image.convert("RGB") if image.mode in ("P", "PA") else image for image in images]
        if self.config.do_resize:
            height, width = self.get_default_height_width(images[0], height, width)
            images = [self.resize(image, height, width, mode) for image in images]
        if self.config.do_convert_rgb:
            images = [self.convert_to_rgb(image) for image in images]
        elif self.config.do_convert_grayscale:
            images = [self.convert_to_grayscale(image) for image in images]
        kinds = {(image.mode, image.size) for image in images}
        if len(kinds) > 1:
            raise ValueError(f"image is a list of different modes or sizes {sorted(kinds)}: convert them to one")
        return numpy_to_pt(pil_to_numpy(images))

    def _stack(self, images: list[Any]) -> torch.Tensor:
        """Arrays or tensors, with or without batch and channel axes, to one tensor (N, C, H, W)."""
        several = len(images) > 1
        parts = []
        for image in images:
            array = isinstance(image, np.ndarray)
            part = torch.from_numpy(np.require(image, requirements="W")) if array else image
            if array and part.ndim == 3 and (part.shape[-1] in (1, 3, 4) or not self.config.do_convert_grayscale):
                part = part.permute(2, 0, 1)
            elif array and part.ndim == 4:
                part = part.permute(0, 3, 1, 2)
            if part.ndim == 2:
                part = part[None]
            if part.ndim == 3:
                # A stack of gray images or one image of one channel: both become (N, 1, H, W).
                gray = self.config.do_convert_grayscale and (not several or part.shape[0] == 1)
                part = part[:, None] if gray else part[None]
            if part.ndim != 4:
                raise ValueError(f"image has {image.ndim} axes, expected 2 to 4")
            parts.append(part)
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"image is a list of different shapes {sorted(shapes)}: make them one size first")
        return torch.cat(parts)

    def postprocess(
        self, image: torch.Tensor, output_type: str | None = "pil", do_denormalize: list[bool] | None = None
    ) -> Any:
        """Bring an autoencoder's output to what was asked for.

        Args:
            image: (N, C, H, W) with values from -1 to 1.
            output_type: "pil" for a list of PIL images, "np" for an array (N, H, W, C), "pt" for a tensor (N, C, H, W),
                both from 0 to 1; "latent" returns `image` as it is.
            do_denormalize: for each image, whether it runs from -1 to 1; by default as `do_normalize` says.

        Raises:
            ValueError: if `output_type` is unknown.
            NumericalError: if values are not finite.
        """
        check_output_type(output_type)
        if not isinstance(image, torch.Tensor):
            raise TypeError(f"image must be a tensor of shape (N, C, H, W), not {type(image).__name__}")
        if output_type == "latent":
            return image
        require_finite(image, "picture", "run the autoencoder in float32 or bfloat16, as float16 may overflow")
        flags = do_denormalize or [self.config.do_normalize] * len(image)
        if len(flags) != len(image):
            raise ValueError(f"do_denormalize has {len(flags)} entries for {len(image)} images")
        if all(flags):
            image = self.denormalize(image)
        elif any(flags):
            image = torch.stack(
                [self.denormalize(one) if flag else one for one, flag in zip(image, flags, strict=True)]
            )
        if output_type == "pt":
            return image
        array = pt_to_numpy(image)
        return array if output_type == "np" else numpy_to_pil(array)

    def apply_overlay(
        self,
        mask: "Image",
        init_image: "Image",
        image: "Image",
        crop_coords: tuple[int, int, int, int] | None = None,
    ) -> "Image":
        """Keep the pixels of the original picture wherever the mask is black.

        Args:
            mask: white where `image` counts.
            init_image: the original picture, whose size the result has.
            image: what was painted; it fills `crop_coords` if those are given, else the whole picture.
            crop_coords: (left, upper, right, lower) in pixels of the original.
        """
        import PIL.Image
        import PIL.ImageOps

        size = init_image.size
        original = PIL.Image.new("RGBa", size)
        keep = PIL.ImageOps.invert(mask.convert("L"))
        original.paste(init_image.convert("RGBA").convert("RGBa"), mask=keep)
        painted = image.convert("RGBA")
        if crop_coords is not None:
            left, upper, right, lower = crop_coords
            region = _fit(image, right - left, lower - upper, fill=False)
            painted = PIL.Image.new("RGBA", size)
            painted.paste(region, (left, upper))
        painted.alpha_composite(original.convert("RGBA"))
        return painted.convert("RGB")


def _as_list(image: Any) -> list[Any]:
    """The parts of an image argument, checked to be of one known kind."""
    import PIL.Image

    images = list(image) if isinstance(image, list | tuple) else [image]
    if not images:
        raise ValueError("image is an empty list: pass at least one")
    for kind in (PIL.Image.Image, np.ndarray, torch.Tensor):
        if all(isinstance(one, kind) for one in images):
            return images
    names = sorted({type(one).__name__ for one in images})
    raise TypeError(f"image must be PIL images, numpy arrays or tensors, and all of one kind, not {names}")


def _widen(low: int, high: int, wanted: float, limit: int) -> tuple[int, int]:
    """The span from `low` to `high` made `wanted` long around its middle, moved and cut to lie within 0 and `limit`."""
    extra = int(wanted - (high - low))
    low, high = low - extra // 2, high + extra - extra // 2
    outside = max(high - limit, 0) or min(low, 0)
    low, high = low - outside, high - outside
    return max(low, 0), min(high, limit)


def _fit(image: "Image", width: int, height: int, fill: bool) -> "Image":
    """Resize to `width` x `height` keeping the shape: `fill` repeats the edges, otherwise what stands out is cut."""
    import PIL.Image

    wider = image.width * height > width * image.height
    if wider == fill:
        size = (width, image.height * width // image.width)
    else:
        size = (image.width * height // image.height, height)
    resized = image.resize(size, resample=PIL.Image.Resampling.LANCZOS)
    canvas = PIL.Image.new("RGB", (width, height))
    left, upper = width // 2 - size[0] // 2, height // 2 - size[1] // 2
    canvas.paste(resized, (left, upper))
    if fill:
        # PIL reads a box without extent as the colours right at that edge.
        for start, end, edge in ((0, upper, 0), (upper + size[1], height, size[1])):
            if end > start:
                canvas.paste(resized.resize((width, end - start), box=(0, edge, size[0], edge)), (0, start))
        for start, end, edge in ((0, left, 0), (left + size[0], width, size[0])):
            if end > start:
                canvas.paste(resized.resize((end - start, height), box=(edge, 0, edge, size[1])), (start, 0))
    return canvas
