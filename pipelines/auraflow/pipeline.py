"""`AuraFlowPipeline`: text to image."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.randomness import Generators

from ...models.transformers.checks import check_attention_kwargs
from ..arguments import refuse_adapters
from ..callbacks import Callback
from ..flow import share_of_noise
from ..guidance import guide
from ..picture import Call, PictureOutput, Tensors
from ..tasks import FromNoise
from ..text_masked import Encoded, MaskedTextPipeline, Prompts


class AuraFlowPipeline(MaskedTextPipeline):
    """From a prompt to pictures with AuraFlow's rectified flow; see `MaskedTextPipeline` for the components."""

    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds"]

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        num_inference_steps: int = 50,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 3.5,
        num_images_per_prompt: int = 1,
        height: int | None = 1024,
        width: int | None = 1024,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        max_sequence_length: int = 256,
        output_type: str | None = "pil",
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
    ) -> PictureOutput | tuple[Any, ...]:
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            negative_prompt: what not to draw: one text for all prompts, or one for each. Without guidance it is unused.
            num_inference_steps: more take longer and give better pictures.
            sigmas: times of the flow to take, falling from 1, in place of the scheduler's choice.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            height: in pixels, a multiple of `size_multiple`; None takes what `latents` have, or else what the
                transformer was trained on.
            width: likewise.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: noise to start from, shape (pictures, channels, height / scale, width / scale).
            prompt_embeds: what `encode_prompt` made, in place of `prompt`, with `prompt_attention_mask`.
            prompt_attention_mask: which tokens count, shape (prompts, tokens). The embeddings of others are zero
                already, so that the transformer needs no mask.
            negative_prompt_embeds: likewise, in place of `negative_prompt`, with `negative_prompt_attention_mask`.
            negative_prompt_attention_mask: likewise.
            max_sequence_length: tokens for each prompt; what is longer is cut, and said in `truncated_prompts`.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(images,)`.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.

        Raises:
            TypeError: for an argument of the wrong kind.
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
            NumericalError: if a model gives values that are not finite.
        """
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            prompt_attention_mask=prompt_attention_mask,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            max_sequence_length=max_sequence_length,
        )
        call = Call(
            prompts,
            FromNoise(height, width, latents),
            num_inference_steps,
            sigmas=sigmas,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={"guidance_scale": guidance_scale, "attention_kwargs": attention_kwargs},
        )
        return self._draw(call)

    @property
    def _text_width(self) -> int:
        return self.transformer.config.joint_attention_dim

    def _check(self, call: Call) -> int:
        check_attention_kwargs(call.state["attention_kwargs"], "attention_kwargs")
        return super()._check(call)

    # ---- encode ----

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        num_images_per_prompt: int = 1,
        device: torch.device | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        max_sequence_length: int = 256,
        lora_scale: float | None = None,
    ) -> Encoded:
        """Encode prompts, which `__call__` takes as `prompt_embeds` and the like.

        Args:
            prompt: one text or several.
            negative_prompt: one text for all prompts, or one for each; "" if None.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            num_images_per_prompt: how often each prompt is repeated.
            device: where to compute; the pipeline's device if None.
            prompt_embeds, prompt_attention_mask: take these in place of `prompt`.
            negative_prompt_embeds, negative_prompt_attention_mask: take these in place of `negative_prompt`.
            max_sequence_length: tokens for each prompt; shorter ones are padded, longer ones cut.
            lora_scale: must be None, as no adapter is loaded.

        Returns:
            Embeddings (prompts * num_images_per_prompt, tokens, size), zero where there is padding, and mask
            (..., tokens) of the prompts, then those of the negative prompts, which are None without guidance.
        """
        refuse_adapters(lora_scale=lora_scale)
        prompts = Prompts(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            prompt_attention_mask,
            negative_prompt_attention_mask,
            max_sequence_length,
        )
        with self.letting_go():
            return self._encoded(prompts, do_classifier_free_guidance, device)

    def _masked(self, embeds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return embeds * mask[..., None].to(embeds.dtype)

    # ---- denoise ----

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        guided = self.do_classifier_free_guidance
        velocity = self.transformer(
            torch.cat([sample, sample]) if guided else sample,
            encoder_hidden_states=tensors["prompt_embeds"],
            # The transformer counts the flow's time from 0 to 1, the scheduler to 1000.
            timestep=share_of_noise(timestep),
            attention_kwargs=self.attention_kwargs,
            return_dict=False,
        )[0]
        return guide(velocity, self.guidance_scale) if guided else velocity
