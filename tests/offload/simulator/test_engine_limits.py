"""The engine at its limits: several devices, budgets, no memory left, plans by hand, wrong arguments."""

import contextlib

import pytest
import torch
from torch import nn

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.hooks import apply_group_offloading, remove_group_offloading
from diffusion_core.offload.engine import apply_plan, execution_device, placement_of
from diffusion_core.offload.plan import Group, Plan, Transfers, Until
from diffusion_core.offload.strategies import Settings, by_map, leaves, within
from tests.offload.toys import IDS, Toy, picture, same, toy, traces
from tests.pipelines import tiny

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]
two_devices = pytest.mark.simulated_devices(devices=2)
SIM = torch.device("privateuseone", 0)  # the name of "sim" before a simulator has run


def run(module, *args, **kwargs):
    with torch.no_grad():
        return module(*args, **kwargs)["x"].cpu()


def unet_and_call():
    args = torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 5, 32)
    return tiny.unet(diffusion_core), lambda model: model(*args).sample


# ---- device maps and budgets ----


@two_devices
def test_a_device_map_splits_a_module(simulated_devices):
    model = tiny.unet(diffusion_core)
    args = torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 5, 32)
    with torch.inference_mode():
        want = model(*args).sample
        places = {"": "sim:0", "up_blocks": "sim:1", "mid_block": "cpu", "down_blocks.0.resnets": "sim:1"}
        placement = apply_plan(model, by_map(Settings(SIM, return_outputs=True), places))
        for _ in range(2):
            got = model(*args).sample
            assert got.device.type == "cpu" and torch.equal(got, want)
    assert model.up_blocks[0].resnets[0].conv1.weight.device == torch.device("sim:1")
    assert execution_device(model) == SIM and execution_device(model.up_blocks[0].resnets[0].conv1).index == 1
    assert model.mid_block.resnets[0].conv1.weight.device.type == "cpu"
    placement.remove()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(simulated_devices.statistics(device).allocated == 0 for device in (0, 1))


