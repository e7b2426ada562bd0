"""Gates before the calls of modules, through which weights can be brought in, and which can be taken away again.

A gate stands outside of everything else that a call does: hooks, and the compiled code of `module.compile()`, which
stays one graph. Watchers at a gate are called in their order, so placement comes before decoding whoever came first.
Copies and pickles of a module have no gates.
"""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import nn

CALL = "__call__"
_CALL_ATTRIBUTE = "_compiled_call_impl"
_ABSENT: Any = object()


class Answer:
    """What a watcher's `enter` gives for a call that is not to be made: its result. Those further in do not see it."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Watcher(Protocol):
    """What stands at a gate. `order`: lower ones are further outside; placement has 0, decoding 10.

    `enter` may change the arguments, or give an `Answer`; if it raises, it must have undone its own work. After it,
    `leave` is called on every way out, and must not raise. `result` sees what a call that succeeded returns.
    """

    order: int

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | Answer: ...

    def result(self, output: Any) -> Any: ...

    def leave(self) -> None: ...


class Override:
    """Stands in the place of a method of one module, until `remove_override`: `around(original, *args, **kwargs)`."""

    def __init__(self, module: nn.Module, attribute: str, around: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._attribute = attribute
        self.around = around
        self.before: Any = module.__dict__.get(attribute, _ABSENT)
        # Past `__setattr__`: modules made by `torch.compile` hand that on to what they wrap.
        module.__dict__[attribute] = self

    @property
    def module(self) -> nn.Module:
        """The module that it stands before."""
        module = self._module()
        assert module is not None, "an attribute of a module outlives it"
        return module

    @property
    def original(self) -> Callable[..., Any]:
        """The method without this override."""
        if self.before is not _ABSENT and self.before is not None:
            return self.before
        module = self.module
        if self._attribute == _CALL_ATTRIBUTE:
            return cast("Any", module)._call_impl
        return getattr(type(module), self._attribute).__get__(module)

    @property
    def _torchdynamo_orig_callable(self) -> Callable[..., Any]:
        """What `torch.compile(module.method)` compiles: the method itself. `take_compiled` puts it behind the gate."""
        return self.original

    @property
    def _torchdynamo_wrapper_id(self) -> int:
        """Torch looks at the above only where this is the very object that it was told of."""
        return id(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.original, *args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, self._attribute)


def remove_override(module: nn.Module, attribute: str, around: Callable[..., Any]) -> None:
    """Put back what was there before an override. Where something was put on top, a plain call stays in between."""
    content = module.__dict__
    found = content.get(attribute)
    if isinstance(found, Override) and found.around == around:
        if found.before is _ABSENT:
            del content[attribute]
        else:
            content[attribute] = found.before
        return
    while found is not None:
        if isinstance(found, Override) and found.around == around:
            found.around = _plainly
        found = getattr(found, "before", None)


def take_compiled(module: nn.Module, attribute: str, value: Any) -> bool:
    """Let a compiled method that is assigned to a module go behind the gate that stands there; False if none does."""
    override = module.__dict__.get(attribute)
    if not isinstance(override, Override) or not hasattr(value, "_torchdynamo_orig_callable"):
        return False
    override.before = value
    return True


def _plainly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


class _Gate:
    """The watchers of one method of one module. The module holds it, and it holds nothing that holds the module."""

    def __init__(self, module: nn.Module, method: str) -> None:
        self.watchers: tuple[Watcher, ...] = ()
        self.open = 0
        self._module = weakref.ref(module)
        self._attribute = _CALL_ATTRIBUTE if method == CALL else method
        Override(module, self._attribute, self._pass)
        self._guard = None
        if method == CALL:
            Override(module, "compile", self._compile_behind)
            self._guard = module.register_forward_pre_hook(_Guard(self), prepend=True)

    def _pass(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        entered: list[Watcher] = []
        try:
            for watcher in self.watchers:
                passed = watcher.enter(args, kwargs)
                entered.append(watcher)
                if isinstance(passed, Answer):
                    return _seen(entered[:-1], passed.output)
                args, kwargs = passed
            self.open += 1
            try:
                output = original(*args, **kwargs)
            finally:
                self.open -= 1
            return _seen(entered, output)
        finally:
            for watcher in reversed(entered):
                watcher.leave()

    def _compile_behind(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """`module.compile()`: what is compiled goes behind the gate."""
        module = self._module()
        assert module is not None, "its method is being called"
        override = module.__dict__[_CALL_ATTRIBUTE]
        original(*args, **kwargs)
        override.before = module.__dict__[_CALL_ATTRIBUTE]
        module.__dict__[_CALL_ATTRIBUTE] = override

    def remove(self) -> None:
        """Leave the module as it was before."""
        module = self._module()
        if module is None:
            return
        remove_override(module, self._attribute, self._pass)
        if self._guard is not None:
            remove_override(module, "compile", self._compile_behind)
            self._guard.remove()


def _seen(watchers: list[Watcher], output: Any) -> Any:
    for watcher in reversed(watchers):
        output = watcher.result(output)
    return output


class _Guard:
    """A hook that lets `torch.compile` of a module around the gate end its graph there, since it would go past it."""

    def __init__(self, gate: _Gate | None = None) -> None:
        self._gate = gate

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._gate is not None and not self._gate.open and torch.compiler.is_compiling():
            cast("Any", torch)._dynamo.graph_break("weights come in through a gate that a graph cannot hold")

    def __reduce__(self) -> Any:
        return _Guard, ()


_gates: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[_Gate]]] = weakref.WeakKeyDictionary()


def watch(module: nn.Module, method: str, watcher: Watcher) -> None:
    """Put a watcher before a method of a module; `CALL` is the call of the module itself."""
    gates = _gates.setdefault(module, {})
    gate = gates[method]() if method in gates else None
    if gate is None:
        gate = _Gate(module, method)
        gates[method] = weakref.ref(gate)
    gate.watchers = tuple(sorted((*gate.watchers, watcher), key=lambda each: each.order))


def unwatch(module: nn.Module, method: str, mine: Callable[[Watcher], bool]) -> None:
    """Take the watchers that are `mine` away; a gate without watchers goes too, and the module is as it was."""
    gates = _gates.get(module, {})
    gate = gates[method]() if method in gates else None
    if gate is None:
        return
    gate.watchers = tuple(each for each in gate.watchers if not mine(each))
    if not gate.watchers:
        gate.remove()
        del gates[method]


def watchers_of(module: nn.Module, method: str = CALL) -> tuple[Watcher, ...]:
    """The watchers of a method, the outermost first."""
    gates = _gates.get(module, {})
    gate = gates[method]() if method in gates else None
    return () if gate is None else gate.watchers
