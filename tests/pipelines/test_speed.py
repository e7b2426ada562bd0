"""Switches of pipelines that concern how their models compute, and what pipelines refuse with a remedy."""

from typing import Any

import pytest
import torch

import diffusion_core
from diffusion_core.errors import MissingPackageError, UnsupportedError

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
