"""Step caches that answer for single layers: TaylorSeer and pyramid attention broadcast."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_core.logging import get_logger

from .chain_caches import TaylorChainCache, TaylorSeries
from .gates import Answer
from .runs import RunMemory
from .step_caches import CacheConfig, CallState, StepCache, each_tensor, empty_like
from .structure import is_within, submodules

logger = get_logger(__name__)


def _in_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of the blocks that occur many times, by their names."""
    declared = getattr(model, "_repeated_blocks", None) or ()
    parts = list(submodules(model))
    blocks = [name for name, part in parts if type(part).__name__ in declared]
    return [(name, part) for name, part in parts if any(name != block and is_within(name, block) for block in blocks)]


# ---- TaylorSeer ----


@dataclass
class TaylorSeerCacheConfig(CacheConfig):
    """Forecast what layers give from their last full computations (Liu et al. 2025, arXiv 2503.06923).

    Args:
        cache_interval: every so many steps are computed in full.
        disable_cache_before_step: as are all before this one, counted from 0.
        disable_cache_after_step: and all from this one on.
        max_order: of the Taylor series.
        taylor_factors_dtype: that its terms are kept in; None keeps that of the layers.
        skip_predict_identifiers: regular expressions for names of parts that are not called in forecast steps, and give
            zeros: what feeds only parts that are forecast.
        cache_identifiers: the same for parts whose results are forecast; by default the attention and feed-forward
            layers of all blocks, and what joins both where they run side by side.
        use_lite_mode: forecast what all blocks add together: the least memory, and whole blocks are left out.

    Raises:
        ValueError: if a number makes no sense or a pattern is no regular expression.
    """

    cache_interval: int = 5
    disable_cache_before_step: int = 3
    disable_cache_after_step: int | None = None
    max_order: int = 1
    taylor_factors_dtype: torch.dtype | None = torch.bfloat16
    skip_predict_identifiers: list[str] | None = None
    cache_identifiers: list[str] | None = None
    use_lite_mode: bool = False

    def __post_init__(self) -> None:
        if self.cache_interval < 1 or self.disable_cache_before_step < 0 or self.max_order < 0:
            raise ValueError("cache_interval must be 1 or more, disable_cache_before_step and max_order 0 or more")
        for pattern in (*(self.skip_predict_identifiers or ()), *(self.cache_identifiers or ())):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        if self.use_lite_mode and (self.skip_predict_identifiers or self.cache_identifiers):
            raise ValueError("use_lite_mode=True forecasts all blocks together; leave the identifiers out")

    def computes(self, index: int) -> bool:
        """Whether a step is computed in full."""
        start, end = self.disable_cache_before_step, self.disable_cache_after_step
        return index <= start or (end is not None and index >= end) or (index - start) % self.cache_interval == 0

    def series(self) -> TaylorSeries:
        """An empty series."""
        return TaylorSeries(self.max_order, self.taylor_factors_dtype)

    def make(self, model: nn.Module) -> StepCache:
        return TaylorChainCache(model, self) if self.use_lite_mode else _TaylorCache(model, self)


class _TaylorCache(StepCache):
    def __init__(self, model: nn.Module, config: TaylorSeerCacheConfig) -> None:
        forecast, skipped = _default_parts(model)
        if config.cache_identifiers is not None or config.skip_predict_identifiers is not None:
            names = [name for name, _ in submodules(model)]
            skipped = _matching(names, config.skip_predict_identifiers)
            forecast = _matching(names, config.cache_identifiers)
        if not forecast:
            raise ValueError(f"{type(model).__name__} has no layers that could be forecast; name cache_identifiers")
        super().__init__(model, [*forecast, *(name for name in skipped if name not in forecast)])
        self._config, self._forecast = config, len(forecast)

    def begin(self, state: CallState, memory: RunMemory) -> None:
        state.kept["computes"] = self._config.computes(state.index)

    def enter(self, state: CallState, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
        if state.kept["computes"] or ("form", place) not in state.kept:
            return None
        form = state.kept["form", place]
        if place >= self._forecast:
            return Answer(form)
        values = iter(state.kept["series", place].forecast(state.index))

        def following(_: torch.Tensor) -> torch.Tensor:
            return next(values)

        return Answer(each_tensor(following, form))

    def result(self, state: CallState, place: int, output: Any) -> None:
        if not state.kept["computes"] and ("form", place) in state.kept:
            return
        state.kept["form", place] = empty_like(output)
        if place < self._forecast:
            values: list[torch.Tensor] = []

            def note(tensor: torch.Tensor) -> torch.Tensor:
                values.append(tensor)
                return tensor

            each_tensor(note, output)
            state.kept.setdefault(("series", place), self._config.series()).learn(state.index, values)


def _matching(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns or ())]


