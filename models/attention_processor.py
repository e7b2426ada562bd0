"""How attention layers compute, by the names of the reference; see `Model.set_attn_processor`."""

from dataclasses import dataclass

from ..offload.attention import AttentionSettings, SliceSize
from .layers.attention import Attention

__all__ = ["Attention", "AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor"]


@dataclass(frozen=True)
class AttnProcessor(AttentionSettings):
    """Attention by plain matrix products."""

    backend: str | None = "_native_math"


@dataclass(frozen=True)
class AttnProcessor2_0(AttentionSettings):  # noqa: N801  # the reference's name
    """Attention by the kernel that torch chooses."""

    backend: str | None = "native"


@dataclass(frozen=True)
class SlicedAttnProcessor(AttentionSettings):
    """Attention in parts.

    Args:
        slice_size: how many heads of one sample at a time, "auto" for half of them, "max" for one.
    """

    slice_size: SliceSize = "auto"

    def __init__(self, slice_size: SliceSize = "auto") -> None:
        super().__init__(slice_size=slice_size)
