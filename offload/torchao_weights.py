"""Weights quantised by torchao: made one by one, taken to plain tensors for safetensors, and made of these again.

The names and notes in the files are those of `torchao.prototype.safetensors`, which other libraries write too: the
weight "x.weight" is stored as "x._weight_qdata", "x._weight_scale" and so on, and the notes say under "x.weight" what
kind of tensor these make.
"""

import contextlib
import functools
import importlib
import json
import logging
import math
from collections.abc import Generator, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from diffusion_core.errors import CheckpointError

from .quantized import inner_tensors, is_wrapper

NAMES_KEY = "tensor_names"
_PARTS_KEY = "_tensor_data_names"
# So many numbers are quantised at once, and no fewer rows than that.
_AT_ONCE = 1 << 18
_FEWEST_ROWS = 64
# What the packages log while torchao is imported: kernels for other machines that are not used here.
_CHATTY = ("torchao", "torch.utils._pytree", "root")


@contextlib.contextmanager
def _quietly() -> Generator[None]:
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@functools.cache
def torchao() -> Any:
    """The module `torchao.quantization`.

    Raises:
        ImportError: torchao is not installed, or too old.
    """
    try:
        with _quietly():
            _module("prototype.safetensors.safetensors_utils")
            return _module("quantization")
    except ImportError as error:
        raise ImportError(
            "quantised weights need torchao 0.15 or newer: pip install 'diffusion-core[quant]', "
            f"or pip install -U torchao ({error})"
        ) from error


def _module(name: str) -> Any:
    return importlib.import_module(f"torchao.{name}")


def _safetensors() -> Any:
    torchao()
    return _module("prototype.safetensors.safetensors_utils")


def is_config(value: Any) -> bool:
    """Whether a value is a configuration of torchao, such as `Int8WeightOnlyConfig()`."""
    if not type(value).__module__.startswith("torchao"):
        return False
    torchao()
    return isinstance(value, _module("core.config").AOBaseConfig)


def config_to_dict(config: Any) -> dict[str, Any]:
    """A configuration of torchao as JSON has it."""
    return _module("core.config").config_to_dict(config)


def config_from_dict(content: Mapping[str, Any]) -> Any:
    """The way back.

    Raises:
        ValueError: torchao knows no such configuration.
    """
    torchao()
    try:
        return _module("core.config").config_from_dict(dict(content))
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise ValueError(f"torchao makes no configuration of {dict(content)}: {error}") from error


