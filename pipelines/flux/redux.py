"""`FluxPriorReduxPipeline`: pictures in place of a prompt, for `FluxPipeline`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_core.images import ImageInput
from diffusion_core.outputs import BaseOutput

from ...models.base import Model
from ...offload.engine import execution_device, execution_dtype
from ..loop import check_scale
from ..text import as_prompts
from .base import LONGEST_TEXT, FluxText, Prompts

if TYPE_CHECKING:
    from transformers import (
        CLIPTextModel,
        CLIPTokenizer,
        SiglipImageProcessor,
        SiglipVisionModel,
        T5EncoderModel,
        T5Tokenizer,
    )

# Channels of CLIP's vector, for which zeros stand where there is no prompt.
POOLED_CHANNELS = 768


@dataclass
class ReduxImageEncoderOutput(BaseOutput):
    """What `ReduxImageEncoder` returns.

    Attributes:
        image_embeds: (N, tokens, txt_in_features), to go behind T5's.
    """

    image_embeds: torch.Tensor


class ReduxImageEncoder(Model):
    """Two layers that turn SigLIP's picture tokens into tokens like T5's (FLUX.1-Redux, Black Forest Labs 2024).

    Args:
        redux_dim: channels of the picture tokens.
        txt_in_features: channels of text tokens.
    """

    _repeated_blocks: ClassVar[list[str]] = []
    _no_split_modules: ClassVar[list[str] | None] = []
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = None

    def __init__(self, redux_dim: int = 1152, txt_in_features: int = 4096) -> None:
        super().__init__()
        self.redux_up = nn.Linear(redux_dim, 3 * txt_in_features)
        self.redux_down = nn.Linear(3 * txt_in_features, txt_in_features)

    def forward(self, x: torch.Tensor) -> ReduxImageEncoderOutput:
        """Translate picture tokens (N, tokens, redux_dim)."""
        return ReduxImageEncoderOutput(self.redux_down(F.silu(self.redux_up(x))))


@dataclass
class FluxPriorReduxPipelineOutput(BaseOutput):
    """What goes into `FluxPipeline` in place of a prompt.

    Args:
        prompt_embeds: (1, text tokens and picture tokens, channels).
        pooled_prompt_embeds: (1, channels).
    """

    prompt_embeds: torch.Tensor
    pooled_prompt_embeds: torch.Tensor


class FluxPriorReduxPipeline(FluxText):
    """Turns pictures, and a prompt if there is one, into what `FluxPipeline` takes: it then draws variations of them.

    Args:
        image_encoder: SigLIP, which gives a vector for each part of a picture.
        feature_extractor: prepares pictures for it.
        image_embedder: turns its vectors into ones like T5's.
        text_encoder, tokenizer, text_encoder_2, tokenizer_2: as for `FluxPipeline`; None for all works without prompt.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "image_encoder->image_embedder"
    _optional_components: ClassVar[list[str]] = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
    _callback_tensor_inputs: ClassVar[list[str]] = []

    def __init__(
        self,
        image_encoder: "SiglipVisionModel",
        feature_extractor: "SiglipImageProcessor",
        image_embedder: ReduxImageEncoder,
        text_encoder: "CLIPTextModel | None" = None,
        tokenizer: "CLIPTokenizer | None" = None,
        text_encoder_2: "T5EncoderModel | None" = None,
        tokenizer_2: "T5Tokenizer | None" = None,
    ) -> None:
        self.register_modules(
            image_encoder=image_encoder,
            feature_extractor=feature_extractor,
            image_embedder=image_embedder,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
        )

    @torch.no_grad()
    def __call__(
        self,
        image: "ImageInput",
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_scale: float | Sequence[float] = 1.0,
        pooled_prompt_embeds_scale: float | Sequence[float] = 1.0,
        return_dict: bool = True,
    ) -> FluxPriorReduxPipelineOutput | tuple[torch.Tensor, torch.Tensor]:
        """Encode pictures; several are mixed.

        Args:
            image: one picture or several.
            prompt: what to draw besides, one text for all pictures or one for each; needs the text encoders.
            prompt_2: what T5 is told, if it is something else.
            prompt_embeds, pooled_prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            prompt_embeds_scale, pooled_prompt_embeds_scale: the share of each picture in the mixture: one number for
                all, or one for each.
            return_dict: return an output object rather than a tuple.

        Raises:
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
        """
        pictures = list(image) if isinstance(image, list | tuple) else [image]
        count = len(image) if isinstance(image, torch.Tensor) and image.ndim == 4 else len(pictures)
        if not count or any(each is None for each in pictures):
            raise ValueError("image is missing: pass one picture or several")
        scales = [
            _shares(name, value, count)
            for name, value in (
                ("prompt_embeds_scale", prompt_embeds_scale),
                ("pooled_prompt_embeds_scale", pooled_prompt_embeds_scale),
            )
        ]
        prompts = self._prompts(count, prompt, prompt_2, prompt_embeds, pooled_prompt_embeds)
        with self.run():
            encoder = self.image_encoder
            pixels = self.feature_extractor(images=image, return_tensors="pt", do_convert_rgb=True).pixel_values
            pixels = pixels.to(execution_device(encoder), execution_dtype(encoder))
            tokens = encoder(pixel_values=pixels).last_hidden_state
            seen = self.image_embedder(tokens.to(self.image_embedder.dtype)).image_embeds
            if prompts is None:
                text = seen.new_zeros(count, LONGEST_TEXT, seen.shape[2])
                pooled = seen.new_zeros(count, POOLED_CHANNELS)
            else:
                tensors, _ = self._encode(prompts, False)
                text, pooled = (tensors[name].to(seen) for name in ("prompt_embeds", "pooled_prompt_embeds"))
            embeds, shares = torch.cat([text, seen], dim=1), [torch.tensor(each).to(seen) for each in scales]
            embeds = (embeds * shares[0][:, None, None]).sum(dim=0, keepdim=True)
            pooled = (pooled * shares[1][:, None]).sum(dim=0, keepdim=True)
        return FluxPriorReduxPipelineOutput(embeds, pooled) if return_dict else (embeds, pooled)

    def _prompts(self, count: int, prompt: Any, prompt_2: Any, embeds: Any, pooled: Any) -> Prompts | None:
        """The prompts, one for each picture; None where there are no text encoders and nothing was said."""
        given = prompt is not None or prompt_2 is not None
        absent = [name for name in self._optional_components if getattr(self, name) is None]
        if absent and embeds is None and pooled is None:
            if given:
                raise ValueError(f"prompt needs {', '.join(absent)}, which the pipeline does not have: leave it out")
            return None
        if embeds is None and pooled is None:
            prompt = as_prompts(prompt, count)
        prompts = Prompts(prompt, prompt_embeds=embeds, prompt_2=prompt_2, pooled_prompt_embeds=pooled)
        if prompts.count() != count:
            raise ValueError(f"there are {prompts.count()} prompts for {count} pictures: pass one for each")
        return prompts


def _shares(name: str, value: Any, count: int) -> list[float]:
    """A number for each picture."""
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} pictures: pass one for each")
    for each in values:
        check_scale(name, each)
    return [float(each) for each in values]
