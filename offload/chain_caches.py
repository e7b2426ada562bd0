"""Step caches that leave out the chain of a model's blocks: first-block cache, MagCache, and TaylorSeer's lite form.

What the blocks add to their input changes slowly from step to step. Where a cache trusts that, the blocks are not
called, and what they added in an earlier step, or a forecast of it, is added instead. In UNets the blocks between the
outermost ones are left out, and their last result is used again (DeepCache, Ma et al. 2023, arXiv 2312.00858).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_core.logging import get_logger

from .gates import Answer
from .runs import RunMemory
from .step_caches import CacheConfig, CallState, StepCache, empty_like
from .structure import submodules

logger = get_logger(__name__)
Tensors = list[torch.Tensor]


def chain_of(model: nn.Module) -> tuple[list[str], bool]:
    """The parts that run one after another, and whether they are the halves of a UNet.

    Refiners prepare one kind of tokens, before the chain begins.

    Raises:
        ValueError: if the model is neither a chain of two blocks or more, nor a UNet.
    """
    declared = getattr(model, "_repeated_blocks", None) or ()
    blocks = [
        name
        for name, part in submodules(model)
        if type(part).__name__ in declared and name.count(".") == 1 and "refiner" not in name
    ]
    if len(blocks) > 1:
        return blocks, False
    if {"down_blocks", "up_blocks"} <= {name for name, _ in model.named_children()}:
        down, up = (len(list(model.get_submodule(name).children())) for name in ("down_blocks", "up_blocks"))
        middle = ["mid_block"] if isinstance(getattr(model, "mid_block", None), nn.Module) else []
        return [f"down_blocks.{n}" for n in range(down)] + middle + [f"up_blocks.{n}" for n in range(up - 1)], True
    raise ValueError(f"{type(model).__name__} has no chain of blocks that a cache could leave out")


class ChainCache(StepCache):
    """Leaves out the parts of a chain from one place on. Subclasses decide when.

    Args:
        model: with such a chain.
        after_first: the first part is computed in any case.
    """

    def __init__(self, model: nn.Module, after_first: bool) -> None:
        names, self._is_unet = chain_of(model)
        self._from = 1 if after_first or self._is_unet else 0
        self._last = len(names) - 1
        super().__init__(model, names)

    # ---- what subclasses do ----

    def leaves_out(self, state: CallState) -> bool:
        """Whether the rest is left out in this call; asked before the first part that could be."""
        return False

    def learn(self, state: CallState, change: Tensors) -> None:
        """What the rest has given in a call that computed it."""
        state.kept["change"] = change

    def forecast(self, state: CallState) -> Tensors:
        """What the rest would give."""
        return state.kept["change"]

    # ---- the chain ----

    def begin(self, state: CallState, memory: RunMemory) -> None:
        state.kept["skips"] = False

    def enter(self, state: CallState, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
        kept = state.kept
        if place == 0:
            kept["input"] = [each for each in args[:2] if isinstance(each, torch.Tensor)]
            if self._from == 0:
                self._decide(state, kept["input"][: kept.get("streams", 1)])
        if not kept["skips"] or place < self._from:
            return None
        form = kept["form", place]
        if self._is_unet:
            return Answer(_put(form, self.forecast(state)) if place == self._last else form)
        if place < self._last:
            return Answer((*args[:1], None if form[1] is None else args[1]) if isinstance(form, tuple) else args[0])
        start = _joined(kept["start"], kept["change"])
        assert start is not None, "it was not when the change was noted"
        return Answer(_put(form, [each + more for each, more in zip(start, self.forecast(state), strict=True)]))

    def result(self, state: CallState, place: int, output: Any) -> None:
        kept = state.kept
        if place == 0 and self._from == 1:
            outputs, inputs = _streams_of(output), kept["input"]
            # Where sizes differ there is no difference to take.
            same = inputs and outputs[0].shape == inputs[0].shape
            kept["first"] = outputs[0] - inputs[0] if same else outputs[0]
            self._decide(state, outputs)
        elif place == 0 and not kept["skips"]:
            kept["streams"] = len(_streams_of(output))
            kept["start"] = kept["input"][: kept["streams"]]
        if kept["skips"]:
            return
        kept["form", place] = empty_like(output)
        if place == self._last:
            outputs = _streams_of(output)
            if self._is_unet:
                self.learn(state, outputs)
                return
            start = _joined(kept["start"], outputs)
            if start is None:
                logger.warning("the last block gives tokens that the first one does not have; nothing is left out")
                kept["unfit"] = True
            else:
                self.learn(state, [each - other for each, other in zip(outputs, start, strict=True)])

    def _decide(self, state: CallState, start: Tensors) -> None:
        state.kept["start"] = start
        ready = "change" in state.kept and "unfit" not in state.kept
        state.kept["skips"] = self.leaves_out(state) and ready

    def end(self, state: CallState) -> None:
        for name in ("input", "start"):
            state.kept.pop(name, None)


def _streams_of(output: Any) -> Tensors:
    """The tokens that a block gives: one tensor, or those of picture and text."""
    if isinstance(output, torch.Tensor):
        return [output]
    return [each for each in output if isinstance(each, torch.Tensor)]


def _joined(start: Tensors, like: Tensors) -> Tensors | None:
    """The streams of the first block in the form that the last one has: as they are, or the text before the picture."""
    if len(like) <= len(start) and all(a.shape == b.shape for a, b in zip(like, start, strict=False)):
        return start[: len(like)]
    if len(start) == 2 and start[0].shape[1] + start[1].shape[1] == like[0].shape[1]:
        return [torch.cat([start[1], start[0]], dim=1)]
    return None


def _put(form: Any, streams: Sequence[torch.Tensor]) -> Any:
    """An output of this form with these tensors."""
    if isinstance(form, torch.Tensor):
        return streams[0]
    left = iter(streams)
    return tuple([next(left) if isinstance(each, torch.Tensor) else each for each in form])


# ---- first-block cache ----


@dataclass
class FirstBlockCacheConfig(CacheConfig):
    """Leave out all blocks but the first where that has changed little since the last full step (ParaAttention, 2024).

    Args:
        threshold: mean change of what the first block adds, as a share of its mean size. More leaves out more. Each
            step waits for the device to know it.

    Raises:
        ValueError: if it is negative.
    """

    threshold: float = 0.05

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold!r} must be a number of 0 or more")

    def make(self, model: nn.Module) -> StepCache:
        return _FirstBlockCache(model, self)


class _FirstBlockCache(ChainCache):
    def __init__(self, model: nn.Module, config: FirstBlockCacheConfig) -> None:
        super().__init__(model, after_first=True)
        self._config = config

    def leaves_out(self, state: CallState) -> bool:
        now, before = state.kept["first"], state.kept.get("before")
        if before is not None:
            change = (now - before).abs().mean() / before.abs().mean()
            if change.item() < self._config.threshold:
                return True
        state.kept["before"] = now
        return False


# ---- MagCache ----

# Of FLUX.1-dev in 28 steps, as its authors measured them (github.com/Zehong-Ma/MagCache).
FLUX_MAG_RATIOS: tuple[float, ...] = (
    *(1.0, 1.21094, 1.11719, 1.07812, 1.0625, 1.03906, 1.03125, 1.03906, 1.02344, 1.03125, 1.02344, 0.98047, 1.01562),
    *(1.00781, 1.0, 1.00781, 1.0, 1.00781, 1.0, 1.0, 0.99609, 0.99609, 0.98047, 0.98828, 0.96484, 0.95703, 0.93359),
    0.89062,
)


@dataclass
class MagCacheConfig(CacheConfig):
    """Leave out all blocks while the size of what they add hardly changes (Ma et al. 2025, arXiv 2506.09045).

    Args:
        threshold: how far the size may be off in total, since the last full step.
        max_skip_steps: steps in a row that may be left out.
        retention_ratio: this share of the steps, from the first, is computed in full.
        num_inference_steps: of the calls that follow; `mag_ratios` of another number are spread over these.
        mag_ratios: for each step, the size of what the blocks add divided by that in the step before.
        calibrate: compute every step and measure the ratios; after the call they are in `mag_ratios`.

    Raises:
        ValueError: if there are no ratios and none are to be measured, or a number makes no sense.
    """

    threshold: float = 0.06
    max_skip_steps: int = 3
    retention_ratio: float = 0.2
    num_inference_steps: int = 28
    mag_ratios: Any = None
    calibrate: bool = False

    def __post_init__(self) -> None:
        if self.mag_ratios is None and not self.calibrate:
            raise ValueError(
                "mag_ratios are needed, one a step: FLUX_MAG_RATIOS for FLUX.1-dev; measure those of another model "
                "with calibrate=True"
            )
        if not 0 <= self.retention_ratio <= 1:
            raise ValueError(f"retention_ratio={self.retention_ratio} must be a share from 0 to 1")
        if self.num_inference_steps < 1 or self.max_skip_steps < 0 or not self.threshold >= 0:
            raise ValueError("num_inference_steps must be 1 or more, max_skip_steps and threshold 0 or more")

    def ratio(self, step: int) -> float:
        """Of a step, from 0; those past the end are like the last."""
        ratios = [float(each) for each in self.mag_ratios]
        last = max(self.num_inference_steps - 1, 1)
        return ratios[round(min(step, last) * (len(ratios) - 1) / last)]

    def make(self, model: nn.Module) -> StepCache:
        return _MagCache(model, self)


class _MagCache(ChainCache):
    def __init__(self, model: nn.Module, config: MagCacheConfig) -> None:
        super().__init__(model, after_first=False)
        self._config = config

    def leaves_out(self, state: CallState) -> bool:
        config, kept = self._config, state.kept
        if config.calibrate or state.index < config.retention_ratio * config.num_inference_steps:
            return False
        ratio, error, skipped = kept.get("since", (1.0, 0.0, 0))
        ratio *= config.ratio(state.index)
        error, skipped = error + abs(1 - ratio), skipped + 1
        if "change" in kept and error < config.threshold and skipped <= config.max_skip_steps:
            kept["since"] = (ratio, error, skipped)
            return True
        kept["since"] = (1.0, 0.0, 0)
        return False

    def learn(self, state: CallState, change: Tensors) -> None:
        before = state.kept.get("change")
        super().learn(state, change)
        if self._config.calibrate:
            ratio = 1.0 if before is None else _growth(before[0], change[0])
            measured = state.kept.setdefault("measured", [])
            measured.append(ratio)
            self._config.mag_ratios = measured


def _growth(before: torch.Tensor, now: torch.Tensor) -> float:
    """The mean growth of the length of tokens."""
    axis = 1 if now.dim() == 4 else -1
    lengths = [each.float().square().sum(axis).sqrt() for each in (before, now)]
    return float((lengths[1] / lengths[0]).mean().item())


# ---- TaylorSeer, lite ----


class TaylorSeries:
    """Forecasts of values from their last full computations (Liu et al. 2025, arXiv 2503.06923, equations 3 to 5).

    Args:
        order: of the series; 0 uses the last value again.
        dtype: that the terms are kept in; None keeps that of the values.
    """

    def __init__(self, order: int, dtype: torch.dtype | None) -> None:
        self._order, self._dtype = order, dtype
        self._terms: list[list[torch.Tensor]] = []
        self._at = 0
        self._dtypes: list[torch.dtype] = []

    def learn(self, index: int, values: Tensors) -> None:
        """The values of a step."""
        gap = index - self._at
        self._dtypes = [each.dtype for each in values]
        terms = [[each.to(self._dtype or each.dtype) for each in values]]
        for order in range(min(self._order, len(self._terms))):
            pairs = zip(terms[order], self._terms[order], strict=True)
            terms.append([(now - before) / gap for now, before in pairs])
        self._terms, self._at = terms, index

    def forecast(self, index: int) -> Tensors:
        """What they would be in a step."""
        ahead = index - self._at
        found: Tensors = []
        for place, dtype in enumerate(self._dtypes):
            total = self._terms[0][place]
            for order, term in enumerate(self._terms[1:], start=1):
                total = total + term[place] * (ahead**order / math.factorial(order))
            found.append(total.to(dtype))
        return found


class TaylorChainCache(ChainCache):
    """TaylorSeer for the whole chain at once: what all blocks add is forecast.

    Args:
        model: with such a chain.
        config: `computes(index)` tells which steps are computed; `series()` makes a series.
    """

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__(model, after_first=False)
        self._config = config

    def leaves_out(self, state: CallState) -> bool:
        return not self._config.computes(state.index)

    def learn(self, state: CallState, change: Tensors) -> None:
        # The form of the change is asked for before the forecast is made.
        state.kept["change"] = [each.new_zeros(()).expand(each.shape) for each in change]
        if "series" not in state.kept:
            state.kept["series"] = self._config.series()
        state.kept["series"].learn(state.index, change)

    def forecast(self, state: CallState) -> Tensors:
        return state.kept["series"].forecast(state.index)
