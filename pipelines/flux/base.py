"""What the FLUX.1 pipelines share: components, prompts, packed latents, and one call of the transformer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...models.autoencoders.kl import AutoencoderKL
from ...models.transformers.checks import check_attention_kwargs
from ...models.transformers.flux import FluxTransformer2DModel
from ...offload.runs import once
from ...schedulers.base import Scheduler
from ..arguments import refuse_adapters
from ..flow import share_of_noise
from ..guidance import guide
from ..packed import PackedPipeline
from ..picture import Call, Tensors
from ..prompts import PooledPrompts, PromptedPipeline
from ..text import as_prompts, encode_clip
from ..text_t5 import check_length, encode_t5
from .output import FluxPipelineOutput

if TYPE_CHECKING:
    from transformers import (
        CLIPImageProcessor,
        CLIPTextModel,
        CLIPTokenizer,
        CLIPVisionModelWithProjection,
        T5EncoderModel,
        T5Tokenizer,
    )

LONGEST_TEXT = 512
_KINDS = ("prompt_embeds", "pooled_prompt_embeds")
_IN_ALL_STEPS = ("encoder_hidden_states", "pooled_projections", "guidance")


@dataclass(frozen=True)
class Prompts(PooledPrompts):
    """The arguments of a call that say what to draw; see there."""

    max_sequence_length: int = LONGEST_TEXT

    @property
    def negative(self) -> bool:
        """Whether it is said what not to draw."""
        given = (self.negative_prompt, self.negative_prompt_2, self.negative_prompt_embeds)
        return any(each is not None for each in given)

    def count(self) -> int:
        check_length("max_sequence_length", self.max_sequence_length, LONGEST_TEXT)
        return super().count()


class FluxText(PromptedPipeline):
    """How CLIP and T5 read prompts for FLUX.1."""

    _denoiser: ClassVar[str] = "transformer"

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        prompt_2: str | list[str] | None = None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        max_sequence_length: int = LONGEST_TEXT,
        lora_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode prompts, which `__call__` takes as `prompt_embeds` and `pooled_prompt_embeds`.

        Args:
            prompt: one text or several, for CLIP.
            prompt_2: the same for T5; `prompt` if None.
            device: where the result lies; the pipeline's device if None.
            num_images_per_prompt: how often each prompt is repeated.
            prompt_embeds, pooled_prompt_embeds: take these in place of the texts.
            max_sequence_length: tokens for each prompt, from 1 to 512; shorter ones are padded, longer ones cut.
            lora_scale: must be None, as no adapter is loaded.

        Returns:
            The embeddings (prompts * num_images_per_prompt, tokens, size), the pooled ones (..., size), and the
            positions of the tokens (tokens, 3), all zero.
        """
        refuse_adapters(lora_scale=lora_scale)
        prompts = Prompts(
            prompt,
            prompt_embeds=prompt_embeds,
            num_images_per_prompt=num_images_per_prompt,
            prompt_2=prompt_2,
            pooled_prompt_embeds=pooled_prompt_embeds,
            max_sequence_length=max_sequence_length,
        )
        with self.letting_go():
            tensors, _ = self._encode(prompts, False, device)
        embeds = tensors["prompt_embeds"]
        return embeds, tensors["pooled_prompt_embeds"], embeds.new_zeros(embeds.shape[1], 3)

    def _encode(
        self, prompts: Prompts, guided: bool, device: torch.device | None = None
    ) -> tuple[Tensors, list[str] | None]:
        """The embeddings for each picture, those of the negative prompts if `guided`, and what was cut from prompts."""
        count, sides = prompts.count(), ["", "negative_"] if guided else [""]
        made = {f"{sign}{kind}": getattr(prompts, f"{sign}{kind}") for sign in sides for kind in _KINDS}
        asked = [sign for sign in sides if made[f"{sign}prompt_embeds"] is None]
        truncated = None
        if asked:
            clip_texts: list[str] = []
            t5_texts: list[str] = []
            for sign in asked:
                first, second = getattr(prompts, f"{sign}prompt"), getattr(prompts, f"{sign}prompt_2")
                clip_texts += as_prompts(first, count, f"{sign}prompt")
                t5_texts += as_prompts(second or first, count, f"{sign}prompt_2")
            given = prompts.prompt_embeds
            length = prompts.max_sequence_length if given is None else given.shape[1]
            # All texts at once, so that each encoder is needed once.
            pooled = encode_clip(clip_texts, self.tokenizer, self.text_encoder, device=device).pooled
            text = encode_t5(t5_texts, self.tokenizer_2, self.text_encoder_2, length=length, device=device)
            for index, sign in enumerate(asked):
                part = slice(index * count, (index + 1) * count)
                made |= {f"{sign}prompt_embeds": text.embeds[part], f"{sign}pooled_prompt_embeds": pooled[part]}
            truncated = text.truncated[:count] if asked[0] == "" else None
        return {name: self._per_picture(value, prompts, count, device) for name, value in made.items()}, truncated


