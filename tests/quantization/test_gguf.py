"""GGUF files: every block format as the gguf package reads it, FLUX files as the reference reads them, broken files."""

import re
import struct

import diffusers
import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file
from torchao.quantization import Int8WeightOnlyConfig

from diffusion_core import FluxTransformer2DModel, GGUFQuantizationConfig, SD3Transformer2DModel, TorchAoConfig
from diffusion_core.errors import ConfigError, CorruptFileError, KeyMismatchError, MissingFileError
from diffusion_core.offload.gguf import GGUFFile
from diffusion_core.offload.gguf_formats import FORMATS, dequantized
from tests.quantization.gguf_files import authors_layout, write
from tests.quantization.models import run, tiny_flux

# Rows of 256 numbers, so that all formats fit.
WIDE = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128, "num_attention_heads": 2,
        "joint_attention_dim": 256, "pooled_projection_dim": 32, "axes_dims_rope": (16, 56, 56),
        "in_channels": 32, "out_channels": None, "guidance_embeds": True}  # fmt: skip


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(1, 16, 32, generator=g).to(dtype),
        "encoder_hidden_states": torch.randn(1, 5, 256, generator=g).to(dtype),
        "pooled_projections": torch.randn(1, 32, generator=g).to(dtype),
        "guidance": torch.tensor([3.5]).to(dtype),
    }


@pytest.fixture(scope="module")
def model():
    return tiny_flux(**WIDE)


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "flux-Q8_0.gguf", authors_layout(model.state_dict()))


