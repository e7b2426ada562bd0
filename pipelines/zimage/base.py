"""What pipelines of Z-Image share: components, prompts, and one call of the transformer."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...models.autoencoders.kl import AutoencoderKL
from ...models.transformers.checks import check_attention_kwargs
from ...models.transformers.zimage import ZImageTransformer2DModel
from ...schedulers.base import Scheduler
from ..flow import flow_schedule
from ..loop import Steps, check_scale, check_share
from ..picture import Call, PicturePipeline, Tensors
from ..text import as_prompts
from .prompts import LONGEST_TEXT, Embeds, Prompts, ZImagePipelineOutput, encode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen2Tokenizer


class ZImageBase(PicturePipeline):
    """Base of the pipelines of Z-Image.

    Args:
        scheduler: takes the steps along the flow.
        vae: between pictures and latents. None works where latents go in and out.
        text_encoder: a language model, Qwen3.
        tokenizer: for it, with a template for chats.
        transformer: predicts the flow.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->transformer->vae"
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds"]
    _denoiser: ClassVar[str] = "transformer"
    _output: ClassVar[type[Any]] = ZImagePipelineOutput
    # The configs ask for float32, but this autoencoder computes well in bfloat16, as the checkpoints are used.
    _upcasts: ClassVar[bool] = False

    def __init__(
        self,
        scheduler: Scheduler,
        vae: AutoencoderKL,
        text_encoder: "PreTrainedModel",
        tokenizer: "Qwen2Tokenizer",
        transformer: ZImageTransformer2DModel,
    ) -> None:
        self.register_modules(
            scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
        )

    @property
    def size_multiple(self) -> int:
        """Height and width of pictures are multiples of this, since 2 x 2 latents make a token."""
        return 2 * self.vae_scale_factor

    @property
    def latent_channels(self) -> int:
        return self.transformer.in_channels

    def _default_size(self) -> tuple[int, int]:
        return 1024, 1024

    # ---- check ----

    def _guided(self, scale: float) -> bool:
        return scale > 0

    def _check(self, call: Call) -> int:
        batch, prompts, state = super()._check(call), call.prompts, call.state
        check_attention_kwargs(state["joint_attention_kwargs"])
        check_scale("cfg_normalization", state["cfg_normalization"])
        check_share("cfg_truncation", state["cfg_truncation"])
        self._check_encoders(call, "text_encoder", "tokenizer", remedy="pass prompt_embeds and negative_prompt_embeds")
        size = self.transformer.config.cap_feat_dim
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            for embeds in getattr(prompts, name) or ():
                if embeds.shape[-1] != size:
                    raise ValueError(
                        f"{name} has vectors of size {embeds.shape[-1]}, the transformer takes size {size}"
                    )
        return batch

    # ---- encode ----

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        device: torch.device | None = None,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: Embeds | None = None,
        negative_prompt_embeds: Embeds | None = None,
        max_sequence_length: int = LONGEST_TEXT,
    ) -> tuple[Embeds, Embeds]:
        """Encode prompts, which `__call__` takes as `prompt_embeds` and `negative_prompt_embeds`.

        Args:
            prompt: one text or several.
            device: where to compute, and where the result lies; the pipeline's devices if None.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            negative_prompt: what the pictures should not show: one text for all, or one for each; "" if None.
            prompt_embeds, negative_prompt_embeds: take these in place of the texts.
            max_sequence_length: tokens for each prompt with its chat, from 1 to 512.

        Returns:
            Two lists with a tensor (tokens, size) for each prompt; the second is empty without guidance.
        """
        prompts = Prompts(
            prompt, negative_prompt, prompt_embeds, negative_prompt_embeds, max_sequence_length=max_sequence_length
        )
        with self.letting_go():
            positive, negative, _ = self._encode(prompts, do_classifier_free_guidance, device)
        return positive, negative

    def _encode(
        self, prompts: Prompts, guided: bool, device: torch.device | None = None
    ) -> tuple[Embeds, Embeds, list[str] | None]:
        """The embeddings for each picture, those of the negative prompts if `guided`, and what was cut from prompts."""
        count, found, truncated = prompts.count(), [], None
        for name in ("prompt", "negative_prompt") if guided else ("prompt",):
            embeds = getattr(prompts, f"{name}_embeds")
            if embeds is None:
                texts = as_prompts(getattr(prompts, name), count, name)
                length = prompts.max_sequence_length
                embeds, cut = encode(texts, self.tokenizer, self.text_encoder, length, device)
                truncated = cut if name == "prompt" else truncated
            embeds = list(embeds) * (count if len(embeds) == 1 else 1)
            rows = [row for row in embeds for _ in range(prompts.num_images_per_prompt)]
            dtype = rows[0].dtype if self.transformer is None else self.transformer.dtype
            found.append([row.to(device=device or self._execution_device, dtype=dtype) for row in rows])
        return found[0], found[1] if guided else [], truncated

    def _text_tensors(self, prompts: Prompts) -> tuple[Tensors, list[str] | None]:
        positive, negative, truncated = self._encode(prompts, self.do_classifier_free_guidance)
        return {"prompt_embeds": positive, "negative_prompt_embeds": negative}, truncated

    # ---- denoise ----

    def _schedule(self, call: Call) -> Tensors:
        tokens, count = call.task.tokens(self.size_multiple), call.num_inference_steps
        return flow_schedule(self.scheduler, count, tokens, sigmas=call.sigmas, always=True)

    def _plan(self, call: Call) -> Steps:
        steps = super()._plan(call)
        if call.state["cfg_truncation"] < 1:
            # All timesteps are read at once, so that the loop need not wait for one.
            shares = [1 - timestep / 1000 for timestep in steps.timesteps.tolist()]
            self.guided_steps = sum(share <= call.state["cfg_truncation"] for share in shares)
        return steps

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        ends = self.guided_steps is not None and index >= self.guided_steps
        guided = self.do_classifier_free_guidance and not ends
        text = tensors["prompt_embeds"] + (tensors["negative_prompt_embeds"] if guided else [])
        latents = sample.to(self.transformer.dtype)[:, :, None]
        flow = torch.stack(
            self.transformer(
                list(latents) * (2 if guided else 1),
                ((1000 - timestep) / 1000).expand(len(text)),
                text,
                joint_attention_kwargs=self.joint_attention_kwargs,
                return_dict=False,
            )[0]
        )[:, :, 0].to(sample.dtype)
        if guided:
            flow, without = flow.chunk(2)
            flow = _no_longer(flow + self.guidance_scale * (flow - without), flow, float(self.cfg_normalization))
        # The model predicts the way to the picture, the scheduler takes the one to noise.
        return -flow


def _no_longer(flow: torch.Tensor, other: torch.Tensor, times: float) -> torch.Tensor:
    """A flow (N, C, h, w), shortened where it is more than `times` as long as the other; 0 leaves it as it is."""
    if times <= 0:
        return flow
    lengths = [each.flatten(1).norm(dim=1) for each in (flow, other)]
    return flow * (times * lengths[1] / lengths[0]).clamp(max=1).view(-1, 1, 1, 1)
