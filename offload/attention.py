"""`attention`: the one function through which every model attends, and the settings of how it does.

The settings belong to the layers of a model. What no layer has set is that of the `attention_backend` around the call,
or else that of the environment.
"""

import os
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F

from diffusion_core.logging import get_logger

from .attention_backends import BACKENDS, Backend, backend_named
from .attention_kernels import RefusedError, native
from .attention_masks import DEFAULT_MAX_BYTES, Call, packed, padding_of, split, worth_splitting

logger = get_logger(__name__)
SliceSize: TypeAlias = int | str | None
# Names for code that was written for the reference: AttentionBackendName.FLASH.
AttentionBackendName = Enum("AttentionBackendName", {name.upper(): name for name in BACKENDS}, type=str)
VARIABLES = ("DIFFUSION_CORE_ATTENTION_BACKEND", "DIFFUSERS_ATTN_BACKEND")


@dataclass(frozen=True)
class AttentionSettings:
    """How the layers of a model attend. Every layer has its own, so nothing is shared between models.

    Args:
        backend: a key of `BACKENDS`; None for that of the surroundings, which is "native" if nothing says otherwise.
        slice_size: None computes all heads at once, a number so many heads of one sample at a time, "auto" half of
            them, and "max" one. Less memory where torch has no fused kernel, with the same numbers.
        strict: raise where the backend cannot take a call, in place of leaving the call to torch.
        max_bytes: what the backend "chunked" may take besides its result.

    Raises:
        ValueError: if there is no such backend, or the others are out of range.
    """

    backend: str | None = None
    slice_size: SliceSize = None
    strict: bool = False
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        if self.backend is not None:
            object.__setattr__(self, "backend", backend_named(self.backend).name)
        size = self.slice_size
        if not (size in (None, "auto", "max") or (type(size) is int and size > 0)):
            raise ValueError(f"slice_size={size!r} must be 'auto', 'max', or a number of heads, 1 or more")
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            raise ValueError(f"max_bytes={self.max_bytes!r} must be a number of bytes, 1 or more")

    def __deepcopy__(self, memo: Any) -> "AttentionSettings":
        return self  # it never changes, and a copied model then is as fast as the first

    def heads_at_once(self, heads: int) -> int:
        """How many of `heads` heads are computed at a time."""
        size = self.slice_size
        if isinstance(size, str):
            size = max(heads // 2, 1) if size == "auto" else 1
        return min(size or heads, heads)


DEFAULT = AttentionSettings()


def _of_environment() -> AttentionSettings:
    """The settings that environment variables ask for."""
    for variable in VARIABLES:
        name = os.environ.get(variable)
        if name:
            try:
                settings = AttentionSettings(name)
                backend_named(name).require_package()
            except (ValueError, ImportError) as error:
                raise type(error)(f"{variable}={name}: {error}") from error
            return settings
    return DEFAULT


class _Surroundings(threading.local):
    """What holds for layers that have set nothing, in this thread."""

    settings = _of_environment()


_surroundings = _Surroundings()
# Who has changed the surroundings, in any thread: what is looked at first since it is cheap, and what makes compiled
# code compile again, which does not look at values of a thread.
_changed: tuple[str, ...] = () if _surroundings.settings is DEFAULT else ("environment",)


@contextmanager
def attention_backend(
    backend: str = "native", *, strict: bool = False, max_bytes: int = DEFAULT_MAX_BYTES
) -> Generator[None]:
    """A context in which models without a backend of their own compute attention with this one, in this thread.

    Args:
        backend: as for `set_attention_backend` of models.
        strict: raise where the backend cannot take a call, in place of leaving the call to torch.
        max_bytes: what the backend "chunked" may take besides its result.

    Raises:
        ValueError: if there is no such backend.
        MissingPackageError: if it needs a package that is not installed.
    """
    global _changed
    settings = AttentionSettings(str(backend_named(backend).name), strict=strict, max_bytes=max_bytes)
    backend_named(backend).require_package()
    before, mark = _surroundings.settings, repr(settings)
    _surroundings.settings = settings
    with _marking:
        _changed = (*_changed, mark)
    try:
        yield
    finally:
        _surroundings.settings = before
        with _marking:
            marks = list(_changed)
            marks.remove(mark)
            _changed = tuple(marks)


_marking = threading.Lock()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    settings: AttentionSettings = DEFAULT,
) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1).

    Args:
        query: shape (batch, query tokens, heads, head size).
        key: shape (batch, key tokens, heads, head size).
        value: as `key`.
        attn_mask: broadcastable to (batch, heads, query tokens, key tokens); bool (True takes part) or added to the
            scores.
        is_causal: each query sees keys up to its own position; not together with a mask.
        scale: factor of the scores, 1 / sqrt(head size) by default.
        settings: those of the layer.

    Returns:
        As `query`, with the head size of `value`.

    Raises:
        ValueError: if a backend that was set with `strict=True` cannot take the call.
    """
    if settings is DEFAULT and not _changed:
        parts = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        attended = F.scaled_dot_product_attention(*parts, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
        return attended.transpose(1, 2)
    around = settings if settings.backend is not None else _surroundings.settings
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    call = Call(query, key, value, attn_mask, is_causal, scale, around.max_bytes)
    backend, strict = around.backend or "native", around.strict
    if settings.slice_size is None:
        return _attend(call, backend, strict)
    rows = [
        torch.cat([_attend(part, backend, strict) for part in sample], dim=2)
        for sample in _slices(call, settings.heads_at_once(query.shape[2]))
    ]
    return torch.cat(rows)


def _attend(call: Call, name: str, strict: bool) -> torch.Tensor:
    """One call, by a backend."""
    if name == "native":
        return native(call)
    backend = BACKENDS[name]
    if not torch.compiler.is_compiling():
        return attend(call, backend, strict)
    if backend.inline:
        return backend.kernel.dense(call)
    options = (call.is_causal, call.scale, call.max_bytes, name, strict)
    if call.mask is None:
        return _opaque(call.query, call.key, call.value, *options)
    return _opaque_with_mask(call.query, call.key, call.value, call.mask, *options)


def attend(call: Call, backend: Backend, strict: bool = False) -> torch.Tensor:
    """One call by a backend, or where it cannot take it by torch, which is said once.

    Raises:
        ValueError: if it cannot, and `strict` is set.
    """
    reason = backend.refuses(call)
    if reason is None:
        try:
            return _by_kernel(call, backend, strict)
        except RefusedError as error:
            reason = str(error)
    shape = f"{str(call.query.dtype).removeprefix('torch.')} with heads of {call.query.shape[-1]}"
    kind = "masked " if call.mask is not None else "causal " if call.is_causal else ""
    message = f"attention backend {backend.name!r} cannot take {kind}attention of {shape} on {call.query.device.type}"
    if strict:
        raise ValueError(f"{message}: {reason}; set_attention_backend('native') can")
    _say_once(f"{message}: {reason}. torch computes such calls")
    return native(call)


def _by_kernel(call: Call, backend: Backend, strict: bool) -> torch.Tensor:
    """One call that the backend can take; padding is left out for those that take no mask."""
    kernel = backend.kernel
    if call.masks_padding and kernel.packed is not None:
        empty = [sample for sample, length in enumerate(padding_of(call).lengths) if length == 0]
        if not (empty and backend.any_mask):
            attended = kernel.packed(packed(call)).reshape(*call.query.shape[:3], -1)
            # As a kernel with a mask: what sees nothing is zero.
            return attended.index_fill(0, torch.tensor(empty, device=attended.device), 0.0) if empty else attended
    if call.mask is None and backend.varlen and kernel.packed is not None:
        return kernel.packed(packed(call)).reshape(*call.query.shape[:3], -1)
    if call.mask is None or backend.any_mask:
        return kernel.dense(call)
    return split(call, kernel.dense) if strict or worth_splitting(call) else native(call)


def check_fit(backend: Backend, device: torch.device, dtype: torch.dtype, head_sizes: set[int]) -> set[int]:
    """Refuse a backend that cannot work on a device in a dtype, before a model is told to use it.

    A device that is not the model's yet will do: it may be moved there.

    Returns:
        Those of `head_sizes` that it cannot take; torch is to compute them.

    Raises:
        MissingPackageError: if it needs a package that is not installed.
        ValueError: if it could take no call.
    """
    backend.require_package()
    reason = None if device.type == "meta" else backend.refuses_device(device)
    if reason is not None and device.type not in backend.devices and any(map(_is_there, backend.devices)):
        reason = None
    reason = reason or backend.refuses_dtype(dtype)
    refused = {size: why for size in head_sizes if (why := backend.refuses_head(size))}
    if reason is None and refused and refused.keys() == head_sizes:
        reason = "; ".join(refused.values())
    if reason is None and backend.probes and not backend.refuses_device(device):
        size = min(head_sizes - refused.keys(), default=64)
        probe = torch.zeros(1, 8, 1, size, device=device, dtype=dtype)
        try:
            backend.kernel.dense(Call(probe, probe, probe))
        except RefusedError as error:
            reason = f"{error}, of {dtype} on {device}"
    if reason is not None:
        raise ValueError(f"attention backend {backend.name!r} cannot compute this model: {reason}")
    return set(refused)


def _is_there(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:
        return False


_said: set[str] = set()


def say_again(backend: str) -> None:
    """What was said of calls that a backend cannot take is said once more, for who has chosen it now."""
    _said.difference_update([message for message in _said if repr(backend) in message])


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def _slices(call: Call, heads: int) -> Iterator[list[Call]]:
    """For each sample, its parts of `heads` heads, with their part of the mask."""
    mask = call.mask
    if mask is not None:
        mask = mask.expand(len(call.query), call.query.shape[2], -1, -1)
    for sample in range(len(call.query)):
        one = slice(sample, sample + 1)
        yield [
            Call(
                call.query[one, :, start : start + heads],
                call.key[one, :, start : start + heads],
                call.value[one, :, start : start + heads],
                None if mask is None else mask[one, start : start + heads],
                call.is_causal,
                call.scale,
                call.max_bytes,
            )
            for start in range(0, call.query.shape[2], heads)
        ]


# ---- in compiled code ----
# Kernels of packages, loops and waits for the device would break a graph. As operators they are one node of it.


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    max_bytes: int,
    backend: str,
    strict: bool,
) -> torch.Tensor:
    call = Call(query, key, value, mask, is_causal, scale, max_bytes)
    return attend(call, BACKENDS[backend], strict).contiguous()


@torch.library.custom_op("diffusion_core::attention", mutates_args=())
def _opaque(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    max_bytes: int,
    backend: str,
    strict: bool,
) -> torch.Tensor:
    return _run(query, key, value, None, is_causal, scale, max_bytes, backend, strict)


# Reading a mask waits for the device, which a captured CUDA graph cannot.
@torch.library.custom_op(
    "diffusion_core::attention_with_mask",
    mutates_args=(),
    tags=[torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else [],
)
def _opaque_with_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    max_bytes: int,
    backend: str,
    strict: bool,
) -> torch.Tensor:
    return _run(query, key, value, mask, is_causal, scale, max_bytes, backend, strict)


def _shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


for _operator in (_opaque, _opaque_with_mask):
    cast("Any", _operator).register_fake(_shape)
