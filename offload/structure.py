"""What a module consists of: its tensors with their names, its blocks, its leaves, and who calls whom."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diffusion_core.errors import PlacementError

from .quantized import inner_tensors, is_wrapper, size_in_bytes

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Their forward reads the tensors of their children without calling these.
_READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def tensor_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and buffer, by its first name; a tied tensor has several.

    A module that is a part in two places counts in the first of them.
    """
    known = {name for name, _ in submodules(module)}
    first: dict[int, str] = {}
    result: dict[str, list[str]] = {}
    for name, tensor in named_tensors(module):
        if name.rpartition(".")[0] in known:
            result.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return result


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def submodules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, called "", and all its parts, by dotted names."""
    yield from cast("Iterator[tuple[str, nn.Module]]", module.named_modules())


def nbytes(module: nn.Module) -> dict[str, int]:
    """Bytes of each tensor, by its first name."""
    tensors = dict(named_tensors(module))
    return {name: size_in_bytes(tensors[name]) for name in tensor_names(module)}


def calling_module(module: nn.Module, tensor: str) -> str:
    """The name of the innermost module around a tensor that is called: lists of modules or parameters are not."""
    path = tensor.rpartition(".")[0]
    while path and isinstance(module.get_submodule(path), _NOT_CALLED):
        path = path.rpartition(".")[0]
    return path


def is_within(name: str, path: str) -> bool:
    """Whether a dotted name is a path, or lies below it."""
    return not path or name == path or name.startswith(f"{path}.")


def check_movable(module: nn.Module) -> None:
    """Refuse tensors that can be moved neither by their data nor, quantised weights, by that of their parts.

    Raises:
        PlacementError: a tensor has no values, or has others inside and is no such weight.
    """
    for name, tensor in named_tensors(module):
        if tensor.is_meta:
            raise PlacementError(f"{name!r} is on the meta device and has no values; load the weights first")
        parts = inner_tensors(tensor).values()
        if any(map(is_traceable_wrapper_subclass, parts or [tensor.data])):
            kind = type(tensor.data).__name__
            raise PlacementError(f"{name!r} is a {kind}, which cannot be moved by its data; keep it on one device")


def fingerprint(modules: Iterable[nn.Module]) -> list[Any]:
    """What a plan rests on: the parts of modules and which tensors each has. New values change nothing."""
    found: list[Any] = []
    for module in modules:
        for part in module.modules():
            found.append(id(part))
            found += [(name, is_wrapper(tensor)) for name, tensor in part._parameters.items() if tensor is not None]
            found += [name for name, tensor in part._buffers.items() if tensor is not None]
    return found


def find_leaves(module: nn.Module) -> list[str]:
    """Names of the modules that have tensors of their own, in the order of definition."""
    found: list[str] = []
    whole: str | None = None
    for name, part in submodules(module):
        if whole is not None and is_within(name, whole):
            continue
        if isinstance(part, _READ_THEIR_CHILDREN):
            whole = name
        own: list[Any] = [*part._parameters.values(), *part._buffers.values()]
        if isinstance(part, _READ_THEIR_CHILDREN) or any(tensor is not None for tensor in own):
            if isinstance(part, _NOT_CALLED):
                name = calling_module(module, f"{name}.x")
            if name not in found:
                found.append(name)
    return found


def find_blocks(module: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the blocks, and of the modules with tensors beside them, both in the order of definition.

    A block is a module of a class that `_repeated_blocks`, or else `_no_split_modules`, names, on whatever model
    in the module states it. So is an element of an `nn.ModuleList` or `nn.Sequential`, unless there are blocks
    inside of it: declared ones, or a stack of modules that have parts themselves. Modules around blocks are looked
    into; all others stay whole.
    """
    declared = _declared(module)
    blocks: list[str] = []
    loose: list[str] = []
    seen: set[int] = set()  # numbers, since a function that calls itself keeps what it knows until a collection

    def holds_declared(part: nn.Module) -> bool:
        return any(type(each).__name__ in declared for each in list(part.modules())[1:])

    def visit(name: str, part: nn.Module, element: bool) -> None:
        if id(part) in seen or next(_tensors(part), None) is None:
            return
        seen.add(id(part))
        simple = not holds_declared(part) and not any(_is_stack_of_parts(each) for each in part.modules())
        called = bool(name) and not isinstance(part, _NOT_CALLED)
        if called and (type(part).__name__ in declared or (element and simple)):
            blocks.append(name)
            seen.update(map(id, part.modules()))
        elif isinstance(part, (nn.ParameterList, nn.ParameterDict)):
            pass  # never called; its tensors come in with the module around it
        elif not name or isinstance(part, _LISTS) or holds_declared(part) or _holds_list(part):
            for child_name, child in part.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child, isinstance(part, _LISTS))
        else:
            loose.append(name)
            seen.update(map(id, part.modules()))

    visit("", module, False)
    return blocks, loose


def _holds_list(part: nn.Module) -> bool:
    return not isinstance(part, _READ_THEIR_CHILDREN) and any(isinstance(each, _LISTS) for each in part.modules())


def _is_stack_of_parts(part: nn.Module) -> bool:
    """Whether it is a list of modules with tensors that all have children: blocks rather than layers."""
    if not isinstance(part, _LISTS):
        return False
    elements = [each for each in part.children() if next(_tensors(each), None) is not None]
    return bool(elements) and all(next(each.children(), None) is not None for each in elements)


def _declared(module: nn.Module) -> set[str]:
    found: set[str] = set()
    for part in module.modules():
        names: Iterable[str] | None = getattr(part, "_repeated_blocks", None)
        names = names or getattr(part, "_no_split_modules", None)
        found.update(names or ())
    return found


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
