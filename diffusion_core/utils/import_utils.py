"""A familiar import path: which packages are installed."""

from importlib.util import find_spec

__all__ = ["is_accelerate_available", "is_torch_available", "is_transformers_available", "is_xformers_available"]


def is_accelerate_available() -> bool:
    """Whether accelerate is installed; this library needs it, so it is."""
    return find_spec("accelerate") is not None


def is_torch_available() -> bool:
    """Whether torch is installed; this library needs it, so it is."""
    return find_spec("torch") is not None


def is_transformers_available() -> bool:
    """Whether transformers is installed; this library needs it, so it is."""
    return find_spec("transformers") is not None


def is_xformers_available() -> bool:
    """Whether xFormers is installed; `set_attention_backend("xformers")` uses it."""
    return find_spec("xformers") is not None
