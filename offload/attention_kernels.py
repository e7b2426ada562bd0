"""How each kernel is called. Its package is imported when it is first used; nothing here decides whether it may be."""

import functools
import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention_masks import Call, PackedCall

Dense = Callable[[Call], torch.Tensor]
Packed = Callable[[PackedCall], torch.Tensor]
_ALIGNED = 8  # entries of a row of a mask, for kernels that load several at once
# torch keeps its choice of kernels for the process; two threads must not change it at once.
_choosing = threading.RLock()


class RefusedError(Exception):
    """A kernel cannot take a call, for the reason that it gives."""


@dataclass(frozen=True)
class Kernel:
    """What computes attention.

    Attributes:
        dense: takes a `Call`.
        packed: takes samples of unlike lengths one after another, where the kernel can.
    """

    dense: Dense
    packed: Packed | None = None


# ---- torch ----


def native(call: Call) -> torch.Tensor:
    """The kernel that torch chooses."""
    parts = _heads_first(call)
    attended = F.scaled_dot_product_attention(*parts, attn_mask=call.mask, is_causal=call.is_causal, scale=call.scale)
    return attended.transpose(1, 2)


def forced(kind: SDPBackend) -> Dense:
    """One of torch's kernels and no other."""

    def dense(call: Call) -> torch.Tensor:
        try:
            with _choosing, cast("Any", sdpa_kernel(kind)):
                return native(call)
        except RuntimeError as error:
            if "kernel" not in str(error):
                raise
            raise RefusedError("torch has no such kernel for this call") from error

    return dense


def plain(call: Call) -> torch.Tensor:
    """Matrix products and a softmax, as torch computes them where it has no kernel."""
    parts = _heads_first(call)
    # Called by itself, since forcing it would do so in other threads too.
    compute: Any = torch.ops.aten._scaled_dot_product_attention_math
    attended = compute(*parts, added(call.mask, call.query.dtype), 0.0, call.is_causal, None, scale=call.scale)[0]
    return attended.transpose(1, 2)


