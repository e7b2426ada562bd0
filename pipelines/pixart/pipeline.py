"""`PixArtAlphaPipeline` and `PixArtSigmaPipeline`: text to image."""

from collections.abc import Callable as Function
from collections.abc import Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

from diffusion_core.randomness import Generators

from ..callbacks import Callback
from ..picture import Call, PictureOutput
from ..text_masked import Encoded, Prompts
from .base import OldCallback, PixArtBase

Method = TypeVar("Method", bound=Function[..., Any])


def _with_longer_prompts(method: Method, tokens: int) -> Method:
    """The same method with another default of `max_sequence_length`: the one thing in which Sigma differs."""
    found = cast("FunctionType", method)
    names = found.__code__.co_varnames[: found.__code__.co_argcount]
    defaults = dict(zip(reversed(names), reversed(found.__defaults__ or ()), strict=False))
    changed = {**defaults, "max_sequence_length": tokens}
    values = tuple(changed[name] for name in names if name in changed)
    made = FunctionType(found.__code__, found.__globals__, found.__name__, values, found.__closure__)
    made.__doc__, made.__annotations__, made.__qualname__ = found.__doc__, found.__annotations__, found.__qualname__
    return cast("Method", made)


class PixArtAlphaPipeline(PixArtBase):
    """From a prompt to pictures with PixArt-alpha (Chen et al. 2024, arXiv 2310.00426)."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = "",
        num_inference_steps: int = 20,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 4.5,
        num_images_per_prompt: int = 1,
        height: int | None = None,
        width: int | None = None,
        eta: float = 0.0,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        output_type: str | None = "pil",
        return_dict: bool = True,
        callback: OldCallback | None = None,
        callback_steps: int = 1,
        clean_caption: bool = True,
        use_resolution_binning: bool = True,
        max_sequence_length: int = 120,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
    ) -> PictureOutput | tuple[Any, ...]:
        """Draw pictures.

        Args:
            prompt: what to draw, one text or several.
            negative_prompt: what not to draw: one text for all prompts, or one for each. Without guidance it is unused.
            num_inference_steps: more take longer and give better pictures.
            timesteps: the timesteps to take, falling, in place of the scheduler's choice.
            sigmas: noise levels to take, falling, in place of timesteps.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            num_images_per_prompt: pictures for each prompt; they follow one another in the result.
            height: in pixels; what the transformer was trained on by default.
            width: likewise.
            eta: share of random noise in DDIM's steps, from 0 to 1.
            generator: where random numbers come from: one, or one for each picture. Picture k of a list is the one
                that its generator draws alone. A generator on the CPU gives the same pictures on every device.
            latents: noise to start from, shape (pictures, channels, height / scale, width / scale), of the size that
                is drawn.
            prompt_embeds: what `encode_prompt` made, in place of `prompt`, with `prompt_attention_mask`.
            prompt_attention_mask: 1 for tokens that count, shape (prompts, tokens).
            negative_prompt_embeds: likewise, in place of `negative_prompt`, with `negative_prompt_attention_mask`.
            negative_prompt_attention_mask: likewise.
            output_type: "pil", "np" (N, H, W, C), "pt" (N, C, H, W), both from 0 to 1, or "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(images,)`.
            callback: called as `f(step, timestep, latents)`: the form of old.
            callback_steps: it is called after every so many steps.
            clean_caption: read prompts in the form of the captions of the training data, see `clean_caption` in
                `pipelines/captions.py`; else in lower case.
            use_resolution_binning: draw at the nearest of the sizes that the model was trained on, then scale and crop
                the picture to `height` and `width`, which may be anything. Else they must be multiples of
                `size_multiple`.
            max_sequence_length: tokens for each prompt; what is longer is cut, and said in `truncated_prompts`.
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
            # Nothing to avoid is the same as an empty text, also beside embeddings.
            None if negative_prompt == "" else negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            prompt_attention_mask=prompt_attention_mask,
            negative_prompt_attention_mask=negative_prompt_attention_mask,
            max_sequence_length=max_sequence_length,
            clean_caption=clean_caption,
        )
        call = Call(
            prompts,
            self._start(height, width, latents, use_resolution_binning),
            num_inference_steps,
            timesteps,
            sigmas,
            eta=eta,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={"guidance_scale": guidance_scale},
            kwargs={"callback": callback, "callback_steps": callback_steps},
        )
        return self._draw(call)

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = "",
        num_images_per_prompt: int = 1,
        device: torch.device | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        clean_caption: bool = False,
        max_sequence_length: int = 120,
    ) -> Encoded:
        """Encode prompts, which `__call__` takes as `prompt_embeds` and the like.

        Args:
            prompt: one text or several.
            do_classifier_free_guidance: whether negative prompts are encoded too.
            negative_prompt: one text for all prompts, or one for each.
            num_images_per_prompt: how often each prompt is repeated.
            device: where to compute; the pipeline's device if None.
            prompt_embeds, prompt_attention_mask: take these in place of `prompt`.
            negative_prompt_embeds, negative_prompt_attention_mask: take these in place of `negative_prompt`.
            clean_caption, max_sequence_length: as for `__call__`, where captions are cleaned by default.

        Returns:
            Embeddings (prompts * num_images_per_prompt, tokens, size) and mask (..., tokens) of the prompts, then
            those of the negative prompts, which are None without guidance.
        """
        prompts = Prompts(
            prompt,
            None if negative_prompt == "" else negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_images_per_prompt,
            prompt_attention_mask,
            negative_prompt_attention_mask,
            max_sequence_length,
            clean_caption,
        )
        return self._encode_prompt(prompts, do_classifier_free_guidance, device)


class PixArtSigmaPipeline(PixArtBase):
    """From a prompt to pictures with PixArt-Sigma (Chen et al. 2024, arXiv 2403.04692), which reads longer prompts."""

    __call__ = _with_longer_prompts(PixArtAlphaPipeline.__call__, 300)
    encode_prompt = _with_longer_prompts(PixArtAlphaPipeline.encode_prompt, 300)
