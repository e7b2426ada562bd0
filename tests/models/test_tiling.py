"""Slicing and tiling: shapes, joints, numbers that are refused, parity with the reference where it is right."""

import diffusers
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_core.models import AsymmetricAutoencoderKL, AutoencoderKL, AutoencoderTiny
from diffusion_core.models.autoencoders.tiling import Axis, TilingMixin, image_axes, stride_for

LEVELS = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "norm_num_groups": 2,
}
KL = {**LEVELS, "block_out_channels": (4, 4, 4), "latent_channels": 2, "sample_size": 32}
TINY = {
    "encoder_block_out_channels": (4,) * 3,
    "decoder_block_out_channels": (4,) * 3,
    "num_encoder_blocks": (1, 1, 1),
    "num_decoder_blocks": (1, 1, 1),
    "latent_channels": 2,
}
ASYMMETRIC = {
    **LEVELS,
    "down_block_out_channels": (4, 4, 4),
    "up_block_out_channels": (4, 8, 8),
    "latent_channels": 2,
    "sample_size": 32,
}


def make(kind: str) -> AutoencoderKL | AutoencoderTiny | AsymmetricAutoencoderKL:
    torch.manual_seed(0)
    if kind == "kl":
        return AutoencoderKL(**KL).eval()
    return AutoencoderTiny(**TINY).eval() if kind == "tiny" else AsymmetricAutoencoderKL(**ASYMMETRIC).eval()


def latents_of(model: torch.nn.Module, picture: torch.Tensor) -> torch.Tensor:
    (encoded,) = model.encode(picture, return_dict=False)
    return encoded if isinstance(encoded, torch.Tensor) else encoded.parameters


