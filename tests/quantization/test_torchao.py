"""Weights quantised by torchao: while loading, in files, beside the reference, and refused where they cannot be."""

import copy
import json
import logging
import pickle
import re
import subprocess
import sys

import diffusers
import pytest
import torch
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerTensor,
    quantize_,
)

from benchmarks.load_memory import MB
from benchmarks.quantization import load_peaks
from diffusion_core import (
    AutoModel,
    BitsAndBytesConfig,
    FluxTransformer2DModel,
    QuantoConfig,
    TorchAoConfig,
    UNet2DConditionModel,
    models,
)
from diffusion_core.errors import ConfigError, CorruptFileError, UnsupportedError
from diffusion_core.models.quantization import _chosen_layers
from diffusion_core.offload import torchao_weights
from diffusion_core.offload.loading import build_without_weights
from diffusion_core.offload.quantized import inner_tensors
from diffusion_core.offload.torchao_weights import quantize_weight
from tests.quantization.models import flux_inputs, kinds, run, tiny_flux

CONFIGS = {"int8": Int8WeightOnlyConfig, "int8 dynamic": Int8DynamicActivationInt8WeightConfig}
both = pytest.mark.parametrize("made", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux")
    tiny_flux().save_pretrained(path)
    return path


def load(folder, made=Int8WeightOnlyConfig, skip=None, **options):
    return FluxTransformer2DModel.from_pretrained(folder, quantization_config=TorchAoConfig(made(), skip), **options)


def same_weights(model, other):
    """Whether two models have the same weights, bit by bit, quantised in the same way."""
    mine, others = model.state_dict(), other.state_dict()
    inside = [(inner_tensors(mine[name]) or {"": mine[name]}, inner_tensors(others[name]) or {"": others[name]})
              for name in mine]  # fmt: skip
    equal = all(left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
                for left, right in inside)  # fmt: skip
    return mine.keys() == others.keys() and kinds(model) == kinds(other) and equal


@both
def test_it_computes_what_the_reference_computes(folder, made):
    ours = load(folder, made, [], torch_dtype=torch.bfloat16)
    theirs = diffusers.FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=diffusers.TorchAoConfig(made()), torch_dtype=torch.bfloat16
    )
    assert (run(ours) - run(theirs)).abs().max() < 0.03  # both in bfloat16
    assert same_weights(ours, theirs)
    assert list(ours.state_dict()) == list(tiny_flux().state_dict())


@both
@pytest.mark.parametrize("skip", [None, [], ["proj_out"]], ids=["declared", "all", "list"])
def test_checkpoints_go_both_ways(folder, tmp_path, made, skip):
    ours = load(folder, made, skip)
    expected = run(ours)
    for shards in ("5GB", "30KB"):
        ours.save_pretrained(tmp_path, max_shard_size=shards)
        again = FluxTransformer2DModel.from_pretrained(tmp_path)
        assert again.is_quantized
        assert again.dtype == torch.bfloat16
        assert kinds(again) == kinds(ours)
        assert torch.equal(run(again), expected)
        theirs = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
        assert same_weights(theirs, ours)
    theirs.save_pretrained(tmp_path / "theirs")
    back = FluxTransformer2DModel.from_pretrained(tmp_path / "theirs")
    assert torch.equal(run(back), expected)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written == json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]


def test_a_model_that_torchao_quantised_in_place_is_saved(folder, tmp_path):
    """Case 41: the reference finds no storage behind these weights."""
    model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    quantize_(model, Int8WeightOnlyConfig())
    expected = run(model)
    assert model.is_quantized
    model.save_pretrained(tmp_path)
    again = FluxTransformer2DModel.from_pretrained(tmp_path)
    assert torch.equal(run(again), expected)
    assert again.dtype == torch.bfloat16


