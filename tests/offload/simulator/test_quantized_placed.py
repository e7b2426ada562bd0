"""Quantised weights under every placement: the same numbers, fewer bytes, taken back, or refused before anything."""

import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import transformers
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

from diffusion_core import FluxPipeline, FluxTransformer2DModel, PipelineQuantizationConfig, TorchAoConfig
from diffusion_core.errors import PlacementError
from diffusion_core.hooks import apply_group_offloading, remove_group_offloading
from diffusion_core.offload.engine import apply_plan, placement_of
from diffusion_core.offload.plan import Transfers
from diffusion_core.offload.quantized import is_quantized
from diffusion_core.offload.strategies import Settings, leaves, whole, within
from tests.offload.toys import IDS, toy, traces
from tests.pipelines import flux
from tests.quantization.gguf_files import write
from tests.quantization.models import kinds, run, tiny_flux

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]
SIM = torch.device("privateuseone", 0)
GROUPS = {
    "leaf": {"offload_type": "leaf_level"},
    "leaf+stream": {"offload_type": "leaf_level", "use_stream": True},
    "leaf+ring": {"offload_type": "leaf_level", "use_stream": True, "low_cpu_mem_usage": True},
    "block": {},
    "block+stream": {"use_stream": True, "record_stream": True},
    "block 2": {"num_blocks_per_group": 2, "non_blocking": True},
    "disk": {"offload_type": "leaf_level", "offload_to_disk_path": "."},
}


def place(module, mode):
    if mode == "whole":
        apply_plan(module, whole(Settings(SIM, transfers=Transfers())))
    elif mode == "budget":
        apply_plan(module, within(Settings(SIM), leaves(Settings(SIM)), 60_000))
    else:
        apply_group_offloading(module, "sim:0", **GROUPS[mode])


@cache
def saved() -> Path:
    folder = Path(mkdtemp())
    tiny_flux().save_pretrained(folder)
    return folder


def load(made=Int8WeightOnlyConfig, skip=None, **options):
    return FluxTransformer2DModel.from_pretrained(saved(), quantization_config=TorchAoConfig(made(), skip), **options)


def hooks(model):
    """What is left on the quantised layers."""
    return {name: trace for name, trace in traces(model).items() if f"{name}.weight" in kinds(model)}


@pytest.mark.parametrize(
    ("mode", "made"),
    [
        *((mode, Int8WeightOnlyConfig) for mode in [*GROUPS, "whole", "budget"]),
        *((mode, Int8DynamicActivationInt8WeightConfig) for mode in ("leaf+stream", "block", "disk")),
    ],
)
def test_the_numbers_are_those_of_no_placement(mode, made, tmp_path, monkeypatch):
    """Case 74."""
    monkeypatch.chdir(tmp_path)
    model = load(made)
    expected, before, left = run(model), kinds(model), hooks(model)
    place(model, mode)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    assert kinds(model) == before
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == tiny_flux().num_parameters()
    model.save_pretrained("saved")
    assert torch.equal(run(FluxTransformer2DModel.from_pretrained("saved")), expected)
    remove_group_offloading(model)
    assert hooks(model) == left
    assert torch.equal(run(model), expected)
    assert {name: type(tensor).__name__ for name, tensor in model.named_parameters() if name in before} == before


@pytest.mark.parametrize("mode", ["leaf", "leaf+stream", "block", "whole"])
def test_peaks_fall_with_the_bytes(mode, simulated_devices):
    def peak(quantised):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
        if quantised:
            quantize_(model, Int8WeightOnlyConfig())
        place(model, mode)
        torch.get_device_module("sim").reset_peak_memory_stats(0)
        with torch.no_grad():
            model(torch.ones(1, 256))
        return simulated_devices.statistics("sim:0").peak

    # torchao multiplies by a copy of the layer's integers in the dtype of the input, and one more for the layout.
    layer = 256 * 256 * 4
    assert peak(True) < peak(False) / 4 + 2 * layer + 10_000


def test_in_place_quantised_and_tied_weights():
    """Case 41's other half: what torchao quantised in place moves too, and tied weights stay tied."""
    model = toy()
    model.extra.weight = model.first.weight
    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda part, name: isinstance(part, nn.Linear) and name != "head"
    )
    model.extra.weight = model.first.weight
    with torch.no_grad():
        expected = model(IDS, extra=True)["x"]
        for mode in ("leaf+stream", "block", "whole"):
            place(model, mode)
            assert torch.equal(model(IDS, extra=True)["x"].cpu(), expected)
    remove_group_offloading(model)
    assert model.extra.weight is model.first.weight
    assert type(model.first.weight).__name__ == "Int8Tensor"


def test_quantised_while_it_is_placed():
    model, alone = toy(), toy()
    place(model, "leaf")
    chosen = lambda part, name: name == "first"  # noqa: E731
    with torch.no_grad():
        model(IDS)
        for each in (model, alone):
            quantize_(each, Int8WeightOnlyConfig(), filter_fn=chosen)
        for _ in range(2):
            assert torch.equal(model(IDS)["x"].cpu(), alone(IDS)["x"])
    remove_group_offloading(model)
    with torch.no_grad():
        assert torch.equal(model(IDS)["x"], alone(IDS)["x"])


def test_a_plan_that_fails_leaves_the_weights_whole():
    model = load()
    before = {name: id(tensor) for name, tensor in model.named_parameters()}
    with pytest.raises(PlacementError, match="too small"):
        apply_plan(model, within(Settings(SIM), leaves(Settings(SIM)), 10))
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == before


