"""`PromptCache`: what text encoders made of a prompt, kept from call to call."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .gates import CALL, Answer, unwatch, watch, watchers_of
from .sizes import parse_bytes
from .structure import named_tensors

LIMIT = 1 << 26
# Outside of placement and of everything else: an answer brings no weights in.
_ORDER = -30


class PromptCache:
    """Results of text encoders by what they were told, on the CPU, the least recently used ones dropped first.

    Told apart are the encoder and how often its weights were edited or replaced, all arguments by their values, the
    kind of device and autocast. Where weights are at the moment does not matter. Edits through `.data` leave no trace:
    call `clear()` after those. Where gradients are recorded, encoders compute.

    Args:
        limit: bytes that the results may take together, also as "64MB".

    Attributes:
        hits, misses: how many calls were answered, and how many were not.

    Raises:
        ValueError: if `limit` is no size.
    """

    def __init__(self, limit: int | str = LIMIT) -> None:
        self.limit = parse_bytes(limit, "limit")
        self.hits = self.misses = 0
        self._results: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._encoders: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._results)

    @property
    def size(self) -> int:
        """Bytes that the results take."""
        return self._size

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._results.clear()
            self._size = 0

    def attend(self, encoder: nn.Module) -> None:
        """Answer for this encoder from now on."""
        if not any(isinstance(each, _AtEncoder) and each.cache is self for each in watchers_of(encoder)):
            watch(encoder, CALL, _AtEncoder(self, encoder))
            self._encoders.add(encoder)

    def remove(self) -> None:
        """Leave the encoders as they were, and drop all results."""
        for encoder in list(self._encoders):
            unwatch(encoder, CALL, lambda each: isinstance(each, _AtEncoder) and each.cache is self)
        self._encoders.clear()
        self.clear()

    def find(self, key: Hashable, device: torch.device) -> Any:
        """A copy of the result on a device, or None."""
        with self._lock:
            found = self._results.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._results.move_to_end(key)

        def copied(leaf: Any) -> Any:
            return torch.empty_like(leaf, device=device).copy_(leaf) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(copied, found[0])

    def keep(self, key: Hashable, output: Any) -> None:
        """Note a result, unless it is too large or holds what is no value."""
        leaves = pytree.tree_leaves(output)
        if not all(isinstance(leaf, (torch.Tensor, int, float, str, type(None))) for leaf in leaves):
            return
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
        if size > self.limit:
            return

        def kept(leaf: Any) -> Any:
            return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf

        with self._lock:
            self._size -= self._results.pop(key, (None, 0))[1]
            self._results[key] = (pytree.tree_map(kept, output), size)
            self._size += size
            while self._size > self.limit:
                self._size -= self._results.popitem(last=False)[1][1]


class _Waiting(threading.local):
    """The keys of the calls that a thread is making."""

    def __init__(self) -> None:
        self.keys: list[Hashable | None] = []


class _AtEncoder:
    order = _ORDER

    def __init__(self, cache: PromptCache, encoder: nn.Module) -> None:
        self.cache = cache
        self._encoder = weakref.ref(encoder)
        self._waiting = _Waiting()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | Answer:
        encoder = self._encoder()
        told = _told(args, kwargs)
        if encoder is None or encoder.training or torch.is_grad_enabled() or told is None:
            self._waiting.keys.append(None)
            return args, kwargs
        values, device = told
        key = (self, _state(encoder), values, device.type, torch.is_autocast_enabled(device.type))
        found = self.cache.find(key, device)
        self._waiting.keys.append(key if found is None else None)
        return (args, kwargs) if found is None else Answer(found)

    def result(self, output: Any) -> Any:
        key = self._waiting.keys[-1]
        if key is not None:
            self.cache.keep(key, output)
        return output

    def leave(self) -> None:
        self._waiting.keys.pop()


def _state(encoder: nn.Module) -> int:
    """Which weights an encoder has."""
    tensors = named_tensors(encoder)
    return hash(tuple([(id(each), each.dtype, 0 if each.is_inference() else each._version) for _, each in tensors]))


def _told(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, torch.device] | None:
    """The arguments by their values, and the device that they are on; None if they cannot be compared."""
    found: list[Hashable] = []
    device: torch.device | None = None
    for name, value in [*enumerate(args), *sorted(kwargs.items())]:
        if isinstance(value, torch.Tensor):
            device = device or value.device
            if value.is_meta or value.numel() > 1 << 20:
                return None
            values = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            found.append((name, values, tuple(value.shape), value.dtype))
        elif isinstance(value, (int, float, str, type(None), torch.dtype)):
            found.append((name, value))
        else:
            return None
    return None if device is None else (tuple(found), device)