def test_the_class_says_what_stays(folder):
    model = load(folder)
    quantised = set(kinds(model))
    assert "transformer_blocks.0.attn.to_q.weight" in quantised
    assert "single_transformer_blocks.0.proj_out.weight" in quantised
    stays = {
        "proj_out.weight",
        "x_embedder.weight",
        "norm_out.linear.weight",
        "transformer_blocks.0.norm1.linear.weight",
    }
    assert not stays & quantised
    named = set(kinds(load(folder, skip=["transformer_blocks.0", "to_q"])))
    assert "single_transformer_blocks.0.proj_mlp.weight" in named
    assert not any(name.startswith("transformer_blocks.0.") or ".to_q." in name for name in named)


@pytest.mark.parametrize("name", sorted(name for name in dir(models) if name.endswith(("DModel", "ControlNetModel"))))
def test_what_each_class_leaves(name):
    """Modulation, embeddings and the ends stay; attention and feed-forward are quantised, the most of a transformer."""
    cls = getattr(models, name)
    if name in ("MultiControlNetModel", "FluxMultiControlNetModel", "Transformer2DModel"):
        pytest.skip("holds or becomes others")
    model = build_without_weights(cls)
    chosen = _chosen_layers(model, None)
    odd = [each for each in chosen if re.search("norm|embed|modul|_mod[.]|adaln|time|caption|^proj_|_in[.]|^x_", each)]
    assert not odd
    blocks = {key for key, part in model.named_modules() if type(part) is nn.Linear and re.search("[.]to_[qkv]$", key)}
    blocks = {key for key in blocks if "embedder" not in key}
    assert {f"{key}.weight" for key in blocks} <= chosen
    if "Transformer" in name:
        inside = sum(model.get_parameter(each).numel() for each in chosen)
        assert inside > 0.5 * sum(parameter.numel() for parameter in model.parameters())


def test_a_name_that_is_not_there_is_said(folder, caplog):
    with caplog.at_level(logging.WARNING):
        load(folder, skip=["proj_outt"])
    assert "'proj_outt'" in caplog.text


def test_dtype_is_bfloat16_unless_it_is_named(folder, tmp_path):
    assert load(folder).dtype == torch.bfloat16
    exact = load(folder, dtype=torch.float32)
    assert exact.dtype == torch.float32
    plain = run(FluxTransformer2DModel.from_pretrained(folder))
    error = (run(exact) - plain).abs().max() / plain.abs().max()
    assert 0 < error < 0.05
    load(folder).save_pretrained(tmp_path)
    assert run(FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float32)).dtype == torch.float32


@pytest.mark.parametrize("made", [Float8WeightOnlyConfig, IntxWeightOnlyConfig], ids=["float8", "intx"])
def test_other_configurations_of_torchao(folder, tmp_path, made):
    model = load(folder, made)
    expected = run(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(run(FluxTransformer2DModel.from_pretrained(tmp_path)), expected)


def test_a_configuration_by_names(folder):
    config = FqnToConfig({r"re:.*attn\.to_q": Int8WeightOnlyConfig()})
    model = FluxTransformer2DModel.from_pretrained(folder, quantization_config=TorchAoConfig(config))
    assert kinds(model)
    assert all(".attn.to_q." in name for name in kinds(model))


def test_a_dict_of_the_config_file_and_a_config_of_the_reference_do(folder):
    expected = run(load(folder, skip=[]))
    entry = TorchAoConfig(Int8WeightOnlyConfig(), []).to_dict()
    for config in (entry, diffusers.TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=[])):
        model = FluxTransformer2DModel.from_pretrained(folder, quantization_config=config)
        assert torch.equal(run(model), expected)
    assert TorchAoConfig.from_dict(entry) == TorchAoConfig(Int8WeightOnlyConfig(), [])
    assert TorchAoConfig.from_dict(entry) != TorchAoConfig(Int8WeightOnlyConfig())


