"""AutoencoderKL, AutoencoderTiny and AsymmetricAutoencoderKL against the reference and against real weights."""

import json
import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution as ReferenceDistribution
from PIL import Image
from safetensors.torch import load_file, save_file

from diffusion_core.config import unknown_entries
from diffusion_core.errors import CorruptFileError, KeyMismatchError, MissingFileError
from diffusion_core.models import AsymmetricAutoencoderKL, AutoencoderKL, AutoencoderTiny
from diffusion_core.models.autoencoders.distribution import DiagonalGaussianDistribution
from diffusion_core.models.layers.resnet import Downsample2D, ResnetBlock2D, Upsample2D
from tests.support import SHARED, hub_config, needs_shared

Config = dict[str, Any]
DOWN, UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
KL: Config = {
    "down_block_types": DOWN,
    "up_block_types": UP,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}
TINY: Config = {
    "encoder_block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "num_encoder_blocks": (1, 2),
    "num_decoder_blocks": (2, 1),
}
ASYMMETRIC: Config = {
    "down_block_types": DOWN,
    "up_block_types": UP,
    "down_block_out_channels": (8, 16),
    "up_block_out_channels": (8, 16),
    "layers_per_up_block": 2,
    "norm_num_groups": 4,
}
KL_VARIANTS: list[Config] = [
    {},
    {"block_out_channels": (8, 8), "layers_per_block": 2, "latent_channels": 3, "in_channels": 4, "out_channels": 2},
    {"use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.1, "force_upcast": False},
    {"mid_block_add_attention": False, "act_fn": "relu"},
    {"down_block_types": ("AttnDownEncoderBlock2D",) * 2, "up_block_types": ("AttnUpDecoderBlock2D",) * 2},
]
TAEF2 = SHARED / "weights" / "taef2"


def pair(name: str, config: Config) -> tuple[Any, Any]:
    """Our model and the reference's, with the same weights; loading is strict, so names and shapes are equal."""
    torch.manual_seed(0)
    theirs = getattr(diffusers, name)(**config).eval()
    ours = {"AutoencoderKL": AutoencoderKL, "AutoencoderTiny": AutoencoderTiny}.get(name, AsymmetricAutoencoderKL)
    ours = ours(**config).eval()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("variant", KL_VARIANTS)
@pytest.mark.parametrize("size", [(16, 16), (18, 31)])
def test_kl_agrees_with_reference(variant: Config, size: tuple[int, int]) -> None:
    config = KL | variant
    ours, theirs = pair("AutoencoderKL", config)
    picture = uniform(2, config.get("in_channels", 3), *size)
    with torch.no_grad():
        expected = theirs.encode(picture).latent_dist
        actual = ours.encode(picture).latent_dist
        close(actual.parameters, expected.parameters)
        seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
        close(actual.sample(seeds[0]), expected.sample(seeds[1]))
        close(ours.decode(expected.mean).sample, theirs.decode(expected.mean).sample)
        close(ours(picture).sample, theirs(picture).sample)
        seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
        drawn = ours(picture, sample_posterior=True, generator=seeds[0]).sample
        close(drawn, theirs(picture, sample_posterior=True, generator=seeds[1]).sample)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"act_fn": "silu", "latent_channels": 6, "latent_magnitude": 2, "latent_shift": 0.25},
        {"upsample_fn": "bilinear", "in_channels": 4, "out_channels": 4},
    ],
)
def test_tiny_agrees_with_reference(variant: Config) -> None:
    ours, theirs = pair("AutoencoderTiny", TINY | variant)
    picture = uniform(2, variant.get("in_channels", 3), 18, 31)
    with torch.no_grad():
        latents = theirs.encode(picture).latents
        close(ours.encode(picture).latents, latents)
        close(ours.decode(latents * 5).sample, theirs.decode(latents * 5).sample)
        close(ours(picture).sample, theirs(picture).sample)
        close(ours.scale_latents(latents * 9), theirs.scale_latents(latents * 9), 0)
        close(ours.unscale_latents(latents), theirs.unscale_latents(latents), 0)


