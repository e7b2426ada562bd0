"""`WanImageToVideoPipeline`: a first frame, perhaps a last one, and a text, to film."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_core.images import ImageInput
from diffusion_core.randomness import Generators

from ...models.autoencoders.wan import AutoencoderKLWan
from ...models.transformers.wan import WanTransformer3DModel
from ...schedulers.base import Scheduler
from ..callbacks import Callback
from ..film import Prompts
from ..latents import spread
from ..picture import Call, Tensors
from .base import WanBase
from .output import WanPipelineOutput
from .pictures import FilmBetweenImages, as_list, embed_pictures

if TYPE_CHECKING:
    from transformers import CLIPImageProcessor, CLIPVisionModel, T5Tokenizer, UMT5EncoderModel


class WanImageToVideoPipeline(WanBase):
    """From a picture to films that start with it, and end with another one if it is given, with Wan 2.1 and 2.2.

    The transformer sees the latents of the pictures beside the noise, and a mask that says which frames are known; that
    of Wan 2.1 also what CLIP sees in them. Wan 2.2's 5B (`expand_timesteps`) has the first frame in the film itself: it
    is told that its tokens are without noise, and no step moves them.

    Args:
        tokenizer: from text to tokens.
        text_encoder: from tokens to embeddings.
        vae: between films and latents.
        scheduler: takes the steps along the flow.
        image_processor: prepares pictures for `image_encoder`.
        image_encoder: CLIP's vision model, for transformers with `image_dim`.
        transformer: predicts the flow, in the first steps where there are two.
        transformer_2: predicts it in the later ones.
        boundary_ratio: from 0 to 1, the share of noise below which `transformer_2` predicts; None for never.
        expand_timesteps: each token is told its own time, as in Wan 2.2's 5B.
    """

    _optional_components: ClassVar[list[str]] = ["transformer", "transformer_2", "image_encoder", "image_processor"]
    # A component has this name; what brings pictures to the autoencoder is `video_processor`.
    image_processor: Any = None

    def __init__(
        self,
        tokenizer: "T5Tokenizer",
        text_encoder: "UMT5EncoderModel",
        vae: AutoencoderKLWan,
        scheduler: Scheduler,
        image_processor: "CLIPImageProcessor | None" = None,
        image_encoder: "CLIPVisionModel | None" = None,
        transformer: WanTransformer3DModel | None = None,
        transformer_2: WanTransformer3DModel | None = None,
        boundary_ratio: float | None = None,
        expand_timesteps: bool = False,
    ) -> None:
        self.register_modules(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=vae,
            scheduler=scheduler,
            image_processor=image_processor,
            image_encoder=image_encoder,
            transformer=transformer,
            transformer_2=transformer_2,
        )

    def __call__(
        self,
        image: "ImageInput",
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        guidance_scale_2: float | None = None,
        num_videos_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        image_embeds: torch.Tensor | None = None,
        last_image: "ImageInput | None" = None,
        output_type: str | None = "np",
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ("latents",),
        max_sequence_length: int = 512,
    ) -> WanPipelineOutput | tuple[Any]:
        """Make films.

        Args:
            image: the first frame, one picture for all prompts, or one for each; it is brought to the size of the film.
            prompt: what to show, one text or several.
            negative_prompt: what not to show: one text for all prompts, or one for each. Without guidance it is unused.
            height: in pixels, a multiple of 16, of Wan 2.2's 5B of 32 (`size_multiple`).
            width: likewise.
            num_frames: of the film, 4 k + 1; of 4 k, 4 k + 2 and 4 k + 3 it has 4 k + 1 too, and the result says so in
                `rounded_from`.
            num_inference_steps: more take longer and give better films.
            guidance_scale: how closely the prompt is followed; at 1 and below there is no guidance.
            guidance_scale_2: the same in the steps of `transformer_2`; as `guidance_scale` if None.
            num_videos_per_prompt: films for each prompt; they follow one another in the result.
            generator: where random numbers come from: one, or one for each film. Film k of a list is the one that its
                generator makes alone. A generator on the CPU gives the same films on every device.
            latents: noise to start from, (films, channels, f, height / scale, width / scale).
            prompt_embeds: what `encode_prompt` made, in place of `prompt`.
            negative_prompt_embeds: likewise, in place of `negative_prompt`.
            image_embeds: what `encode_image` made of the pictures, for transformers with `image_dim`: one for all
                prompts, or one for each. With `last_image`, tokens of both follow one another.
            last_image: the last frame, as `image`; not for Wan 2.2's 5B.
            output_type: "pil" (lists of pictures), "np" (N, F, H, W, C), "pt" (N, F, C, H, W), both from 0 to 1, or
                "latent" (not decoded).
            return_dict: return an output object rather than the tuple `(frames,)`.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            callback_on_step_end: called as `f(pipe, step, timestep, tensors)` after each step; may return a dict of
                tensors that it changed. It can set `pipe._interrupt = True` to stop after the step.
            callback_on_step_end_tensor_inputs: names of the tensors it is shown.
            max_sequence_length: tokens for each prompt; what is longer is cut, and said in `truncated_prompts`.

        Raises:
            TypeError: for an argument of the wrong kind.
            ValueError: for an argument that makes no sense; it is named, and no model has been called.
            NumericalError: if a model gives values that are not finite.
        """
        call = Call(
            Prompts(
                prompt,
                negative_prompt,
                prompt_embeds,
                negative_prompt_embeds,
                num_videos_per_prompt,
                max_sequence_length,
            ),
            FilmBetweenImages(image, last_image, image_embeds, height, width, num_frames, latents),
            num_inference_steps,
            generator=generator,
            output_type=output_type,
            return_dict=return_dict,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            state={
                "guidance_scale": guidance_scale,
                "guidance_scale_2": guidance_scale_2,
                "attention_kwargs": attention_kwargs,
            },
        )
        return self._draw(call)

    # ---- check ----

    @property
    def _picture_channels(self) -> int:
        """What the transformer takes besides the noise: a mask for each frame of a latent, and latents."""
        return 0 if self._expands() else self.vae_scale_factor_temporal + self.latent_channels

    def _check(self, call: Call) -> int:
        batch, config, task = super()._check(call), self.denoiser.config, call.task
        assert isinstance(task, FilmBetweenImages)
        wanted = self.latent_channels + self._picture_channels
        if config.in_channels != wanted:
            raise ValueError(
                f"the transformer has {config.in_channels} input channels; image to video needs {wanted}, or "
                "expand_timesteps=True for Wan 2.2's 5B: load a checkpoint for image to video"
            )
        if task.last_image is not None and self._expands():
            raise ValueError("last_image is given, which a pipeline with expand_timesteps=True does not take")
        self._check_embeds(task)
        return batch

    def _check_embeds(self, task: FilmBetweenImages) -> None:
        """Refuse what does not fit the transformer's way to see pictures through CLIP."""
        config, embeds = self.denoiser.config, task.image_embeds
        if config.image_dim is None:
            if embeds is not None:
                raise ValueError("image_embeds is given, but the transformer takes none (image_dim is None)")
            return
        if (task.last_image is not None) != (config.pos_embed_seq_len is not None):
            kind = "a first and a last frame: pass last_image"
            if config.pos_embed_seq_len is None:
                kind = "a first frame alone: leave last_image out"
            raise ValueError(f"the transformer was trained for {kind}")
        if embeds is None:
            self._check_present("image_encoder", "image_processor", remedy="pass image_embeds")
        elif embeds.ndim != 3 or embeds.shape[2] != config.image_dim:
            raise ValueError(
                f"image_embeds has the shape {tuple(embeds.shape)}, expected (pictures, tokens, {config.image_dim})"
            )

    # ---- encode ----

    def encode_image(self, image: "ImageInput", device: torch.device | None = None) -> torch.Tensor:
        """What CLIP sees in pictures, which `__call__` takes as `image_embeds`.

        Args:
            image: one picture or several.
            device: where to compute; the pipeline's device if None.

        Returns:
            The states before CLIP's last layer, (pictures, tokens, size).
        """
        self._check_present("image_encoder", "image_processor", remedy="load the checkpoint with both")
        with torch.no_grad(), self.letting_go():
            return embed_pictures(as_list(image), self.image_processor, self.image_encoder, device)

    def _image_tensors(self, task: Any, pixels: torch.Tensor) -> Tensors:
        """What the transformer is shown of the pictures: "condition" beside the noise, and CLIP's "image_embeds"."""
        placed = {"device": self._execution_device, "dtype": self.denoiser.dtype}
        tensors: Tensors = {"condition": spread(task.condition(self), task.count, task.batch, "image")}
        tensors["condition"] = tensors["condition"].to(placed["device"], self.latents_dtype)
        if self.denoiser.config.image_dim is not None:
            embeds = task.image_embeds
            if embeds is None:
                embeds = task.embed(self)
            length = self.denoiser.config.pos_embed_seq_len
            embeds = embeds if length is None else embeds.reshape(-1, length, embeds.shape[2])
            tensors["image_embeds"] = spread(embeds, task.count, task.batch, "image_embeds").to(**placed)
        return tensors

    # ---- denoise ----

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """Where the first frame is in the film: which tokens are noisy, (N, S)."""
        if not self._expands():
            return {}
        (patch_t, *patch), latents = self.denoiser.config.patch_size, tensors["latents"]
        noisy = latents.new_ones(len(latents), *latents.shape[2:])
        noisy[:, 0] = 0
        return {"noisy": noisy[:, ::patch_t, :: patch[0], :: patch[1]].flatten(1)}

    def _times(self, timestep: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        return timestep * tensors["noisy"] if self._expands() else super()._times(timestep, tensors)
