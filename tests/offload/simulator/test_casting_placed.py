"""Every placement with layerwise casting computes what casting alone computes, with less memory, and can be undone."""

import itertools

import pytest
import torch

import diffusion_core
from diffusion_core import UNet2DConditionModel
from diffusion_core.hooks import apply_group_offloading, remove_group_offloading
from diffusion_core.offload.casting import apply_layerwise_casting, is_cast, remove_layerwise_casting
from diffusion_core.offload.engine import apply_plan
from diffusion_core.offload.plan import Transfers
from diffusion_core.offload.strategies import Settings, by_map, whole
from tests.offload.casting_models import run as call
from tests.offload.casting_models import tiny_unet, unet_inputs
from tests.offload.toys import IDS, toy
from tests.pipelines import tiny

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
    elif mode == "resident":
        module.to("sim:0")
    else:
        apply_group_offloading(module, "sim:0", **GROUPS[mode])


def run(module):
    with torch.no_grad():
        device = "sim:0" if next(module.parameters()).device.type == "sim" else "cpu"
        return module(IDS.to(device))["x"].cpu()


@pytest.mark.parametrize(
    ("mode", "storage"),
    [*itertools.product([*GROUPS, "whole", "resident"], ["plain", "int8"]), ("leaf+stream", "fp8_scaled")],
)
@pytest.mark.parametrize("casting_first", [True, False], ids=["cast first", "placed first"])
def test_numbers_are_those_of_casting_alone(mode, storage, casting_first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone, model = toy(), toy()
    exact = run(alone)
    apply_layerwise_casting(alone, storage=storage)
    expected = run(alone)
    assert not torch.equal(expected, exact)
    if casting_first:
        apply_layerwise_casting(model, storage=storage)
        place(model, mode)
    else:
        place(model, mode)
        if mode != "disk":
            run(model)
        apply_layerwise_casting(model, storage=storage)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    # Homes on disk are mapped files, so the exact weights are still there.
    saved = toy() if mode == "disk" and not casting_first else alone
    state = model.state_dict()
    assert all(torch.equal(state[name].cpu(), tensor) for name, tensor in saved.state_dict().items())
    if mode == "resident":
        model.to("cpu")
    elif casting_first:
        remove_group_offloading(model)
    assert torch.equal(run(model), expected)
    remove_layerwise_casting(model)
    after = exact if saved is not alone else expected
    assert torch.equal(run(model), after) and not is_cast(model)
    if not casting_first and mode != "resident":
        remove_group_offloading(model)
        assert torch.equal(run(model), after)
    assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("mode", ["leaf", "leaf+stream", "block", "whole", "resident"])
def test_peaks_fall_with_the_bytes(mode, simulated_devices):
    def peak(storage):
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
        if storage:
            apply_layerwise_casting(model, storage=storage)
        place(model, mode)
        torch.get_device_module("sim").reset_peak_memory_stats(0)
        with torch.no_grad():
            model(torch.ones(1, 256, device="sim:0" if mode == "resident" else "cpu"))
        return simulated_devices.statistics("sim:0").peak

    # The layer that computes is there in both forms.
    layer = 256 * 256 * 4
    assert peak("int8") < peak(None) / 4 + 2 * layer + 10_000


@pytest.mark.simulated_devices(devices=2)
@pytest.mark.parametrize("casting_first", [True, False])
def test_a_cast_model_over_two_devices(casting_first):
    alone, model = toy(), toy()
    apply_layerwise_casting(alone, storage="int8")
    if casting_first:
        apply_layerwise_casting(model, storage="int8")
    first, second = torch.device("sim", 0), torch.device("sim", 1)
    halves = {"": first, "blocks.0": second, "blocks.1": second, "blocks.2": "cpu"}
    placement = apply_plan(model, by_map(Settings(first), halves))
    if not casting_first:
        apply_layerwise_casting(model, storage="int8")
    for _ in range(2):
        assert torch.equal(run(model), run(alone))
    placement.remove()
    assert torch.equal(run(model), run(alone))


@pytest.mark.parametrize("mode", list(GROUPS))
def test_a_mapped_model_stays_exact_under_both(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_unet().save_pretrained("unet")
    model, expected = UNet2DConditionModel.from_pretrained("unet"), tiny_unet()
    exact = expected.state_dict()
    expected.enable_layerwise_casting()
    model.enable_layerwise_casting()
    model.enable_group_offload("sim:0", **GROUPS[mode])
    assert torch.equal(call(model, **unet_inputs()).cpu(), call(expected))
    assert all(torch.equal(tensor, exact[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained("again")
    model.disable_layerwise_casting()
    model.disable_group_offload()
    again = UNet2DConditionModel.from_pretrained("again")
    for other in (model, again):
        assert all(torch.equal(tensor, exact[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize(("mode", "casting_first"), list(itertools.product(["leaf", "block+stream"], [True, False])))
def test_edits_under_both_reach_the_master(mode, casting_first):
    """Case 70: a merge acts on the master copy, wherever the layer is at the time."""
    model = toy()
    if casting_first:
        apply_layerwise_casting(model, storage="int8")
    place(model, mode)
    if not casting_first:
        apply_layerwise_casting(model, storage="int8")
    run(model)
    model.first.weight.data += 0.5
    with torch.no_grad():
        model.table.weight.mul_(2)
    alone = toy()
    apply_layerwise_casting(alone, storage="int8")
    alone.first.weight.data += 0.5
    alone.table.weight.data *= 2
    for _ in range(2):
        assert torch.equal(run(model), run(alone))
    remove_group_offloading(model)
    assert torch.equal(run(model), run(alone))


def test_dtype_changes_under_both():
    """Cases 80 and 91 together."""
    model, alone = toy(), toy()
    for module in (model, alone):
        apply_layerwise_casting(module)
    place(model, "leaf+stream")
    run(model)
    for module in (model, alone):
        module.to(torch.bfloat16)
    assert torch.equal(run(model), run(alone)) and run(model).dtype == torch.bfloat16


def test_a_weight_on_a_device_looks_and_reads_as_there():
    layer = torch.nn.Linear(4, 4)
    apply_layerwise_casting(layer, storage="int8")
    values = layer.weight.clone()
    layer.to("sim:0")
    weight = layer.weight
    assert weight.device == torch.device("sim:0") and weight.dtype == torch.float32
    assert torch.equal((weight * 2).cpu(), values * 2)
    layer.weight.data += 1.0
    layer.weight.data = layer.weight.data - torch.ones(4, 4, device="sim:0")
    assert torch.allclose(layer.weight.cpu(), values, atol=0.02)


@pytest.mark.parametrize("mode", list(GROUPS))
def test_the_memory_format_is_kept_through_placing_and_casting(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone, model = tiny_unet(), tiny_unet()
    for each in (alone, model):
        each.to(memory_format=torch.channels_last)
        each.enable_layerwise_casting(storage="int8")
    model.enable_group_offload("sim:0", **GROUPS[mode])
    seen = []

    def note(layer, args):
        form = layer._parameters["weight"]
        seen.append(form.device.type == "sim" and form.is_contiguous(memory_format=torch.channels_last))

    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_pre_hook(note)
    assert torch.equal(call(model, **unet_inputs()).cpu(), call(alone))
    assert len(seen) > 10 and all(seen)
    model.disable_group_offload()
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in model.parameters() if t.dim() == 4)


# ---- pipelines ----


def offload_model(pipeline):
    pipeline.enable_model_cpu_offload(device="sim:0")
    return pipeline.disable_model_cpu_offload


def offload_leaves(pipeline):
    pipeline.enable_sequential_cpu_offload(device="sim:0")
    return pipeline.disable_sequential_cpu_offload


def offload_groups(pipeline):
    pipeline.enable_group_offload("sim:0", offload_type="leaf_level", use_stream=True)
    return pipeline.disable_group_offload


def move(pipeline):
    pipeline.to("sim:0")
    return lambda: pipeline.to("cpu")


@pytest.mark.parametrize(
    ("enable", "casting_first", "storage"),
    [
        (offload_model, True, "int8"),
        (offload_model, False, "plain"),
        (offload_leaves, True, "plain"),
        (offload_groups, False, "int8"),
        (move, True, "fp8_scaled"),
    ],
)
def test_pipelines_draw_the_same_picture(enable, casting_first, storage, tmp_path, simulated_devices):
    pipe_class = diffusion_core.StableDiffusionPipeline
    parts = tiny.components(diffusion_core, tmp_path)
    pipe_class(**parts, requires_safety_checker=False).save_pretrained(tmp_path / "saved")

    def cast(pipeline):
        for component in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
            apply_layerwise_casting(component, storage=storage)

    def draw(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        return pipeline("cat", num_inference_steps=1, latents=latents, output_type="pt").images.cpu()

    alone = pipe_class.from_pretrained(tmp_path / "saved")
    exact = draw(alone)
    cast(alone)
    expected = draw(alone)
    pipeline = pipe_class.from_pretrained(tmp_path / "saved")
    if casting_first:
        cast(pipeline)
    disable = enable(pipeline)
    if not casting_first:
        draw(pipeline)
        cast(pipeline)
    assert torch.equal(draw(pipeline), expected)
    if casting_first or enable is not move:  # else its weights were copies on the device when they were cast
        pipeline.save_pretrained(tmp_path / "again")
        assert torch.equal(draw(pipe_class.from_pretrained(tmp_path / "again")), exact)
    disable()
    assert torch.equal(draw(pipeline), expected)
    assert not simulated_devices.races