@pytest.mark.parametrize(
    "widths", [(8, 16), (12, 12), (12,)], ids=["doubling", "equal widths take the deepest features", "one level"]
)
def test_asymmetric_agrees_with_reference(widths: tuple[int, ...]) -> None:
    levels = {
        "down_block_types": DOWN[: len(widths)],
        "up_block_types": UP[: len(widths)],
        "down_block_out_channels": (8, 16)[: len(widths)],
        "up_block_out_channels": widths,
    }
    ours, theirs = pair("AsymmetricAutoencoderKL", ASYMMETRIC | levels)
    picture = uniform(2, 3, 16, 24)
    mask = (uniform(2, 1, 16, 24) > 0).float()
    with torch.no_grad():
        expected = theirs.encode(picture).latent_dist
        close(ours.encode(picture).latent_dist.parameters, expected.parameters)
        close(ours(picture).sample, theirs(picture).sample)
        close(ours(picture, mask).sample, theirs(picture, mask).sample)
        actual = ours.decode(expected.mean, image=picture, mask=mask[:1]).sample
        close(actual, theirs.decode(expected.mean, image=picture, mask=mask[:1].expand(2, -1, -1, -1)).sample)


def test_asymmetric_keeps_only_what_the_mask_leaves() -> None:
    model = AsymmetricAutoencoderKL(**ASYMMETRIC).eval()
    mask = torch.zeros(1, 1, 16, 16)
    mask[..., :8] = 1
    latents, pictures = torch.randn(1, 4, 8, 8), [uniform(1, 3, 16, 16), uniform(1, 3, 16, 16)]
    pictures[1][..., :8] = 0
    with torch.no_grad():
        first, second = (model.decode(latents, image=picture, mask=mask).sample for picture in pictures)
    assert torch.equal(first, second), "what is masked must have no influence"


@needs_shared
@pytest.mark.parametrize(
    ("folder", "millions"),
    [
        ("runwayml/stable-diffusion-v1-5/vae", 83.65),
        ("runwayml/stable-diffusion-inpainting/vae", 83.65),
        ("stabilityai/stable-diffusion-2-1/vae", 83.65),
        ("stabilityai/stable-diffusion-xl-base-1.0/vae", 83.65),
        ("stabilityai/stable-diffusion-xl-refiner-1.0/vae", 83.65),
        ("diffusers/stable-diffusion-xl-1.0-inpainting-0.1/vae", 83.65),
        ("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS/vae", 83.65),
        ("fal/AuraFlow/vae", 83.65),
        ("stabilityai/stable-diffusion-3-medium-diffusers/vae", 83.82),
        ("black-forest-labs/FLUX.1-dev/vae", 83.82),
        ("black-forest-labs/FLUX.1-schnell/vae", 83.82),
        ("madebyollin/taesd", 2.45),
        ("cross-attention/asymmetric-autoencoder-kl-x-1-5", 194.30),
    ],
)
def test_real_configs_on_meta(folder: str, millions: float) -> None:
    config = json.loads((hub_config(folder) / "config.json").read_text())
    ours_class = {
        "AutoencoderKL": AutoencoderKL,
        "AutoencoderTiny": AutoencoderTiny,
        "AsymmetricAutoencoderKL": AsymmetricAutoencoderKL,
    }[config["_class_name"]]
    with torch.device("meta"):
        ours = ours_class.from_config(config)
        theirs = getattr(diffusers, config["_class_name"]).from_config(config)
    shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert sum(parameter.numel() for parameter in ours.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)
    differing = {key for key, value in theirs.config.items() if not key.startswith("_") and ours.config[key] != value}
    assert not differing
    assert ours.spatial_compression_ratio == 8
    if config["_class_name"] != "AsymmetricAutoencoderKL":
        assert ours.tile_sample_min_size == theirs.tile_sample_min_size


def test_defaults_are_the_references() -> None:
    for ours in (AutoencoderKL, AutoencoderTiny, AsymmetricAutoencoderKL):
        with torch.device("meta"):
            theirs = getattr(diffusers, ours.__name__)().config
            config = ours().config
        assert {key: config[key] for key in theirs if key != "_use_default_values"} == {
            key: value for key, value in theirs.items() if key != "_use_default_values"
        }


