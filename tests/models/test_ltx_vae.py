"""`AutoencoderKLLTXVideo` against the reference, whole and tiled, on a real config, and on input that does not fit."""

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core.models import AutoencoderKLLTXVideo
from diffusion_core.models.autoencoders.ltx_blocks import LTXVideoCausalConv3d, fold, from_patches, to_patches, unfold
from tests.support import hub_config

Config = dict[str, Any]

OLD: Config = {
    "block_out_channels": (4, 8, 8, 8),
    "decoder_block_out_channels": (4, 8, 8, 8),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "latent_channels": 4,
}
V091: Config = {
    "block_out_channels": (8, 16, 16, 16),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (2, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 2, 1, 1),
    "latent_channels": 8,
    "decoder_spatio_temporal_scaling": (True, True, True),
    "decoder_inject_noise": (True, True, True, False),
    "upsample_residual": (True, True, True),
    "upsample_factor": (2, 2, 2),
    "timestep_conditioning": True,
}
V095: Config = {
    **V091,
    "block_out_channels": (4, 8, 16, 32, 32),
    "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    "spatio_temporal_scaling": (True,) * 4,
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    "decoder_inject_noise": (False,) * 4,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
PLAIN: Config = {**V095, "timestep_conditioning": False}


def pair(**config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKLLTXVideo(**config).eval()
    for name, tensor in theirs.named_parameters():
        if "per_channel_scale" in name:
            torch.nn.init.normal_(tensor)
    ours = AutoencoderKLLTXVideo(**config).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        OLD,
        V091,
        V095,
        {**V095, "encoder_causal": False, "decoder_causal": True},
        {**V091, "decoder_inject_noise": (False, True, False, True, True), "upsample_factor": (1, 2, 2, 2)},
        {**V095, "downsample_type": ("conv", "temporal", "spatial", "spatial"), "block_out_channels": (8,) * 5},
        {**OLD, "block_out_channels": (8,) * 5, "down_block_types": ("LTXVideo095DownBlock3D",) * 4},
    ],
    ids=["0.9.0", "0.9.1", "0.9.5", "causal-decoder", "longer-lists", "kinds", "plain-levels"],
)
@pytest.mark.parametrize("frames", [1, 17])
def test_agrees_with_the_reference_both_ways(config: Config, frames: int) -> None:
    ours, theirs = pair(**config)
    film = seeded(2, 3, frames, 64, 96)
    expected, found = theirs.encode(film).latent_dist, ours.encode(film).latent_dist
    close(found.mean, expected.mean)
    close(found.logvar, expected.logvar)
    times = torch.tensor([0.05, 0.4])
    torch.manual_seed(1)
    wanted = theirs.decode(expected.mean, times).sample
    torch.manual_seed(1)
    close(ours.decode(expected.mean, times).sample, wanted)
    torch.manual_seed(1)
    close(ours(film, times, return_dict=False)[0], wanted)


@torch.no_grad()
def test_tiles_are_the_reference_s() -> None:
    ours, theirs = pair(**PLAIN)
    numbers = {
        "tile_sample_min_height": 96,
        "tile_sample_min_width": 64,
        "tile_sample_stride_height": 64,
        "tile_sample_stride_width": 32,
    }
    ours.enable_tiling(**numbers)
    theirs.enable_tiling(**numbers)
    film = seeded(1, 3, 9, 160, 128)
    latents = theirs.encode(film).latent_dist.mode()
    close(ours.encode(film).latent_dist.mode(), latents)
    close(ours.decode(latents).sample, theirs.decode(latents).sample)
    assert (ours.tile_sample_min_num_frames, ours.tile_sample_stride_num_frames) == (16, 8)


@torch.no_grad()
def test_tiles_in_time_are_the_reference_s_and_lie_where_they_belong() -> None:
    """Decoded tiles keep their place; the reference's are moved by a frame, so that they differ more from the whole."""
    ours, theirs = pair(**PLAIN)
    film, latents = seeded(1, 3, 41, 32, 32), seeded(1, 8, 6, 2, 2)
    whole = ours.decode(latents).sample
    for each in (ours, theirs):
        each.use_framewise_encoding = each.use_framewise_decoding = True
    close(ours.encode(film).latent_dist.mode(), theirs.encode(film).latent_dist.mode())
    tiled = ours.decode(latents).sample
    assert tiled.shape == whole.shape
    assert (tiled - whole).abs().mean() < 0.8 * (theirs.decode(latents).sample - whole).abs().mean()
    ours.disable_tiling()
    assert torch.equal(ours.decode(latents).sample, whole)


@torch.no_grad()
def test_tiles_with_a_wide_overlap_are_near_the_whole() -> None:
    """Within a fifth of the signal on average, for random weights; trained ones look less far."""
    ours, _ = pair(**PLAIN)
    latents = seeded(1, 8, 12, 3, 12)
    whole = ours.decode(latents).sample
    ours.enable_tiling(96, 256, 96, 128, tile_sample_min_num_frames=64, tile_sample_stride_num_frames=32)
    assert (ours.decode(latents).sample - whole).abs().mean() < 0.2 * whole.abs().mean()


