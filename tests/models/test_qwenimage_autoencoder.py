"""`AutoencoderKLQwenImage` against the reference, on its real size, in parts, compiled, and on wrong input."""

import inspect
import json
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core import AutoencoderKLQwenImage
from tests.support import hub_config

TINY: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tiny(**changes: Any) -> AutoencoderKLQwenImage:
    torch.manual_seed(0)
    return AutoencoderKLQwenImage(**{**TINY, **changes}).eval()


def pair(**changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKLQwenImage(**{**TINY, **changes}).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    ours = tiny(**changes)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def close(found: torch.Tensor, expected: torch.Tensor, most: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < most


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"dim_mult": [1, 2], "temperal_downsample": [True], "num_res_blocks": 2}])
@pytest.mark.parametrize("size", [(1, 32, 32), (1, 40, 36), (5, 16, 24), (9, 16, 16), (8, 16, 16)])
def test_agrees_with_the_reference(size: tuple[int, int, int], changes: dict[str, Any]) -> None:
    ours, theirs = pair(**changes)
    # The reference leaves out what is less than 4 frames, also where a latent has 2.
    video = seeded(1, 3, *size)[:, :, : None if not changes else 1 + (size[0] - 1) // 4 * 4]
    close(ours.encode(video).latent_dist.parameters, theirs.encode(video).latent_dist.parameters)
    latents = theirs.encode(video).latent_dist.mode()
    close(ours.decode(latents).sample, theirs.decode(latents).sample)
    if size[0] == 1:
        close(ours(video).sample, theirs(video).sample)


@torch.no_grad()
def test_a_picture_is_the_first_frame_of_a_video() -> None:
    model, video = tiny(), seeded(1, 3, 5, 16, 16)
    latents = model.encode(video).latent_dist.mode()
    close(model.encode(video[:, :, :1]).latent_dist.mode(), latents[:, :, :1])
    close(model.decode(latents[:, :, :1]).sample, model.decode(latents).sample[:, :, :1])


@torch.no_grad()
def test_attention_at_other_resolutions() -> None:
    model = tiny(attn_scales=[0.5])
    assert "encoder.down_blocks.3.to_qkv.weight" in model.state_dict()
    assert model(seeded(1, 3, 1, 16, 16)).sample.shape == (1, 3, 1, 16, 16)


def test_the_real_size_has_the_same_tensors() -> None:
    config = json.loads(hub_config("Qwen/Qwen-Image/vae/config.json").read_text())
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in (AutoencoderKLQwenImage, diffusers.AutoencoderKLQwenImage))
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    defaults = AutoencoderKLQwenImage.config_arguments()
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()} == {
        key: value for key, value in config.items() if key[0] != "_"
    }
    assert (ours.spatial_compression_ratio, ours.temporal_compression_ratio) == (8, 4)


def test_arguments_are_the_reference_s() -> None:
    found, expected = (
        inspect.signature(each.__init__).parameters.values()
        for each in (AutoencoderKLQwenImage, diffusers.AutoencoderKLQwenImage)
    )
    pairs = [[(each.name, each.default) for each in side] for side in (found, expected)]
    assert [(name, list(value) if isinstance(value, tuple) else value) for name, value in pairs[0]] == pairs[1]


@torch.no_grad()
def test_slices_and_tiles() -> None:
    model, latents = tiny(), seeded(2, 4, 1, 8, 10)
    whole = model.decode(latents).sample
    model.enable_slicing()
    close(model.decode(latents).sample, whole)
    model.enable_tiling(tile_sample_min_height=32, tile_sample_min_width=32)
    tiled = model.decode(latents).sample
    assert tiled.shape == whole.shape == (2, 3, 1, 64, 80)
    assert not torch.equal(tiled, whole)
    assert model.encode(seeded(1, 3, 1, 64, 80)).latent_dist.mode().shape == (1, 4, 1, 8, 10)
    with pytest.raises(ValueError, match="larger than the tile"):
        model.enable_tiling(tile_sample_min_height=32, tile_sample_stride_height=64)
    model.disable_tiling()
    model.disable_slicing()
    assert torch.equal(model.decode(latents).sample, whole)


@torch.no_grad()
def test_tiles_start_as_the_reference_s() -> None:
    ours, theirs = pair()
    assert (ours.tile_sample_min_height, ours.tile_sample_stride_width) == (256, 192)
    ours.enable_tiling(32, 32, 24, 24)
    theirs.enable_tiling(32, 32, 24, 24)
    latents = seeded(1, 4, 1, 8, 8)
    assert ours.decode(latents).sample.shape == theirs.decode(latents).sample.shape


@torch.no_grad()
def test_compiles_whole() -> None:
    model, latents = tiny(dim_mult=[1, 2], temperal_downsample=[True]), seeded(1, 4, 1, 4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(model.decode, backend="aot_eager", fullgraph=True)
    close(compiled(latents).sample, model.decode(latents).sample, 1e-6)


@torch.no_grad()
def test_memory_format_and_half_precision() -> None:
    model, video = tiny(), seeded(1, 3, 1, 16, 16)
    exact = model(video).sample
    model.to(memory_format=torch.channels_last_3d)
    close(model(video.to(memory_format=torch.channels_last_3d)).sample, exact)
    assert float((model.to(torch.bfloat16)(video.bfloat16()).sample - exact).abs().max()) < 0.1


def test_save_and_load_both_ways(tmp_path: Any) -> None:
    ours, theirs = pair()
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    video = seeded(1, 3, 1, 16, 16)
    there = diffusers.AutoencoderKLQwenImage.from_pretrained(tmp_path / "ours")
    close(there(video).sample, ours(video).sample)
    close(AutoencoderKLQwenImage.from_pretrained(tmp_path / "theirs")(video).sample, ours(video).sample)


def test_wrong_input_is_refused() -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"one frame, x\[:, :, None\]"):
        model.encode(seeded(1, 3, 16, 16))
    with pytest.raises(ValueError, match="4 channels"):
        model.decode(seeded(1, 3, 1, 4, 4))
    with pytest.raises(ValueError, match="at least 8 x 8"):
        model.encode(seeded(1, 3, 1, 4, 4))
    with pytest.raises(ValueError, match="temperal_downsample"):
        tiny(temperal_downsample=[True])
