"""`AutoencoderKLWan` against the reference, whole and tiled, on real configs, and on input that does not fit."""

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core.models.autoencoders.wan import AutoencoderKLWan, into_patches, out_of_patches
from tests.support import hub_config

TINY: dict[str, Any] = {
    "base_dim": 6,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
    "scale_factor_spatial": 4,
}
OTHER: dict[str, Any] = {"temperal_downsample": [False, True], "decoder_base_dim": 8, "scale_factor_temporal": 2}
FOUR: dict[str, Any] = {"dim_mult": [1, 2, 2, 2], "temperal_downsample": [False, True, True], "scale_factor_spatial": 8}
# As Wan 2.2's 5B, which sees patches of pixels and has shortcuts around its levels.
PATCHES: dict[str, Any] = {
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "base_dim": 8,
    "decoder_base_dim": 12,
    "dim_mult": [1, 2, 4, 4],
    "temperal_downsample": [False, True, True],
    "scale_factor_spatial": 16,
}
# The numbers of Wan2.2-TI2V-5B, whose config the shared folder does not have.
REAL_5B: dict[str, Any] = {
    **PATCHES,
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "num_res_blocks": 2,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def pair(**changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderKLWan(**{**TINY, **changes}).eval()
    ours = AutoencoderKLWan(**{**TINY, **changes}).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def film(frames: int, height: int = 16, width: int = 24, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(frames))


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, FOUR, PATCHES])
@pytest.mark.parametrize("frames", [1, 5, 7, 13])
def test_agrees_with_the_reference_both_ways(changes: dict[str, Any], frames: int) -> None:
    ours, theirs = pair(**changes)
    given = film(frames, 32, 48, batch=2)
    expected = theirs.encode(given).latent_dist
    found = ours.encode(given).latent_dist
    assert torch.allclose(found.mean, expected.mean, atol=1e-5)
    assert torch.allclose(found.logvar, expected.logvar, atol=1e-5)
    decoded = theirs.decode(expected.mean).sample
    again = ours.decode(expected.mean).sample
    assert again.shape == decoded.shape
    assert torch.allclose(again, decoded, atol=1e-5)


@torch.no_grad()
def test_agrees_where_the_decoder_has_a_width_of_its_own() -> None:
    ours, theirs = pair(**OTHER)
    latents = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ours.decode(latents).sample, theirs.decode(latents).sample, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, PATCHES])
def test_steps_give_what_the_whole_film_gives(changes: dict[str, Any]) -> None:
    ours, _ = pair(**changes)
    given = film(13, 32, 48)
    whole = ours.encoder(into_patches(given, ours.patch))
    assert torch.allclose(ours.encode(given).latent_dist.parameters, ours.quant_conv(whole), atol=1e-5)
    latents = ours.encode(given).latent_dist.mode()
    expected = out_of_patches(ours.decoder(ours.post_quant_conv(latents)), ours.patch).clamp(-1, 1)
    assert torch.allclose(ours.decode(latents).sample, expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, PATCHES])
def test_no_convolution_sees_more_of_a_longer_film(changes: dict[str, Any]) -> None:
    """What a step takes is that of the largest map, however long the film."""
    ours, _ = pair(**changes)
    largest: list[int] = []
    for module in ours.decoder.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _module, _given, found: largest.append(found.numel()))
    peaks = []
    for frames in (2, 6):
        largest.clear()
        ours.decode(torch.zeros(1, 4, frames, 4, 6))
        peaks.append(max(largest))
    assert peaks[0] == peaks[1]


@torch.no_grad()
def test_tiles_are_the_reference_s() -> None:
    ours, theirs = pair()
    numbers = {
        "tile_sample_min_height": 16,
        "tile_sample_min_width": 16,
        "tile_sample_stride_height": 12,
        "tile_sample_stride_width": 12,
    }
    ours.enable_tiling(**numbers)
    theirs.enable_tiling(**numbers)
    whole = film(5, 32, 28)
    expected = theirs.encode(whole).latent_dist.mode()
    assert torch.allclose(ours.encode(whole).latent_dist.mode(), expected, atol=1e-5)
    assert torch.allclose(ours.decode(expected).sample, theirs.decode(expected).sample, atol=1e-5)


@torch.no_grad()
def test_tiles_of_films_in_patches_are_the_reference_s() -> None:
    ours, theirs = pair(**PATCHES)
    size, stride = {"tile_sample_min_height": 64, "tile_sample_min_width": 64}, "tile_sample_stride_"
    ours.enable_tiling(**size, tile_sample_stride_height=48, tile_sample_stride_width=48)
    theirs.enable_tiling(**size, tile_sample_stride_height=48, tile_sample_stride_width=48)
    latents = torch.randn(1, 4, 2, 7, 5, generator=torch.Generator().manual_seed(1))
    found, expected = ours.decode(latents).sample, theirs.decode(latents).sample
    # Where tiles overlap, theirs are blended by patches; the first pixel of a patch has the weights of ours.
    assert torch.allclose(found[..., ::2, ::2], expected[..., ::2, ::2], atol=1e-5)
    assert torch.allclose(found[..., :48, :48], expected[..., :48, :48], atol=1e-5)
    assert (found - expected).abs().mean() < 0.01
    # The reference cuts films to encode at twice the size that it was asked for, since it counts patches.
    ours.enable_tiling(128, 128, **{f"{stride}height": 96, f"{stride}width": 96})
    whole = film(5, 160, 176)
    expected = theirs.encode(whole).latent_dist.parameters
    assert torch.allclose(ours.encode(whole).latent_dist.parameters, expected, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, FOUR, PATCHES])