@pytest.mark.parametrize("name", ["AutoencoderKL", "AutoencoderTiny", "AsymmetricAutoencoderKL"])
def test_checkpoints_go_both_ways(name: str, tmp_path: Any) -> None:
    ours, theirs = pair(name, {"AutoencoderKL": KL, "AutoencoderTiny": TINY}.get(name, ASYMMETRIC))
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    picture = uniform(1, 3, 8, 8)
    with torch.no_grad():
        expected = ours(picture).sample
        for folder in ("ours", "theirs"):
            close(type(ours).from_pretrained(tmp_path / folder)(picture).sample, expected, 0)
        close(type(theirs).from_pretrained(tmp_path / "ours")(picture).sample, expected)
    assert not unknown_entries(type(ours), json.loads((tmp_path / "theirs" / "config.json").read_text()))


def test_compression_ratio_comes_from_the_blocks() -> None:
    """Case 113: the reference takes 8 for all of AutoencoderTiny, since it counts the colours."""
    assert AutoencoderTiny(**TINY).spatial_compression_ratio == 2
    assert AutoencoderKL(**KL).spatial_compression_ratio == 2
    assert AsymmetricAutoencoderKL(**ASYMMETRIC).spatial_compression_ratio == 2
    assert AutoencoderKL().spatial_compression_ratio == 1
    wide = AutoencoderTiny(**TINY | {"out_channels": 5})
    assert wide.decode(torch.zeros(1, 4, 3, 3)).sample.shape == (1, 5, 6, 6)
    assert (wide.spatial_compression_ratio, len(wide.config.block_out_channels)) == (2, 2)


def test_embedded_model_config() -> None:
    """The shape that the embedded checkpoint has, trained as it is: bfloat16 autocast, channels last."""
    model = AutoencoderKL(
        block_out_channels=(32, 48, 64, 96),
        down_block_types=DOWN * 2,
        up_block_types=UP * 2,
        latent_channels=8,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
    ).to(memory_format=torch.channels_last)
    outputs = []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | ResnetBlock2D | Upsample2D | Downsample2D):
            module.register_forward_hook(lambda _, __, output: outputs.append(output))
    picture = uniform(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        posterior = model.encode(picture).latent_dist
        restored = model.decode(posterior.sample()).sample
    assert posterior.mean.shape == (2, 8, 8, 8)
    assert restored.shape == picture.shape
    loss = (restored.float() - picture).abs().mean() + 1e-6 * posterior.kl().mean()
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in outputs)
    assert all(output.dtype == torch.bfloat16 for output in outputs)


@pytest.mark.parametrize("name", ["AutoencoderKL", "AsymmetricAutoencoderKL"])
def test_gradients_agree_with_reference(name: str) -> None:
    ours, theirs = pair(name, KL if name == "AutoencoderKL" else ASYMMETRIC)
    picture = uniform(1, 3, 16, 16)
    for model in (ours, theirs):
        posterior = model.encode(picture).latent_dist
        loss = (model.decode(posterior.mode()).sample - picture).square().mean() + 1e-3 * posterior.kl().mean()
        loss.backward()
    expected = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        grad = expected[key].grad
        if grad is None:
            assert parameter.grad is None, key
        else:
            close(parameter.grad, grad)


def test_tiny_gradient_reaches_the_encoder() -> None:
    model = AutoencoderTiny(**TINY, mid_block_pool=True)
    picture = uniform(1, 3, 16, 16)
    (model.decode(model.encode(picture).latents).sample - picture).abs().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("deterministic", [False, True])
def test_distribution_agrees_with_reference(deterministic: bool) -> None:
    moments, others = uniform(2, 6, 4, 5) * 3, uniform(2, 6, 4, 5)
    moments[0, 3] = 100.0  # clamped
    actual, expected = (kind(moments, deterministic) for kind in (DiagonalGaussianDistribution, ReferenceDistribution))
    for name in ("mean", "logvar", "std", "var"):
        close(getattr(actual, name), getattr(expected, name), 0)
    close(actual.mode(), expected.mode(), 0)
    seeds = [torch.Generator().manual_seed(5) for _ in range(2)]
    close(actual.sample(seeds[0]), expected.sample(seeds[1]), 0)
    latents = uniform(2, 3, 4, 5)
    other = DiagonalGaussianDistribution(others), ReferenceDistribution(others)
    for ours, theirs in (
        (actual.kl(), expected.kl()),
        (actual.kl(other[0]), expected.kl(other[1])),
        (actual.nll(latents), expected.nll(latents)),
    ):
        torch.testing.assert_close(ours, theirs.expand(2), rtol=1e-5, atol=1e-5)


