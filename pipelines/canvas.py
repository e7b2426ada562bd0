"""What inpainting paints on: picture and mask, cut and scaled to one size."""

from dataclasses import dataclass
from typing import Any

import torch

from diffusion_core.images import VaeImageProcessor

from .latents import spread


@dataclass(frozen=True)
class Canvas:
    """Pictures and masks at the size that a pipeline works in.

    Attributes:
        pixels: pictures (M, C, H, W) from -1 to 1, or latents at the denoiser's scale.
        mask: (K, 1, H, W), 1 where something is to be painted.
        crop: the part of the picture that was enlarged, as (left, upper, right, lower), if one was.
        count: how many prompts there are.
        batch: how many pictures are drawn.
    """

    pixels: torch.Tensor
    mask: torch.Tensor
    crop: tuple[int, int, int, int] | None
    count: int
    batch: int

    def for_each(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """An entry for each picture that is drawn, from one for all or one for each prompt."""
        return spread(values, self.count, self.batch, name)


def make_canvas(
    processors: tuple[VaeImageProcessor, VaeImageProcessor],
    image: Any,
    mask_image: Any,
    size: tuple[int, int],
    padding: int | None,
    count: int,
    batch: int,
) -> Canvas:
    """Bring picture and mask to one size.

    Args:
        processors: for pictures, and for masks.
        image: one picture, or one for each of `count` prompts.
        mask_image: likewise.
        size: height and width in pixels, checked.
        padding: enlarge the masked part with this many pixels around it; the whole picture is taken if None.
        count: how many prompts there are.
        batch: how many pictures are drawn.

    Raises:
        ValueError: if one is missing, the mask is empty, or the numbers do not go together.
    """
    for name, value in (("image", image), ("mask_image", mask_image)):
        if value is None:
            raise ValueError(f"{name} is missing: inpainting needs image and mask_image")
    (for_images, for_masks), (height, width) = processors, size
    crop = None if padding is None else for_masks.get_crop_region(mask_image, width, height, padding)
    shape: dict[str, Any] = {"resize_mode": "default" if crop is None else "fill", "crops_coords": crop}
    pixels = for_images.preprocess(image, height, width, **shape).float()
    try:
        mask = for_masks.preprocess(mask_image, height, width, **shape).float()
    except (TypeError, ValueError) as error:
        raise type(error)(f"mask_image cannot be used: {error}") from error
    if mask.shape[1] != 1:
        raise ValueError(f"mask_image has {mask.shape[1]} channels, expected 1")
    canvas = Canvas(pixels, mask, crop, count, batch)
    canvas.for_each(pixels, "image")
    canvas.for_each(mask, "mask_image")
    return canvas


def check_crop(padding: Any, image: Any, mask_image: Any, output_type: str | None) -> None:
    """Refuse what cannot be cropped and put back.

    Raises:
        ValueError: unless there are one PIL image and one mask of its size, and PIL images are asked for.
    """
    import PIL.Image

    if not isinstance(padding, int) or padding < 0:
        raise ValueError(f"padding_mask_crop={padding!r} must be a number of pixels, 0 or more")
    for name, value in (("image", image), ("mask_image", mask_image)):
        if not isinstance(value, PIL.Image.Image):
            raise ValueError(f"padding_mask_crop needs one PIL image as {name}, not {type(value).__name__}")
    if image.size != mask_image.size:
        raise ValueError(f"image {image.size} and mask_image {mask_image.size} differ in size: resize one of them")
    if output_type != "pil":
        raise ValueError(f"padding_mask_crop gives PIL images: pass output_type='pil', not {output_type!r}")
