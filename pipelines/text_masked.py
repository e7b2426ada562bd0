"""Families whose prompts are one T5's embeddings with a mask that says which tokens count: PixArt, AuraFlow."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..models.autoencoders.kl import AutoencoderKL
from ..schedulers.base import Scheduler
from . import picture
from .loop import check_count
from .picture import Call, PicturePipeline, Tensors
from .text import as_prompts
from .text_t5 import encode_t5

if TYPE_CHECKING:
    from transformers import T5EncoderModel, T5Tokenizer

# What `encode_prompt` returns: embeddings and mask of the prompts, then those of the negative ones.
Encoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Prompts(picture.Prompts):
    """The arguments of a call that say what to draw; see there."""

    prompt_attention_mask: torch.Tensor | None = None
    negative_prompt_attention_mask: torch.Tensor | None = None
    max_sequence_length: int = 256
    clean_caption: bool = False

    def count(self) -> int:
        count = super().count()
        check_count("max_sequence_length", self.max_sequence_length)
        check_masks(self)
        return count


def check_masks(prompts: Any) -> None:
    """Refuse embeddings without a mask, a mask without them, and one of another length."""
    for name in ("prompt", "negative_prompt"):
        embeds, mask = getattr(prompts, f"{name}_embeds"), getattr(prompts, f"{name}_attention_mask")
        if (embeds is None) != (mask is None):
            raise ValueError(f"{name}_embeds and {name}_attention_mask come together: encode_prompt gives both")
        if mask is not None and tuple(mask.shape) != tuple(embeds.shape[:2]):
            raise ValueError(
                f"{name}_attention_mask has the shape {tuple(mask.shape)}, expected {tuple(embeds.shape[:2])}, "
                f"one entry for each token of {name}_embeds"
            )


class MaskedTextPipeline(PicturePipeline):
    """Base of pipelines with a T5 encoder and a transformer.

    Classes override `_text_width`, and may override `_prepared` and `_masked`.

    Args:
        tokenizer: from text to tokens.
        text_encoder: from tokens to embeddings.
        vae: between pictures and latents. None works where latents go in and out.
        transformer: predicts.
        scheduler: takes the steps.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->transformer->vae"
    _denoiser: ClassVar[str] = "transformer"

    def __init__(
        self,
        tokenizer: "T5Tokenizer",
        text_encoder: "T5EncoderModel",
        vae: AutoencoderKL,
        transformer: Any,
        scheduler: Scheduler,
    ) -> None:
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
        )

    @property
    def latent_channels(self) -> int:
        """Channels of the latents; the transformer may give more, for a variance that it has learned."""
        return self.transformer.config.in_channels

    @property
    def size_multiple(self) -> int:
        """Height and width of pictures are multiples of this, since patches of latents make a token."""
        return self.vae_scale_factor * self.transformer.config.patch_size

    @property
    def _text_width(self) -> int | None:
        """The size of the vectors of text that the transformer takes."""
        raise TypeError(f"{type(self).__name__} must say which text its transformer takes")

    def _check(self, call: Call) -> int:
        batch, prompts = super()._check(call), call.prompts
        guided = self._guided(call.state["guidance_scale"])
        if prompts.prompt is not None or (guided and prompts.negative_prompt_embeds is None):
            self._check_present("text_encoder", "tokenizer", remedy="pass embeddings and their masks")
        size = self._text_width
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            embeds = getattr(prompts, name)
            if embeds is not None and size is not None and embeds.shape[-1] != size:
                raise ValueError(f"{name} has vectors of size {embeds.shape[-1]}, the transformer takes size {size}")
        return batch

    # ---- encode ----

    def _prepared(self, texts: list[str], prompts: Prompts) -> list[str]:
        """Texts as the encoder is to read them."""
        return texts

    def _masked(self, embeds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Embeddings (N, tokens, size) as the encoder gives them to those that the transformer is shown."""
        return embeds

    def _encoded(self, prompts: Prompts, guided: bool, device: torch.device | None = None) -> Encoded:
        """What `encode_prompt` returns, within a call or on its own."""
        tensors, _ = self._encode(prompts, guided, device)
        names = (f"{sign}prompt_{kind}" for sign in ("", "negative_") for kind in ("embeds", "attention_mask"))
        first, mask, second, second_mask = (tensors.get(name) for name in names)
        assert first is not None and mask is not None
        return first, mask, second, second_mask

    def _encode(
        self, prompts: Prompts, guided: bool, device: torch.device | None = None
    ) -> tuple[Tensors, list[str] | None]:
        """Embeddings and masks for each picture, of the negative prompts too if `guided`, and what was cut."""
        count, truncated = prompts.count(), None
        given = prompts.prompt_embeds if prompts.prompt_embeds is not None else prompts.negative_prompt_embeds
        length = prompts.max_sequence_length if given is None else given.shape[1]
        names = ["prompt", "negative_prompt"] if guided else ["prompt"]
        made: Tensors = {}
        for name in names:
            embeds, mask = getattr(prompts, f"{name}_embeds"), getattr(prompts, f"{name}_attention_mask")
            if embeds is None:
                texts = self._prepared(as_prompts(getattr(prompts, name), count, name), prompts)
                text = encode_t5(texts, self.tokenizer, self.text_encoder, length=length, masked=True, device=device)
                embeds, mask = self._masked(text.embeds, text.mask), text.mask
                truncated = text.truncated if name == "prompt" else truncated
            made |= {f"{name}_embeds": embeds, f"{name}_attention_mask": mask}
        return {name: self._per_picture(value, prompts, count, device) for name, value in made.items()}, truncated

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        """The tensors of the loop: with guidance those of the negative prompts and then those of the prompts."""
        made, truncated = self._encode(prompts, self.do_classifier_free_guidance)
        tensors = {}
        for name in ("prompt_embeds", "prompt_attention_mask"):
            negative = made.get(f"negative_{name}")
            tensors[name] = made[name] if negative is None else torch.cat([negative, made[name]])
        return tensors, truncated
