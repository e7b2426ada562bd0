"""Layerwise casting: weights are stored in fewer bits and decoded by each layer just before it computes.

An idea that half of all inference programs share: activations need the range and precision of 16 bits, resting
weights do not. The encodings are in `encodings.py`, the layers in `cast_layers.py`; here is who is cast, and how it
is taken back.
"""

# pyright: reportPrivateUsage=false

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from diffusion_core.logging import get_logger

from .cast_layers import CastLayer, Stored, cast_layer, decoded, original_class, scale_name, stored_parts, uncast_layer
from .encodings import Encoding, parse_encoding
from .engine import at_home, placement_of
from .mixin import OffloadMixin
from .quantized import Parts, is_quantized
from .sizes import format_bytes
from .stores import mapped_ranges
from .structure import submodules

logger = get_logger(__name__)

SUPPORTED_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)
# Layers at the ends of a model, through which everything passes once: they are small and their errors add up.
DEFAULT_SKIP_PATTERNS = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$")
# Small trained weights that PEFT puts beside a layer.
_ADAPTERS = (r"(^|\.)(lora|hada|lokr)_",)
_ORIGINS = "_before_casting"


@dataclass
class _Origin:
    """A tensor that was not stored in fewer bits but converted to the compute dtype.

    Attributes:
        converted: the dtype it was converted to; if it has another one by now, the user has decided.
        dtype: the one it had.
        master: the tensor that it was, where this costs no memory.
    """

    converted: torch.dtype
    dtype: torch.dtype
    master: torch.Tensor | None


@dataclass(frozen=True)
class _Skip:
    """What stays as it is, by name and by class."""

    patterns: tuple[str, ...]
    classes: tuple[type[nn.Module], ...]
    class_words: tuple[str, ...]
    keep_matrices_in_norms: bool

    def declared(self, module: nn.Module) -> tuple[str, ...]:
        """The patterns that a module's class states, for names within it."""
        patterns = list(getattr(module, "_skip_layerwise_casting_patterns", None) or ())
        patterns += [rf"(^|\.){re.escape(part)}(\.|$)" for part in getattr(module, "_keep_in_fp32_modules", None) or ()]
        return self._chosen(patterns)

    def _chosen(self, patterns: Iterable[str]) -> tuple[str, ...]:
        return tuple(pattern for pattern in patterns if self.keep_matrices_in_norms or pattern != "norm")

    def is_skipped(self, module: nn.Module) -> bool:
        cls = original_class(module)
        if issubclass(cls, self.classes):
            return True
        return any(word in cls.__name__.lower() for word in self.class_words)


def apply_layerwise_casting(
    module: nn.Module,
    storage_dtype: torch.dtype | None = torch.float8_e4m3fn,
    compute_dtype: torch.dtype | None = None,
    skip_modules_pattern: str | Iterable[str] | None = "auto",
    skip_modules_classes: Any = None,
    non_blocking: bool = False,
    *,
    storage: str = "plain",
) -> None:
    """Store the weights of a module's layers in fewer bits; each layer decodes its own just before it computes.

    Linear layers, convolutions and embeddings are cast; norms and loose parameters are not. The module then computes
    in `compute_dtype`, to which whatever else it holds in its present dtype is converted. Parameters stay the same
    objects and hold the stored form, so every placement moves fewer bytes. `layer.weight` gives a view in the compute
    dtype, and what is changed in it is stored again. `state_dict()` is in the compute dtype.

    A weight that is a mapped file keeps it as its master copy: it is what `state_dict()` gives, what changes in place
    go to, and what comes back when casting is removed. Other weights are encoded in place. Applying it again replaces.

    Args:
        module: any module, of this library, of `transformers` or your own.
        storage_dtype: what a weight is stored in, usually `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        compute_dtype: what layers compute in; None is the module's present dtype.
        skip_modules_pattern: regular expressions, searched in dotted names: submodules that match stay, with all that
            is in them. "auto" stands for `DEFAULT_SKIP_PATTERNS` and adapters of PEFT, None for none. What the classes
            of the module and its submodules state in `_skip_layerwise_casting_patterns` and `_keep_in_fp32_modules`
            counts in any case.
        skip_modules_classes: submodules that stay, by class: classes, their names, or parts of their names in any
            case, such as "norm".
        non_blocking: accepted; decoding never blocks the host.
        storage: "plain" casts each value. "int8" and "fp8_scaled" (with `storage_dtype`) keep a scale for each row,
            which makes them several times more precise; biases stay as they are, and as the norms' own weights are no
            layers of these kinds, "norm" in the default and declared patterns does not count: the large matrices within
            adaptive norms are cast too.

    Raises:
        ValueError: if an argument makes no sense, a pattern is no regular expression, a weight is too large for a
            plain cast, or the module is quantised. Nothing has changed then.
        TypeError: if an argument is of the wrong type.
    """
    if is_quantized(module):
        raise ValueError(
            f"{type(module).__name__} is quantised: its layers are stored in few bits already. Load it without "
            "quantization_config to cast it"
        )
    encoding = parse_encoding(storage, storage_dtype)
    present = module_dtype(module)
    compute = present if compute_dtype is None else _checked_compute_dtype(compute_dtype)
    if not encoding.scaled and encoding.dtype.itemsize > compute.itemsize:
        raise ValueError(f"storage_dtype={encoding.dtype} takes more memory than compute_dtype={compute}")
    skip = _parse_skip(skip_modules_pattern, skip_modules_classes, encoding)
    layers = dict(_layers(module, skip))
    chosen = _castable(module, layers, encoding)
    _refuse_overflow(layers, chosen, encoding)
    with at_home(module):
        _restore(module, keep=chosen, encoding=encoding)
        _remember_others(module, chosen, present, compute)
        in_memory = _store(layers, chosen, encoding, compute)
        _convert_others(module, present, compute)
    _show_dtype(module)
    if in_memory:
        logger.warning(
            "%s was in memory only: its weights are now the rounded ones (%s). What disabling gives back, and what is "
            "saved, are these. Load it from safetensors files in its own dtype (dtype='auto') to keep exact ones.",
            type(module).__name__,
            format_bytes(in_memory),
        )