def test_distribution_over_videos_sums_all_but_the_batch() -> None:
    """The reference stops at the fourth dimension and returns a row of widths."""
    moments = uniform(2, 6, 3, 4, 5)
    film = DiagonalGaussianDistribution(moments)
    flat = DiagonalGaussianDistribution(moments.flatten(2, 3))
    torch.testing.assert_close(film.kl(), flat.kl())
    torch.testing.assert_close(film.nll(film.mean), flat.nll(flat.mean))


def test_list_of_generators() -> None:
    """Sample k drawn from a list is the one that generator k draws alone."""
    posterior = DiagonalGaussianDistribution(uniform(2, 6, 4, 4))
    drawn = posterior.sample([torch.Generator().manual_seed(seed) for seed in (1, 2)])
    for index, seed in enumerate((1, 2)):
        alone = DiagonalGaussianDistribution(posterior.parameters[index : index + 1])
        close(drawn[index : index + 1], alone.sample(torch.Generator().manual_seed(seed)), 0)
    with pytest.raises(ValueError, match="generator is a list of 3"):
        posterior.sample([torch.Generator() for _ in range(3)])


def test_tuples_on_request() -> None:
    kl, tiny = AutoencoderKL(**KL), AutoencoderTiny(**TINY)
    picture = uniform(1, 3, 8, 8)
    (posterior,) = kl.encode(picture, return_dict=False)
    assert isinstance(posterior, DiagonalGaussianDistribution)
    (latents,) = tiny.encode(picture, return_dict=False)
    assert latents.shape == (1, 4, 4, 4)
    for outputs in (
        kl.decode(latents, return_dict=False),
        tiny.decode(latents, return_dict=False),
        kl(picture, return_dict=False),
        tiny(picture, return_dict=False),
    ):
        assert [output.shape for output in outputs] == [(1, 3, 8, 8)]


BAD_INPUTS = [
    ("encode", (3, 16, 16), r"x must be \(batch, 3, height, width\), not \(3, 16, 16\); add the batch with x\[None\]"),
    ("encode", (1, 3, 1, 16, 16), "must be"),
    ("encode", (1, 4, 16, 16), "must have 3 channels, not 4"),
    ("decode", (4, 8, 8), "add the batch"),
    ("decode", (1, 3, 8, 8), "must have 4 channels, not 3"),
    ("decode", (1, 4, 0, 8), "at least 1 x 1"),
]


@pytest.mark.parametrize(("method", "shape", "message"), BAD_INPUTS)
@pytest.mark.parametrize("kind", ["kl", "tiny", "asymmetric"])
def test_bad_inputs(kind: str, method: str, shape: tuple[int, ...], message: str) -> None:
    model = {
        "kl": lambda: AutoencoderKL(**KL),
        "tiny": lambda: AutoencoderTiny(**TINY),
        "asymmetric": lambda: AsymmetricAutoencoderKL(**ASYMMETRIC),
    }[kind]()
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(torch.zeros(shape))


def test_pictures_smaller_than_a_latent() -> None:
    with pytest.raises(ValueError, match="at least 2 x 2"):
        AutoencoderKL(**KL).encode(torch.zeros(1, 3, 1, 8))