@pytest.mark.parametrize("number", FORMATS)
def test_each_format_is_decoded_as_the_gguf_package_does(number):
    form, kind = FORMATS[number], GGMLQuantizationType(number)
    assert kind.name == form.name
    assert gguf.GGML_QUANT_SIZES[kind] == (form.numbers, form.size)
    raw = np.random.default_rng(number).integers(0, 256, (6, 3 * form.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, kind)
    found = dequantized(torch.from_numpy(raw), form, torch.float32).numpy()
    assert found.shape == (6, 3 * form.numbers)
    # Scales of random bits may be infinite or no numbers.
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_computes_what_the_reference_computes(model, tmp_path, dtype):
    model.save_pretrained(tmp_path)
    path = write(tmp_path / "own.gguf", model.state_dict())
    ours = FluxTransformer2DModel.from_single_file(
        path, quantization_config=GGUFQuantizationConfig(compute_dtype=dtype), torch_dtype=dtype
    )
    theirs = diffusers.FluxTransformer2DModel.from_single_file(
        str(path), config=str(tmp_path), torch_dtype=dtype,
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
    )  # fmt: skip
    found = run(ours, **inputs(dtype))
    # The reference multiplies scales and numbers in half precision, whatever the compute dtype.
    assert (found - run(theirs, **inputs(dtype))).abs().max() <= (2e-3 if dtype == torch.float32 else 0.03)
    exact = tiny_flux(**WIDE)
    for name, tensor in exact.state_dict().items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            tensor.copy_(torch.from_numpy(quants.dequantize(quants.quantize(tensor.numpy(), kind), kind)))
        assert torch.equal(ours.state_dict()[name], tensor.to(dtype))
    assert torch.equal(run(exact.to(dtype), **inputs(dtype)), found)


def test_the_authors_layout(model, file):
    """The reference arranges the rows of the published width only, so that the names and rows are compared by hand."""
    loaded = FluxTransformer2DModel.from_single_file(
        file, quantization_config=GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    )
    assert loaded.dtype == torch.bfloat16
    assert loaded.quantization_method == "gguf"
    assert "x Q8_0" in str(loaded)
    assert {key: loaded.config[key] for key in WIDE} == {key: model.config[key] for key in WIDE}
    expected = model.state_dict()
    for name, tensor in FluxTransformer2DModel.from_single_file(file).state_dict().items():
        assert (tensor - expected[name]).abs().max() <= expected[name].abs().max() / 100, name


def test_the_authors_layout_without_quantisation(model, tmp_path):
    save_file({name: tensor.contiguous() for name, tensor in authors_layout(model.state_dict()).items()},
              tmp_path / "flux.safetensors")  # fmt: skip
    loaded = FluxTransformer2DModel.from_single_file(tmp_path / "flux.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in authors_layout(model.state_dict()).items()}
    save_file(prefixed, tmp_path / "comfy.safetensors")
    quantised = FluxTransformer2DModel.from_single_file(
        tmp_path / "comfy.safetensors", quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    )
    assert quantised.quantization_method == "torchao"
    assert torch.isfinite(run(quantised, **inputs(torch.bfloat16))).all()


def test_our_own_names_with_the_config_beside(model, tmp_path):
    model.save_pretrained(tmp_path)
    path = write(tmp_path / "own.gguf", model.state_dict(), "Q4_0")
    loaded = FluxTransformer2DModel.from_single_file(path, dtype=torch.float32)
    plain = run(model, **inputs())
    error = (run(loaded, **inputs()) - plain).abs().mean() / plain.abs().mean()
    assert 0 < error < 0.2
    named = FluxTransformer2DModel.from_single_file(path, config=tmp_path, torch_dtype=torch.float32)
    assert torch.equal(run(named, **inputs()), run(loaded, **inputs()))
    assert loaded.num_parameters() == model.num_parameters()
    assert loaded.get_memory_footprint() < model.get_memory_footprint() / 4


def test_it_is_saved_as_plain_weights_and_dequantised(file, tmp_path):
    loaded = FluxTransformer2DModel.from_single_file(file)
    expected = run(loaded, **inputs())
    loaded.save_pretrained(tmp_path)
    again = FluxTransformer2DModel.from_pretrained(tmp_path)
    assert not again.is_quantized
    assert torch.equal(run(again, **inputs()), expected)
    with pytest.raises(ValueError, match="is quantised"):
        loaded.half()
    with pytest.raises(RuntimeError, match="take no others"):
        loaded.load_state_dict(again.state_dict())
    assert torch.equal(run(loaded.dequantize(), **inputs()), expected)
    assert not loaded.is_quantized


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_it_is_moved_in_its_blocks(file, level, tmp_path):
    loaded = FluxTransformer2DModel.from_single_file(file)
    expected = run(loaded, **inputs())
    loaded.enable_group_offload("cpu", offload_type=level, offload_to_disk_path=str(tmp_path))
    assert torch.equal(run(loaded, **inputs()), expected)
    loaded.disable_group_offload()
    assert loaded.quantization_method == "gguf"


def test_one_graph(file):
    loaded = FluxTransformer2DModel.from_single_file(file)
    expected = run(loaded, **inputs())
    torch._dynamo.reset()
    loaded.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert torch.allclose(run(loaded, **inputs()), expected, atol=1e-6)


def test_what_makes_no_sense(model, file, tmp_path):
    with pytest.raises(ConfigError, match="quantised already"):
        FluxTransformer2DModel.from_single_file(file, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    with pytest.raises(ConfigError, match="not a SD3Transformer2DModel"):
        SD3Transformer2DModel.from_single_file(file, config={})
    own = write(tmp_path / "own.gguf", model.state_dict())
    with pytest.raises(ConfigError, match="pass config="):
        FluxTransformer2DModel.from_single_file(own)
    with pytest.raises(KeyMismatchError, match="unexpected"):
        FluxTransformer2DModel.from_single_file(file, config={**WIDE, "guidance_embeds": False})
    with pytest.raises(ConfigError, match=r"\.gguf or \.safetensors"):
        (tmp_path / "model.ckpt").write_bytes(b"0")
        FluxTransformer2DModel.from_single_file(tmp_path / "model.ckpt")
    with pytest.raises(MissingFileError, match=r"absent\.gguf"):
        FluxTransformer2DModel.from_single_file(tmp_path / "absent.gguf")
    with pytest.raises(ConfigError, match="address of a file"):
        FluxTransformer2DModel.from_single_file("https://huggingface.co/owner/name")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("owner/name/flux-Q8_0.gguf", ("owner/name", "flux-Q8_0.gguf", {})),
        ("owner/name/deep/flux.gguf", ("owner/name", "deep/flux.gguf", {})),
        ("https://huggingface.co/owner/name/blob/main/flux.gguf", ("owner/name", "flux.gguf", {"revision": "main"})),
        ("https://huggingface.co/owner/name/resolve/abc/a/b.gguf", ("owner/name", "a/b.gguf", {"revision": "abc"})),
    ],
)
def test_files_on_the_hub(given, asked, file, monkeypatch):
    calls = []

    def find(repo, name, **options):
        calls.append((repo, name, options))
        return file

    monkeypatch.setattr("diffusion_core.models.single_file.find_file", find)
    FluxTransformer2DModel.from_single_file(given)
    assert calls == [asked]


def test_broken_files_are_named(file, tmp_path):
    content = file.read_bytes()
    broken = {
        "cut.gguf": (content[:-40_000], "cut off"),
        "head.gguf": (content[:200], "within its head"),
        "page.gguf": (b"<!DOCTYPE html>" + b" " * 100, "web page"),
        "version.gguf": (content[:4] + struct.pack("<I", 9) + content[8:], "version 9"),
        "tensors.gguf": (content[:8] + struct.pack("<Q", 1 << 40) + content[16:], "tensors"),
        "empty.gguf": (b"", ""),
    }
    for name, (bad, message) in broken.items():
        path = tmp_path / name
        path.write_bytes(bad)
        with pytest.raises(CorruptFileError, match=f"{re.escape(name)}.*{message}"):
            GGUFFile(path)


@pytest.mark.parametrize("at", range(24, 424, 8))
def test_a_wrong_byte_in_the_head_is_an_error_or_harmless(file, tmp_path, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 0xFF
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    try:
        found = GGUFFile(path)
    except CorruptFileError:
        return
    for name in found.tensors:
        found.raw(name)


@pytest.mark.slow
def test_the_reference_arranges_the_authors_layout_alike(tmp_path):
    """At the published width, which the reference takes for granted; rows are told apart by their first number."""
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    model.save_config(tmp_path)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    rows = {}
    for number, (name, shape) in enumerate(shapes.items()):
        marks = torch.arange(shape[0]).remainder(1999).to(torch.float16) + number % 7
        rows[name] = marks.reshape(-1, *[1] * (len(shape) - 1))
    wide = authors_layout({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    file = {name: tensor.expand(wide[name].shape) for name, tensor in authors_layout(rows).items()}
    theirs = diffusers.FluxTransformer2DModel.from_single_file(file, config=str(tmp_path), torch_dtype=torch.float16)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor[:, :1] if tensor.dim() == 2 else tensor, rows[name]), name
