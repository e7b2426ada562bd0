"""What pipelines of Qwen-Image share: components, prompts, packed latents, and one call of the transformer."""

from typing import TYPE_CHECKING, ClassVar

import torch

from diffusion_core.images import VaeImageProcessor

from ...models.autoencoders.qwenimage import AutoencoderKLQwenImage
from ...models.transformers.checks import check_attention_kwargs
from ...models.transformers.qwenimage import QwenImageTransformer2DModel
from ...schedulers.base import Scheduler
from ..flow import share_of_noise
from ..latents import decode_latents
from ..packed import PackedPipeline
from ..picture import Call, Tensors
from ..text import as_prompts
from .prompts import Prompts, Text, encode

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer


class QwenImageBase(PackedPipeline):
    """Base of the pipelines of Qwen-Image.

    Args:
        scheduler: takes the steps along the flow.
        vae: between pictures and latents. None works where latents go in and out.
        text_encoder: the language model.
        tokenizer: for it.
        transformer: predicts the flow.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->transformer->vae"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds"]
    _spaces_steps: ClassVar[bool] = True

    def __init__(
        self,
        scheduler: Scheduler,
        vae: AutoencoderKLQwenImage,
        text_encoder: "Qwen2_5_VLForConditionalGeneration",
        tokenizer: "Qwen2Tokenizer",
        transformer: QwenImageTransformer2DModel,
    ) -> None:
        self.register_modules(
            scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
        )

    # ---- sizes and shapes ----

    @property
    def image_processor(self) -> VaeImageProcessor:
        """Brings pictures to the autoencoder's range and sizes, and back."""
        return VaeImageProcessor(vae_scale_factor=self.size_multiple, vae_latent_channels=self.latent_channels)

    # ---- check and encode ----

    def _check(self, call: Call) -> int:
        batch, prompts = super()._check(call), call.prompts
        check_attention_kwargs(call.state["attention_kwargs"], "attention_kwargs")
        self._check_encoders(call, "text_encoder", "tokenizer", remedy="pass prompt_embeds and their masks")
        self._check_widths(prompts, prompt_embeds=self.transformer.config.joint_attention_dim)
        return batch

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        max_sequence_length: int = 1024,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode prompts, which `__call__` takes as `prompt_embeds` and `prompt_embeds_mask`.

        Args:
            prompt: one text or several.
            device: where to compute, and where the result lies; the pipeline's devices if None.
            num_images_per_prompt: how often each prompt is repeated.
            prompt_embeds, prompt_embeds_mask: take these in place of `prompt`.
            max_sequence_length: tokens for each prompt, from 1 to 1024.

        Returns:
            The embeddings (prompts * num_images_per_prompt, tokens, size), and which tokens count (..., tokens); None
            if all do.
        """
        prompts = Prompts(
            prompt,
            prompt_embeds=prompt_embeds,
            num_images_per_prompt=num_images_per_prompt,
            prompt_embeds_mask=prompt_embeds_mask,
            max_sequence_length=max_sequence_length,
        )
        with self.letting_go():
            text = self._encode(prompts, "prompt", device)
        return text.embeds, text.mask

    def _encode(self, prompts: Prompts, name: str, device: torch.device | None = None) -> Text:
        """Embeddings and mask for each picture, of "prompt" or of "negative_prompt"."""
        count, embeds = prompts.count(), getattr(prompts, f"{name}_embeds")
        if embeds is None:
            texts = as_prompts(getattr(prompts, name), count, name)
            made = encode(texts, self.tokenizer, self.text_encoder, prompts.max_sequence_length, device)
        else:
            made = Text(embeds, getattr(prompts, f"{name}_embeds_mask"))
        embeds, mask = (self._per_picture(each, prompts, count, device) for each in (made.embeds, made.mask))
        return Text(embeds, mask, made.truncated)

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        text = self._encode(prompts, "prompt")
        tensors = {"prompt_embeds": text.embeds, "prompt_embeds_mask": text.mask}
        if self.do_classifier_free_guidance:
            other = self._encode(prompts, "negative_prompt")
            tensors |= {"negative_prompt_embeds": other.embeds, "negative_prompt_embeds_mask": other.mask}
        return tensors, text.truncated

    # ---- denoise and decode ----

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        return {"shape": (1, call.task.height // self.size_multiple, call.task.width // self.size_multiple)}

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        prediction = self._flow(timestep, sample, tensors, "prompt")
        if not self.do_classifier_free_guidance or "negative_prompt_embeds" not in tensors:
            return prediction
        without = self._flow(timestep, sample, tensors, "negative_prompt")
        guided = without + self.true_cfg_scale * (prediction - without)
        # Each token keeps the length that it has without guidance, against overexposed pictures.
        return guided * (prediction.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def _flow(self, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
        return self.transformer(
            hidden_states=sample,
            timestep=share_of_noise(timestep, len(sample), sample.dtype),
            encoder_hidden_states=tensors[f"{name}_embeds"],
            encoder_hidden_states_mask=tensors[f"{name}_embeds_mask"],
            img_shapes=[[tensors["shape"]]] * len(sample),
            attention_kwargs=self.attention_kwargs,
            return_dict=False,
        )[0]

    def _pixels(self, latents: torch.Tensor, call: Call) -> torch.Tensor:
        # The autoencoder is one for videos: a picture is one of a single frame.
        videos = self._unpack(latents, call.task.height, call.task.width).unsqueeze(2)
        return decode_latents(self.vae, videos, generator=call.generator)[:, :, 0]