def test_bad_masks() -> None:
    model, latents = AsymmetricAutoencoderKL(**ASYMMETRIC), torch.zeros(2, 4, 4, 4)
    picture, mask = torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, 8, 8)
    with pytest.raises(ValueError, match="pass `image` too"):
        model.decode(latents, mask=mask)
    with pytest.raises(ValueError, match=r"image must be \(2, 3, 8, 8\), not \(2, 3, 9, 8\)"):
        model.decode(latents, image=torch.zeros(2, 3, 9, 8), mask=mask)
    for wrong in (mask[0], mask[:, :, :4], torch.zeros(3, 1, 8, 8), torch.zeros(2, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"mask must be \(2, 1, 8, 8\)"):
            model.decode(latents, image=picture, mask=wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoencoderKL(**KL | {"down_block_types": ("DownBlock9D",) * 2}), "down_block_types has"),
        (lambda: AutoencoderKL(**KL | {"up_block_types": UP[:1]}), "up_block_types has 1 entries"),
        (lambda: AutoencoderKL(block_out_channels=()), "down_block_types has 1 entries and block_out_channels 0"),
        (lambda: AutoencoderKL(**KL | {"norm_num_groups": 3}), r"has \[8, 16\], which norm_num_groups=3 does not"),
        (lambda: AutoencoderKL(**KL | {"act_fn": "tanhh"}), "unknown activation 'tanhh'"),
        (lambda: AutoencoderTiny(**TINY | {"num_encoder_blocks": (1,)}), "num_encoder_blocks 1; give one each"),
        (lambda: AutoencoderTiny(**TINY | {"decoder_block_out_channels": (8, 4)}), "must have the same width"),
        (lambda: AutoencoderTiny(**TINY | {"upsampling_scaling_factor": 4}), "enlarges by 4; make them equal"),
        (lambda: AsymmetricAutoencoderKL(**ASYMMETRIC | {"up_block_types": UP[:1]}), "2 levels and up_block_types 1"),
    ],
)
def test_configs_that_do_not_fit(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def taef2() -> AutoencoderTiny:
    if not TAEF2.is_dir():
        pytest.skip("the weights of TAEF2 are not in ../shared")
    return AutoencoderTiny.from_taesd(TAEF2 / "encoder.safetensors", TAEF2 / "decoder.safetensors")


def test_taef2_reconstructs_the_photograph() -> None:
    model = taef2()
    expected = load_file(TAEF2 / "expected.safetensors")
    pixels = torch.from_numpy(np.array(Image.open(TAEF2 / "astronaut_256.png").convert("RGB"))).permute(2, 0, 1)[None]
    with torch.no_grad():
        latents = model.encode(pixels / 127.5 - 1).latents
        restored = (model.decode(expected["latents"]).sample / 2 + 0.5).clamp(0, 1)
        through = (model.decode(latents).sample / 2 + 0.5).clamp(0, 1)
    close(latents, expected["latents"], 2e-3)
    close(restored, expected["reconstruction"], 2e-3)
    quality = -10 * math.log10((through - pixels / 255).square().mean().item())
    assert quality >= 28.8
    assert model.config.latent_channels == 32
    assert model.config.mid_block_pool


def test_taesd_files_of_the_first_kind(tmp_path: Any) -> None:
    """Without pooling, and with other numbers of blocks: config and weights come back from the authors' layout."""
    model = AutoencoderTiny(**TINY, latent_channels=5).eval()
    weights = model.state_dict()
    encoder = {key.removeprefix("encoder.layers."): weights[key] for key in weights if key.startswith("encoder")}
    decoder = {}
    for key in weights:
        if key.startswith("decoder"):
            layer, _, rest = key.removeprefix("decoder.layers.").partition(".")
            decoder[f"{int(layer) + 1}.{rest}"] = weights[key].half()
    save_file(encoder, tmp_path / "encoder.safetensors")
    save_file(decoder, tmp_path / "decoder.safetensors")
    loaded = AutoencoderTiny.from_taesd(tmp_path / "encoder.safetensors", tmp_path / "decoder.safetensors")
    assert {key: loaded.config[key] for key in (*TINY, "latent_channels", "mid_block_pool")} == {
        **TINY,
        "latent_channels": 5,
        "mid_block_pool": False,
    }
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    close(loaded.encode(uniform(1, 3, 8, 8)).latents, model.encode(uniform(1, 3, 8, 8)).latents, 0)


def test_taesd_files_that_cannot_be_used(tmp_path: Any) -> None:
    good, bad, other = (tmp_path / name for name in ("good.safetensors", "bad.safetensors", "other.safetensors"))
    save_file({"0.weight": torch.zeros(8, 3, 3, 3), "0.bias": torch.zeros(8)}, good)
    bad.write_bytes(b"<!DOCTYPE html><html></html>")
    save_file({"encoder.conv_in.weight": torch.zeros(3)}, other)
    with pytest.raises(MissingFileError, match=r"no file .*nowhere"):
        AutoencoderTiny.from_taesd(tmp_path / "nowhere", good)
    with pytest.raises(CorruptFileError, match=r"bad\.safetensors is not a safetensors file"):
        AutoencoderTiny.from_taesd(good, bad)
    with pytest.raises(KeyMismatchError, match=r"other\.safetensors does not hold numbered layers"):
        AutoencoderTiny.from_taesd(good, other)
    with pytest.raises(KeyMismatchError, match=r"good\.safetensors does not hold numbered layers from 1"):
        AutoencoderTiny.from_taesd(good, good)
    save_file({"1.weight": torch.zeros(8, 3, 3, 3), "1.bias": torch.zeros(8)}, other)
    with pytest.raises(KeyMismatchError, match="do not fit together"):
        AutoencoderTiny.from_taesd(good, other)


@pytest.mark.parametrize("kind", ["kl", "tiny", "asymmetric"])
def test_compiles_into_one_graph(kind: str) -> None:
    picture, inputs = uniform(1, 3, 16, 16), ()
    if kind == "kl":
        model = AutoencoderKL(**KL).eval()
    elif kind == "tiny":
        model = AutoencoderTiny(**TINY).eval()
    else:
        model, inputs = AsymmetricAutoencoderKL(**ASYMMETRIC).eval(), ((uniform(1, 1, 16, 16) > 0).float(),)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(picture, *inputs).sample, model(picture, *inputs).sample, 1e-6)


