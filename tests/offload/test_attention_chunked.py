"""Attention in blocks: the numbers of torch, within the bound on memory."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_core.offload.attention import AttentionSettings, attention
from diffusion_core.offload.attention_chunked import chunked
from diffusion_core.offload.attention_masks import Call


class Peak(TorchDispatchMode):
    """The most bytes that live in storages made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                # A storage is let go of when the last tensor over it is; each is counted once while it lives.
                if storage.data_ptr() not in given and storage.data_ptr() not in self.seen:
                    self._count(storage)
        return out

    def _count(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        self.seen.add(address)
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.live -= size


def tensors(batch: int, queries: int, keys: int, heads: int, size: int, dtype: Any = torch.float32) -> list[Any]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(batch, tokens, heads, size, generator=source).to(dtype) for tokens in (queries, keys, keys)]


@pytest.mark.parametrize("max_bytes", [20_000, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "padding", "added", "added for each", "causal"])
def test_it_stays_within_its_bound(kind: str, dtype: torch.dtype, max_bytes: int) -> None:
    parts = tensors(2, 300, 300, 2, 16, dtype)
    mask = {
        "padding": torch.rand(2, 1, 1, 300) > 0.3,
        "added": torch.randn(2, 1, 1, 300, dtype=dtype),
        "added for each": torch.randn(1, 2, 300, 300, dtype=dtype),
    }.get(kind)
    whole = attention(
        *[part.float() for part in parts],
        attn_mask=mask if kind == "padding" or mask is None else mask.float(),
        is_causal=kind == "causal",
    )
    with torch.no_grad(), Peak() as peak:
        found = chunked(Call(*parts, mask, kind == "causal", None, max_bytes))
    result = found.nbytes
    assert result < peak.most <= max_bytes + result
    assert found.dtype == dtype
    assert torch.allclose(found.float(), whole, atol=2e-6 if dtype == torch.float32 else 2e-2)


def test_plain_attention_would_take_more() -> None:
    parts = tensors(1, 512, 512, 2, 16)
    with torch.no_grad(), Peak() as plain:
        attention(*parts, settings=AttentionSettings("_native_math"))
    with torch.no_grad(), Peak() as blocks:
        attention(*parts, settings=AttentionSettings("chunked", max_bytes=100_000))
    assert plain.most > 2 * 512 * 512 * 4 > 10 * blocks.most


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    max_bytes=st.integers(1200, 30_000),
    mask=st.sampled_from(["none", "bool", "added", "causal"]),
    scale=st.sampled_from([None, 0.1, 5.0]),
)
def test_any_blocks_give_the_numbers_of_the_whole(
    batch: int, queries: int, keys: int, max_bytes: int, mask: str, scale: float | None
) -> None:
    parts = tensors(batch, queries, keys, 2, 4)
    shape = (batch, 1, queries, keys)
    # Some queries see nothing at all.
    hidden = {"bool": torch.rand(shape) > 0.7, "added": torch.randn(shape) * 3}.get(mask)
    options: dict[str, Any] = {"attn_mask": hidden, "is_causal": mask == "causal", "scale": scale}
    whole = attention(
        *[part.double() for part in parts],
        **{**options, "attn_mask": hidden if hidden is None or mask == "bool" else hidden.double()},
    )
    found = attention(*parts, **options, settings=AttentionSettings("chunked", max_bytes=max_bytes))
    assert torch.allclose(found.double(), whole, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    query, key, value = (300 * part for part in tensors(1, 20, 30, 1, 8))
    found = attention(query, key, value, settings=AttentionSettings("chunked", max_bytes=3000))
    whole = attention(query.double(), key.double(), value.double())
    assert torch.allclose(found.double(), whole, rtol=1e-3)
    assert found.isfinite().all()


def test_too_little_memory_is_refused_with_the_least() -> None:
    with pytest.raises(ValueError, match=r"max_bytes=100 is too little .* it takes \d+ at least"):
        attention(*tensors(1, 4, 4, 1, 8), settings=AttentionSettings("chunked", max_bytes=100))


def test_heads_of_values_may_differ() -> None:
    query, key, value = tensors(2, 9, 9, 2, 4)
    value = torch.cat([value, value], dim=-1)
    found = attention(query, key, value, settings=AttentionSettings("chunked", max_bytes=4000))
    assert torch.allclose(found, attention(query, key, value), atol=1e-6)