def quantize_weight(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """A weight of a linear layer as torchao quantises it, on the device where it is.

    Where rows are quantised independently of each other, a few are at a time: torchao makes ten copies as it goes.

    Args:
        name: the dotted name of the weight, for configurations that go by it.
        weight: (outputs, inputs), a floating-point dtype.

    Raises:
        ValueError: the configuration does not suit the weight, or changes more than that.
    """
    step = max(_FEWEST_ROWS, _AT_ONCE // weight.shape[1])
    if weight.is_meta or step >= weight.shape[0]:
        return _quantized(name, weight, config)
    form = _form_by_rows(name, weight, config, step)
    if form is None:
        return _quantized(name, weight, config)
    inner = {key: torch.empty_like(part, device=weight.device) for key, part in inner_tensors(form).items()}
    for begin in range(0, weight.shape[0], step):
        rows = slice(begin, begin + step)
        for key, part in inner_tensors(_quantized(name, weight[rows], config)).items():
            inner[key][rows] = part
    kind: Any = type(form)
    return kind.__tensor_unflatten__(inner, kind.__tensor_flatten__(form)[1], form.shape, form.stride())


def _form_by_rows(name: str, weight: torch.Tensor, config: Any, step: int) -> torch.Tensor | None:
    """What quantising gives, without values; None if it is not the same row by row."""
    try:
        sizes = (weight.shape, (step, weight.shape[1]))
        empty = (torch.empty(size, dtype=weight.dtype, device="meta") for size in sizes)
        whole, part = (_quantized(name, each, config) for each in empty)
    except ValueError:
        return None
    of_whole, of_part = inner_tensors(whole), inner_tensors(part)
    rest: list[Any] = [cast("Any", each).__tensor_flatten__()[1] for each in (whole, part) if is_wrapper(each)]
    alike = len(rest) == 2 and rest[0] == rest[1] and of_whole.keys() == of_part.keys()
    by_rows = alike and all(
        of_whole[key].shape == (weight.shape[0], *of_part[key].shape[1:]) and of_part[key].shape[0] == step
        for key in of_whole
    )
    return whole if by_rows else None


def _quantized(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    quantization = torchao()
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    root: nn.Module = layer
    for part in reversed(name.split(".")[:-1]):
        outer = nn.Module()
        outer.add_module(part, root)
        root = outer
    try:
        quantization.quantize_(root, config, filter_fn=None)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, TypeError, ImportError) as error:
        raise ValueError(
            f"{type(config).__name__} does not suit {name} of shape {tuple(weight.shape)} and dtype {weight.dtype}: "
            f"{error}. Name its layer in modules_to_not_convert, or take another configuration"
        ) from error
    made = layer.weight.detach()
    if root.get_submodule(name.rpartition(".")[0]) is not layer:
        raise ValueError(f"{type(config).__name__} replaces layers, which is not supported: take one for weights")
    return made


def flattened(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The same tensors with those of torchao as what they consist of, and the notes to make them again.

    Raises:
        CheckpointError: a tensor has no such form.
    """
    if not any(is_wrapper(tensor) for tensor in tensors.values()):
        return dict(tensors), {}
    plain: dict[str, torch.Tensor] = {}
    notes: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not is_wrapper(tensor):
            plain[name] = tensor
            notes[name] = json.dumps({"_type": "Tensor"})
            continue
        utils = _safetensors()
        if type(tensor).__name__ not in utils.ALLOWED_TENSORS_SUBCLASSES:
            raise CheckpointError(f"{name} is a {type(tensor).__name__}, which torchao cannot store in safetensors yet")
        notes[name] = json.dumps(tensor.detach(), cls=utils.TensorSubclassAttributeJSONEncoder)
        plain |= {stored_name(name, part): each.detach() for part, each in inner_tensors(tensor).items()}
    notes[NAMES_KEY] = json.dumps(list(tensors))
    return plain, notes


def stored_name(name: str, part: str) -> str:
    """The name in a file of a part of a weight: "x._weight_scale" of "x.weight"."""
    path, _, leaf = name.rpartition(".")
    return f"{path}._{leaf}_{part}" if path else f"_{leaf}_{part}"


def stored_parts(notes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """For each quantised weight that the notes of files speak of: the names of its parts, with their names there."""
    found: dict[str, dict[str, str]] = {}
    for name, text in notes.items():
        if f'"{_PARTS_KEY}"' not in text:
            continue
        try:
            parts = [str(part) for part in json.loads(text)[_PARTS_KEY]]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        found[name] = {part: stored_name(name, part) for part in parts}
    return found


def described(name: str, note: str, shapes: Iterable[tuple[int, ...]]) -> tuple[str, int]:
    """What kind of weight a note is about, and of how many values; torchao is not needed for this.

    Args:
        shapes: those of its parts.
    """
    form = json.loads(note)
    stated = form.get("_data", {}).get("shape")
    return str(form.get("_type", name)), math.prod(stated) if stated else max(map(math.prod, shapes))


def composed(name: str, note: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A quantised weight from its parts and the note about it.

    Raises:
        CheckpointError: torchao makes no tensor of these.
    """
    utils = _safetensors()
    try:
        form = json.loads(note)
        form["_data"].update(parts)
        return utils.object_from_dict(form)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise CheckpointError(f"torchao cannot make {name!r} of what the file holds: {error}") from error