@pytest.mark.parametrize("streams", [False, True])
def test_a_budget_is_kept_and_used(simulated_devices, streams):
    model, call = unet_and_call()
    total = model.get_memory_footprint()
    options = Settings(SIM, transfers=Transfers(streams=streams))
    seen = []
    with torch.inference_mode():
        want = call(model)
        for budget in (total // 2, int(0.8 * total), 2 * total):
            placement = apply_plan(model, within(options, leaves(options), budget))
            for _ in range(2):
                assert torch.equal(call(model).cpu(), want)
            seen.append(placement.resident_bytes)
            assert seen[-1] <= budget
            assert torch.equal(model.state_dict()["conv_in.weight"].cpu(), tiny.unet(diffusion_core).conv_in.weight)
    assert seen == sorted(seen) and seen[-1] == total
    with pytest.raises(PlacementError, match=r"budget of 1000 bytes is too small.*leaf_level"):
        apply_plan(model, within(options, leaves(options), 1000))
    with torch.inference_mode():  # a refused plan leaves the one before
        assert torch.equal(call(model).cpu(), want) and placement_of(model) is placement


def test_edits_of_resident_weights_come_home(simulated_devices):
    model, reference = toy(), toy()
    before = picture(model)
    placement = apply_plan(model, within(Settings(SIM), leaves(Settings(SIM)), 1 << 20))
    for each in (model, reference):
        each.first.weight.data += 1  # leaves no trace in the version
    assert torch.equal(run(model, IDS), run(reference, IDS))
    placement.remove()
    after = picture(model)
    assert torch.equal(model.first.weight, reference.first.weight)
    assert all(before[name][1] == after[name][1] for name in before)


# ---- out of memory ----


@pytest.mark.simulated_devices(capacity=14_000)
def test_what_is_fetched_ahead_gives_way(simulated_devices):
    model = toy()
    want = run(model, IDS)
    apply_plan(model, leaves(Settings(SIM, transfers=Transfers(streams=True, ahead_bytes=1 << 20))))
    assert torch.equal(run(model, IDS), want)
    with contextlib.suppress(torch.OutOfMemoryError):
        run(model, IDS)  # the order is known, and as much is fetched ahead as there is memory
    for _ in range(3):
        assert torch.equal(run(model, IDS), want)


@pytest.mark.simulated_devices(capacity=3_000)
def test_running_out_of_memory_leaves_the_module_usable(simulated_devices):
    model = toy()
    want = run(model, IDS)
    apply_group_offloading(model, "sim:0")
    with pytest.raises(torch.OutOfMemoryError):
        run(model, IDS)
    assert simulated_devices.statistics().allocated == 0
    apply_group_offloading(model, "cpu")
    assert torch.equal(run(model, IDS), want)


# ---- plans by hand and wrong arguments ----


def test_a_plan_by_hand(simulated_devices):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    want = model(torch.ones(1, 4))
    groups = (Group("all", ("0.weight", "0.bias", "1.weight", "1.bias"), ("",), SIM, until=Until.USED),)
    placement = apply_plan(model, Plan(groups, SIM, return_outputs=True))
    got = model(torch.ones(1, 4))
    assert got.device.type == "cpu" and torch.equal(got, want) and placement.execution_device == SIM
    with pytest.raises(PlacementError, match=r"says nothing about 1\.bias"):
        apply_plan(model, Plan((Group("all", ("0.weight", "0.bias", "1.weight"), ("",), SIM),), SIM))
    assert placement_of(model) is placement


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"offload_type": "layer_level"}, ValueError, 'offload_type must be "block_level" or "leaf_level"'),
        ({"num_blocks_per_group": 0}, ValueError, "num_blocks_per_group must be at least 1, not 0"),
        ({"num_blocks_per_group": -1}, ValueError, "at least 1, not -1"),
        ({"num_blocks_per_group": 1.5}, TypeError, "whole number"),
        ({"record_stream": True}, ValueError, "only with use_stream=True"),
        ({"onload_device": "cpu", "use_stream": True}, ValueError, "needs a device with streams"),
        ({"onload_device": "sim:7"}, ValueError, "onload_device: 'sim:7' is not a device that can be used here"),
        ({"offload_device": "meta"}, ValueError, "offload_device"),
        ({"block_modules": ["blocks", "bloks"]}, ValueError, r"\['bloks'\].*Toy does not have; it has blocks, table"),
        ({"offload_to_disk_path": __file__}, ValueError, "cannot be used as a folder"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(arguments, error, message):
    model = toy()
    before, left = picture(model), traces(model)
    with pytest.raises(error, match=message):
        apply_group_offloading(model, **{"onload_device": "sim:0", **arguments})
    assert same(before, picture(model)) and traces(model) == left


def test_modules_without_values_are_refused():
    with torch.device("meta"):
        model = Toy()
    with pytest.raises(PlacementError, match="meta device and has no values"):
        apply_group_offloading(model, "sim:0")


def test_excluded_arguments_are_not_moved():
    model = nn.ModuleDict({"a": toy()})["a"]
    seen = []

    class Layer(nn.Module):
        _skip_keys = "cache"

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x, cache, other):
            seen.append((x.device, cache[0].device, other["y"][0].device))
            return self.blocks[0](x)

    layer = Layer()
    apply_group_offloading(layer, "sim:0")
    cache = [torch.ones(1)]
    layer(torch.ones(1, 2), cache=cache, other={"y": (torch.ones(1),)})
    assert seen == [(SIM, torch.device("cpu"), SIM)] and model is not None


@two_devices
@pytest.mark.parametrize("options", [{}, {"use_stream": True}, {"offload_to_disk_path": "away"}])
def test_the_index_of_a_device_is_kept(simulated_devices, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    model = toy()
    want = run(model, IDS)
    apply_group_offloading(model, "sim:1", **options)
    for _ in range(2):
        assert torch.equal(run(model, IDS), want)
    assert simulated_devices.statistics("sim:0").h2d == 0 < simulated_devices.statistics("sim:1").h2d
    assert execution_device(model) == torch.device("sim:1")


@two_devices
def test_another_accelerator_can_be_the_home(simulated_devices):
    model = toy()
    want, before = run(model, IDS), picture(model)
    apply_group_offloading(model, "sim:0", "sim:1", use_stream=True)
    assert model.first.weight.device == torch.device("sim:1")
    for _ in range(2):
        assert torch.equal(run(model, IDS), want)
    remove_group_offloading(model)
    assert same(before, picture(model), addresses=False)


def test_a_module_on_the_device_goes_home_and_returns_there(simulated_devices):
    model = toy().to("sim:0")
    want = run(model, IDS.to("sim:0"))
    apply_group_offloading(model, "sim:0", offload_type="leaf_level")
    assert simulated_devices.statistics().allocated < 2_000 and model.first.weight.device.type == "cpu"
    assert torch.equal(run(model, IDS), want)
    remove_group_offloading(model)
    assert {parameter.device for parameter in model.parameters()} == {SIM}


def test_quantised_tensors_are_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(PlacementError, match="'weight' is a TwoTensor, which cannot be moved by its data"):
        apply_group_offloading(model, "sim:0", offload_type="leaf_level")
