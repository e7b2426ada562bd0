"""`AutoencoderKLCogVideoX` against the reference, whole and tiled, on real configs, and on input that does not fit."""

import json
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core.models.autoencoders import chunks
from diffusion_core.models.autoencoders.chunks import ChunkedConv3d, Memory, by_frame
from diffusion_core.models.autoencoders.cogvideox import AutoencoderKLCogVideoX
from diffusion_core.models.layers.resnet import DoublingConv2d
from tests.support import hub_config

TINY: dict[str, Any] = {
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "sample_height": 192,
    "sample_width": 320,
}
TWO_LEVELS: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2,
    "temporal_compression_ratio": 2,
}


def pair(**changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKLCogVideoX(**{**TINY, **changes}).eval()
    ours = AutoencoderKLCogVideoX(**{**TINY, **changes}).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def film(frames: int, height: int = 32, width: int = 48, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(frames))


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"layers_per_block": 2, "temporal_compression_ratio": 8}, TWO_LEVELS])
@pytest.mark.parametrize("frames", [1, 5, 8, 9, 17, 20])
def test_agrees_with_the_reference_both_ways(changes: dict[str, Any], frames: int) -> None:
    ours, theirs = pair(**changes)
    expected = theirs.encode(film(frames)).latent_dist
    found = ours.encode(film(frames)).latent_dist
    assert torch.allclose(found.mean, expected.mean, atol=1e-5)
    assert torch.allclose(found.logvar, expected.logvar, atol=1e-5)
    decoded = theirs.decode(expected.mean).sample
    again = ours.decode(expected.mean).sample
    assert again.shape == decoded.shape
    assert torch.allclose(again, decoded, atol=1e-5)


@torch.no_grad()
def test_tiles_are_the_reference_s() -> None:
    ours, theirs = pair(**TWO_LEVELS, sample_height=48, sample_width=40)
    ours.enable_tiling()
    theirs.enable_tiling()
    whole = film(5, 32, 48)
    expected = theirs.encode(whole).latent_dist.mode()
    assert torch.allclose(ours.encode(whole).latent_dist.mode(), expected, atol=1e-5)
    assert torch.allclose(ours.decode(expected).sample, theirs.decode(expected).sample, atol=1e-5)
    numbers = {"tile_sample_min_height": 12, "tile_sample_min_width": 20, "tile_overlap_factor_height": 0.5}
    ours.enable_tiling(**numbers)
    theirs.enable_tiling(**numbers)
    assert torch.allclose(ours.decode(expected).sample, theirs.decode(expected).sample, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("frames", [9, 17])
def test_tiles_in_time_keep_the_shape(frames: int) -> None:
    ours, _ = pair(**TWO_LEVELS)
    latents = ours.encode(film(frames)).latent_dist.mode()
    whole = ours.decode(latents).sample
    ours.enable_tiling(tile_sample_min_num_frames=4, tile_sample_stride_num_frames=2)
    assert ours.decode(latents).sample.shape == whole.shape
    assert ours.encode(film(frames)).latent_dist.mode().shape == latents.shape


@torch.no_grad()
def test_slices_are_the_whole_batch() -> None:
    ours, _ = pair(**TWO_LEVELS)
    whole = ours.decode(ours.encode(film(5, batch=2)).latent_dist.mode()).sample
    ours.enable_slicing()
    assert torch.allclose(ours.decode(ours.encode(film(5, batch=2)).latent_dist.mode()).sample, whole, atol=1e-5)


@torch.no_grad()
def test_large_chunks_are_worked_on_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair()
    latents = torch.randn(1, 4, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    decoded, encoded = ours.decode(latents).sample, ours.encode(film(17)).latent_dist.mode()
    monkeypatch.setattr(chunks, "LARGE", 0)
    monkeypatch.setattr(DoublingConv2d, "LARGE", 0)
    assert torch.allclose(ours.decode(latents).sample, decoded, atol=1e-5)
    assert torch.allclose(ours.encode(film(17)).latent_dist.mode(), encoded, atol=1e-5)


def test_gradients_flow_as_in_the_reference() -> None:
    latents = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    found = []
    for each in pair():
        given = latents.clone().requires_grad_()
        each.decode(given).sample.square().mean().backward()
        found.append(given.grad)
    assert torch.allclose(*found, atol=1e-6)


@torch.no_grad()
def test_padding_in_time_keeps_the_memory_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 115: before a film, between chunks, and where it grows. (On the CPU, torch's group norm loses it.)"""

    def in_format(given: torch.Tensor) -> bool:
        return given.is_contiguous(memory_format=torch.channels_last_3d)

    met: list[bool] = []
    conv = ChunkedConv3d(8, 8).to(memory_format=torch.channels_last_3d)
    conv.conv.register_forward_pre_hook(lambda _, args: met.append(in_format(args[0])))
    first, second = (torch.randn(2, 8, 5, 6, 6).contiguous(memory_format=torch.channels_last_3d) for _ in range(2))
    memory: Memory = {}
    apart = torch.cat([conv(part, memory) for part in (first, second)], dim=2)
    assert torch.allclose(apart, conv(torch.cat([first, second], dim=2), {}), atol=1e-5)
    assert met[:2] == [True, True]
    monkeypatch.setattr(chunks, "LARGE", 0)
    assert in_format(conv(first, {})) and in_format(by_frame(torch.nn.Identity(), first))


@pytest.mark.parametrize("name", ["CogVideoX-2b", "CogVideoX-5b"])
def test_real_configs_match_name_by_name(name: str) -> None:
    config = json.loads((hub_config(f"THUDM/{name}/vae") / "config.json").read_text())
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in (AutoencoderKLCogVideoX, diffusers.AutoencoderKLCogVideoX))
    shapes, expected = ({key: value.shape for key, value in each.state_dict().items()} for each in (ours, theirs))
    assert shapes == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3, 5, 32, 32), "add the batch"),
        (torch.zeros(1, 4, 5, 32, 32), "3 channels"),
        (torch.zeros(1, 3, 5, 4, 32), "8 x 8"),
        (torch.zeros(1, 3, 0, 32, 32), "frame"),
    ],
)
def test_bad_films_are_refused(given: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLCogVideoX(**TINY).encode(given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temporal_compression_ratio": 3}, "power of 2"),
        ({"norm_num_groups": 3}, "norm_num_groups"),
        ({"down_block_types": ("CogVideoXDownBlock3D",)}, "down_block_types"),
        ({"up_block_types": ("UpBlock",) * 4}, "up_block_types"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLCogVideoX(**{**TINY, **changes})
