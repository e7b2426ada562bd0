"""Switches of pipelines that concern how their models compute, and what pipelines refuse with a remedy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import diffusion_core
from diffusion_core.errors import MissingPackageError, PlacementError, UnsupportedError
from diffusion_core.offload.attention_backends import BACKENDS
from tests.offload.fake_kernels import installed

from . import tiny
from .sd import pipe, seeded


@pytest.fixture
def made() -> Any:
    return pipe(unet=tiny.unet(diffusion_core), vae=tiny.vae(diffusion_core))


def draw(made: Any) -> torch.Tensor:
    return made("a red cat", num_inference_steps=2, generator=seeded(), output_type="pt").images


def test_attention_in_slices_gives_the_same_pictures(made: Any) -> None:
    whole = draw(made)
    for size in ("auto", "max", 2):
        made.enable_attention_slicing(size)
        assert {each.slice_size for each in made.unet.attn_processors.values()} == {size}
        assert torch.allclose(draw(made), whole, atol=1e-5)
    made.disable_attention_slicing()
    assert torch.equal(draw(made), whole)
    with pytest.raises(ValueError, match="slice_size=0"):
        made.enable_attention_slicing(0)


def backends(model: Any) -> set[str | None]:
    return {each.backend for each in model.attn_processors.values()}


def test_kernels_projections_and_xformers(made: Any) -> None:
    whole = draw(made)
    made.set_attention_backend("_native_math")
    made.enable_xformers_memory_efficient_attention()
    made.fuse_qkv_projections()
    assert torch.allclose(draw(made), whole, atol=1e-5)
    made.unfuse_qkv_projections()
    made.disable_xformers_memory_efficient_attention()
    made.reset_attention_backend()
    assert torch.equal(draw(made), whole)
    with pytest.raises(MissingPackageError, match=r"'flash': flash-attn is not installed; .*pip install flash-attn"):
        made.set_attention_backend("flash")


def test_a_backend_for_all_components_or_by_component(made: Any) -> None:
    whole = draw(made)
    made.set_attention_backend("chunked", max_bytes=100_000)
    assert backends(made.unet) == backends(made.vae) == {"chunked"}
    assert {each.max_bytes for each in made.unet.attn_processors.values()} == {100_000}
    assert torch.allclose(draw(made), whole, atol=1e-5)
    made.set_attention_backend({"unet": "_native_math"})
    assert (backends(made.unet), backends(made.vae)) == ({"_native_math"}, {"chunked"})
    made.set_attention_backend({"unet": "native", "vae": "_native_math"})
    assert (backends(made.unet), backends(made.vae)) == ({"native"}, {"_native_math"})
    made.reset_attention_backend()
    assert backends(made.unet) == backends(made.vae) == {None}
    assert torch.equal(draw(made), whole)


def test_wrong_backends_change_nothing(made: Any) -> None:
    made.set_attention_backend({"unet": "chunked"})
    for wrong, message in [
        ({"unet": "native", "vae": "flsh"}, "no attention backend 'flsh'"),
        ({"unet": "native", "text_encoder": "native"}, r"no models \['text_encoder'\] .* it has \['unet', 'vae'\]"),
        ("_native_cudnn", "'_native_cudnn' cannot compute this model: it runs on cuda, not on cpu"),
    ]:
        with pytest.raises(ValueError, match=message):
            made.set_attention_backend(wrong)
    with pytest.raises(MissingPackageError):
        made.set_attention_backend({"unet": "native", "vae": "flash"})
    assert (backends(made.unet), backends(made.vae)) == ({"chunked"}, {None})


def test_components_that_cannot_take_a_backend_keep_theirs(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    made.vae.to(torch.float64)
    with installed() as calls, pytest.MonkeyPatch.context() as patch:
        own = replace(BACKENDS["flash"], dtypes=(torch.float32,))
        patch.setitem(BACKENDS, "flash", own)
        with caplog.at_level("WARNING"):
            made.set_attention_backend("flash")
        assert (backends(made.unet), backends(made.vae)) == ({"flash"}, {None})
        assert "vae attends as before: attention backend 'flash' cannot compute this model" in caplog.text
        made.vae.to(torch.float32)
        whole = draw(made)
        assert set(calls.names) == {"flash_attn_func"}
        made.reset_attention_backend()
        assert torch.allclose(draw(made), whole, atol=1e-5)
        made.vae.to(torch.float64)
        with pytest.raises(ValueError, match="it takes float32, not float64"):
            made.set_attention_backend("flash", strict=True)
        with pytest.raises(ValueError, match="it takes float32, not float64"):
            made.set_attention_backend({"unet": "flash", "vae": "flash"})
    assert backends(made.unet) == {None}


def test_a_context_holds_for_a_whole_run(made: Any) -> None:
    whole = draw(made)
    with installed() as calls:
        with diffusion_core.attention_backend("sage"):
            assert torch.allclose(draw(made), whole, atol=1e-5)
        assert set(calls.names) == {"sageattn"}
        calls.clear()
        assert torch.equal(draw(made), whole)
        assert calls == []


@pytest.mark.parametrize("enable", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_backends_and_fused_projections_go_with_memory_modes(made: Any, enable: str) -> None:
    whole = draw(made)
    made.fuse_qkv_projections()
    getattr(made, enable)(device="cpu")
    made.set_attention_backend("chunked")
    assert torch.allclose(draw(made), whole, atol=1e-5)
    made.reset_attention_backend()
    with pytest.raises(PlacementError, match="unfuse_qkv_projections"):
        made.unfuse_qkv_projections()
    getattr(made, enable.replace("enable", "disable"))()
    made.unfuse_qkv_projections()
    assert torch.equal(draw(made), whole)


def fused(model: Any) -> bool:
    return any("to_qkv" in name for name, _ in model.named_modules())


def test_which_projections_are_fused(made: Any, tmp_path: Any) -> None:
    whole = draw(made)
    made.fuse_qkv_projections(vae=False)
    assert (fused(made.unet), fused(made.vae)) == (True, False)
    made.fuse_qkv_projections(unet=False)
    assert (fused(made.unet), fused(made.vae)) == (True, True)
    made.save_pretrained(tmp_path)
    again = diffusion_core.StableDiffusionPipeline.from_pretrained(tmp_path)
    assert torch.equal(draw(again), whole)
    made.unfuse_qkv_projections(unet=False)
    assert (fused(made.unet), fused(made.vae)) == (True, False)
    made.unfuse_qkv_projections()
    assert torch.equal(draw(made), whole)
    made.vae = diffusion_core.AutoencoderTiny()
    with pytest.raises(ValueError, match="StableDiffusionPipeline has no attention layers of this kind"):
        made.fuse_qkv_projections(unet=False)
    made.fuse_qkv_projections()
    assert fused(made.unet)


def test_freeu(made: Any) -> None:
    whole = draw(made)
    made.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    assert not torch.allclose(draw(made), whole)
    made.disable_freeu()
    assert torch.equal(draw(made), whole)
    made.unet = None
    with pytest.raises(ValueError, match="StableDiffusionPipeline has no unet"):
        made.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("load_lora_weights", "fuse_lora"),
        ("unload_lora_weights", "fuse_lora"),
        ("load_textual_inversion", "diffusers"),
        ("load_ip_adapter", "image-to-image"),
        ("from_single_file", "save_pretrained"),
    ],
)
def test_what_is_not_here_says_what_to_do(made: Any, name: str, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"StableDiffusionPipeline\.{name}\(\) is not supported: .*{remedy}"):
        getattr(made, name)("somewhere")
