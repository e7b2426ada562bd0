"""What a call is told to draw, checked before any model is called, and where what is made of it goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .base import Pipeline
from .loop import check_count
from .text import as_prompts, check_negative, count_prompts, repeat_for_images


@dataclass(frozen=True)
class Prompts:
    """The arguments of a call that say what to draw. Families add theirs, with defaults."""

    prompt: str | Sequence[str] | None
    negative_prompt: str | Sequence[str] | None = None
    prompt_embeds: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    num_images_per_prompt: int = 1
    # What a call names the last one.
    _repeats: ClassVar[str] = "num_images_per_prompt"

    def count(self) -> int:
        """The number of prompts, after all that can be told about them alone was checked."""
        count = count_prompts(self.prompt, self.prompt_embeds)
        check_negative(self.negative_prompt, self.negative_prompt_embeds, self.prompt_embeds, count)
        check_count(self._repeats, self.num_images_per_prompt)
        return count


@dataclass(frozen=True)
class PooledPrompts(Prompts):
    """Prompts for two encoders, of which one gives a vector for the whole text besides."""

    prompt_2: str | Sequence[str] | None = None
    negative_prompt_2: str | Sequence[str] | None = None
    pooled_prompt_embeds: torch.Tensor | None = None
    negative_pooled_prompt_embeds: torch.Tensor | None = None

    def count(self) -> int:
        count = super().count()
        for sign in ("", "negative_"):
            self.check_text(f"{sign}prompt_2", count)
            embeds, pooled = getattr(self, f"{sign}prompt_embeds"), getattr(self, f"{sign}pooled_prompt_embeds")
            if (embeds is None) != (pooled is None):
                raise ValueError(
                    f"{sign}prompt_embeds and {sign}pooled_prompt_embeds come together: encode_prompt gives both"
                )
            if pooled is not None and (pooled.ndim != 2 or len(pooled) not in (1, count)):
                raise ValueError(
                    f"{sign}pooled_prompt_embeds has the shape {tuple(pooled.shape)}, expected ({count}, size)"
                )
        return count

    def check_text(self, name: str, count: int) -> None:
        """Refuse a text for a further encoder, such as "negative_prompt_2", that has no place beside embeddings."""
        text, embeds = getattr(self, name), f"{name.rpartition('_')[0]}_embeds"
        if text is None:
            return
        if getattr(self, embeds) is not None:
            raise ValueError(f"{name} and {embeds} exclude each other: pass one of them")
        as_prompts(text, count, name)


class PromptedPipeline(Pipeline):
    """Base of pipelines that encode prompts, for a component of their own that predicts or for other pipelines."""

    # The component that predicts.
    _denoiser: ClassVar[str] = "unet"

    @property
    def denoiser(self) -> Any:
        """The component that predicts, if there is one."""
        return self.__dict__.get(self._denoiser)

    def _per_picture(
        self, values: torch.Tensor | None, prompts: Any, count: int, device: torch.device | None = None
    ) -> Any:
        """What belongs to prompts, or to all of them, where and as the denoiser takes it, an entry for each picture."""
        if values is None:
            return None
        dtype = values.dtype if self.denoiser is None or not values.is_floating_point() else self.denoiser.dtype
        values = values.to(device=device or self._execution_device, dtype=dtype)
        values = values.expand(count, *values.shape[1:]) if len(values) == 1 else values
        return repeat_for_images(values, prompts.num_images_per_prompt)