def test_the_checkpoint_says_how_it_is_quantised(folder, tmp_path, caplog):
    load(folder).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        again = load(tmp_path, Int8DynamicActivationInt8WeightConfig)
    assert "quantised already" in caplog.text
    assert again.config.quantization_config == TorchAoConfig(Int8WeightOnlyConfig())
    assert torch.equal(run(again), run(load(folder)))
    assert torch.equal(run(AutoModel.from_pretrained(tmp_path)), run(again))


def test_it_says_what_it_is(folder):
    model = load(folder)
    assert model.quantization_method == "torchao"
    assert f"quantized: {len(kinds(model))} x Int8Tensor" in str(model)
    plain = tiny_flux()
    assert not plain.is_quantized
    assert plain.quantization_method is None
    assert "quantized" not in str(plain)
    assert model.num_parameters() == plain.num_parameters()
    assert model.get_memory_footprint() < plain.get_memory_footprint() / 2


def test_it_cannot_be_cast(folder):
    model = load(folder)
    expected = run(model)
    for cast in (model.half, model.float, model.double, lambda: model.to(torch.float16)):
        with pytest.raises(ValueError, match=r"quantised for torch.bfloat16.*dequantize"):
            cast()
    with pytest.raises(ValueError, match="is quantised"):
        model.enable_layerwise_casting()
    assert torch.equal(run(model.to(torch.bfloat16).to("cpu")), expected)


def test_dequantize_gives_a_plain_model(folder, tmp_path):
    model = load(folder)
    expected = run(model)
    assert model.dequantize() is model
    assert not model.is_quantized
    assert "quantization_config" not in model.config
    assert (run(model) - expected).abs().max() < 0.02 * expected.abs().max() + 0.02
    model.half()
    model.save_pretrained(tmp_path)
    diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not quantised"):
        model.dequantize()


@both
def test_one_graph(folder, made):
    model = load(folder, made)
    expected = run(model)
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert torch.equal(run(model), expected)


@both
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_one_graph_for_each_block_under_group_offload(folder, made, level):
    model = load(folder, made)
    expected = run(model)
    torch._dynamo.reset()
    model.compile_repeated_blocks(fullgraph=level == "block_level", backend="aot_eager")
    model.enable_group_offload("cpu", offload_type=level)
    for _ in range(2):
        assert torch.equal(run(model), expected)
    model.disable_group_offload()
    assert torch.equal(run(model), expected)


@both
def test_a_copy_under_group_offload_is_a_plain_model(folder, made):
    model = load(folder, made)
    expected = run(model)
    model.enable_group_offload("cpu", offload_type="leaf_level")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other), expected)
    fresh = load(folder, made)
    with torch.no_grad():
        fresh.proj_out.weight.zero_()
    fresh.enable_group_offload("cpu")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(run(fresh), expected)


@pytest.mark.parametrize(
    "config",
    [
        Int8WeightOnlyConfig(),
        Int8DynamicActivationInt8WeightConfig(),
        Int8WeightOnlyConfig(granularity=PerTensor()),
        Int8WeightOnlyConfig(granularity=PerGroup(16)),
        Float8WeightOnlyConfig(),
        IntxWeightOnlyConfig(),
    ],
    ids=lambda config: f"{type(config).__name__}-{getattr(config, 'granularity', '')}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_rows_at_a_time_are_all_rows_at_once(config, dtype, monkeypatch):
    weight = torch.randn(150, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = quantize_weight("layer.weight", weight, config)
    monkeypatch.setattr(torchao_weights, "_AT_ONCE", 64 * 64)
    parts = quantize_weight("layer.weight", weight, config)
    assert parts.__tensor_flatten__()[1] == whole.__tensor_flatten__()[1]
    for name, tensor in inner_tensors(whole).items():
        assert torch.equal(inner_tensors(parts)[name], tensor)


def test_a_load_takes_the_quantised_model_and_one_tensor(tmp_path):
    """In a process of its own. The allocator keeps some of what it was given back."""
    found = load_peaks(str(tmp_path), layers=4, dtypes=("bfloat16",))["bfloat16"]
    assert found["peak"] < found["model"] + found["largest"] + 60 * MB


@both
def test_projections_are_fused_before_they_are_quantised(folder, tmp_path, made):
    with pytest.raises(ValueError, match="fuse them first"):
        load(folder).fuse_qkv_projections()
    model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    model.fuse_qkv_projections()
    quantize_(model, made())
    expected = run(model)
    model.save_pretrained(tmp_path)
    again = FluxTransformer2DModel.from_pretrained(tmp_path)
    assert torch.allclose(run(again), expected, atol=0.02)
    assert kinds(again) == kinds(model)
    model.enable_group_offload("cpu")
    assert torch.equal(run(model), expected)
    model.disable_group_offload()
    model.unfuse_qkv_projections()
    assert torch.equal(run(model), run(again))


def test_state_dict_is_taken_back(folder):
    model, other = load(folder), load(folder)
    with torch.no_grad():
        other.proj_out.weight.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other), run(model))