def _default_parts(model: nn.Module) -> tuple[list[str], list[str]]:
    """The layers to forecast, and those that then need not be called."""
    forecast: list[str] = []
    skipped: list[str] = []
    parts = dict(_in_blocks(model))
    for name, part in parts.items():
        block = name.rpartition(".")[0]
        is_layer = hasattr(part, "attention_settings") or "FeedForward" in type(part).__name__
        if is_layer and f"{block}.proj_mlp" in parts and f"{block}.proj_out" in parts:
            # Attention and feed-forward side by side: one layer joins them.
            forecast.append(f"{block}.proj_out")
            skipped += [name, f"{block}.proj_mlp"]
        elif is_layer:
            forecast.append(name)
    return forecast, skipped


# ---- pyramid attention broadcast ----


@dataclass
class PyramidAttentionBroadcastConfig(CacheConfig):
    """Use what attention layers gave again for some steps (Zhao et al. 2024, arXiv 2408.12588).

    Args:
        spatial_attention_block_skip_range: layers that attend within a picture are computed every so many steps; None
            leaves them alone. If all three are None, this one is 2.
        temporal_attention_block_skip_range: the same for layers that attend over time alone.
        cross_attention_block_skip_range: the same for attention to text.
        spatial_attention_timestep_skip_range: (low, high): only while the scheduler's timestep is between these.
        temporal_attention_timestep_skip_range, cross_attention_timestep_skip_range: the same for the others.
        spatial_attention_block_identifiers: parts of the names of layers that count as such.
        temporal_attention_block_identifiers, cross_attention_block_identifiers: the same for the others.
        current_timestep_callback: tells the timestep; None takes that of the pipeline's step.

    Raises:
        ValueError: if a number makes no sense.
    """

    spatial_attention_block_skip_range: int | None = None
    temporal_attention_block_skip_range: int | None = None
    cross_attention_block_skip_range: int | None = None
    spatial_attention_timestep_skip_range: tuple[int, int] = (100, 800)
    temporal_attention_timestep_skip_range: tuple[int, int] = (100, 800)
    cross_attention_timestep_skip_range: tuple[int, int] = (100, 800)
    spatial_attention_block_identifiers: tuple[str, ...] = (
        *("blocks", "transformer_blocks", "single_transformer_blocks", "layers"),
        "visual_transformer_blocks",
    )
    temporal_attention_block_identifiers: tuple[str, ...] = ("temporal_transformer_blocks",)
    cross_attention_block_identifiers: tuple[str, ...] = ("blocks", "transformer_blocks", "layers")
    current_timestep_callback: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        for kind in _KINDS:
            every = getattr(self, f"{kind}_attention_block_skip_range")
            if every is not None and every < 1:
                raise ValueError(f"{kind}_attention_block_skip_range={every} must be 1 or more")
            low, high = getattr(self, f"{kind}_attention_timestep_skip_range")
            if low > high:
                raise ValueError(f"{kind}_attention_timestep_skip_range=({low}, {high}) must rise")
        if all(getattr(self, f"{kind}_attention_block_skip_range") is None for kind in _KINDS):
            logger.warning("no skip range is given: attention within pictures is computed in every second step")
            self.spatial_attention_block_skip_range = 2

    def make(self, model: nn.Module) -> StepCache:
        return _BroadcastCache(model, self)


_KINDS = ("spatial", "temporal", "cross")


class _BroadcastCache(StepCache):
    def __init__(self, model: nn.Module, config: PyramidAttentionBroadcastConfig) -> None:
        self._kinds: list[str] = []
        names: list[str] = []
        for name, part in _in_blocks(model):
            kind = _kind(name, part, config) if hasattr(part, "attention_settings") else None
            if kind is not None and getattr(config, f"{kind}_attention_block_skip_range") is not None:
                self._kinds.append(kind)
                names.append(name)
        if not names:
            raise ValueError(f"{type(model).__name__} has no attention layers of the kinds that are to be skipped")
        super().__init__(model, names)
        self._config = config

    def begin(self, state: CallState, memory: RunMemory) -> None:
        ask = self._config.current_timestep_callback
        now: Any = memory.timestep if ask is None else ask()
        if now is None:
            raise ValueError("outside of pipelines, current_timestep_callback must tell the timestep")
        time = float(now)
        for kind in _KINDS:
            low, high = getattr(self._config, f"{kind}_attention_timestep_skip_range")
            every = getattr(self._config, f"{kind}_attention_block_skip_range")
            state.kept[kind] = every is not None and low < time < high and state.index % every != 0

    def enter(self, state: CallState, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
        if state.kept[self._kinds[place]] and place in state.kept:
            return Answer(state.kept[place])
        return None

    def result(self, state: CallState, place: int, output: Any) -> None:
        state.kept[place] = output


def _kind(name: str, part: Any, config: PyramidAttentionBroadcastConfig) -> str | None:
    path = name.split(".")
    if any(each in path for each in config.temporal_attention_block_identifiers):
        return "temporal"
    kind = "cross" if getattr(part, "crosses", False) else "spatial"
    return kind if any(each in path for each in getattr(config, f"{kind}_attention_block_identifiers")) else None