class Averages(TilingMixin):
    """An autoencoder whose tiles know all they need: latents are means of blocks. Tiled and whole must be equal.

    With frames, the first is a latent by itself, as in causal video autoencoders.
    """

    def __init__(self, ratio: int, frame_ratio: int = 0, rounds_up: bool = False, paste: bool = False) -> None:
        self.ratio, self.frame_ratio, self.rounds_up, self._paste_tiles = ratio, frame_ratio, rounds_up, paste
        axes = image_axes(4 * ratio, ratio, 0.25, rounds_up)
        if frame_ratio:
            axes["num_frames"] = Axis(-3, frame_ratio, tile=4, stride=3, lead=1)
        self._declare_tiles(axes)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self._in_parts(self._encode, x, decode=False)

    def decode(self, z: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        return self._in_parts(self._decode, z, *beside, decode=True)

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        frames = x if x.dim() == 5 else x[:, :, None]
        if self.rounds_up:
            frames = F.pad(frames, (0, -frames.shape[-1] % self.ratio, 0, -frames.shape[-2] % self.ratio))
        means = F.avg_pool3d(frames, (1, self.ratio, self.ratio))
        if self.frame_ratio:
            groups = (
                means[:, :, 1:].unfold(2, self.frame_ratio, self.frame_ratio)
                if means.shape[2] > self.frame_ratio
                else None
            )
            means = means[:, :, :1] if groups is None else torch.cat([means[:, :, :1], groups.mean(-1)], 2)
        return means if x.dim() == 5 else means[:, :, 0]

    def _decode(self, z: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        out = z.repeat_interleave(self.ratio, -1).repeat_interleave(self.ratio, -2)
        if self.frame_ratio:
            rest = out[:, :, 1:].repeat_interleave(self.frame_ratio, 2)
            out = torch.cat([out[:, :, :1], rest], 2)
        return out + sum(beside)


numbers = st.integers(1, 60)


@settings(max_examples=150, deadline=None)
@given(
    size=st.tuples(numbers, numbers),
    tile=st.tuples(numbers, numbers),
    stride=st.none() | st.tuples(numbers, numbers),
    overlap=st.floats(0, 0.99),
    ratio=st.sampled_from([1, 2, 4, 8]),
    rounds_up=st.booleans(),
    paste=st.booleans(),
)
def test_tiled_equals_whole(size, tile, stride, overlap, ratio, rounds_up, paste) -> None:
    model = Averages(ratio, rounds_up=rounds_up, paste=paste)
    height, width = (max(side, ratio) for side in size)
    tile = [max(side, ratio) for side in tile]
    given_numbers = {"tile_sample_min_height": tile[0], "tile_sample_min_width": tile[1]}
    if stride is None:
        given_numbers["tile_overlap_factor"] = overlap
    else:
        steps = [min(max(step, ratio), side) for step, side in zip(stride, tile, strict=True)]
        given_numbers |= {"tile_sample_stride_height": steps[0], "tile_sample_stride_width": steps[1]}
    picture = torch.rand(2, 1, height, width)
    whole = model.encode(picture)
    decoded = model.decode(whole)
    beside = torch.rand_like(decoded)
    model.enable_tiling(**given_numbers)
    torch.testing.assert_close(model.encode(picture), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.decode(whole), decoded, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.decode(whole, beside), decoded + beside, atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    latent_frames=st.integers(1, 12),
    spare=st.integers(0, 3),
    side=st.integers(4, 24),
    tile=st.integers(4, 40),
    stride=st.integers(4, 40),
    frame_ratio=st.sampled_from([1, 4]),
)
def test_tiles_in_time(latent_frames, spare, side, tile, stride, frame_ratio) -> None:
    model = Averages(4, frame_ratio)
    film = torch.rand(1, 2, 1 + (latent_frames - 1) * frame_ratio + min(spare, frame_ratio - 1), side, side)
    whole = model.encode(film)
    decoded = model.decode(whole)
    model.enable_tiling(8, 8, tile_sample_min_num_frames=tile, tile_sample_stride_num_frames=min(tile, stride))
    torch.testing.assert_close(model.encode(film), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.decode(whole), decoded, atol=1e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["kl", "tiny", "asymmetric"]),
    size=st.tuples(st.integers(4, 70), st.integers(4, 70)),
    tile=st.tuples(st.integers(8, 40), st.integers(8, 40)),
    overlap=st.floats(0, 0.9),
)
def test_shape_of_models(kind, size, tile, overlap) -> None:
    """Cases 100 and 101: the shape is that of the whole run for every size, tile and overlap."""
    model = make(kind)
    picture = torch.rand(1, 3, *size)
    with torch.no_grad():
        whole = latents_of(model, picture)
        decoded = model.decode(whole[:, :2]).sample
        model.enable_tiling(*tile, tile_overlap_factor=overlap)
        assert latents_of(model, picture).shape == whole.shape
        assert model.decode(whole[:, :2]).sample.shape == decoded.shape


@pytest.mark.parametrize("sample_size", [30, 50, 100, [48, 48]])
def test_default_tile_that_does_not_divide(sample_size) -> None:
    """Case 101: the reference gives 163x134 for 160x132 here."""
    model = AutoencoderKL(**{**KL, "sample_size": sample_size})
    model.enable_tiling()
    with torch.no_grad():
        assert model(torch.rand(1, 3, 160, 132)).sample.shape == (1, 3, 160, 132)


@pytest.mark.parametrize("size", [(36, 44), (40, 100), (33, 67), (64, 64), (32, 48)])
def test_kl_agrees_with_reference(size) -> None:
    ours, theirs = make("kl"), diffusers.AutoencoderKL(**KL).eval()
    theirs.load_state_dict(ours.state_dict())
    ours.enable_tiling()
    theirs.enable_tiling()
    picture = torch.rand(1, 3, *size) * 2 - 1
    with torch.no_grad():
        expected = theirs.encode(picture).latent_dist
        torch.testing.assert_close(ours.encode(picture).latent_dist.parameters, expected.parameters, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            ours.decode(expected.mean).sample, theirs.decode(expected.mean).sample, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("size", [(520, 64), (64, 600), (640, 576)])
def test_tiny_agrees_with_reference(size) -> None:
    config = {"encoder_block_out_channels": (4,) * 4, "decoder_block_out_channels": (4,) * 4}
    ours, theirs = AutoencoderTiny(**config).eval(), diffusers.AutoencoderTiny(**config).eval()
    theirs.load_state_dict(ours.state_dict())
    ours.enable_tiling()
    theirs.enable_tiling()
    picture = torch.rand(1, 3, *size) * 2 - 1
    with torch.no_grad():
        expected = theirs.encode(picture).latents
        torch.testing.assert_close(ours.encode(picture).latents, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.decode(expected).sample, theirs.decode(expected).sample, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["kl", "tiny", "asymmetric"])
def test_defaults_are_the_references(kind) -> None:
    if kind == "tiny":
        theirs, ours = diffusers.AutoencoderTiny(), AutoencoderTiny()
    else:
        theirs, ours = diffusers.AutoencoderKL(**KL), make(kind)
    for name in ("tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert (ours.use_slicing, ours.use_tiling) == (False, False)


@pytest.mark.parametrize("kind", ["kl", "tiny", "asymmetric"])
def test_up_to_the_tile_nothing_is_cut(kind) -> None:
    model = make(kind)
    picture = torch.rand(1, 3, 64, 48)
    whole = model(picture).sample
    model.enable_tiling(64, 48)
    assert torch.equal(model(picture).sample, whole)
    model.enable_tiling(32, 32)
    assert not torch.equal(model(picture).sample, whole)
    model.disable_tiling()
    assert torch.equal(model(picture).sample, whole)


@pytest.mark.parametrize("kind", ["kl", "tiny", "asymmetric"])
@pytest.mark.parametrize("tiled", [False, True])
def test_sliced_equals_unsliced(kind, tiled) -> None:
    """Cases 104 and 106: one sample at a time, before tiles are cut."""
    model = make(kind)
    if tiled:
        model.enable_tiling(16, 16)
    picture = torch.rand(3, 3, 32, 24)
    condition = {"mask": (torch.rand(3, 1, 32, 24) > 0.5).float()} if kind == "asymmetric" else {}
    batches = []
    for part in (model.encoder, model.decoder):
        part.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    with torch.no_grad():
        expected = model(picture, **condition).sample
        assert set(batches) == {3}
        batches.clear()
        model.enable_slicing()
        sliced = model(picture, **condition).sample
        assert set(batches) == {1}
    torch.testing.assert_close(sliced, expected, atol=1e-5, rtol=0)
    model.disable_slicing()
    assert not model.use_slicing


def test_mask_is_cut_with_the_latents() -> None:
    model = make("asymmetric")
    picture, mask = torch.rand(2, 3, 64, 64), torch.zeros(1, 1, 64, 64)
    mask[..., :32] = 1
    with torch.no_grad():
        latents = model.encode(picture).latent_dist.mode()
        whole = model.decode(latents, image=picture, mask=mask).sample
        model.enable_tiling(32, 32)
        tiled = model.decode(latents, image=picture, mask=mask).sample
        other = model.decode(latents, image=picture, mask=1 - mask).sample
    assert (tiled - whole).abs().mean() < (other - whole).abs().mean()


BAD = [
    ({"tile_sample_min_height": 0}, ValueError, "tile_sample_min_height=0 must be at least 4"),
    ({"tile_sample_min_width": -8}, ValueError, "tile_sample_min_width=-8 must be at least 4"),
    ({"tile_sample_min_height": 3}, ValueError, "at least 4"),
    ({"tile_sample_min_height": 32.0}, TypeError, "tile_sample_min_height must be an integer"),
    ({"tile_sample_min_height": True}, TypeError, "tile_sample_min_height must be an integer"),
    ({"tile_sample_stride_height": 2}, ValueError, "tile_sample_stride_height=2 must be at least 4"),
    ({"tile_sample_min_width": 32, "tile_sample_stride_width": 64}, ValueError, "larger than the tile of 32"),
    ({"tile_sample_stride_width": 512}, ValueError, "tile_sample_stride_width=512 is larger"),
    ({"tile_overlap_factor": 1.0}, ValueError, "less than 1"),
    ({"tile_overlap_factor": -0.1}, ValueError, "tile_overlap_factor=-0.1 must be at least 0"),
    ({"tile_overlap_factor": float("nan")}, ValueError, "tile_overlap_factor"),
    ({"tile_overlap_factor": "0.3"}, TypeError, "tile_overlap_factor must be a number"),
    ({"tile_overlap_factor": 0.3, "tile_sample_stride_width": 16}, ValueError, "not both"),
    ({"tile_sample_min_num_frames": 16}, ValueError, "no use for"),
]


@pytest.mark.parametrize(("numbers", "error", "message"), BAD)
def test_bad_numbers_are_refused_when_set(numbers, error, message) -> None:
    """Case 109, and nothing is half applied: the good number beside the bad one is not taken either."""
    model = make("kl")
    before = model._axes
    with pytest.raises(error, match=message):
        model.enable_tiling(**{"tile_sample_min_height": 64, **numbers})
    assert model._axes == before
    assert not model.use_tiling


def test_stride_follows_the_tile() -> None:
    """Case 98: with only a tile given, below the default stride, nothing is lost."""
    model = make("kl")
    model.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=64)
    assert (model.tile_sample_min_height, model.tile_sample_stride_height) == (16, 12)
    assert (model.tile_sample_min_width, model.tile_sample_stride_width) == (64, 48)
    model.enable_tiling(tile_overlap_factor=0.5)
    assert (model.tile_sample_stride_height, model.tile_sample_stride_width) == (8, 32)
    model.disable_tiling()
    model.enable_tiling()
    assert model.tile_sample_stride_width == 32
    model.enable_tiling(50, tile_sample_stride_height=37)
    assert (model.tile_sample_min_height, model.tile_sample_stride_height) == (48, 36)


def test_numbers_as_attributes() -> None:
    model = make("kl")
    model.tile_sample_min_size = 64
    assert (model.tile_sample_min_width, model.tile_latent_min_size, model.tile_overlap_factor) == (64, 16, 0.25)
    model.tile_latent_min_size = 8
    model.tile_overlap_factor = 0.5
    assert (model.tile_sample_min_height, model.tile_sample_stride_width) == (32, 16)
    model.tile_sample_stride_width = 32
    assert (model.tile_sample_stride_height, model.tile_sample_stride_width) == (16, 32)
    with pytest.raises(ValueError, match="tile_overlap_factor=2"):
        model.tile_overlap_factor = 2
    with pytest.raises(AttributeError):
        model.tile_sample_min_num_frames  # noqa: B018
    assert stride_for(10, 0.999) == 1


@pytest.mark.parametrize("kind", ["kl", "tiny"])
def test_gradient_through_tiles(kind) -> None:
    model = make(kind).double()
    model.enable_tiling(16, 16)
    latents = torch.rand(1, 2, 6, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(1, 3, 24, 28, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((model.decode(latents).sample * weight).sum(), latents)
    direction = torch.rand_like(latents)
    with torch.no_grad():
        step = 1e-6
        ahead, behind = (model.decode(latents + sign * step * direction).sample for sign in (1, -1))
        slope = ((ahead - behind) * weight).sum() / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-8)


def test_layout_and_dtype_are_kept() -> None:
    model = make("kl").to(torch.bfloat16, memory_format=torch.channels_last)
    model.enable_tiling(16, 16)
    with torch.no_grad():
        sample = model.decode(torch.rand(1, 2, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)).sample
    assert sample.dtype == torch.bfloat16
    assert sample.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", ["kl", "tiny"])
def test_tiles_compile_into_one_graph(kind) -> None:
    model = make(kind)
    model.enable_tiling(16, 16)
    latents = torch.rand(1, 2, 6, 6)
    compiled = torch.compile(model.decode, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(latents).sample, model.decode(latents).sample, atol=1e-6, rtol=0)