def test_refused_under_a_placement_with_nothing_changed():
    model = load()
    expected = run(model)
    place(model, "leaf+stream")
    for refused in (model.half, lambda: model.to(torch.float32), model.enable_layerwise_casting):
        with pytest.raises(ValueError, match="is quantised"):
            refused()
        assert torch.equal(run(model), expected)
    with pytest.raises(PlacementError, match="remove_group_offloading"):
        model.dequantize()
    assert torch.equal(run(model), expected)


@pytest.mark.simulated_devices(devices=2)
@pytest.mark.parametrize(
    "device_map",
    [
        "balanced",
        "sequential",
        0,
        {"": 0, "transformer_blocks.1": 1, "single_transformer_blocks": "cpu"},
        {"": 1, "single_transformer_blocks.0": "disk"},
    ],
    ids=str,
)
def test_device_maps(device_map):
    expected = run(load())
    model = load(device_map=device_map)
    for _ in range(2):
        assert torch.equal(run(model), expected)


@pytest.mark.simulated_devices(devices=2)
def test_a_map_counts_the_quantised_bytes():
    """A budget that the plain weights would not fit."""
    plain = FluxTransformer2DModel.from_pretrained(saved(), torch_dtype=torch.bfloat16)
    quantised = load(skip=[])
    size = quantised.get_memory_footprint()
    assert size < 0.7 * plain.get_memory_footprint()
    budget = {0: int(size * 0.7), 1: int(size * 0.7)}
    model = load(skip=[], device_map="sequential", max_memory=budget)
    assert set(model.hf_device_map.values()) == {0, 1}
    assert torch.equal(run(model), run(quantised))


# ---- GGUF ----


@cache
def gguf_file() -> Path:
    return write(Path(mkdtemp()) / "tiny.gguf", tiny_flux().state_dict(), "Q4_0")


def load_gguf(**options):
    return FluxTransformer2DModel.from_single_file(gguf_file(), config=saved(), dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("mode", [*GROUPS, "whole", "budget"])
def test_blocks_of_a_gguf_file_are_moved_as_they_are(mode, tmp_path, monkeypatch, simulated_devices):
    monkeypatch.chdir(tmp_path)
    model = load_gguf()
    expected, size = run(model), model.get_memory_footprint()
    place(model, mode)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    if mode == "whole":
        assert simulated_devices.statistics("sim:0").h2d < 1.1 * size
    with pytest.raises(ValueError, match="is quantised"):
        model.half()
    remove_group_offloading(model)
    assert model.quantization_method == "gguf"
    assert torch.equal(run(model), expected)
    assert torch.equal(run(model.to("sim:0")), expected)


@pytest.mark.simulated_devices(devices=2)
@pytest.mark.parametrize("device_map", ["sequential", 0, {"": 0, "single_transformer_blocks": "cpu"}], ids=str)
def test_device_maps_of_a_gguf_file(device_map):
    expected = run(load_gguf())
    assert torch.equal(run(load_gguf(device_map=device_map)), expected)


# ---- pipelines ----

MODES = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "group": lambda pipe: pipe.enable_group_offload("sim:0", use_stream=True),
    "leaf": lambda pipe: pipe.enable_group_offload("sim:0", offload_type="leaf_level"),
    "on the device": lambda pipe: pipe.to("sim:0"),
}


@cache
def saved_pipeline() -> Path:
    folder = Path(mkdtemp())
    flux.pipe().save_pretrained(folder)
    return folder


def load_pipeline(**options):
    config = PipelineQuantizationConfig(
        quant_mapping={
            "transformer": TorchAoConfig(Int8WeightOnlyConfig()),
            "text_encoder_2": transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        }
    )
    pipe = FluxPipeline.from_pretrained(
        saved_pipeline(), quantization_config=config, torch_dtype=torch.bfloat16, **options
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe):
    arguments = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    return pipe("a red cat", **arguments, generator=torch.Generator().manual_seed(0)).images.cpu()


@pytest.mark.parametrize("mode", MODES)
def test_pipelines_under_every_mode(mode):
    pipe = load_pipeline()
    expected = draw(pipe)
    MODES[mode](pipe)
    for _ in range(2):
        assert torch.equal(draw(pipe), expected)
    assert pipe.dtype == torch.bfloat16
    pipe.remove_all_hooks()
    assert not any(placement_of(part) for part in pipe.transformer.modules())
    assert torch.equal(draw(pipe.to("cpu")), expected)
    assert is_quantized(pipe.text_encoder_2)


@pytest.mark.simulated_devices(devices=2)
@pytest.mark.parametrize("device_map", ["balanced", "cpu", {"": 0, "text_encoder_2": "cpu"}], ids=str)
def test_pipelines_over_devices(device_map):
    expected = draw(load_pipeline())
    assert torch.equal(draw(load_pipeline(device_map=device_map)), expected)


def test_plans_count_the_quantised_bytes():
    pipe = load_pipeline()
    expected = draw(pipe)
    plain = FluxPipeline.from_pretrained(saved_pipeline(), torch_dtype=torch.bfloat16)
    texts = [str(each.plan_memory("10MB")) for each in (pipe, plain)]
    quantised, whole = (float(re.findall(r"all on the device +([\d.]+) KiB", text)[0]) for text in texts)
    assert quantised < 0.95 * whole
    pipe.fit_memory("166KiB")
    for _ in range(2):
        assert torch.equal(draw(pipe), expected)
