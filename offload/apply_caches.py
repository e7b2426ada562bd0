"""Step caches by the functions that users of the reference know, and those of its caches that are not here."""

from __future__ import annotations

from typing import Any

from torch import nn

from diffusion_core.errors import UnsupportedError

from .chain_caches import FirstBlockCacheConfig, MagCacheConfig
from .feature_caches import PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from .step_caches import enable


def apply_first_block_cache(module: nn.Module, config: FirstBlockCacheConfig) -> None:
    """As `module.enable_cache(config)`."""
    _apply(module, config, FirstBlockCacheConfig)


def apply_mag_cache(module: nn.Module, config: MagCacheConfig) -> None:
    """As `module.enable_cache(config)`."""
    _apply(module, config, MagCacheConfig)


def apply_pyramid_attention_broadcast(module: nn.Module, config: PyramidAttentionBroadcastConfig) -> None:
    """As `module.enable_cache(config)`."""
    _apply(module, config, PyramidAttentionBroadcastConfig)


def apply_taylorseer_cache(module: nn.Module, config: TaylorSeerCacheConfig) -> None:
    """As `module.enable_cache(config)`."""
    _apply(module, config, TaylorSeerCacheConfig)


def _apply(module: nn.Module, config: Any, kind: type[Any]) -> None:
    if not isinstance(config, kind):
        raise TypeError(f"config must be a {kind.__name__}, not {type(config).__name__}")
    enable(module, config)


def _refuse(name: str, remedy: str) -> Any:
    raise UnsupportedError(f"{name} is not supported: {remedy}")


class FasterCacheConfig:
    """Refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse("FasterCache", "PyramidAttentionBroadcastConfig leaves out attention, TaylorSeerCacheConfig more")


class SeaCacheConfig:
    """Refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse("SeaCache", "it is for one model that is not here; take FirstBlockCacheConfig")


class TextKVCacheConfig:
    """Refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse("TextKVCacheConfig", "keys and values of the text are computed once a call in any case")