def flex(call: Call) -> torch.Tensor:
    """FlexAttention (Dong et al. 2024), with the mask as a change of scores."""
    from torch.nn.attention.flex_attention import flex_attention

    # Compiling for a CPU takes longer than it gains; what is being compiled compiles this with it.
    plain = torch.compiler.is_compiling() or call.query.device.type == "cpu"
    run: Any = flex_attention if plain else _compiled_flex()
    mask, is_causal = call.mask, call.is_causal

    def change(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        if is_causal:
            score = torch.where(query >= key, score, -torch.inf)
        if mask is None:
            return score
        own = mask[
            batch if len(mask) > 1 else 0,
            head if mask.shape[1] > 1 else 0,
            query if mask.shape[2] > 1 else 0,
            key if mask.shape[3] > 1 else 0,
        ]
        return torch.where(own, score, -torch.inf) if mask.dtype == torch.bool else score + own

    change_scores = None if mask is None and not is_causal else change
    return run(*_heads_first(call), score_mod=change_scores, scale=call.scale).transpose(1, 2)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return cast("Any", torch).compile(flex_attention)


# ---- FlashAttention ----


def flash(
    find: Callable[[], Any], dense: str = "flash_attn_func", packed: str | None = "flash_attn_varlen_func"
) -> Kernel:
    """FlashAttention 2, 3 and 4 (Dao 2023; Shah et al. 2024): functions of the module that `find` gives."""

    def call_dense(call: Call) -> torch.Tensor:
        run = getattr(find(), dense)
        return _first(run(call.query, call.key, call.value, softmax_scale=call.scale, causal=call.is_causal))

    def call_packed(call: PackedCall) -> torch.Tensor:
        assert packed is not None
        run = getattr(find(), packed)
        return _first(run(*_varlen(call), softmax_scale=call.scale, causal=call.is_causal))

    return Kernel(call_dense, None if packed is None else call_packed)


# ---- SageAttention ----


def sage(find: Callable[[], Any], dense: str = "sageattn", packed: str | None = None) -> Kernel:
    """SageAttention (Zhang et al. 2024), which computes scores in 8 bits."""

    def call_dense(call: Call) -> torch.Tensor:
        run = getattr(find(), dense)
        parts = (call.query, call.key, call.value)
        return run(*parts, tensor_layout="NHD", is_causal=call.is_causal, sm_scale=call.scale)

    def call_packed(call: PackedCall) -> torch.Tensor:
        assert packed is not None
        run = getattr(find(), packed)
        return run(*_varlen(call), is_causal=call.is_causal, sm_scale=call.scale)

    return Kernel(call_dense, None if packed is None else call_packed)


def sage_blackwell(find: Callable[[], Any]) -> Kernel:
    """SageAttention 3 (Zhang et al. 2025), in 4 bits."""

    def dense(call: Call) -> torch.Tensor:
        run = find().sageattn3_blackwell
        parts = (part.contiguous() for part in _heads_first(call))
        return run(*parts, is_causal=call.is_causal).transpose(1, 2)

    return Kernel(dense)


# ---- others ----


def xformers(find: Callable[[], Any]) -> Kernel:
    """The memory-efficient attention of xFormers."""

    def dense(call: Call) -> torch.Tensor:
        ops = find()
        bias = ops.LowerTriangularMask() if call.is_causal else _bias_of_all(call)
        return ops.memory_efficient_attention(call.query, call.key, call.value, attn_bias=bias, scale=call.scale)

    def packed(call: PackedCall) -> torch.Tensor:
        ops = find()
        bias = ops.fmha.attn_bias.BlockDiagonalMask.from_seqlens(call.query_lengths, call.key_lengths)
        parts = (part[None] for part in (call.query, call.key, call.value))
        return ops.memory_efficient_attention(*parts, attn_bias=bias, scale=call.scale)[0]

    return Kernel(dense, packed)


def npu(find: Callable[[], Any]) -> Kernel:
    """The fused attention of Ascend NPUs."""

    def dense(call: Call) -> torch.Tensor:
        query, key = call.query, call.key
        hidden = None
        if call.mask is not None:
            shape = (len(query), call.mask.shape[1], query.shape[1], key.shape[1])
            hidden = call.mask.logical_not().expand(shape).contiguous()
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        return find().npu_fusion_attention(
            query,
            key,
            call.value,
            query.shape[2],
            input_layout="BSND",
            atten_mask=hidden,
            scale=scale,
            pre_tockens=2**31 - 1,
            next_tockens=2**31 - 1,
        )[0]

    return Kernel(dense)


def xla(find: Callable[[], Any]) -> Kernel:
    """The FlashAttention of torch_xla."""

    def dense(call: Call) -> torch.Tensor:
        scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        run = find().flash_attention
        return run(*_heads_first(call), causal=call.is_causal, sm_scale=scale).transpose(1, 2)

    return Kernel(dense)


# ---- where they come from ----


def module(name: str) -> Callable[[], Any]:
    """A module by its name, imported when it is needed."""
    return lambda: importlib.import_module(name)


def from_hub(repo: str, version: int) -> Callable[[], Any]:
    """A kernel of the Hub, downloaded only when it is needed."""
    return lambda: hub_kernel(repo, version)


@functools.cache
def hub_kernel(repo: str, version: int) -> Any:
    """A kernel of the Hub, asked for once a process."""
    return importlib.import_module("kernels").get_kernel(repo, version=version)


# ---- shapes and masks ----


def added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as what is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _bias_of_all(call: Call) -> torch.Tensor | None:
    """The mask for every head, query and key, in rows whose starts are aligned."""
    mask = added(call.mask, call.query.dtype)
    if mask is None:
        return None
    batch, queries, heads = call.query.shape[:3]
    keys = call.key.shape[1]
    wide = mask.new_empty(batch, heads, queries, -(-keys // _ALIGNED) * _ALIGNED, dtype=call.query.dtype)
    return wide[..., :keys].copy_(mask)


def _heads_first(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return call.query.transpose(1, 2), call.key.transpose(1, 2), call.value.transpose(1, 2)


def _varlen(call: PackedCall) -> tuple[Any, ...]:
    longest = (max(call.query_lengths), max(call.key_lengths))
    return call.query, call.key, call.value, call.query_ends, call.key_ends, *longest


def _first(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Some versions give the sums of the softmax besides."""
    return result[0] if isinstance(result, tuple) else result
