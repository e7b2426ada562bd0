"""Stand-ins for the packages of attention kernels: they compute with torch, and note how they were called."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffusion_core.offload import attention_backends, attention_kernels


def heads_first(*parts: torch.Tensor) -> list[torch.Tensor]:
    return [part.transpose(1, 2) for part in parts]


def dense(query: Any, key: Any, value: Any, *, mask: Any = None, causal: bool = False, scale: Any = None) -> Any:
    parts = heads_first(query, key, value)
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)


def by_ends(query: Any, key: Any, value: Any, query_ends: Any, key_ends: Any, **options: Any) -> Any:
    """Samples one after another, each by itself."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert query.dim() == key.dim() == value.dim() == 3
    out = torch.full((*query.shape[:2], value.shape[2]), torch.nan, dtype=query.dtype, device=query.device)
    samples = zip(query_ends[:-1], query_ends[1:], key_ends[:-1], key_ends[1:], strict=True)
    for q0, q1, k0, k1 in samples:
        if k1 > k0:
            out[q0:q1] = dense(query[None, q0:q1], key[None, k0:k1], value[None, k0:k1], **options)[0]
    return out


class Calls(list[tuple[str, dict[str, Any]]]):
    """What was called, in order, with the arguments by name."""

    def note(self, name: str, **arguments: Any) -> None:
        self.append((name, arguments))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self]


def flash_functions(calls: Calls, with_sums: bool = False) -> dict[str, Any]:
    """FlashAttention's two functions, by their real signatures; version 3 gives the sums besides in some releases."""

    def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, **other: Any) -> Any:
        assert not other
        calls.note("flash_attn_func", q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal)
        out = dense(q, k, v, causal=causal, scale=softmax_scale)
        return (out, None) if with_sums else out

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        softmax_scale: Any = None, causal: bool = False, **other: Any,
    ) -> Any:  # fmt: skip
        assert not other
        calls.note("flash_attn_varlen_func", q=q, k=k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                   max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale)  # fmt: skip
        out = by_ends(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, scale=softmax_scale)
        return (out, None) if with_sums else out

    return {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}


def sage_functions(calls: Calls) -> dict[str, Any]:
    def named(name: str) -> Any:
        def sageattn(
            q: Any, k: Any, v: Any, tensor_layout: str = "HND", is_causal: bool = False, sm_scale: Any = None
        ) -> Any:
            assert tensor_layout == "NHD"
            calls.note(name, q=q, sm_scale=sm_scale, is_causal=is_causal)
            return dense(q, k, v, causal=is_causal, scale=sm_scale)

        return sageattn

    def sageattn_varlen(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        is_causal: bool = False, sm_scale: Any = None,
    ) -> Any:  # fmt: skip
        calls.note("sageattn_varlen", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k)
        return by_ends(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=is_causal, scale=sm_scale)

    def sageattn3_blackwell(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        assert q.is_contiguous()
        calls.note("sageattn3_blackwell", q=q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    names = [
        "sageattn",
        *(f"sageattn_qk_int8_pv_{end}" for end in ("fp8_cuda", "fp8_cuda_sm90", "fp16_cuda", "fp16_triton")),
    ]
    return {**{name: named(name) for name in names}, "sageattn_varlen": sageattn_varlen,
            "sageattn3_blackwell": sageattn3_blackwell}  # fmt: skip


def xformers_functions(calls: Calls) -> dict[str, Any]:
    class BlockDiagonalMask:
        def __init__(self, queries: list[int], keys: list[int]) -> None:
            self.queries, self.keys = queries, keys

        @classmethod
        def from_seqlens(cls, q_seqlen: list[int], kv_seqlen: list[int]) -> "BlockDiagonalMask":
            return cls(q_seqlen, kv_seqlen)

    class LowerTriangularMask:
        pass

    def memory_efficient_attention(
        query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None
    ) -> Any:
        calls.note("memory_efficient_attention", query=query, attn_bias=attn_bias, scale=scale)
        if isinstance(attn_bias, BlockDiagonalMask):
            ends = [torch.tensor([0, *each]).cumsum(0).int() for each in (attn_bias.queries, attn_bias.keys)]
            return by_ends(query[0], key[0], value[0], *ends, scale=scale)[None]
        if isinstance(attn_bias, LowerTriangularMask):
            return dense(query, key, value, causal=True, scale=scale)
        if attn_bias is not None:
            batch, queries, heads = query.shape[:3]
            assert attn_bias.shape == (batch, heads, queries, key.shape[1])
            assert attn_bias.dtype == query.dtype and attn_bias.stride(2) % 8 == 0
        return dense(query, key, value, mask=attn_bias, scale=scale)

    fmha = SimpleNamespace(attn_bias=SimpleNamespace(BlockDiagonalMask=BlockDiagonalMask))
    return {
        "memory_efficient_attention": memory_efficient_attention,
        "LowerTriangularMask": LowerTriangularMask,
        "fmha": fmha,
    }


def npu_functions(calls: Calls) -> dict[str, Any]:
    def npu_fusion_attention(
        query: Any, key: Any, value: Any, head_num: int, input_layout: str, *, atten_mask: Any = None,
        scale: float = 1.0, pre_tockens: int = 0, next_tockens: int = 0,
    ) -> Any:  # fmt: skip
        assert (input_layout, head_num) == ("BSND", query.shape[2])
        assert min(pre_tockens, next_tockens) >= query.shape[1]
        calls.note("npu_fusion_attention", atten_mask=atten_mask, scale=scale)
        # On this device True hides.
        return dense(query, key, value, mask=None if atten_mask is None else ~atten_mask, scale=scale), None

    return {"npu_fusion_attention": npu_fusion_attention}


def xla_functions(calls: Calls) -> dict[str, Any]:
    def flash_attention(q: Any, k: Any, v: Any, causal: bool = False, *, sm_scale: float = 1.0) -> Any:
        calls.note("flash_attention", q=q, sm_scale=sm_scale)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)

    return {"flash_attention": flash_attention}


def hub_functions(calls: Calls) -> dict[str, Any]:
    def get_kernel(repo_id: str, revision: str | None = None, version: int | None = None) -> Any:
        calls.note("get_kernel", repo_id=repo_id, version=version)
        return SimpleNamespace(**flash_functions(calls, with_sums="attn4" in repo_id), **sage_functions(calls))

    return {"get_kernel": get_kernel}


@contextlib.contextmanager
def installed(version: str = "99.0") -> Iterator[Calls]:
    """All the packages, as if they were installed and their kernels ran here, in any dtype."""
    calls = Calls()
    made = {
        "flash_attn": flash_functions(calls),
        "flash_attn_interface": flash_functions(calls, with_sums=True),
        "sageattention": sage_functions(calls),
        "xformers": {},
        "xformers.ops": xformers_functions(calls),
        "torch_npu": npu_functions(calls),
        "torch_xla": {},
        "torch_xla.experimental": {},
        "torch_xla.experimental.custom_kernel": xla_functions(calls),
        "kernels": hub_functions(calls),
    }
    attention_kernels.hub_kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in made.items():
            module = ModuleType(name)
            module.__dict__.update(contents, __version__=version)
            patch.setitem(sys.modules, name, module)
        for name, backend in attention_backends.BACKENDS.items():
            if backend.package is not None:
                anywhere = replace(backend, devices=(), dtypes=(), capability=None)
                patch.setitem(attention_backends.BACKENDS, name, anywhere)
        yield calls
    attention_kernels.hub_kernel.cache_clear()