class FluxBase(FluxText, PackedPipeline):
    """Base of the FLUX.1 pipelines.

    Args:
        scheduler: takes the steps along the flow.
        vae: between pictures and latents. None works where latents go in and out.
        text_encoder: CLIP, which gives one vector for each prompt.
        tokenizer: for CLIP.
        text_encoder_2: T5, which gives a vector for each token.
        tokenizer_2: for T5.
        transformer: predicts the flow.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->text_encoder_2->transformer->vae"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds"]
    _output: ClassVar[type[Any]] = FluxPipelineOutput
    _rounds_strength_up: ClassVar[bool] = True
    # The configs ask for float32, but this autoencoder computes well in bfloat16, as the checkpoints are used.
    _upcasts: ClassVar[bool] = False

    def __init__(
        self,
        scheduler: Scheduler,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        tokenizer: "CLIPTokenizer",
        text_encoder_2: "T5EncoderModel",
        tokenizer_2: "T5Tokenizer",
        transformer: FluxTransformer2DModel,
    ) -> None:
        self.register_modules(
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            transformer=transformer,
        )

    # ---- sizes and shapes ----

    @property
    def latent_channels(self) -> int:
        """Channels of the latents before they are packed."""
        config = self.transformer.config
        return (config.out_channels or config.in_channels) // 4

    @property
    def _condition_channels(self) -> int:
        """How many channels of a token the transformer is shown besides those of the latents."""
        return 0

    # ---- check ----

    def _sees_mask(self) -> bool:
        return False

    def _state(
        self, prompts: Prompts, guidance_scale: float, true_cfg_scale: float = 1.0, kwargs: Any = None
    ) -> Tensors:
        """What can be read and changed during a call. Guidance needs something to be guided away from."""
        return {
            "guidance_scale": guidance_scale,
            "true_cfg_scale": true_cfg_scale if prompts.negative else 1.0,
            "joint_attention_kwargs": kwargs,
        }

    def _check(self, call: Call) -> int:
        batch, prompts = super()._check(call), call.prompts
        check_attention_kwargs(call.state["joint_attention_kwargs"])
        names = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
        self._check_encoders(call, *names, remedy="pass embeddings and pooled ones")
        config, channels = self.transformer.config, 4 * self.latent_channels + self._condition_channels
        if config.in_channels != channels:
            raise ValueError(
                f"{type(self).__name__} shows the transformer tokens of {channels} channels, but this one takes "
                f"{config.in_channels}: it was trained for another pipeline"
            )
        sizes = (config.joint_attention_dim, config.pooled_projection_dim)
        self._check_widths(prompts, **dict(zip(_KINDS, sizes, strict=True)))
        return batch

    # ---- denoise ----

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        return self._encode(prompts, self.do_classifier_free_guidance)

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        latents, device = tensors["latents"], self._execution_device
        rows, columns = call.task.height // self.size_multiple, call.task.width // self.size_multiple
        scales = None
        if self.transformer.config.guidance_embeds:
            scales = torch.full((len(latents),), self.guidance_scale, device=device, dtype=torch.float32)
        return {
            "image_ids": token_ids(rows, columns, device=device),
            "text_ids": torch.zeros(tensors["prompt_embeds"].shape[1], 3, device=device),
            "guidance": scales,
        }

    def _shown(self, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The tokens that the transformer is shown: the latents (N, tokens, channels) and what goes beside them."""
        return sample

    def _residuals(self, index: int, given: Tensors, tensors: Tensors) -> Tensors:
        """More arguments for the transformer, from those for the prediction with the prompt."""
        return {}

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        guided = self.do_classifier_free_guidance and tensors.get("negative_prompt_embeds") is not None
        given = {
            "hidden_states": self._shown(sample, tensors),
            "timestep": share_of_noise(timestep, len(sample), sample.dtype),
            "guidance": tensors["guidance"],
            "encoder_hidden_states": tensors["prompt_embeds"],
            "pooled_projections": tensors["pooled_prompt_embeds"],
        }
        shared = {
            "txt_ids": tensors["text_ids"],
            "img_ids": tensors["image_ids"],
            "joint_attention_kwargs": self.joint_attention_kwargs,
            "return_dict": False,
        }
        given |= self._residuals(index, {**given, **shared}, tensors)
        if guided:
            negative = {
                "encoder_hidden_states": tensors["negative_prompt_embeds"],
                "pooled_projections": tensors["negative_pooled_prompt_embeds"],
            }
            given = {name: _joined(name, negative.get(name, value), value) for name, value in given.items()}
            given["timestep"] = share_of_noise(timestep, 2 * len(sample), sample.dtype)
        prediction = self.transformer(**given, **shared)[0][:, : sample.shape[1]]
        return guide(prediction, self.true_cfg_scale) if guided else prediction


