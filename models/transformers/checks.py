"""What diffusion transformers refuse."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_tokens(name: str, tokens: Tensor, batch: int, channels: int) -> None:
    """Refuse tokens that are not (batch, any number, channels)."""
    if tokens.ndim != 3 or tokens.shape[0] != batch or tokens.shape[2] != channels:
        raise ValueError(f"{name} has the shape {tuple(tokens.shape)}, expected ({batch}, tokens, {channels})")


def check_latents(latents: Tensor, channels: int) -> None:
    """Refuse latents that are not (any number, channels, height, width)."""
    if latents.ndim != 4 or latents.shape[1] != channels:
        raise ValueError(
            f"hidden_states has the shape {tuple(latents.shape)}, expected (batch, {channels}, height, width)"
        )


def check_given(model: str, **given: Any) -> None:
    """Refuse inputs that are None."""
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(f"{model} needs {', '.join(missing)} besides hidden_states")


def check_attention_kwargs(given: Mapping[str, Any] | None, name: str = "joint_attention_kwargs") -> None:
    """Refuse entries of `joint_attention_kwargs`, or of what else they are called, that nothing here would act on."""
    unknown = sorted(set(given or ()) - {"scale"})
    if unknown:
        raise ValueError(f"{name} has {unknown}, which are not supported; 'scale' is")
