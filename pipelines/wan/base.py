"""What the Wan pipelines share: text, sizes, guidance, which of two transformers predicts, and one call of it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ...models.transformers.checks import check_attention_kwargs
from ..film import FilmPipeline
from ..flow import one_a_sample
from ..loop import Steps, check_scale
from ..picture import Call, Tensors
from .output import WanPipelineOutput
from .prompts import encode

# Timesteps of training, which `boundary_ratio` is a share of.
TRAINED = 1000


class WanBase(FilmPipeline):
    """Base of the pipelines of Wan. Latents are (N, C, f, h, w).

    Of f latents along time come 4 f - 3 frames. The steps are computed in float32, whatever the transformer's dtype.
    With and without the prompt, the transformer is called apart, which takes half the memory of one call for both.

    In Wan 2.2 A14B two transformers share the steps: `transformer` predicts while noise is strong, `transformer_2`
    below `boundary_ratio` of it. Each step needs one of them, so either may be absent where no step needs it.
    """

    model_cpu_offload_seq: ClassVar[str | None] = "text_encoder->image_encoder->transformer->transformer_2->vae"
    _optional_components: ClassVar[list[str]] = ["transformer", "transformer_2"]
    _output: ClassVar[type[Any]] = WanPipelineOutput

    # ---- sizes ----

    @property
    def denoiser(self) -> Any:
        """The transformer that there is; the first, of two."""
        components = self.__dict__
        first = components.get("transformer")
        return components.get("transformer_2") if first is None else first

    @property
    def fps(self) -> float:
        """Frames a second of the films that the transformer was trained on: 24 for Wan 2.2's 5B, 16 for the others."""
        return 24 if self._expands() else 16

    @property
    def latents_dtype(self) -> torch.dtype:
        """What the steps are computed in."""
        return torch.float32

    def _default_size(self) -> tuple[int, int]:
        return 480, 832

    def _default_frames(self) -> int:
        return 81

    def _fitting(self, num_frames: int) -> int:
        """Those of 4 k and the three that follow, 4 k + 1."""
        ratio = self.vae_scale_factor_temporal
        return num_frames if num_frames % ratio == 1 % ratio else num_frames // ratio * ratio + 1

    # ---- check ----

    @property
    def _boundary(self) -> float | None:
        """The timestep below which `transformer_2` predicts; None if `transformer` does throughout."""
        ratio = self.config.get("boundary_ratio")
        return None if ratio is None else ratio * TRAINED

    def _expands(self) -> bool:
        """Whether each token is told its own time, as in Wan 2.2's 5B."""
        return bool(self.config.get("expand_timesteps"))

    @property
    def _embeds_of(self) -> int:
        return self.denoiser.config.text_dim

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the current call predicts with and without the prompt, in a part of the steps at least."""
        return self.guidance_scale > 1 or (self.guidance_scale_2 or 0) > 1

    def _check(self, call: Call) -> int:
        if self.denoiser is None:
            raise ValueError("this call needs transformer, which the pipeline does not have: load one")
        check_attention_kwargs(call.state["attention_kwargs"], "attention_kwargs")
        ratio, second = self.config.get("boundary_ratio"), call.state["guidance_scale_2"]
        if ratio is not None and not (isinstance(ratio, int | float) and 0 <= ratio <= 1):
            raise ValueError(f"boundary_ratio={ratio!r} of the pipeline must be a number from 0 to 1")
        if second is not None:
            check_scale("guidance_scale_2", second)
            if ratio is None:
                raise ValueError(
                    "guidance_scale_2 is for a pipeline with boundary_ratio, whose steps two transformers share: leave "
                    "it out, or make the pipeline with boundary_ratio"
                )
        batch = super()._check(call)
        if second is not None and second > 1 and call.prompts.negative_prompt_embeds is None:
            self._check_present("text_encoder", "tokenizer", remedy="pass negative_prompt_embeds")
        return batch

    def _plan(self, call: Call) -> Steps:
        """The steps, each of which has the transformer that it needs."""
        steps = super()._plan(call)
        needed = set(self._experts(steps))
        absent = sorted(name for name in needed if self.__dict__.get(name) is None)
        if absent:
            raise ValueError(
                f"some steps need {absent[0]}, which the pipeline does not have: boundary_ratio="
                f"{self.config.get('boundary_ratio')} gives them to it"
            )
        return steps

    def _experts(self, steps: Steps) -> list[str]:
        """The component that predicts in each step."""
        boundary = -math.inf if self._boundary is None else self._boundary
        return ["transformer" if time >= boundary else "transformer_2" for time in steps.timesteps.tolist()]

    # ---- encode ----

    def _embed(
        self, texts: Sequence[str], length: int, device: torch.device | None
    ) -> tuple[torch.Tensor, list[str] | None]:
        return encode(texts, self.tokenizer, self.text_encoder, length, device)

    # ---- denoise ----

    def _denoise(
        self, run: Any, call: Call, steps: Steps, tensors: Tensors, callback: Callable[..., Tensors]
    ) -> torch.Tensor:
        return super()._denoise(run, call, steps, {**tensors, "experts": self._experts(steps)}, callback)

    def _times(self, timestep: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """How noisy the transformer is told the films (N,), or their tokens (N, S), to be."""
        return one_a_sample(timestep, len(tensors["latents"]))

    def _predict(self, index: int, timestep: torch.Tensor, sample: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        expert, scale = tensors["experts"][index], self.guidance_scale
        if expert == "transformer_2" and self.guidance_scale_2 is not None:
            scale = self.guidance_scale_2
        transformer, times = getattr(self, expert), self._times(timestep, tensors)
        sample = sample.to(transformer.dtype)

        def flow(embeds: torch.Tensor) -> torch.Tensor:
            return transformer(
                hidden_states=sample,
                timestep=times,
                encoder_hidden_states=embeds,
                encoder_hidden_states_image=tensors.get("image_embeds"),
                attention_kwargs=self.attention_kwargs,
                return_dict=False,
            )[0].float()

        prediction, negative = flow(tensors["prompt_embeds"]), tensors["negative_prompt_embeds"]
        if scale <= 1 or negative is None:
            return prediction
        without = flow(negative)
        return without + scale * (prediction - without)
