"""Layers whose weights are stored in fewer bits, and decoded just before they compute.

A layer keeps its parameters, as the same objects, with the stored form as their data; scales are buffers beside
them. So all that moves tensors moves these. What the layer computes with is decoded on access: its class becomes a
subclass of its class, in which `weight` is a property. The layer's own `forward` reads it and gets plain values;
anyone else gets a `WeightView`.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from .encodings import Encoding
from .engine import at_home
from .weight_view import WeightView

_can_hold: Callable[[torch.Tensor, torch.Tensor], bool] = cast("Any", torch)._has_compatible_shallow_copy_type
# The layer whose forward runs in this thread.
_running = threading.local()
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def scale_name(name: str) -> str:
    """The buffer beside the parameter `name` that holds its scales."""
    return f"{name}_scale"


class Stored:
    """What is known of one stored parameter; layers that share the parameter share this.

    Attributes:
        encoding: how it is stored.
        compute_dtype: what it is decoded to.
        original_dtype: what it is given back in.
        requires_grad: of the parameter before; integers cannot have it.
        master: the exact values, where they cost no memory because they are a mapped file; they are changed, page by
            page, when the weight is.
    """

    def __init__(
        self, encoding: Encoding, compute_dtype: torch.dtype, like: nn.Parameter, master: torch.Tensor | None
    ) -> None:
        self.encoding = encoding
        self.compute_dtype = compute_dtype
        self.original_dtype = like.dtype
        self.requires_grad = like.requires_grad
        self.master = master
        self.lent: Callable[[], torch.Tensor | None] = _nothing
        self.saved: tuple[Callable[[], Any], str] = (_nothing, "")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lent": _nothing, "saved": (_nothing, "")}


def _nothing() -> None:
    """A weak reference that leads nowhere."""


class _Source:
    """A stored parameter of a layer, for `WeightView`."""

    def __init__(self, layer: "CastLayer", name: str) -> None:
        self.layer, self.name = layer, name

    def exact(self) -> torch.Tensor:
        return exact(self.layer, self.name)

    def store(self, values: torch.Tensor) -> None:
        store(self.layer, self.name, values)


def stored_parts(layer: nn.Module) -> dict[str, Stored]:
    """What is known of the stored parameters of a layer, by their names; nothing for a layer that is not cast."""
    return layer.__dict__.get("_stored", {})


def _parts(layer: nn.Module, name: str) -> tuple[Stored, nn.Parameter, torch.Tensor | None]:
    """What is known of a stored parameter, its stored form, and its scales if it has any."""
    parameter = layer._parameters[name]
    assert parameter is not None
    return stored_parts(layer)[name], parameter, layer._buffers.get(scale_name(name))


def decoded(layer: nn.Module, name: str) -> torch.Tensor:
    """What the layer computes with, on the device where the stored form is."""
    stored, parameter, scale = _parts(layer, name)
    return stored.encoding.decode(parameter, scale, stored.compute_dtype)


def exact(layer: nn.Module, name: str) -> torch.Tensor:
    """The values as precisely as they are known, in the compute dtype, on the device where the stored form is."""
    stored, parameter, _ = _parts(layer, name)
    lent = stored.lent()
    # While someone holds a slice of earlier values, all see the same.
    if lent is not None and lent.device == parameter.device and lent.dtype == stored.compute_dtype:
        return lent
    if stored.master is None:
        values = decoded(layer, name).detach()
    else:
        values = stored.master.to(device=parameter.device, dtype=stored.compute_dtype)
    stored.lent = weakref.ref(values)
    return values


def store(layer: nn.Module, name: str, values: torch.Tensor) -> None:
    """Encode changed values anew, and change the master copy if there is one."""
    stored, parameter, scale = _parts(layer, name)
    if values.shape != parameter.shape:
        raise ValueError(f"{name} has the shape {tuple(parameter.shape)}, the new values {tuple(values.shape)}")
    if stored.encoding.overflows(values):
        raise ValueError(f"{name}: the new values have no form in {stored.encoding.dtype}; use storage='fp8_scaled'")
    with torch.no_grad(), at_home(layer):
        if stored.master is not None and values is not stored.master:
            stored.master.copy_(values)
        encoded, new_scale = stored.encoding.encode(values)
        # Not through `.data`: whoever keeps a home for the parameter sees the change by its version.
        parameter.copy_(encoded)
        if scale is not None and new_scale is not None:
            scale.copy_(new_scale)
    if stored.lent() is not values:
        stored.lent = _nothing


class CastLayer(nn.Module):
    """Mixed into the class of a layer by `cast_layer`."""

    _stored: dict[str, Stored]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        outer = getattr(_running, "layer", None)
        _running.layer = self
        try:
            return super().forward(*args, **kwargs)
        finally:
            _running.layer = outer

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in stored_parts(self):
            super().__setattr__(name, value)
        elif value is None or (isinstance(value, nn.Parameter) and value.shape != self._parameters[name].shape):  # pyright: ignore[reportOptionalMemberAccess]
            del self._stored[name]
            self._buffers.pop(scale_name(name), None)
            self._parameters[name] = value
        elif isinstance(value, torch.Tensor):
            store(self, name, value.detach())
        else:
            raise TypeError(f"{name} must be a parameter or None, not {type(value).__name__}")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the stored form as it is; a new dtype is what the layer computes in from now on."""
        bits = {id(self._parameters[name]) for name in self._stored}
        bits |= {id(self._buffers.get(scale_name(name))) for name in self._stored}
        super()._apply(functools.partial(_apply_to_bits, fn, bits), recurse)
        for stored in self._stored.values():
            dtype = fn(torch.empty(0, dtype=stored.compute_dtype)).dtype
            if dtype != stored.compute_dtype:
                stored.compute_dtype = stored.original_dtype = dtype
                stored.lent = _nothing
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, stored in self._stored.items():
            reference, key = stored.saved
            # A shared parameter stays one tensor.
            if reference() is not destination or key not in destination:
                stored.saved = weakref.ref(destination), prefix + name
                destination[prefix + name] = _exported(self, name)
            else:
                destination[prefix + name] = destination[key]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take what is stored here; the rest as ever."""
        others = dict(state_dict)
        for name in self._stored:
            values = others.get(prefix + name)
            if isinstance(values, torch.Tensor) and values.shape == _parts(self, name)[1].shape:
                store(self, name, others.pop(prefix + name).detach())
        rest: Any = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(others, prefix, *rest)
        missing_keys[:] = [key for key in missing_keys if key not in state_dict]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self).__bases__[1], tuple(self._stored)), self.__dict__


class _CastEmbedding(CastLayer):
    """Rows are looked up first and decoded then: a table is large, and few of its rows are used."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that callers use
        stored, table = self._stored.get("weight"), self._parameters["weight"]
        assert table is not None
        if stored is None:
            return super().forward(input)
        scale = self._buffers.get(scale_name("weight"))
        scales = None if scale is None else F.embedding(input, scale)
        return stored.encoding.decode(F.embedding(input, table), scales, stored.compute_dtype)


