"""`StableDiffusion3Pipeline`: text to image."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..loop import check_scale, check_share
from ..picture import Call
from ..tasks import FromNoise
from .base import StableDiffusion3Base
from .output import StableDiffusion3PipelineOutput
from .prompts import Prompts


class StableDiffusion3Pipeline(StableDiffusion3Base):
    """From a prompt to pictures with a flow over latents (Esser et al. 2024, arXiv 2403.03206)."""

    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds", "pooled_prompt_embeds"]

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        prompt_3: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 28,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 7.0,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_2: str | list[str] | None = None,
        negative_prompt_3: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        ip_adapter_image: Any = None,
        ip_adapter_image_embeds: Any = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        clip_skip: int | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 256,
        skip_guidance_layers: Sequence[int] | None = None,
        skip_layer_guidance_scale: float = 2.8,
        skip_layer_guidance_stop: float = 0.2,
        skip_layer_guidance_start: float = 0.01,
        mu: float | None = None,
    ) -> StableDiffusion3PipelineOutput | tuple[Any]:
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            prompt_2: what the second CLIP is told, if it is something else.
            prompt_3: what T5 is told, if it is something else.
            height: in pixels, a multiple of `size_multiple`; what the transformer was trained on by default.
            width: likewise.
            num_inference_steps: more take longer and give better pictures.
            sigmas: noise levels to take, falling from 1, before they are shifted, in place of the scheduler's choice.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            negative_prompt: what not to draw: one text for all prompts, or one for each. Without guidance it is unused.
            negative_prompt_2, negative_prompt_3: what the second CLIP and T5 are told of it, if it is something else.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: noise to start from, shape (pictures, channels, height / scale, width / scale).
            prompt_embeds, pooled_prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            negative_prompt_embeds, negative_pooled_prompt_embeds: likewise, in place of `negative_prompt`.
            ip_adapter_image, ip_adapter_image_embeds: must be None, as no adapter is loaded.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(images,)`.
            joint_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            clip_skip: how many of the CLIPs' last layers are left out for the prompt, besides the last.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            max_sequence_length: tokens that T5 sees of a prompt, from 1 to 512.
            skip_guidance_layers: numbers of blocks; the picture is also guided away from what the transformer draws
                without them, such as [7, 8, 9] for 3.5 medium. It counts with guidance only, and makes its steps take
                half as long again.
            skip_layer_guidance_scale: how far away.
            skip_layer_guidance_stop: the share of the steps after which this ends, from 0 to 1.
            skip_layer_guidance_start: the share of the steps after which it begins.
            mu: how far noise levels are shifted, with schedulers that do so dynamically; what fits the picture's size
                by default.

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
            prompt_2,
            negative_prompt_2,
            pooled_prompt_embeds,
            negative_pooled_prompt_embeds,
            clip_skip,
            prompt_3=prompt_3,
            negative_prompt_3=negative_prompt_3,
            max_sequence_length=max_sequence_length,
        )
        skipping = {
            "skip_guidance_layers": skip_guidance_layers,
            "skip_layer_guidance_scale": skip_layer_guidance_scale,
            "skip_layer_guidance_stop": skip_layer_guidance_stop,
            "skip_layer_guidance_start": skip_layer_guidance_start,
        }
        state = self._state(
            guidance_scale, clip_skip, mu, joint_attention_kwargs, ip_adapter_image, ip_adapter_image_embeds
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
            state={**state, **skipping},
        )
        return self._draw(call)

    def _check(self, call: Call) -> int:
        batch, state = super()._check(call), call.state
        check_scale("skip_layer_guidance_scale", state["skip_layer_guidance_scale"])
        for name in ("skip_layer_guidance_start", "skip_layer_guidance_stop"):
            check_share(name, state[name])
        layers, count = state["skip_guidance_layers"], self.transformer.config.num_layers
        if layers is not None and not all(isinstance(each, int) and 0 <= each < count for each in layers):
            raise ValueError(f"skip_guidance_layers={layers} must be numbers of blocks, from 0 to {count - 1}")
        return batch