def remove_layerwise_casting(module: nn.Module) -> None:
    """Take layerwise casting back: every layer and dtype is as before.

    Weights whose master copy is a mapped file are exact again; others are what their stored form decodes to. After a
    `.to(dtype)` in between, that dtype counts. A module that is not cast stays as it is.
    """
    if not is_cast(module):
        return
    with at_home(module):
        _restore(module, keep=frozenset(), encoding=None)
        # What places the tensors learns from this that they have changed.
        cast("Any", module)._apply(_unchanged)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def is_cast(module: nn.Module) -> bool:
    """Whether a layer of the module is stored in fewer bits."""
    return any(isinstance(part, CastLayer) for part in module.modules())


def compute_dtypes(module: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """Name and dtype of each parameter and buffer, of stored ones the dtype that they are decoded to."""
    for kind in ("_parameters", "_buffers"):
        for path, part in submodules(module):
            if isinstance(part, Parts):
                if kind == "_parameters":
                    yield path, part.dtype
                continue
            stored = stored_parts(part)
            scales = {scale_name(name) for name in stored}
            tensors: dict[str, torch.Tensor | None] = getattr(part, kind)
            for name, tensor in tensors.items():
                if tensor is not None and name not in scales:
                    dtype = stored[name].compute_dtype if name in stored else tensor.dtype
                    yield (f"{path}.{name}" if path else name), dtype


def module_dtype(module: nn.Module) -> torch.dtype:
    """What a module computes in: what its `dtype` says, else the dtype of its first floating-point tensor."""
    own = getattr(module, "dtype", None)
    if isinstance(own, torch.dtype) and own.is_floating_point and own.itemsize > 1:
        return own
    for _, dtype in compute_dtypes(module):
        # One byte is a form of storage; nothing computes in it.
        if dtype.is_floating_point and dtype.itemsize > 1:
            return dtype
    return torch.get_default_dtype()


def _checked_compute_dtype(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"compute_dtype must be a torch.dtype, such as torch.bfloat16, not {dtype!r}")
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise ValueError(f"compute_dtype={dtype}: layers compute in float32, bfloat16, float16 or float64")
    return dtype


def _parse_skip(pattern: Any, classes: Any, encoding: Encoding) -> _Skip:
    """Check what is to be skipped.

    Raises:
        ValueError: a pattern is no regular expression.
        TypeError: something is of the wrong type.
    """
    if pattern == "auto":
        patterns: list[Any] = [*DEFAULT_SKIP_PATTERNS, *_ADAPTERS]
        patterns = [part for part in patterns if not encoding.scaled or part != "norm"]
    else:
        patterns = [] if pattern is None else [pattern] if isinstance(pattern, str) else list(pattern)
    for part in patterns:
        if not isinstance(part, str):
            raise TypeError(f"skip_modules_pattern holds {part!r}; give regular expressions as text")
        try:
            re.compile(part)
        except re.error as error:
            raise ValueError(f"skip_modules_pattern: {part!r} is no regular expression: {error}") from error
    entries: list[Any] = [] if classes is None else [classes] if isinstance(classes, (str, type)) else list(classes)
    for entry in entries:
        if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise TypeError(f"skip_modules_classes holds {entry!r}; give classes of modules, or (parts of) their names")
        if entry == "":
            raise ValueError("skip_modules_classes holds an empty name, which is a part of every name")
    return _Skip(
        patterns=tuple(patterns),
        classes=tuple(entry for entry in entries if isinstance(entry, type)),
        class_words=tuple(entry.lower() for entry in entries if isinstance(entry, str)),
        keep_matrices_in_norms=not encoding.scaled,
    )


def _layers(module: nn.Module, skip: _Skip) -> Iterator[tuple[str, nn.Module]]:
    """The layers to be cast, by their names within the module; what is skipped is skipped with all that is in it."""
    seen: set[int] = set()

    def visit(part: nn.Module, path: str, rules: list[tuple[int, tuple[str, ...]]]) -> Iterator[tuple[str, nn.Module]]:
        # A rule is patterns with the place in the path where the names that they are about begin.
        stays = path and any(re.search(pattern, path[start:]) for start, rule in rules for pattern in rule)
        if stays or skip.is_skipped(part) or id(part) in seen:
            return
        seen.add(id(part))
        if isinstance(part, SUPPORTED_LAYERS):
            yield path, part
            return
        declared = skip.declared(part)
        inner = [*rules, (len(path) + 1 if path else 0, declared)] if declared else rules
        for name, child in part._modules.items():
            if child is not None:
                yield from visit(child, f"{path}.{name}" if path else name, inner)

    yield from visit(module, "", [(0, skip.patterns)])


def _castable(module: nn.Module, layers: dict[str, nn.Module], encoding: Encoding) -> frozenset[int]:
    """The parameters, by id, that can be stored.

    A parameter that something shares which is not cast stays exact, as it has to be there anyway.
    """
    inside = set(map(id, layers.values()))
    elsewhere = {
        id(tensor)
        for part in module.modules()
        if id(part) not in inside
        for tensor in part._parameters.values()
        if tensor is not None
    }
    result: set[int] = set()
    for layer in layers.values():
        # Without a parameter of this name, the weight is computed (weight norm and its kin); such layers stay.
        if layer._parameters.get("weight") is None or getattr(layer, "max_norm", None) is not None:
            continue
        for tensor in layer._parameters.values():
            if tensor is None or id(tensor) in elsewhere:
                continue
            # A bias is small: where the encoding does not suit it, it stays.
            if tensor.dim() < 2 and (encoding.scaled or encoding.overflows(tensor.detach())):
                continue
            stored = isinstance(layer, CastLayer) and tensor is layer._parameters.get("weight")
            if (tensor.is_floating_point() or stored) and type(tensor.data) is torch.Tensor and tensor.numel() > 0:
                result.add(id(tensor))
    return frozenset(result)


def _refuse_overflow(layers: dict[str, nn.Module], chosen: frozenset[int], encoding: Encoding) -> None:
    """Look at all weights before any is changed.

    Raises:
        ValueError: naming those that the encoding cannot hold.
    """
    bad = [
        f"{path}.{name}" if path else name
        for path, layer in layers.items()
        for name, tensor in layer._parameters.items()
        if tensor is not None and id(tensor) in chosen and encoding.overflows(tensor.detach())
    ]
    if bad:
        raise ValueError(
            f"{len(bad)} weights hold values that {encoding.dtype} cannot: {', '.join(bad[:5])}. "
            "Use storage='fp8_scaled' or 'int8', or skip these layers with skip_modules_pattern."
        )


def _store(layers: dict[str, nn.Module], chosen: frozenset[int], encoding: Encoding, compute: torch.dtype) -> int:
    """Give the chosen parameters their stored form, one by one; returns the bytes of those without a master copy."""
    in_memory = 0
    mapped = mapped_ranges()
    done: dict[int, tuple[Stored, torch.Tensor | None]] = {}
    for layer in layers.values():
        entries: dict[str, tuple[Stored, torch.Tensor | None]] = {}
        for name, parameter in layer._parameters.items():
            if parameter is None or id(parameter) not in chosen:
                continue
            if isinstance(layer, CastLayer) and name in layer._stored:
                # It is stored in this way already, and would only become less exact.
                layer._stored[name].compute_dtype = compute
                done[id(parameter)] = layer._stored[name], layer._buffers.get(scale_name(name))
            elif id(parameter) not in done:
                values = parameter.detach()
                stored = Stored(encoding, compute, parameter, values if mapped.holds(values) else None)
                form, scale = encoding.encode(values)
                if scale is not None and placement_of(layer) is not None:
                    # Where a placement takes it from, and brings it back to: its parameter may be on a device now.
                    scale = scale.cpu()
                in_memory += values.nbytes if stored.master is None and not values.is_meta else 0
                if not form.is_floating_point():
                    parameter.requires_grad_(False)
                parameter.data = form
                done[id(parameter)] = stored, scale
            entries[name] = done[id(parameter)]
        _install(layer, entries)
    return in_memory


def _install(layer: nn.Module, entries: dict[str, tuple[Stored, torch.Tensor | None]]) -> None:
    if not entries:
        return
    for name, (_, scale) in entries.items():
        if scale is not None:
            layer.register_buffer(scale_name(name), scale, persistent=False)
    cast_layer(layer, {name: stored for name, (stored, _) in entries.items()})


def _restore(module: nn.Module, keep: frozenset[int], encoding: Encoding | None) -> None:
    """Undo casting, but for the parameters in `keep` that are stored in `encoding` already."""
    done: set[int] = set()
    for part in module.modules():
        if isinstance(part, CastLayer):
            names = list(part._stored)
            kept = {
                name: part._stored[name]
                for name in names
                if id(part._parameters[name]) in keep and part._stored[name].encoding == encoding
            }
            for name in names:
                if name not in kept:
                    _give_back(part, name, done)
            if kept:
                cast_layer(part, kept)
            else:
                uncast_layer(part)
        for name, origin in part.__dict__.pop(_ORIGINS, {}).items():
            tensor = part._parameters[name] if name in part._parameters else part._buffers.get(name)
            if tensor is not None and tensor.dtype == origin.converted:
                tensor.data = tensor.data.to(origin.dtype) if origin.master is None else origin.master.to(tensor.device)
        if isinstance(part, _ShowsDtype):
            part.__class__ = type(part).__bases__[1]


def _give_back(layer: CastLayer, name: str, done: set[int]) -> None:
    """One parameter as it was: the exact values where they are known, else the decoded ones."""
    stored, parameter = layer._stored[name], layer._parameters[name]
    assert parameter is not None
    if id(parameter) not in done:
        done.add(id(parameter))
        with torch.no_grad():
            values = decoded(layer, name).detach() if stored.master is None else stored.master
        parameter.data = values.to(device=parameter.device, dtype=stored.original_dtype)
        parameter.requires_grad_(stored.requires_grad)
    layer._buffers.pop(scale_name(name), None)
    layer._non_persistent_buffers_set.discard(scale_name(name))


def _others(module: nn.Module, present: torch.dtype) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Tensors in the module's dtype that are not stored in fewer bits, but for what its classes keep in float32."""
    kept: set[int] = set()
    for part in module.modules():
        words = getattr(part, "_keep_in_fp32_modules", None) or ()
        for name, tensor in part.named_parameters():
            if words and set(words).intersection(name.split(".")):
                kept.add(id(tensor))
    for part in module.modules():
        stored = stored_parts(part)
        own = {*stored, *map(scale_name, stored)}
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None and tensor.dtype == present and id(tensor) not in kept and name not in own:
                yield part, name, tensor


def _remember_others(module: nn.Module, chosen: frozenset[int], present: torch.dtype, compute: torch.dtype) -> None:
    """Note what is about to be converted."""
    if present == compute:
        return
    mapped = mapped_ranges()
    for part, name, tensor in _others(module, present):
        if id(tensor) not in chosen:
            master = tensor.detach() if mapped.holds(tensor) else None
            part.__dict__.setdefault(_ORIGINS, {})[name] = _Origin(compute, present, master)


def _convert_others(module: nn.Module, present: torch.dtype, compute: torch.dtype) -> None:
    """Bring what is not stored in fewer bits to the compute dtype."""
    convert = {id(tensor) for _, _, tensor in _others(module, present)} if present != compute else set[int]()

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(compute) if id(tensor) in convert else tensor

    cast("Any", module)._apply(converted)


class _ShowsDtype(nn.Module):
    """Mixed into models of other libraries, whose `dtype` would be that of the stored form."""

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        for part in self.modules():
            if isinstance(part, CastLayer):
                return next(iter(part._stored.values())).compute_dtype
        return cast("Any", super()).dtype

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _showing_class(cls: type[nn.Module]) -> type[nn.Module]:
    entries = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_ShowsDtype, cls), entries)


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    new = _showing_class(cls)
    return new.__new__(new)


def _show_dtype(module: nn.Module) -> None:
    """Let models of other libraries say what they compute in; ours ask `compute_dtypes`."""
    for part in module.modules():
        foreign = not isinstance(part, (OffloadMixin, _ShowsDtype))
        if foreign and isinstance(getattr(type(part), "dtype", None), property) and is_cast(part):
            part.__class__ = _showing_class(type(part))
