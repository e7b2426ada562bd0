"""A familiar import path: the config round trip."""

from diffusion_core.config import ConfigMixin, FrozenDict, register_to_config

__all__ = ["ConfigMixin", "FrozenDict", "register_to_config"]
