"""From a checkpoint into a module: build without weights, assign tensor by tensor, leave nothing undefined."""

# pyright: reportPrivateUsage=false
# The tables of nn.Module are written to directly: its own setters would register a tensor again, not share it.

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from diffusion_core.errors import ConfigError, KeyMismatchError, NumericalError
from diffusion_core.logging import get_logger
from diffusion_core.progress import progress_bar

from .checkpoint import Checkpoint, TensorInfo, is_finite
from .memory_format import layout_of, pays_channels_last
from .quantized import for_dtype, hold_parts, inner_tensors, is_wrapper, size_in_bytes

logger = get_logger(__name__)

_Module = TypeVar("_Module", bound=nn.Module)

# transformers changes torch's default dtype, which all threads share, while it builds a model.
BUILDING = threading.RLock()
# From this size on, or with several files, a bar shows how far the load is.
_WORTH_A_BAR = 2**30
_HALF = frozenset({torch.float16, torch.bfloat16})


class WeightsOnMeta(TorchFunctionMode):
    """While active in a thread, memory that would be made uninitialised is made on the meta device.

    Layers make their weights with `torch.empty` and fill them after, which costs nothing on meta. What is computed
    (position tables and other buffers that no checkpoint holds) is made for real.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def build_without_weights(build: Callable[[], _Module]) -> _Module:
    """What `build` makes, with its weights on meta; weights on the CPU if its constructor reads their values."""
    with BUILDING:
        try:
            with WeightsOnMeta():
                return build()
        except (NotImplementedError, RuntimeError) as error:
            logger.debug("the constructor needs real weights (%s); building with them", error)
            return build_with_weights(build)


def build_with_weights(build: Callable[[], _Module]) -> _Module:
    """What `build` makes, with initial values.

    Raises:
        ConfigError: if torch cannot make tensors of the sizes that the config asks for.
    """
    with BUILDING:
        try:
            return build()
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"the config makes no model: {str(error).splitlines()[0]}") from error


@dataclass
class LoadOptions:
    """How tensors become those of the module.

    Attributes:
        dtype: for floating-point tensors; None keeps what the module was built with, "auto" what the files hold.
        place: where each goes, by its name.
        strict: refuse missing and unexpected names, and wrong shapes.
        ignore_mismatched_sizes: refuse all but wrong shapes.
        check_finite: refuse NaN and infinity; reads everything once.
        keep_in_fp32: tells the names that stay float32 where a half precision is asked for.
        rename: an older name's present form.
        ignore_unexpected: patterns of names that may be there for nothing.
        quantize: makes a quantised weight of one that has been read, if it is among those.
        channels_last: weights that are cast are laid out channels last where that is faster; those that are mapped
            stay as they are, since this would be a copy.
    """

    dtype: torch.dtype | Literal["auto"] | None = None
    place: Callable[[str], torch.device] = lambda name: torch.device("cpu")
    strict: bool = True
    ignore_mismatched_sizes: bool = False
    check_finite: bool = False
    keep_in_fp32: Callable[[str], bool] = lambda name: False
    rename: Callable[[str], str] = lambda name: name
    ignore_unexpected: Iterable[str] = ()
    quantize: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    channels_last: bool = False


@dataclass
class Differences:
    """How the names and shapes of a checkpoint and a module differ."""

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    )

    def as_loading_info(self) -> dict[str, Any]:
        """The dict that `output_loading_info=True` asks for."""
        return {
            "missing_keys": self.missing,
            "unexpected_keys": self.unexpected,
            "mismatched_keys": self.mismatched,
            "error_msgs": [],
        }

    def describe(self) -> str:
        """All of them, a group a line."""
        lines: list[str] = []
        if self.missing:
            lines.append(f"  {len(self.missing)} missing: {', '.join(self.missing)}")
        if self.unexpected:
            lines.append(f"  {len(self.unexpected)} unexpected: {', '.join(self.unexpected)}")
        if self.mismatched:
            shapes = [f"{name} (file {list(there)}, model {list(here)})" for name, there, here in self.mismatched]
            lines.append(f"  {len(self.mismatched)} of another shape or kind: {', '.join(shapes)}")
        return "\n".join(lines)


def load_into(
    module: nn.Module, checkpoint: Checkpoint, build: Callable[[], nn.Module], options: LoadOptions, what: str
) -> Differences:
    """Give `module` the tensors of `checkpoint`. On return all of its tensors are on their devices, with values.

    A tensor that has the right dtype and goes to the CPU is adopted as it is, mapped files included; another is
    converted by itself, so that at most one is in memory twice. Names that share a tensor share it afterwards.

    Args:
        module: as `build_without_weights` made it.
        build: makes the module with its own initial values, which are used where the checkpoint has none.
        what: how messages call the checkpoint.

    Raises:
        KeyMismatchError: listing every name that differs, unless `options` excuse it.
        NumericalError: if `check_finite` is set and a tensor is not finite.
    """
    expected: dict[str, torch.Tensor] = {
        name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    sources, differences = _match(expected, checkpoint, options)
    _report(differences, options, type(module).__name__, what)
    twins = _shared_names(expected)
    not_finite: list[str] = []
    done: dict[str, torch.Tensor] = {}
    quantize = options.quantize or _as_it_is
    show = len(checkpoint.files) > 1 or checkpoint.nbytes() > _WORTH_A_BAR
    label = f"Loading {type(module).__name__}"
    with progress_bar(
        total=checkpoint.nbytes(), desc=label, unit="B", unit_scale=True, leave=False, disable=not show
    ) as bar:
        for source, name in sources.items():
            info = checkpoint.infos[source]
            dtype = _target_dtype(name, info, expected[name], options)
            parts = checkpoint.parts(source, dtype) if _is_linear_weight(module, name) else None
            if parts is not None:
                owner, leaf = _owner(module, name)
                hold_parts(owner, {leaf: parts.to(options.place(name))})
                bar.update(parts.numel() * info.dtype.itemsize)
                continue
            tensor = _fetched(checkpoint, source, dtype, options.place(name), options.channels_last)
            if options.check_finite and not all(map(is_finite, inner_tensors(tensor).values() or [tensor])):
                not_finite.append(source)
            plain, tensor = tensor, quantize(name, tensor)
            if tensor is not plain:
                checkpoint.release(source)
            if name in done and not is_wrapper(tensor) and not torch.equal(done[name], tensor):
                raise KeyMismatchError(
                    f"{what} has different values under the names {twins[name]}, which share a tensor"
                )
            if name not in done:
                for other in twins.get(name, [name]):
                    _assign(module, other, tensor, first=name)
                    done[other] = tensor
            bar.update(tensor.numel() * info.dtype.itemsize)
    if not_finite:
        raise NumericalError(f"{what} holds NaN or infinity in {', '.join(not_finite)}: the file is damaged")
    for alias, kept in _aliases(expected, checkpoint, options, sources).items():
        _share(module, alias, kept)
    absent = {*differences.missing, *(name for name, _, _ in differences.mismatched)}
    _fill(module, absent, build, options)
    return differences


def _match(
    expected: Mapping[str, torch.Tensor], checkpoint: Checkpoint, options: LoadOptions
) -> tuple[dict[str, str], Differences]:
    """Pair the names of the checkpoint with those of the module."""
    differences = Differences()
    sources: dict[str, str] = {}
    taken: dict[str, str] = {}
    ignored = [re.compile(pattern) for pattern in options.ignore_unexpected]
    for source in checkpoint:
        name = source if source in expected else options.rename(source)
        if name not in expected or name in taken or (name != source and name in checkpoint.infos):
            if not any(pattern.search(source) for pattern in ignored):
                differences.unexpected.append(source)
            continue
        taken[name] = source
        info, tensor = checkpoint.infos[source], expected[name]
        if info.shape != tuple(tensor.shape) or info.dtype.is_floating_point != tensor.dtype.is_floating_point:
            differences.mismatched.append((name, info.shape, tuple(tensor.shape)))
        else:
            sources[source] = name
    aliases = _aliases(expected, checkpoint, options, sources)
    present = {*taken, *aliases}
    twins = _shared_names(expected)
    for name in expected:
        if not present.intersection(twins.get(name, [name])):
            differences.missing.append(name)
    for found in (differences.missing, differences.unexpected, differences.mismatched):
        found.sort()
    return sources, differences


def _aliases(
    expected: Mapping[str, torch.Tensor], checkpoint: Checkpoint, options: LoadOptions, sources: Mapping[str, str]
) -> dict[str, str]:
    """Names of the module that shall share the tensor of another, as the metadata of the files says."""
    result: dict[str, str] = {}
    loaded = set(sources.values())
    for alias, kept in checkpoint.aliases.items():
        name = alias if alias in expected else options.rename(alias)
        other = sources.get(kept)
        if name not in expected or name in loaded or other is None:
            continue
        if expected[name].shape == expected[other].shape:
            result[name] = other
    return result


def _shared_names(expected: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """For each name whose tensor the module knows under several names: all of these."""
    groups: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        groups.setdefault(id(tensor), []).append(name)
    return {name: names for names in groups.values() if len(names) > 1 for name in names}


def _report(differences: Differences, options: LoadOptions, model: str, what: str) -> None:
    refused = Differences(
        [] if not options.strict else differences.missing,
        [] if not options.strict else differences.unexpected,
        [] if not options.strict or options.ignore_mismatched_sizes else differences.mismatched,
    )
    text = differences.describe()
    if refused.describe():
        error = KeyMismatchError(
            f"{what} does not fit {model}:\n{text}\n"
            "Check that the config belongs to these weights. With strict=False, unexpected tensors are dropped, and "
            "missing or mismatched ones get the layers' own initial values."
        )
        error.missing, error.unexpected = differences.missing, differences.unexpected
        error.mismatched = differences.mismatched
        raise error
    if text:
        logger.warning("%s does not fit %s; what it lacks gets the layers' own initial values:\n%s", what, model, text)


def _target_dtype(name: str, info: TensorInfo, tensor: torch.Tensor, options: LoadOptions) -> torch.dtype:
    if not tensor.dtype.is_floating_point:
        return tensor.dtype
    wanted = tensor.dtype if options.dtype is None else options.dtype
    if not isinstance(wanted, torch.dtype):
        wanted = info.dtype
    return torch.float32 if wanted in _HALF and options.keep_in_fp32(name) else wanted


def _is_linear_weight(module: nn.Module, name: str) -> bool:
    owner, leaf = _owner(module, name)
    return leaf == "weight" and type(owner) is nn.Linear


def _as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def planned_bytes(checkpoint: Checkpoint, options: LoadOptions) -> Callable[[str, torch.Tensor], int]:
    """A function that tells how many bytes a tensor of the module will take, by its name."""
    infos = {options.rename(source): info for source, info in checkpoint.infos.items()} | dict(checkpoint.infos)

    quantize = options.quantize or _as_it_is

    def size(name: str, tensor: torch.Tensor) -> int:
        info = infos.get(name, TensorInfo(tensor.dtype, (), 0, 0))
        if name in checkpoint.quantized:
            return info.end - info.begin
        made = torch.empty(tensor.shape, dtype=_target_dtype(name, info, tensor, options), device="meta")
        return size_in_bytes(quantize(name, made))

    return size


def _fetched(
    checkpoint: Checkpoint, source: str, dtype: torch.dtype, device: torch.device, channels_last: bool
) -> torch.Tensor:
    info = checkpoint.infos[source]
    if dtype != info.dtype or device.type != "cpu":
        checkpoint.prefetch(source)
    tensor = checkpoint[source]
    if source in checkpoint.quantized:
        return for_dtype(tensor.to(device=device), dtype)
    cast = dtype != info.dtype
    last = source in checkpoint.channels_last or (channels_last and cast and pays_channels_last(tensor, dtype, device))
    layout = layout_of(tensor, "auto") if last else None
    # All in one copy: a second one of the largest weight would be a tenth of a model of 500 MB.
    mapped, tensor = tensor, tensor.to(device, dtype, memory_format=layout or torch.preserve_format)
    if tensor is not mapped:
        checkpoint.release(source)
    return tensor


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _assign(module: nn.Module, name: str, tensor: torch.Tensor, first: str) -> None:
    """Set a parameter or buffer; a parameter that has been set under its `first` name is shared."""
    owner, leaf = _owner(module, name)
    if leaf not in owner._parameters:
        owner._buffers[leaf] = tensor
    elif name == first:
        old = owner._parameters[leaf]
        assert old is not None
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad and not is_wrapper(tensor))
    else:
        _share(module, name, first)


def _share(module: nn.Module, name: str, first: str) -> None:
    owner, leaf = _owner(module, name)
    source, source_leaf = _owner(module, first)
    for kind in ("_parameters", "_buffers"):
        if leaf in getattr(owner, kind) and source_leaf in getattr(source, kind):
            getattr(owner, kind)[leaf] = getattr(source, kind)[source_leaf]


def _fill(module: nn.Module, absent: set[str], build: Callable[[], nn.Module], options: LoadOptions) -> None:
    """Give initial values to what the checkpoint did not hold, and bring buffers that no checkpoint holds along."""
    tensors = named_tensors(module)
    lost = absent | {name for name, tensor in tensors.items() if tensor.is_meta}
    fresh = (
        {name: tensor.detach() for name, tensor in named_tensors(build_with_weights(build)).items() if name in lost}
        if lost
        else {}
    )
    done: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = done.setdefault(id(tensor), name)
        owner, leaf = _owner(module, name)
        if name not in lost:
            if leaf in owner._buffers:
                owner._buffers[leaf] = tensor.to(options.place(name))
        elif first != name:
            _share(module, name, first)
        else:
            _assign(module, name, _initial(name, fresh[name], name in absent, options), first)


def _initial(name: str, value: torch.Tensor, stored: bool, options: LoadOptions) -> torch.Tensor:
    """An initial value as if it had come from the checkpoint; what no checkpoint holds keeps its dtype."""
    dtype = value.dtype
    if stored and isinstance(options.dtype, torch.dtype):
        dtype = _target_dtype(name, TensorInfo(dtype, (), 0, 0), value, options)
    return value.to(device=options.place(name), dtype=dtype)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, non-persistent ones too, under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
