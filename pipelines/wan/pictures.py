"""The pictures that a film of Wan starts and ends with: as latents, and as CLIP sees them."""

from typing import Any

import torch

from diffusion_core.images import ImageInput

from ...offload.engine import execution_device, execution_dtype
from ..film import FilmFromImage
from ..latents import encode_image, spread
from ..loop import Steps
from ..picture import Call, Tensors


class FilmBetweenImages(FilmFromImage):
    """Image to film: the picture is the first frame, and another one, if there is one, the last.

    Args:
        image: one picture for all, or one for each prompt.
        last_image: likewise; None where the film may end in any way.
        image_embeds: what CLIP sees in both, if it was encoded before.
        height, width, num_frames, latents: as for `FilmFromNoise`; the pictures are brought to this size.
    """

    def __init__(
        self,
        image: "ImageInput | None",
        last_image: "ImageInput | None",
        image_embeds: torch.Tensor | None,
        height: int | None,
        width: int | None,
        num_frames: int | None,
        latents: torch.Tensor | None = None,
    ) -> None:
        super().__init__(image, height, width, num_frames, latents)
        self.last_image, self.image_embeds, self.last = last_image, image_embeds, None

    def prepare(self, pipe: Any, call: Call, batch: int) -> None:
        super().prepare(pipe, call, batch)
        if self.last_image is None:
            return
        if self.frames == 1:
            raise ValueError("last_image is given for a film of num_frames=1: ask for more frames, or leave it out")
        last = pipe.video_processor.preprocess(self.last_image, self.height, self.width)
        self.last = spread(last, self.count, max(len(last), len(self.pixels)), "last_image")
        self.pixels = spread(self.pixels, self.count, len(self.last), "image")

    def start(self, pipe: Any, steps: Steps) -> Tensors:
        tensors = super().start(pipe, steps)
        self.first = tensors["condition"] if pipe._expands() else None
        self.shown = () if pipe._expands() else ("condition",)
        return {**tensors, "latents": self._with_first(tensors["latents"])}

    def blend(self, steps: Steps, index: int, tensors: Tensors) -> torch.Tensor:
        return self._with_first(tensors["latents"])

    def _with_first(self, latents: torch.Tensor) -> torch.Tensor:
        """The film with its first frame as it is, where the transformer is shown that in the film."""
        return latents if self.first is None else torch.cat([self.first, latents[:, :, 1:]], dim=2)

    def condition(self, pipe: Any) -> torch.Tensor:
        """What joins the noise, for each picture: a mask of known frames and the latents of a film of these alone.

        Where the transformer is shown the first frame in the film: the latents of that.
        """
        device, first = pipe._execution_device, self.pixels.unsqueeze(2)
        if pipe._expands():
            return encode_image(pipe.vae, first.to(device), draw=False)
        film = first.new_zeros(*first.shape[:2], self.frames, *first.shape[3:])
        film[:, :, :1] = first
        if self.last is not None:
            film[:, :, -1] = self.last
        latents = encode_image(pipe.vae, film.to(device), draw=False).float()
        # A channel for each frame that a latent stands for; the first is one by itself, and fills them all.
        mask = latents.new_zeros(len(latents), pipe.vae_scale_factor_temporal, *latents.shape[2:])
        mask[:, :, 0] = 1
        if self.last is not None:
            mask[:, -1, -1] = 1
        return torch.cat([mask, latents], dim=1)

    def embed(self, pipe: Any) -> torch.Tensor:
        """What CLIP sees in the pictures; in the first and then in the last, where there are both."""
        pairs = [(self.image, self.pixels)] + ([] if self.last is None else [(self.last_image, self.last)])
        tokens: list[torch.Tensor] = []
        for given, pixels in pairs:
            # Pictures as they were given have more to see than what they were brought to.
            pictures = as_list(given)
            seen = pictures if all(hasattr(each, "convert") for each in pictures) else list(pixels / 2 + 0.5)
            tokens.append(embed_pictures(seen, pipe.image_processor, pipe.image_encoder))
        count = max(len(each) for each in tokens)
        return torch.cat([each.expand(count, -1, -1) if len(each) == 1 else each for each in tokens], dim=1)


def as_list(image: Any) -> list[Any]:
    """Pictures as a list."""
    if isinstance(image, list | tuple):
        return list(image)
    return list(image) if getattr(image, "ndim", 3) == 4 else [image]


def embed_pictures(
    pictures: list[Any], processor: Any, encoder: Any, device: torch.device | None = None
) -> torch.Tensor:
    """The states before the last layer of CLIP's vision model, (pictures, tokens, size).

    Args:
        pictures: PIL images, or tensors or arrays with values from 0 to 1.
        processor: prepares them.
        encoder: the model.
        device: where to compute; the encoder's own device by default.
    """
    plain = all(hasattr(each, "convert") for each in pictures)
    kind: dict[str, Any] = {"do_convert_rgb": True} if plain else {"do_rescale": False}
    pixels = processor(images=pictures, return_tensors="pt", **kind).pixel_values
    pixels = pixels.to(device or execution_device(encoder), execution_dtype(encoder))
    return encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