RESNETS: list[Config] = [
    {"temb_channels": None},
    {"temb_channels": 12, "out_channels": 16},
    {"temb_channels": 12, "time_embedding_norm": "scale_shift", "output_scale_factor": 2.0, "eps": 1e-5},
    {"temb_channels": 12, "skip_time_act": True, "non_linearity": "gelu", "groups_out": 2},
    {"temb_channels": 12, "up": True},
    {"temb_channels": 12, "down": True, "use_in_shortcut": True, "conv_shortcut_bias": False},
]


@pytest.mark.parametrize("config", RESNETS)
def test_resnet_block_agrees_with_reference(config: Config) -> None:
    from diffusers.models.resnet import ResnetBlock2D as ReferenceBlock

    theirs = ReferenceBlock(in_channels=8, groups=4, **config)
    ours = ResnetBlock2D(8, groups=4, **config)
    ours.load_state_dict(theirs.state_dict())
    temb = None if config["temb_channels"] is None else uniform(2, 12)
    close(ours(uniform(2, 8, 6, 10), temb), theirs(uniform(2, 8, 6, 10), temb), 1e-6)


def test_resampling_agrees_with_reference() -> None:
    from diffusers.models.downsampling import Downsample2D as ReferenceDown
    from diffusers.models.upsampling import Upsample2D as ReferenceUp

    features = uniform(2, 8, 7, 10)
    for config in ({"padding": 1}, {"padding": 0, "out_channels": 12}, {"use_conv": False}):
        theirs, ours = ReferenceDown(8, **{"use_conv": True, "name": "op", **config}), Downsample2D(8, **config)
        ours.load_state_dict(theirs.state_dict())
        close(ours(features), theirs(features), 1e-6)
    for config in ({}, {"out_channels": 12}, {"use_conv": False}):
        theirs, ours = ReferenceUp(8, **{"use_conv": True, **config}), Upsample2D(8, **config)
        ours.load_state_dict(theirs.state_dict())
        close(ours(features), theirs(features), 1e-6)
        close(ours(features, (13, 19)), theirs(features, (13, 19)), 1e-6)


def test_layers_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="time_embedding_norm='ada'"):
        ResnetBlock2D(8, groups=4, time_embedding_norm="ada")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exclude each other"):
        ResnetBlock2D(8, groups=4, up=True, down=True)
    with pytest.raises(ValueError, match="needs use_conv=True"):
        Downsample2D(8, use_conv=False, out_channels=4)
    with pytest.raises(ValueError, match="needs use_conv=True"):
        Upsample2D(8, use_conv=False, out_channels=4)
    with pytest.raises(ValueError, match="needs `temb`"):
        ResnetBlock2D(8, groups=4)(torch.zeros(1, 8, 4, 4))
