"""Attention backends on a device, under memory modes, and the bound of attention in blocks as the device counts it."""

import pytest
import torch

from diffusion_core.errors import PlacementError
from diffusion_core.offload.attention import AttentionSettings, attention
from diffusion_core.offload.simulator import simulator, unavailable
from tests.offload.drawing import CAPACITY, MODES, allocated, draw, expected, load, undo
from tests.offload.fake_kernels import installed

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


@pytest.fixture
def sim():
    expected()
    with simulator(devices=2, capacity=CAPACITY) as running:
        yield running


@pytest.mark.parametrize("mode", ["on the device", "model", "leaf, streams", "block"])
def test_backends_are_chosen_before_and_after_a_mode(sim, mode):
    pipe = load()
    with installed() as calls:
        pipe.set_attention_backend("flash")
        MODES[mode](pipe)
        assert torch.allclose(draw(pipe), expected(), atol=1e-5)
        assert set(calls.names) == {"flash_attn_func"}
        pipe.set_attention_backend("sage")
        calls.clear()
        assert torch.allclose(draw(pipe), expected(), atol=1e-5)
        assert set(calls.names) == {"sageattn"}
        undo(pipe)
        pipe.to("cpu")
        pipe.reset_attention_backend()
        assert torch.equal(draw(pipe), expected())
        calls.clear()  # which keeps what the kernels were given
    assert allocated(sim) == [0, 0]


def test_padding_is_packed_on_the_device(sim):
    with installed() as calls:
        query, key, value = (torch.randn(2, 6, 2, 8) for _ in range(3))
        mask = (torch.arange(6) < torch.tensor([[6], [2]]))[:, None, None]
        for name in ("flash", "sage", "xformers", "chunked"):
            parts = [part.to("sim:0") for part in (query, key, value)]
            found = attention(*parts, attn_mask=mask.to("sim:0"), settings=AttentionSettings(name, strict=True))
            assert found.device == torch.device("sim:0")
            assert torch.allclose(found.cpu(), attention(query, key, value, attn_mask=mask), atol=1e-6)
        assert calls.names == ["flash_attn_varlen_func", "sageattn", "sageattn", "memory_efficient_attention"]


@pytest.mark.parametrize("max_bytes", [100_000, 1_000_000])
def test_the_device_never_holds_more_than_the_bound(sim, max_bytes):
    parts = [torch.randn(1, 400, 2, 16).to("sim:0") for _ in range(3)]
    before = sum(part.nbytes for part in parts)
    torch.get_device_module("sim").reset_peak_memory_stats()
    found = attention(*parts, settings=AttentionSettings("chunked", max_bytes=max_bytes))
    peak = torch.get_device_module("sim").max_memory_allocated()
    assert peak - before - found.nbytes <= max_bytes
    torch.get_device_module("sim").reset_peak_memory_stats()
    attention(*parts, settings=AttentionSettings("_native_math"))
    assert torch.get_device_module("sim").max_memory_allocated() - before > 2 * 400 * 400 * 4


def test_fused_projections_come_before_a_mode(sim):
    pipe = load()
    pipe.fuse_qkv_projections()
    pipe.enable_group_offload("sim:0", offload_type="leaf_level", use_stream=True)
    assert torch.allclose(draw(pipe), expected(), atol=1e-5)
    with pytest.raises(PlacementError, match="unfuse_qkv_projections"):
        pipe.unfuse_qkv_projections()
    pipe.disable_group_offload()
    pipe.unfuse_qkv_projections()
    assert torch.equal(draw(pipe), expected())