def _apply_to_bits(fn: Callable[[torch.Tensor], torch.Tensor], bits: set[int], tensor: torch.Tensor) -> torch.Tensor:
    """`fn` on a stored tensor as if it were integers, which it then moves and lays out but does not convert."""
    if id(tensor) not in bits:
        return fn(tensor)
    raw = tensor.detach().view(_INTEGERS[tensor.element_size()])
    moved = fn(raw)
    if moved is raw:
        return tensor
    if isinstance(tensor, nn.Parameter) or not _can_hold(tensor, moved):
        return moved.view(tensor.dtype)
    # `nn.Module` would put a new buffer in each layer that shares it.
    tensor.data = moved.view(tensor.dtype)
    return tensor


def _read(layer: CastLayer, name: str) -> Any:
    """The attribute `name` of a layer."""
    stored = layer._stored.get(name)
    if stored is None:
        return layer._parameters[name]
    if torch.compiler.is_compiling() or getattr(_running, "layer", None) is layer:
        return decoded(layer, name)
    return WeightView.of(_Source(layer, name), _parts(layer, name)[1], stored.compute_dtype)


def _exported(layer: nn.Module, name: str) -> torch.Tensor:
    """The exact values, in the compute dtype, for others to keep."""
    stored = _parts(layer, name)[0]
    if stored.master is not None:
        return stored.master.to(stored.compute_dtype)
    return decoded(layer, name).detach()


def _weight_property(name: str) -> property:
    # A plain function: the compiler looks into it.
    return property(lambda layer: _read(layer, name))


@functools.cache
def _cast_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[CastLayer]:
    """The subclass of a layer class in which the parameters `names` are decoded. It goes by the same name."""
    mixin = _CastEmbedding if cls.forward is nn.Embedding.forward else CastLayer
    entries: dict[str, Any] = {name: _weight_property(name) for name in names}
    entries |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return cast("type[CastLayer]", type(cls.__name__, (mixin, cls), entries))


def _rebuild(cls: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    new = _cast_class(cls, names)
    return new.__new__(new)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a layer before it was cast."""
    cls = type(module)
    return cls.__bases__[1] if isinstance(module, CastLayer) else cls


def cast_layer(layer: nn.Module, stored: dict[str, Stored]) -> None:
    """Let a layer decode the parameters named in `stored`, which already hold the stored form."""
    layer.__dict__["_stored"] = stored
    layer.__class__ = _cast_class(original_class(layer), tuple(stored))


def uncast_layer(layer: CastLayer) -> None:
    """Give a layer its class back."""
    del layer.__dict__["_stored"]
    cast("nn.Module", layer).__class__ = original_class(layer)
