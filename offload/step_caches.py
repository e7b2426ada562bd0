"""Step caches: parts of a model answer from what earlier steps gave, which is faster and no longer exact.

Here is what they share. A cache watches a model and some of its parts at their gates. What it keeps belongs to one run
(see `runs`): a call of a pipeline, or `with cached_run():`. An aborted call, another size or another prompt leave
nothing behind; outside of a run each call computes everything. Predictions with and without the prompt are told apart
by their text, or by the names of `cache_context`.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from diffusion_core.errors import UnsupportedError
from diffusion_core.logging import get_logger

from .gates import CALL, Answer, unwatch, watch
from .hoisting import is_capturing
from .runs import RunMemory, current_run

logger = get_logger(__name__)
# Outside of placement (0), so that a part that answers brings no weights in; inside of tables of modulation (-20).
_ORDER = -10
# States that a run keeps: of predictions with and without the prompt, by parts.
_MOST = 8


class CacheConfig:
    """Base of the settings of step caches."""

    def make(self, model: nn.Module) -> StepCache:
        """The cache with these settings for a model.

        Raises:
            ValueError: if it has nothing that the cache could act on.
        """
        raise TypeError(f"{type(self).__name__} makes no cache")


@dataclass
class CallState:
    """What a cache keeps of the calls that belong together: those of one run with one text and one size.

    Attributes:
        index: number of the present call, from 0.
        kept: by the cache's own names.
        text: keeps the tensor by which the calls are known.
    """

    index: int = -1
    kept: dict[Any, Any] = field(default_factory=dict[Any, Any])
    text: Any = None


class StepCache:
    """A cache that is enabled for a model. Subclasses say what its parts do.

    Args:
        model: it.
        names: of the parts that are watched.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = list(names)
        self._arguments = [*inspect.signature(type(model).forward).parameters][1:]
        self._watched: list[tuple[weakref.ref[nn.Module], Any]] = []
        self._watch(model, _AtModel(self))
        for place, name in enumerate(names):
            self._watch(model.get_submodule(name), _AtPart(self, place))

    def _watch(self, module: nn.Module, watcher: Any) -> None:
        watch(module, CALL, watcher)
        self._watched.append((weakref.ref(module), watcher))

    def remove(self) -> None:
        """Leave the modules as they were."""
        for reference, watcher in self._watched:
            module = reference()
            if module is not None:
                unwatch(module, CALL, lambda each, mine=watcher: each is mine)
        self._watched = []

    # ---- what subclasses do ----

    def begin(self, state: CallState, memory: RunMemory) -> None:
        """A call of the model begins."""

    def enter(self, state: CallState, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer | None:
        """A part is called: an answer in its place, or None to let it compute."""
        return None

    def result(self, state: CallState, place: int, output: Any) -> None:
        """What a part has computed."""

    def end(self, state: CallState) -> None:
        """The call of the model has succeeded."""

    # ---- states ----

    def state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, CallState] | None:
        """The state of a call with these arguments, or None outside of runs."""
        memory = current_run()
        if memory is None:
            return None
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        sample, text = given[self._arguments[0]], given.get("encoder_hidden_states")
        context = _threads.contexts[-1] if _threads.contexts else id(text)
        key = (self, context, tuple(sample.shape), sample.dtype, sample.device)
        states = memory.states
        if key not in states:
            while len(states) >= _MOST:
                del states[next(iter(states))]
            states[key] = CallState(text=text)
        return key, states[key]


@dataclass
class _Frame:
    """A call of a model that uses a cache."""

    cache: StepCache
    key: Hashable
    state: CallState
    done: bool = False


class _Threads(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame | None] = []
        self.contexts: list[str] = []


_threads = _Threads()


class _AtModel:
    order = _ORDER

    def __init__(self, cache: StepCache) -> None:
        self._cache = cache

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = None if is_capturing() else self._cache.state(args, kwargs)
        memory = current_run()
        if found is None or memory is None:
            _threads.frames.append(None)
            return args, kwargs
        key, state = found
        state.index += 1
        self._cache.begin(state, memory)
        _threads.frames.append(_Frame(self._cache, key, state))
        return args, kwargs

    def result(self, output: Any) -> Any:
        frame = _threads.frames[-1]
        if frame is not None:
            frame.cache.end(frame.state)
            frame.done = True
        return output

    def leave(self) -> None:
        frame, memory = _threads.frames.pop(), current_run()
        if frame is not None and not frame.done and memory is not None:
            memory.states.pop(frame.key, None)


class _AtPart:
    order = _ORDER

    def __init__(self, cache: StepCache, place: int) -> None:
        self._cache, self._place = cache, place

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state()
        answer = None if state is None else self._cache.enter(state, self._place, args, kwargs)
        return (args, kwargs) if answer is None else answer

    def result(self, output: Any) -> Any:
        state = self._state()
        if state is not None:
            self._cache.result(state, self._place, output)
        return output

    def leave(self) -> None:
        """There is nothing to undo."""

    def _state(self) -> CallState | None:
        frame = _threads.frames[-1] if _threads.frames else None
        return frame.state if frame is not None and frame.cache is self._cache else None


# ---- outputs of parts: tensors, or tuples of tensors and None ----


def each_tensor(change: Callable[..., torch.Tensor], *values: Any) -> Any:
    """`change` of the tensors at the same places of values of the same form."""
    first = values[0]
    if isinstance(first, (list, tuple)):
        parts: list[Any] = [each_tensor(change, *each) for each in zip(*values, strict=True)]
        return tuple(parts) if isinstance(first, tuple) else parts
    return None if first is None else change(*values)


def empty_like(value: Any) -> Any:
    """Zeros of the same form that take no memory, for results that nothing depends on."""
    return each_tensor(_empty, value)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)


# ---- enabling ----


@contextmanager
def cache_context(name: str) -> Generator[None]:
    """Context: calls of models in it belong together, whatever their text is."""
    _threads.contexts.append(name)
    try:
        yield
    finally:
        _threads.contexts.pop()


def enable(model: nn.Module, config: Any) -> None:
    """Use a step cache; see `OffloadMixin.enable_cache`."""
    if not isinstance(config, CacheConfig):
        name = type(config).__name__
        if not name.endswith("CacheConfig") and not name.endswith("BroadcastConfig"):
            raise TypeError(
                f"enable_cache takes the config of a cache, such as FirstBlockCacheConfig(), not {config!r}"
            )
        raise UnsupportedError(
            f"{type(config).__module__.partition('.')[0]}'s {name} is not supported: take FirstBlockCacheConfig, "
            "TaylorSeerCacheConfig, MagCacheConfig or PyramidAttentionBroadcastConfig of diffusion_core"
        )
    if enabled(model) is not None:
        raise ValueError(f"{type(model).__name__} has a cache already; call disable_cache() first")
    model.__dict__["_step_cache"] = config.make(model)
    model.__dict__["_cache_config"] = config


def disable(model: nn.Module) -> None:
    """Undo `enable`."""
    cache = enabled(model)
    if cache is not None:
        cache.remove()
        del model.__dict__["_step_cache"], model.__dict__["_cache_config"]


def enabled(model: nn.Module) -> StepCache | None:
    """The cache that a model has."""
    return cast("StepCache | None", model.__dict__.get("_step_cache"))
