"""Moves the tensors in the arguments and results of calls to a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch


def send(value: Any, device: torch.device) -> Any:
    """The same value with all its tensors on a device. Containers without a tensor to move stay the same objects."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        moved = [send(item, device) for item in items]
        if all(new is old for new, old in zip(moved, items, strict=True)):
            return cast("Any", value)
        kind: Any = type(items)
        return kind(*moved) if hasattr(kind, "_fields") else kind(moved)
    if is_dataclass(value) and isinstance(value, Mapping):  # outputs of models
        content = {field.name: getattr(value, field.name) for field in fields(value)}
        moved_fields = {name: send(item, device) for name, item in content.items()}
        if all(moved_fields[name] is item for name, item in content.items()):
            return cast("Any", value)
        return cast("Any", type(value))(**moved_fields)
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        moved_entries = {key: send(item, device) for key, item in entries.items()}
        if all(moved_entries[key] is item for key, item in entries.items()):
            return entries
        return moved_entries if type(entries) is dict else cast("Any", type(entries))(moved_entries)
    return value


def first_device(value: Any) -> torch.device | None:
    """The device of the first tensor in a value."""
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value).values())
    if isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            found = first_device(item)
            if found is not None:
                return found
    return None
