"""`cached_run`: what does not change while a run lasts is computed once, and nothing of it outlives the run.

A run is one call of a pipeline, or whatever a caller puts into `with cached_run():`. Layers ask by `once`; outside of a
run, in compiled code and where gradients are recorded, it computes each time. Inputs are told apart by which tensors
they are and how often these were edited, not by their values: no comparison waits for a device. Results are the same
bit for bit, since they are the very tensors that the first computation gave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

_Result = TypeVar("_Result")

# Bytes that the results of a run may take together; what comes after that is computed each time.
LIMIT = 1 << 28
# Results of one computation for different inputs: with the prompt and without it, and each of these by parts.
_MOST = 4


@dataclass
class _Kept:
    inputs: tuple[Any, ...]
    versions: tuple[int, ...]
    result: Any
    size: int


class RunMemory:
    """What one run has computed, and where it is.

    Args:
        limit: bytes that results may take together; 0 keeps none.

    Attributes:
        step, timestep: of the scheduler's present step, from 0; None where nobody counts them.
        states: what step caches keep, by whose it is.
        tables: of modulation, see `hoisting`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.step: int | None = None
        self.timestep: torch.Tensor | None = None
        self.states: dict[Hashable, Any] = {}
        self.tables: dict[Hashable, tuple[Any, ...]] = {}
        self._kept: dict[Hashable, dict[Hashable, _Kept]] = {}
        self._size = 0
        self._schedules: dict[int, tuple[Sequence[torch.Tensor], int]] = {}
        self._told: dict[Hashable, list[torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop all results and states; the run goes on with none."""
        self.states = {}
        self.forget_results()

    def forget_results(self) -> None:
        """Drop all results, for inputs that may have been edited without a trace."""
        self._kept, self._size, self.tables = {}, 0, {}

    # ---- results ----

    @property
    def size(self) -> int:
        """Bytes that results take."""
        return self._size

    def recall(self, compute: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """The result for these inputs; see `once`."""
        own = self._kept.setdefault(compute, {})
        key, edits = identities(inputs), versions(inputs)
        kept = own.get(key)
        if kept is not None and kept.versions == edits:
            return kept.result
        result = compute(*inputs)
        size = _size_of(result)
        for stale in [key] if kept is not None else [*own][: max(len(own) - _MOST + 1, 0)]:
            self._size -= own.pop(stale).size
        if self._size + size <= self.limit:
            own[key] = _Kept(inputs, edits, result, size)
            self._size += size
        return result

    # ---- timesteps ----

    def expect(self, timesteps: Sequence[torch.Tensor]) -> None:
        """Name the timesteps of the run, in the very tensors that models, or `told`, will be given."""
        self._schedules = {id(each): (timesteps, index) for index, each in enumerate(timesteps)}
        self._told = {}

    def schedule(self, timestep: Any) -> Sequence[torch.Tensor] | None:
        """The timesteps of the run, if this tensor is one of them."""
        found = self._schedules.get(id(timestep))
        return found[0] if found is not None and found[0][found[1]] is timestep else None

    def told(self, change: Callable[..., torch.Tensor], timestep: torch.Tensor, more: tuple[Hashable, ...]) -> Any:
        """See the function `told`."""
        expected = self.schedule(timestep)
        if expected is None:
            return change(timestep, *more)
        key = (change, id(expected), more)
        if key not in self._told:
            made = self._told[key] = [change(each, *more) for each in expected]
            self._schedules |= {id(each): (made, index) for index, each in enumerate(made)}
        return self._told[key][self._schedules[id(timestep)][1]]


class _Threads(threading.local):
    """The runs that each thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[RunMemory] = []


_threads = _Threads()


def current_run() -> RunMemory | None:
    """The innermost run that this thread is in."""
    return _threads.stack[-1] if _threads.stack else None


@contextmanager
def cached_run(timesteps: Sequence[torch.Tensor] = (), *, limit: int = LIMIT) -> Generator[RunMemory]:
    """Context: calls of models in it belong together, as the steps of one picture do. Pipelines enter it by themselves.

    Inside, keys and values of a text, rotary tables and the like are computed once for each tensor that is given, and
    step caches (`model.enable_cache`) know what belongs to what. Give models the same tensor objects at each step, and
    run them under `torch.no_grad()`. At the end, however it comes, all of it is forgotten.

    Args:
        timesteps: what the model will be given as `timestep`, step by step, as these very tensors; then modulation
            tables can be made (`hoist_modulation`).
        limit: bytes that kept results may take together; 0 keeps none.

    Raises:
        ValueError: if `limit` is negative.
    """
    if limit < 0:
        raise ValueError(f"limit={limit} must be a number of bytes, 0 or more")
    memory = RunMemory(limit)
    memory.expect(timesteps)
    _threads.stack.append(memory)
    try:
        yield memory
    finally:
        _threads.stack.remove(memory)
        memory.forget()


def once(compute: Callable[..., _Result], *inputs: Any) -> _Result:
    """`compute(*inputs)`, computed once in a run for these very inputs.

    Args:
        compute: a layer, a method of one, or a function; its result must depend on nothing else that changes in a run.
        inputs: tensors, which count as the same if they are the same objects and were not edited; other things count
            by their values and must be hashable.
    """
    if torch.compiler.is_compiling() or not _threads.stack or torch.is_grad_enabled():
        return compute(*inputs)
    memory = _threads.stack[-1]
    return memory.recall(compute, inputs) if memory.limit else compute(*inputs)


def told(change: Callable[..., torch.Tensor], timestep: torch.Tensor, *more: Hashable) -> torch.Tensor:
    """What a model is told in place of a scheduler's timestep: `change(timestep, *more)`.

    In a run it is made for all steps together, so that what depends on the timestep alone can be computed ahead.
    """
    memory = current_run()
    return change(timestep, *more) if memory is None else memory.told(change, timestep, more)


def identities(inputs: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """Which tensors these are, and other things as they are: to be kept together with the inputs."""
    return tuple([id(each) if isinstance(each, torch.Tensor) else each for each in inputs])


def versions(inputs: tuple[Any, ...]) -> tuple[int, ...]:
    """How often the tensors were edited."""
    # Tensors of inference mode do not count their edits; what shows them to users forgets the results instead.
    return tuple([each._version for each in inputs if isinstance(each, torch.Tensor) and not each.is_inference()])


def _size_of(result: Any) -> int:
    if isinstance(result, torch.Tensor):
        return result.numel() * result.element_size()
    if isinstance(result, (list, tuple)):
        return sum(_size_of(each) for each in cast("list[Any]", result))
    return 0