def _joined(name: str, first: Any, second: Any) -> Any:
    """Two batches as one; lists of tensors entry by entry, and other things as they are."""
    if isinstance(second, torch.Tensor):
        # What is the same in all steps stays one tensor, by which the transformer knows it again.
        return once(_pair, first, second) if name in _IN_ALL_STEPS else _pair(first, second)
    return [torch.cat(pair) for pair in zip(first, second, strict=True)] if isinstance(second, list) else second


def _pair(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat([first, second])


class FluxAdapterBase(FluxBase):
    """`FluxBase` with the parts that image prompts (IP-Adapter) would need.

    Args:
        image_encoder, feature_extractor: not used by the pipeline; kept for checkpoints and extensions that have them.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->text_encoder_2->image_encoder->transformer->vae"
    _optional_components: ClassVar[list[str]] = ["image_encoder", "feature_extractor"]

    def __init__(
        self,
        scheduler: Scheduler,
        vae: AutoencoderKL,
        text_encoder: "CLIPTextModel",
        tokenizer: "CLIPTokenizer",
        text_encoder_2: "T5EncoderModel",
        tokenizer_2: "T5Tokenizer",
        transformer: FluxTransformer2DModel,
        image_encoder: "CLIPVisionModelWithProjection | None" = None,
        feature_extractor: "CLIPImageProcessor | None" = None,
    ) -> None:
        super().__init__(scheduler, vae, text_encoder, tokenizer, text_encoder_2, tokenizer_2, transformer)
        self.register_modules(image_encoder=image_encoder, feature_extractor=feature_extractor)


def token_ids(rows: int, columns: int, *, picture: int = 0, device: Any = None) -> torch.Tensor:
    """The positions of a picture's tokens, (rows * columns, 3): number of the picture, row and column."""
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 0] = picture
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)
    return ids.reshape(-1, 3)