def test_what_cannot_be_is_refused(folder, tmp_path):
    with pytest.raises(TypeError, match=r"'int8wo'.*Int8WeightOnlyConfig\(\)"):
        TorchAoConfig("int8wo")
    with pytest.raises(TypeError, match="int"):
        TorchAoConfig(8)
    for refused in (BitsAndBytesConfig, QuantoConfig):
        with pytest.raises(UnsupportedError, match=f"{refused.__name__}.*TorchAoConfig"):
            refused(load_in_8bit=True)
    with pytest.raises(UnsupportedError, match=r"BitsAndBytesConfig.*TorchAoConfig"):
        FluxTransformer2DModel.from_pretrained(
            folder, quantization_config=__import__("transformers").BitsAndBytesConfig(load_in_8bit=True)
        )
    with pytest.raises(TypeError, match="quantization_config must be a TorchAoConfig"):
        FluxTransformer2DModel.from_pretrained(folder, quantization_config="int8")
    with pytest.raises(ConfigError, match="quant_type"):
        FluxTransformer2DModel.from_pretrained(folder, quantization_config={"quant_method": "torchao"})
    with pytest.raises(ValueError, match="safe_serialization"):
        load(folder).save_pretrained(tmp_path / "bin", safe_serialization=False)
    assert not list(tmp_path.glob("bin/*"))
    with pytest.raises(ValueError, match="no linear layer"):
        load(folder, skip=["transformer_blocks", "single_transformer_blocks", "time_text_embed", "context_embedder",
                           "x_embedder", "norm_out", "proj_out"])  # fmt: skip


def test_a_file_that_lacks_a_part_is_named(folder, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    load(folder).save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    with safe_open(path, "pt") as file:
        notes = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["transformer_blocks.0.attn.to_q._weight_scale"]
    save_file(tensors, path, notes)
    with pytest.raises(CorruptFileError, match=r"lacks .*to_q._weight_scale"):
        FluxTransformer2DModel.from_pretrained(tmp_path)


def test_a_config_that_promises_more_than_the_files_hold(folder, tmp_path):
    load(folder).save_pretrained(tmp_path)
    tiny_flux().save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match="the files have none"):
        FluxTransformer2DModel.from_pretrained(tmp_path / "plain")


def test_without_torchao_the_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "import diffusion_core\n"
        "try:\n    diffusion_core.TorchAoConfig(object())\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'diffusion-core[quant]'" in done.stdout


def test_convolutions_stay(tmp_path):
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=8, norm_num_groups=4, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    unet.save_pretrained(tmp_path)
    model = UNet2DConditionModel.from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    names = set(kinds(model))
    assert all(".attentions." in name for name in names)
    sample = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        model(sample, 1, torch.randn(1, 3, 8, dtype=torch.bfloat16))


def test_inputs_are_not_changed(folder):
    given = flux_inputs()
    before = {name: tensor.clone() for name, tensor in given.items()}
    run(load(folder), **given)
    assert all(torch.equal(before[name], tensor) for name, tensor in given.items())
