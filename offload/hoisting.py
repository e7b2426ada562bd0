"""Modulation tables: what adaptive norms make of timestep, guidance and pooled text, for all steps of a run at once.

In FLUX.1, Qwen-Image and their kin a quarter to a third of the weights make, in each step, a few vectors from one
vector that is known before the run begins. So they are made first, layer by layer, and the weights stay away from the
device during the steps. Each step's vectors are computed by themselves, as the step would: they are the same bit for
bit, which one large multiplication for all steps is not.

A model says in `_modulated_by` which arguments of `forward` make up the conditioning vector. Its layers that take it
are `Modulating` (models/layers/modulation.py); the blocks that these are in, or the layers themselves, get it as an
argument `temb` or `emb`, and in a served call a dict of the ready vectors in its place. Compiled blocks stay one graph.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .gates import CALL, unwatch, watch
from .plan import Group, Until
from .runs import RunMemory, current_run, identities, versions
from .send import send
from .structure import is_within, submodules

_ARGUMENTS = ("temb", "emb")
_BEFORE_PLACEMENT = -20
_MOST = 4  # tables that a run keeps: of different batches or prompts


# ---- which layers, and what it means for a plan ----


@dataclass(frozen=True)
class _Layer:
    """A layer whose vectors can be made ahead.

    Attributes:
        name: dotted, within the model.
        site: the block that it is in, or the layer itself: the module that is handed the conditioning vector.
    """

    name: str
    site: str

    @property
    def made_as(self) -> str:
        """Its name within the site."""
        return self.name[len(self.site) + 1 :]


def modulating_layers(model: nn.Module) -> list[_Layer]:
    """The layers of a model whose vectors can be made ahead."""
    if not getattr(model, "_modulated_by", ()):
        return []
    parts = list(submodules(model))
    blocks = [name for name, part in parts if type(part).__name__ in _blocks_of(model)]
    found: list[_Layer] = []
    for name, part in parts:
        if hasattr(part, "made_as"):
            site = next((block for block in blocks if is_within(name, block)), name)
            found.append(_Layer(name, site))
    return found


def _blocks_of(model: Any) -> Sequence[str]:
    return model._repeated_blocks


def hoist(module: nn.Module, groups: Iterable[Group], by_default: bool = True) -> list[Group]:
    """Groups of their own for the weights of modulating layers, which calls do not need where there are tables.

    Args:
        module: a model, or several in an `nn.ModuleDict`.
        groups: of a plan for it.
        by_default: for models of which it was not said whether to (`hoist_modulation`, `unhoist_modulation`).
    """
    sites: dict[str, str] = {}
    for path, part in submodules(module):
        wanted = part.__dict__.get("_hoists", by_default)
        for layer in modulating_layers(part) if wanted else ():
            maker: Any = part.get_submodule(layer.name)
            sites[".".join(filter(None, (path, layer.name, maker.maker)))] = ".".join(filter(None, (path, layer.site)))
    return [part for group in groups for part in _parted(group, sites)] if sites else list(groups)


def _parted(group: Group, sites: dict[str, str]) -> Iterator[Group]:
    inside: dict[str, list[str]] = {}
    for tensor in group.tensors:
        path = tensor.rpartition(".")[0]
        while path and path not in sites:  # quantised weights lie deeper
            path = path.rpartition(".")[0]
        inside.setdefault(path, []).append(tensor)
    rest = inside.pop("", None)
    if rest is not None:
        yield replace(group, tensors=tuple(rest))
    for path, tensors in inside.items():
        # A group of several modules is needed by all of them, its parts by one alone; unless all come in together.
        together = len(group.modules) == 1 or group.until is Until.NEXT
        resident = group.until is Until.REMOVED
        yield replace(
            group,
            name=path,
            tensors=tuple(tensors),
            modules=group.modules if together and not resident else (sites[path],),
            until=Until.USED if resident else group.until,
            home="cpu" if resident else group.home,
            room=None,
            hoisted=True,
        )


# ---- during a run ----


class _Captured(Exception):  # noqa: N818 - no error, but the way out of a forward pass
    def __init__(self, emb: torch.Tensor) -> None:
        super().__init__()
        self.emb = emb


@dataclass
class _Frame:
    """What a call of a model is told by tables.

    Attributes:
        owner: whose call it is.
        vectors: by site, the vectors of its layers; None while the conditioning vector is being looked for.
    """

    owner: Hoisting
    vectors: dict[str, dict[str, torch.Tensor]] | None


class _Threads(threading.local):
    """The calls of hoisting models that each thread is in, None where one is not served."""

    def __init__(self) -> None:
        self.frames: list[_Frame | None] = []


_threads = _Threads()


def is_serving() -> bool:
    """Whether this thread is in a call of a model that needs no weights of modulating layers."""
    return bool(_threads.frames) and _threads.frames[-1] is not None


def is_capturing() -> bool:
    """Whether a call is only looking for the conditioning vector, and computes no step."""
    return is_serving() and _threads.frames[-1] is not None and _threads.frames[-1].vectors is None


class Hoisting:
    """The tables of one model, made by the first call in a run and used by all its calls there.

    Args:
        model: it, with `_modulated_by`.
        present: a context in which the weights of a layer are where they compute.
    """

    def __init__(self, model: nn.Module, present: Callable[[nn.Module], AbstractContextManager[Any]]) -> None:
        self._model = weakref.ref(model)
        self._present = present
        self._layers = modulating_layers(model)
        self._arguments = [*inspect.signature(type(model).forward).parameters][1:]
        self._watched: list[tuple[weakref.ref[nn.Module], Any]] = []
        for layer in self._layers:
            part: Any = model.get_submodule(layer.name)
            part.made_as = layer.made_as
        self._watch(model, _AtModel(self))
        for site in dict.fromkeys(layer.site for layer in self._layers):
            module = model.get_submodule(site)
            self._watch(module, _AtSite(self, site, [*inspect.signature(type(module).forward).parameters][1:]))

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

    def frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Frame | None:
        """What a call with these arguments is told, or None if it has to compute itself."""
        outer = _threads.frames[-1] if _threads.frames else None
        if outer is not None and outer.owner is self and outer.vectors is None:
            return outer
        memory, model = current_run(), self._model()
        if memory is None or model is None or not memory.limit or torch.is_grad_enabled():
            return None
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        times = memory.schedule(given.get("timestep"))
        if times is None:
            return None
        names: Sequence[str] = getattr(model, "_modulated_by")  # noqa: B009 - a declaration of model classes
        others = [given.get(name) for name in names if name != "timestep"]
        sample = given[self._arguments[0]]
        steps = self._tables(memory, times, sample, others, (args, kwargs))
        index = next(index for index, each in enumerate(times) if each is given["timestep"])
        return None if steps is None else _Frame(self, steps[index])

    def _tables(
        self,
        memory: RunMemory,
        times: Sequence[torch.Tensor],
        sample: torch.Tensor,
        others: list[Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> list[dict[str, dict[str, torch.Tensor]]] | None:
        """The vectors of each step, by site; None where they would take more memory than the weights."""
        inputs = (*others, sample.shape[0], sample.dtype, sample.device)
        key = (self, id(times), *identities(inputs), *versions(inputs))
        if key not in memory.tables:
            while len(memory.tables) >= _MOST:
                del memory.tables[next(iter(memory.tables))]
            # With the inputs, so that no other tensors get their numbers.
            memory.tables[key] = (times, others, self._make(times, sample.shape[0], *call))
        return memory.tables[key][-1]

    def _make(
        self, times: Sequence[torch.Tensor], batch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[dict[str, dict[str, torch.Tensor]]] | None:
        model = self._model()
        assert model is not None, "it is being called"
        layers: list[tuple[_Layer, Any]] = [(layer, model.get_submodule(layer.name)) for layer in self._layers]
        embs = [self._capture(model, times[0], args, kwargs)]
        if len(times) * batch >= embs[0].shape[-1]:
            return None
        embs += [self._capture(model, time, args, kwargs) for time in times[1:]]
        steps: list[dict[str, dict[str, torch.Tensor]]] = [{} for _ in times]
        for layer, part in layers:
            with self._present(part):
                device = next(part.parameters()).device
                for step, emb in zip(steps, embs, strict=True):
                    step.setdefault(layer.site, {})[layer.made_as] = part.make(send(emb, device))
        return steps

    def _capture(
        self, model: nn.Module, time: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """The conditioning vector of a step: the model computes up to the first block, which gets it and goes no
        further."""
        place = self._arguments.index("timestep")
        if place < len(args):
            args = (*args[:place], time, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "timestep": time}
        _threads.frames.append(_Frame(self, None))
        try:
            model(*args, **kwargs)
        except _Captured as found:
            return found.emb
        finally:
            _threads.frames.pop()
        raise AssertionError("no block was handed a conditioning vector")


class _AtModel:
    """At the gate of the model: finds the tables for the call."""

    order = _BEFORE_PLACEMENT

    def __init__(self, hoisting: Hoisting) -> None:
        self._hoisting = hoisting

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        _threads.frames.append(self._hoisting.frame(args, kwargs))
        return args, kwargs

    def result(self, output: Any) -> Any:
        return output

    def leave(self) -> None:
        _threads.frames.pop()


class _AtSite:
    """At the gate of a block: puts the ready vectors into the place of the conditioning vector."""

    order = _BEFORE_PLACEMENT

    def __init__(self, hoisting: Hoisting, site: str, arguments: Sequence[str]) -> None:
        self._hoisting, self._site = hoisting, site
        self._name = next(name for name in _ARGUMENTS if name in arguments)
        self._place = arguments.index(self._name)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        frame = _threads.frames[-1] if _threads.frames else None
        if frame is None or frame.owner is not self._hoisting:
            return args, kwargs
        if frame.vectors is None:
            raise _Captured(kwargs[self._name] if self._name in kwargs else args[self._place])
        vectors = frame.vectors[self._site]
        if self._name in kwargs:
            return args, {**kwargs, self._name: vectors}
        return (*args[: self._place], vectors, *args[self._place + 1 :]), kwargs

    def result(self, output: Any) -> Any:
        return output

    def leave(self) -> None:
        """There is nothing to undo."""


# ---- under a placement ----


def serve(placement: Any) -> list[Hoisting]:
    """Make the models of a placement use tables, those whose modulating layers have groups of their own."""
    hoisted = {tensor for group in placement.plan.groups if group.hoisted for tensor in group.tensors}
    if not hoisted:
        return []
    found: list[Hoisting] = []
    modules: dict[str, nn.Module] = placement.modules
    for root, module in modules.items():
        for path, part in submodules(module):
            prefix = ".".join(filter(None, (root, path)))
            if modulating_layers(part) and any(is_within(tensor, prefix) for tensor in hoisted):
                found.append(Hoisting(part, partial(_present, weakref.ref(placement))))
    return found


@contextmanager
def _present(reference: weakref.ref[Any], layer: nn.Module) -> Generator[None]:
    """Context: the tensors of a layer are where they compute, as in a call that needs them."""
    placement = reference()
    assert placement is not None, "calls of its modules hold it"
    mine = set(map(id, [*layer.parameters(), *layer.buffers()]))
    groups = [group for group in placement._groups if any(id(tensor) in mine for tensor in group.tensors())]
    # A norm in the same layer lies among the other weights, which need not come for what is made of hoisted ones.
    groups = [group for group in groups if group.spec.hoisted] or groups
    with placement._lock:
        for group in groups:
            group.active += 1
            if group.moves:
                placement._bring_in(group)
            group.wait()
    try:
        yield
    finally:
        with placement._lock:
            for group in groups:
                group.active -= 1
                if group.moves:
                    placement._let_go(group)
