"""Quantised weights as what they are made of: plain tensors, which everything that moves tensors can move.

A weight of torchao is one tensor with others inside: the integers, their scales, and so on. Moving it "by its data"
leaves these behind. So a layer that is placed holds the inner tensors themselves, in `Parts`, and its `weight` is put
together from them on access, which copies nothing. Weights in the formats of GGUF are held in `Parts` from the start.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diffusion_core.errors import PlacementError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a quantised weight that consists of other tensors, as those of torchao do."""
    return is_traceable_wrapper_subclass(tensor) and type(tensor).dequantize is not torch.Tensor.dequantize


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a tensor consists of, by name; a plain one of nothing."""
    if not is_wrapper(tensor):
        return {}
    names = cast("Any", tensor).__tensor_flatten__()[0]
    return {name: getattr(tensor, name) for name in names}


def size_in_bytes(tensor: torch.Tensor) -> int:
    """The bytes that a tensor takes, with what is inside of it."""
    inner = inner_tensors(tensor)
    if inner:
        return sum(size_in_bytes(each) for each in inner.values())
    return tensor.numel() * tensor.element_size()


def for_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same weight for layers that compute in another dtype; what is inside a quantised one stays as it is."""
    if not is_wrapper(tensor):
        return tensor.to(dtype)
    if tensor.dtype == dtype:
        return tensor
    names, rest = cast("Any", tensor).__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    kind = cast("Any", type(tensor))
    return kind.__tensor_unflatten__(inner, {**rest, "dtype": dtype}, tensor.shape, tensor.stride())


def _child(name: str) -> str:
    """The name of the submodule that holds the parts of the parameter `name`."""
    return f"_{name}"


