"""`AutoencoderKLHunyuanVideo` against the reference, whole and tiled, on a real config, and on bad input."""

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core.models import AutoencoderKLHunyuanVideo
from diffusion_core.models.autoencoders.hunyuan_video import HunyuanVideoCausalConv3d, level_steps
from tests.support import hub_config

Config = dict[str, Any]

TINY: Config = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}


def pair(**changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKLHunyuanVideo(**{**TINY, **changes}).eval()
    ours = AutoencoderKLHunyuanVideo(**{**TINY, **changes}).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"spatial_compression_ratio": 4}, {"mid_block_add_attention": False}])
@pytest.mark.parametrize("frames", [1, 3, 5, 16, 17, 21, 26, 29])
def test_agrees_with_the_reference_both_ways(changes: Config, frames: int) -> None:
    """Films of more than 17 frames are cut in time by both."""
    ours, theirs = pair(**changes)
    film = seeded(1, 3, frames, 16, 24)
    expected, found = theirs.encode(film).latent_dist, ours.encode(film).latent_dist
    close(found.mean, expected.mean)
    close(found.logvar, expected.logvar)
    latents = seeded(*expected.mean.shape, seed=1)
    close(ours.decode(latents).sample, theirs.decode(latents).sample)


@torch.no_grad()
@pytest.mark.parametrize("framewise", [True, False])
def test_tiles_are_the_reference_s(framewise: bool) -> None:
    ours, theirs = pair()
    numbers = {
        "tile_sample_min_height": 32,
        "tile_sample_min_width": 48,
        "tile_sample_stride_height": 24,
        "tile_sample_stride_width": 24,
        "tile_sample_min_num_frames": 8,
        "tile_sample_stride_num_frames": 4,
    }
    for each in (ours, theirs):
        each.enable_tiling(**numbers)
        each.use_framewise_encoding = each.use_framewise_decoding = framewise
    film = seeded(1, 3, 21, 64, 56)
    close(ours.encode(film).latent_dist.mode(), theirs.encode(film).latent_dist.mode())
    latents = seeded(1, 4, 6, 8, 7, seed=1)
    close(ours.decode(latents).sample, theirs.decode(latents).sample)


@torch.no_grad()
def test_tiles_in_time_are_near_the_whole() -> None:
    """Within a twentieth of the signal on average, for a film that changes slowly."""
    ours, theirs = pair()
    latents = seeded(1, 4, 1, 2, 3) + 0.01 * seeded(1, 4, 9, 2, 3, seed=1)
    tiled = ours.decode(latents).sample
    for each in (ours, theirs):
        each.use_framewise_decoding = False
    whole = ours.decode(latents).sample
    close(whole, theirs.decode(latents).sample)
    assert tiled.shape == whole.shape == (1, 3, 33, 16, 24)
    assert 0 < (tiled - whole).abs().mean() < 0.05 * whole.abs().mean()
    ours.enable_tiling()
    ours.disable_tiling()
    assert torch.equal(ours.decode(latents).sample, tiled)


@torch.no_grad()
def test_what_a_step_takes_does_not_grow_with_the_film() -> None:
    ours, _ = pair()
    largest: list[int] = []
    for module in ours.decoder.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _module, _given, found: largest.append(found.numel()))
    peaks = []
    for frames in (9, 15):
        largest.clear()
        ours.decode(torch.zeros(1, 4, frames, 2, 3))
        peaks.append(max(largest))
    assert peaks[0] == peaks[1]


@torch.no_grad()
def test_slices_are_the_whole_batch() -> None:
    ours, _ = pair()
    latents = seeded(2, 4, 3, 2, 2)
    whole = ours.decode(latents).sample
    ours.enable_slicing()
    # Sums of a batch have another order, and norms of random weights enlarge what that does.
    torch.testing.assert_close(ours.decode(latents).sample, whole, rtol=0, atol=1e-4)


@torch.no_grad()
def test_padding_keeps_the_memory_format() -> None:
    """Case 115."""
    met: list[bool] = []
    conv = HunyuanVideoCausalConv3d(8, 8).to(memory_format=torch.channels_last_3d)
    conv.conv.register_forward_pre_hook(
        lambda _, given: met.append(given[0].is_contiguous(memory_format=torch.channels_last_3d))
    )
    conv(torch.randn(2, 8, 5, 6, 6).contiguous(memory_format=torch.channels_last_3d))
    assert met == [True]


def test_signature_is_the_reference_s() -> None:
    pairs = (AutoencoderKLHunyuanVideo.__init__, diffusers.AutoencoderKLHunyuanVideo.__init__)
    found, expected = ([*inspect.signature(each).parameters.values()][1:] for each in pairs)
    assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]


def test_a_real_config_matches_name_by_name() -> None:
    config = json.loads((hub_config("hunyuanvideo-community/HunyuanVideo/vae") / "config.json").read_text())
    with torch.device("meta"):
        ours, theirs = (
            each.from_config(config) for each in (AutoencoderKLHunyuanVideo, diffusers.AutoencoderKLHunyuanVideo)
        )
    shapes, expected = ({key: value.shape for key, value in each.state_dict().items()} for each in (ours, theirs))
    assert shapes == expected


@torch.no_grad()
def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    ours, theirs = pair()
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    film = seeded(1, 3, 5, 16, 16)
    wanted = theirs(film).sample
    close(AutoencoderKLHunyuanVideo.from_pretrained(tmp_path / "theirs")(film).sample, wanted)
    close(diffusers.AutoencoderKLHunyuanVideo.from_pretrained(tmp_path / "ours")(film).sample, wanted)


def test_what_becomes_smaller_at_which_level() -> None:
    assert level_steps(4, 8, 4) == [(1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 1, 1)]
    assert level_steps(3, 2, 4) == [(2, 2, 2), (2, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3, 5, 16, 16), "add the batch"),
        (torch.zeros(1, 4, 5, 16, 16), "3 channels"),
        (torch.zeros(1, 3, 5, 20, 16), "multiples of 8"),
        (torch.zeros(1, 3, 0, 16, 16), "frame"),
    ],
)
def test_bad_films_are_refused(given: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLHunyuanVideo(**TINY).encode(given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temporal_compression_ratio": 3}, "temporal_compression_ratio=3 must be a power of 2"),
        ({"spatial_compression_ratio": 16}, "spatial_compression_ratio=16"),
        ({"norm_num_groups": 3}, "norm_num_groups"),
        ({"down_block_types": ("HunyuanVideoDownBlock3D",)}, "down_block_types"),
        ({"up_block_types": ("UpBlock",) * 4}, "up_block_types"),
    ],
)
def test_bad_configs_are_refused(changes: Config, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLHunyuanVideo(**{**TINY, **changes})
