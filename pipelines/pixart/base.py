"""What PixArt-alpha and PixArt-Sigma share: all but how long a prompt may be."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..captions import clean_caption, lower_caption
from ..guidance import guide
from ..picture import Call, Tensors
from ..tasks import FromNoise
from ..text_masked import Encoded, MaskedTextPipeline, Prompts
from .bins import FromNoiseInBins

# The callback of old: callback(step, timestep, latents)
OldCallback = Callable[[int, Any, torch.Tensor], None]


class PixArtBase(MaskedTextPipeline):
    """Base of the pipelines of PixArt-alpha and PixArt-Sigma; see `MaskedTextPipeline` for the components."""

    _optional_components: ClassVar[list[str]] = ["tokenizer", "text_encoder"]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds", "prompt_attention_mask"]

    @property
    def _text_width(self) -> int | None:
        config = self.transformer.config
        return config.caption_channels or config.cross_attention_dim

    # ---- encode ----

    def _prepared(self, texts: list[str], prompts: Prompts) -> list[str]:
        clean = clean_caption if prompts.clean_caption else lower_caption
        return [clean(text) for text in texts]

    def _encode_prompt(self, prompts: Prompts, guided: bool, device: torch.device | None) -> Encoded:
        with self.letting_go():
            return self._encoded(prompts, guided, device)

    # ---- denoise ----

    def _start(
        self, height: int | None, width: int | None, latents: torch.Tensor | None, binned: bool
    ) -> FromNoise | FromNoiseInBins:
        return (FromNoiseInBins if binned else FromNoise)(height, width, latents)

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """The picture's size, for a transformer that takes it."""
        if not self.transformer.takes_sizes:
            return {"sizes": {}}
        height, width, embeds = call.task.height, call.task.width, tensors["prompt_embeds"]
        return {
            "sizes": {
                "resolution": embeds.new_tensor([[height, width]]),
                "aspect_ratio": embeds.new_tensor([[height / width]]),
            }
        }

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        guided = self.do_classifier_free_guidance
        if guided:
            sample = torch.cat([sample, sample])
        prediction = self.transformer(
            sample,
            encoder_hidden_states=tensors["prompt_embeds"],
            encoder_attention_mask=tensors["prompt_attention_mask"],
            timestep=timestep,
            added_cond_kwargs={name: value.expand(len(sample), -1) for name, value in tensors["sizes"].items()},
            return_dict=False,
        )[0]
        # What comes after the noise is a learned variance, which these schedulers do without.
        prediction = prediction[:, : self.latent_channels]
        return guide(prediction, self.guidance_scale) if guided else prediction