class Parts(nn.ParameterDict):
    """What a weight is made of: a submodule beside the layer's other tensors.

    Attributes:
        shape: of the weight.
        dtype: of the weight: what the layer computes in.
        kind: what the weight is quantised into, in a word.
        method: the library or format that it is quantised by.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    method: str

    def packed(self) -> torch.Tensor:
        """The weight, made anew."""
        raise TypeError(f"{type(self).__name__} does not say how its weight is made")

    def plain(self) -> torch.Tensor:
        """The weight as a plain tensor in `dtype`."""
        return self.packed()

    def saved(self) -> torch.Tensor:
        """What a state dict holds."""
        return self.packed()

    def stored(self, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The parts of other values.

        Raises:
            ValueError: they have none.
        """
        raise ValueError("quantised weights take no others; load a model without quantisation for that")

    def numel(self) -> int:
        """The number of values in the weight."""
        return torch.Size(self.shape).numel()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # Integers and scales go to a device, and never to another dtype.
        return super()._apply(functools.partial(_moved, fn), recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[_saved_name(prefix)] = self.saved().detach()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The layer does it: it is the one that is shown the weight by its name."""

    def take(self, values: torch.Tensor) -> None:
        """Take the parts of other values.

        Raises:
            ValueError: they have none.
        """
        with torch.no_grad():
            for part, tensor in self.stored(values).items():
                self[part].copy_(tensor)


def _saved_name(prefix: str) -> str:
    """The name of a weight in a state dict, from the prefix of its parts: "x.weight" from "x._weight."."""
    path, _, child = prefix.removesuffix(".").rpartition(".")
    return f"{path}.{child[1:]}" if path else child[1:]


def _moved(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().view(_BITS[tensor.element_size()])
    moved = fn(raw)
    return tensor if moved is raw else moved.view(tensor.dtype)


class WrapperParts(Parts):
    """The inner tensors of a weight that is a wrapper.

    Args:
        inner: as parameters, so that layers which share a weight share these.
    """

    def __init__(self, weight: torch.Tensor, inner: Mapping[str, nn.Parameter]) -> None:
        super().__init__(dict(inner))
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.kind, self.method = type(weight).__name__, "torchao"
        self._form = _number_of(weight)
        # The compiler, which torchao has imported, is to put it into its graph as it is.
        torch.compiler.allow_in_graph(_assembled)

    def packed(self) -> torch.Tensor:
        tensors = cast("list[torch.Tensor]", [self._parameters[name] for name in _FORMS[self._form][1]])
        return _assembled(self._form, *tensors)

    def plain(self) -> torch.Tensor:
        return cast("Any", self.packed()).dequantize()

    def stored(self, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        inner = inner_tensors(values)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in inner.items()}
        if shapes != {name: (tensor.shape, tensor.dtype) for name, tensor in self.items()}:
            raise ValueError("these values are not quantised in the same way")
        return inner

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_form": _FORMS[self._form]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_form": _known(state["_form"])})


# The kinds of wrappers that there are: class, names of the inner tensors, what else it consists of, size and strides.
# They are numbered since the compiler takes numbers as constants.
_FORMS: list[tuple[Any, tuple[str, ...], Any, torch.Size, tuple[int, ...]]] = []


def _number_of(weight: torch.Tensor) -> int:
    names, rest = cast("Any", weight).__tensor_flatten__()
    return _known((type(weight), tuple(names), rest, weight.shape, weight.stride()))


def _known(form: Any) -> int:
    if form not in _FORMS:
        _FORMS.append(form)
    return _FORMS.index(form)


def _assembled(form: int, *tensors: torch.Tensor) -> torch.Tensor:
    kind, names, rest, size, stride = _FORMS[form]
    return kind.__tensor_unflatten__(dict(zip(names, tensors, strict=True)), rest, size, stride)


class QuantizedLayer(nn.Module):
    """Mixed into the class of a layer whose weights are made of `Parts`."""

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
        others = dict(state_dict)
        for name, part in parts_of(self).items():
            values = others.pop(prefix + name, None)
            if values is None:
                missing_keys.append(prefix + name)
                continue
            try:
                part.take(values)
            except ValueError as error:
                error_msgs.append(f"{prefix + name}: {error}")
        rest: Any = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(others, prefix, *rest)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self).__bases__[1], tuple(parts_of(self))), self.__dict__


def parts_of(layer: nn.Module) -> dict[str, Parts]:
    """The parameters of a layer that are made of parts, by their names."""
    return {name[1:]: part for name, part in layer._modules.items() if isinstance(part, Parts)}


def _rebuild(cls: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    new = _quantized_class(cls, names)
    return new.__new__(new)


@functools.cache
def _quantized_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[QuantizedLayer]:
    """The subclass of a layer class in which the parameters `names` are made of parts. It goes by the same name."""
    entries: dict[str, Any] = {name: _packed_property(name) for name in names}
    entries |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return cast("type[QuantizedLayer]", type(cls.__name__, (QuantizedLayer, cls), entries))


def _packed_property(name: str) -> property:
    # A plain function: the compiler looks into it.
    child = _child(name)
    return property(lambda layer: layer._modules[child].packed())


def hold_parts(layer: nn.Module, parts: Mapping[str, Parts]) -> None:
    """Let a layer make these parameters of parts."""
    for name, part in parts.items():
        del layer._parameters[name]
        layer._modules[_child(name)] = part
    cls = type(layer).__bases__[1] if isinstance(layer, QuantizedLayer) else type(layer)
    layer.__class__ = _quantized_class(cls, tuple(parts_of(layer)))


def hold_plain(layer: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Let a layer have these parameters, of which it held parts or wrappers."""
    for name, parameter in parameters.items():
        layer._modules.pop(_child(name), None)
        layer._parameters[name] = parameter
    rest = tuple(parts_of(layer))
    if isinstance(layer, QuantizedLayer):
        cls = cast("Any", type(layer).__bases__[1])
        layer.__class__ = _quantized_class(cls, rest) if rest else cls


def take_apart(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Give every layer whose weights are wrappers the tensors inside of them, so that these can be moved.

    Returns:
        These layers, with the names of the weights and the weights as they were.

    Raises:
        PlacementError: a tensor inside is itself a wrapper. Nothing has changed then.
    """
    found = [
        (layer, name, tensor)
        for layer in module.modules()
        for name, tensor in layer._parameters.items()
        if tensor is not None and is_wrapper(tensor)
    ]
    for _, name, tensor in found:
        if any(is_traceable_wrapper_subclass(each) for each in inner_tensors(tensor).values()):
            raise PlacementError(f"{name!r} is a {type(tensor).__name__} of wrappers, which cannot be moved")
    known: dict[int, dict[str, nn.Parameter]] = {}
    for layer, name, tensor in found:
        if id(tensor) not in known:
            inner = inner_tensors(tensor)
            known[id(tensor)] = {key: nn.Parameter(each.detach(), requires_grad=False) for key, each in inner.items()}
        hold_parts(layer, {name: WrapperParts(tensor, known[id(tensor)])})
    return found


def put_together(layers: Iterable[nn.Module]) -> None:
    """Undo `take_apart` for these layers."""
    known: dict[tuple[int, ...], nn.Parameter] = {}
    for layer in list(layers):
        made: dict[str, nn.Parameter] = {}
        for name, part in parts_of(layer).items():
            if isinstance(part, WrapperParts):
                key = tuple(map(id, part.values()))
                if key not in known:
                    known[key] = nn.Parameter(_whole(part), requires_grad=False)
                made[name] = known[key]
        if made:
            hold_plain(layer, made)


@contextlib.contextmanager
def apart(module: nn.Module) -> Generator[None]:
    """Context: `take_apart`, undone if the block raises."""
    before = take_apart(module)
    try:
        yield
    except BaseException:
        for layer, name, parameter in before:
            hold_plain(layer, {name: parameter})
        raise


def _whole(part: WrapperParts) -> torch.Tensor:
    tensors = [cast("torch.Tensor", part._parameters[name]).detach() for name in _FORMS[part._form][1]]
    return _assembled(part._form, *tensors)


def quantized_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | Parts]]:
    """Every quantised weight of a module by its name, whole or as its parts."""
    for path, layer in cast("Iterator[tuple[str, nn.Module]]", module.named_modules()):
        for name, tensor in layer._parameters.items():
            if tensor is not None and is_wrapper(tensor):
                yield f"{path}.{name}" if path else name, tensor
        for name, part in parts_of(layer).items():
            yield f"{path}.{name}" if path else name, part


def is_quantized(module: nn.Module) -> bool:
    """Whether a module has quantised weights."""
    return next(quantized_weights(module), None) is not None


def num_parameters(module: nn.Module, counts: Callable[[nn.Parameter], bool] = lambda _: True) -> int:
    """The number of values in all parameters, those of quantised weights as if they were not, shared ones once.

    Args:
        counts: tells which of the parameters count; it is asked about one part of each quantised weight.
    """
    parts = {tuple(map(id, part.values())): part for part in module.modules() if isinstance(part, Parts)}
    inside = {number for numbers in parts for number in numbers}
    others = (parameter for parameter in module.parameters() if id(parameter) not in inside)
    apart = (part.numel() for part in parts.values() if counts(next(iter(part.parameters()))))
    return sum(apart) + sum(each.numel() for each in others if counts(each))


def describe_quantization(module: nn.Module) -> str:
    """How many weights of a module are quantised, and into what; nothing for a module that is not."""
    kinds: dict[str, int] = {}
    for _, weight in quantized_weights(module):
        kind = weight.kind if isinstance(weight, Parts) else type(weight).__name__
        kinds[kind] = kinds.get(kind, 0) + 1
    return "" if not kinds else "quantized: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def dequantize(module: nn.Module) -> None:
    """Give every layer plain weights in the dtype that it computes in, tied ones tied as before."""
    known: dict[tuple[int, ...], nn.Parameter] = {}
    for layer in list(module.modules()):
        made: dict[str, nn.Parameter] = {}
        for name, tensor in [*layer._parameters.items(), *parts_of(layer).items()]:
            if isinstance(tensor, Parts):
                key = tuple(map(id, tensor.values()))
            elif isinstance(tensor, torch.Tensor) and is_wrapper(tensor):
                key = (id(tensor),)
            else:
                continue
            if key not in known:
                with torch.no_grad():
                    values = tensor.plain() if isinstance(tensor, Parts) else cast("Any", tensor).dequantize()
                known[key] = nn.Parameter(values.detach())
            made[name] = known[key]
        if made:
            hold_plain(layer, made)