def test_tiles_are_close_to_the_whole(changes: dict[str, Any]) -> None:
    """Within a tenth of the range on average, though random weights look further than trained ones."""
    ours, _ = pair(**changes)
    latent = ours.spatial_compression_ratio
    given = film(5, 10 * latent, 7 * latent).clamp(-1, 1)
    latents = ours.encode(given).latent_dist.mode()
    decoded = ours.decode(latents).sample
    ours.enable_tiling(4 * latent, 4 * latent)
    assert (ours.encode(given).latent_dist.mode() - latents).abs().mean() < 0.1
    tiled = ours.decode(latents).sample
    assert tiled.shape == decoded.shape == given.shape
    assert 0 < (tiled - decoded).abs().mean() < 0.2


@torch.no_grad()
@pytest.mark.parametrize("sides", [(64, 64), (33 * 16, 21 * 16), (16, 400), (130, 75)])
def test_tiles_of_films_in_patches_keep_the_shape(sides: tuple[int, int]) -> None:
    ours, _ = pair(**PATCHES)
    given = film(1, *sides)
    whole = ours.encode(given).latent_dist.mode()
    for tile, stride in ((64, 48), (50, 37), (16, 16)):
        ours.enable_tiling(tile, tile, stride, stride)
        latents = ours.encode(given).latent_dist.mode()
        assert latents.shape == whole.shape
        assert ours.decode(latents).sample.shape[-2:] == tuple(side // 16 * 16 for side in sides)


@torch.no_grad()
@pytest.mark.parametrize("frames", [9, 17])
def test_tiles_in_time_keep_the_shape(frames: int) -> None:
    ours, _ = pair()
    latents = ours.encode(film(frames)).latent_dist.mode()
    whole = ours.decode(latents).sample
    ours.enable_tiling(tile_sample_min_num_frames=8, tile_sample_stride_num_frames=4)
    assert ours.decode(latents).sample.shape == whole.shape
    assert ours.encode(film(frames)).latent_dist.mode().shape == latents.shape


@torch.no_grad()
def test_slices_are_the_whole_batch() -> None:
    ours, _ = pair()
    whole = ours(film(5, batch=2)).sample
    ours.enable_slicing()
    assert torch.allclose(ours(film(5, batch=2)).sample, whole, atol=1e-5)


def test_signature_is_the_reference_s() -> None:
    pairs = (AutoencoderKLWan.__init__, diffusers.AutoencoderKLWan.__init__)
    found, expected = ([*inspect.signature(each).parameters.values()][1:] for each in pairs)
    assert [each.name for each in found] == [each.name for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        same = list(ours.default) if isinstance(ours.default, tuple) else ours.default
        assert same == theirs.default


@pytest.mark.parametrize("name", ["Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B", "Wan2.1-I2V-14B-480P", "Wan2.2-T2V-A14B"])
def test_real_configs_match_name_by_name(name: str) -> None:
    config = json.loads((hub_config(f"Wan-AI/{name}-Diffusers/vae") / "config.json").read_text())
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in (AutoencoderKLWan, diffusers.AutoencoderKLWan))
    shapes, expected = ({key: value.shape for key, value in each.state_dict().items()} for each in (ours, theirs))
    assert shapes == expected


def test_the_5b_matches_name_by_name() -> None:
    with torch.device("meta"):
        ours, theirs = (each(**REAL_5B) for each in (AutoencoderKLWan, diffusers.AutoencoderKLWan))
    shapes, expected = ({key: value.shape for key, value in each.state_dict().items()} for each in (ours, theirs))
    assert shapes == expected
    assert ours.spatial_compression_ratio == 16


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, PATCHES])
def test_save_and_load_both_ways(changes: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = pair(**changes)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    expected = ours(film(5, 32, 32)).sample
    assert torch.equal(AutoencoderKLWan.from_pretrained(tmp_path / "theirs")(film(5, 32, 32)).sample, expected)
    there = diffusers.AutoencoderKLWan.from_pretrained(tmp_path / "ours")
    assert torch.allclose(there(film(5, 32, 32)).sample, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.zeros(3, 5, 32, 32), "batch"),
        (torch.zeros(1, 4, 5, 32, 32), "3 channels"),
        (torch.zeros(1, 3, 5, 2, 32), "4 x 4"),
        (torch.zeros(1, 3, 0, 32, 32), "one frame"),
    ],
)
def test_bad_films_are_refused(given: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLWan(**TINY).encode(given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 2}, "patch_size"),
        ({"patch_size": 0}, "patch_size"),
        ({"in_channels": 6, "patch_size": 2, "out_channels": 12}, "in_channels=6"),
        ({"temperal_downsample": [True]}, "temperal_downsample"),
        ({"is_residual": True, "dim_mult": [3, 1, 4]}, "do not divide"),
        ({"is_residual": True, "dim_mult": [1, 5, 1]}, "do not"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoencoderKLWan(**{**TINY, **changes})