@torch.no_grad()
def test_slices_are_the_whole_batch() -> None:
    ours, _ = pair(**V091)
    film, times = seeded(2, 3, 9, 32, 64), torch.tensor([0.0, 0.3])

    def results() -> torch.Tensor:
        return ours(film, times, generator=[torch.Generator().manual_seed(seed) for seed in range(2)]).sample

    whole = results()
    ours.enable_slicing()
    close(results(), whole)


@torch.no_grad()
def test_noise_is_drawn_by_the_generator() -> None:
    ours, _ = pair(**V091)
    latents = seeded(2, 8, 2, 1, 2)
    both = ours.decode(latents, 0.05, generator=[torch.Generator().manual_seed(seed) for seed in (3, 4)]).sample
    alone = ours.decode(latents[1:], 0.05, generator=torch.Generator().manual_seed(4)).sample
    close(both[1:], alone)
    other = ours.decode(latents[1:], 0.05, generator=torch.Generator().manual_seed(5)).sample
    assert (other - alone).abs().max() > 1e-3


@torch.no_grad()
def test_frames_that_fill_no_latent_are_left_out() -> None:
    ours, _ = pair(**V095)
    film = seeded(1, 3, 16, 32, 32)
    close(ours.encode(film).latent_dist.mode(), ours.encode(film[:, :, :9]).latent_dist.mode())


@torch.no_grad()
def test_padding_in_time_keeps_the_memory_format() -> None:
    """Case 115."""
    met: list[bool] = []
    for causal in (True, False):
        conv = LTXVideoCausalConv3d(8, 8, is_causal=causal).to(memory_format=torch.channels_last_3d)
        conv.conv.register_forward_pre_hook(
            lambda _, given: met.append(given[0].is_contiguous(memory_format=torch.channels_last_3d))
        )
        conv(torch.randn(2, 8, 5, 6, 6).contiguous(memory_format=torch.channels_last_3d))
    assert met == [True, True]


def test_what_is_folded_unfolds() -> None:
    film = seeded(2, 6, 4, 6, 8)
    assert torch.equal(unfold(fold(film, (2, 3, 4)), (2, 3, 4)), film)
    assert torch.equal(from_patches(to_patches(film, 2), 2), film)


def test_signature_is_the_reference_s() -> None:
    pairs = (AutoencoderKLLTXVideo.__init__, diffusers.AutoencoderKLLTXVideo.__init__)
    found, expected = ([*inspect.signature(each).parameters.values()][1:] for each in pairs)
    assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]


def test_a_real_config_matches_name_by_name() -> None:
    config = json.loads((hub_config("Lightricks/LTX-Video/vae") / "config.json").read_text())
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in (AutoencoderKLLTXVideo, diffusers.AutoencoderKLLTXVideo))
    shapes, expected = ({key: value.shape for key, value in each.state_dict().items()} for each in (ours, theirs))
    assert shapes == expected
    assert round(sum(each.numel() for each in ours.parameters()) / 1e6, 2) == 419.19


@torch.no_grad()
def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    ours, theirs = pair(**V095)
    theirs.latents_mean.fill_(0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = AutoencoderKLLTXVideo.from_pretrained(tmp_path / "theirs")
    assert torch.equal(again.latents_mean, torch.full((8,), 0.5))
    ours.save_pretrained(tmp_path / "ours")
    film = seeded(1, 3, 9, 32, 32)
    back = diffusers.AutoencoderKLLTXVideo.from_pretrained(tmp_path / "ours")
    close(ours.encode(film).latent_dist.mode(), back.encode(film).latent_dist.mode())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3, 9, 32, 32), "add the batch"),
        (torch.zeros(1, 4, 9, 32, 32), "3 channels"),
        (torch.zeros(1, 3, 9, 40, 32), "multiples of 32"),
        (torch.zeros(1, 3, 0, 32, 32), "frame"),
    ],
)
def test_bad_films_are_refused(given: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLLTXVideo(**OLD).encode(given)


def test_bad_times_and_generators_are_refused() -> None:
    vae = AutoencoderKLLTXVideo(**V091)
    latents = torch.zeros(2, 8, 1, 1, 1)
    with pytest.raises(ValueError, match="pass temb"):
        vae.decode(latents)
    with pytest.raises(ValueError, match="3 values"):
        vae.decode(latents, torch.zeros(3))
    with pytest.raises(ValueError, match="list of 1"):
        vae.decode(latents, 0.0, generator=[torch.Generator()])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**OLD, "patch_size_t": 2}, "patch_size_t=2 must be 1"),
        ({**OLD, "down_block_types": ("DownBlock",) * 4}, "down_block_types"),
        ({**OLD, "block_out_channels": (4, 8)}, "block_out_channels has 2 entries"),
        ({**V095, "downsample_type": ("all",) * 4}, "downsample_type has"),
        ({**V095, "downsample_type": ("conv",) * 4}, "changes from 4 to 8"),
        ({**OLD, "decoder_inject_noise": (True,)}, "decoder_inject_noise has 1 entries"),
        ({**OLD, "timestep_conditioning": True}, "do not fit"),
        ({**V091, "decoder_spatio_temporal_scaling": (True, False, True)}, "do not fit"),
    ],
)
def test_bad_configs_are_refused(config: Config, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLLTXVideo(**config)
