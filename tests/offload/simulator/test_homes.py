"""Homes on disk and in mapped files: no copy in memory, no file without need, none left behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import diffusion_core
from diffusion_core.hooks import apply_group_offloading, remove_group_offloading
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.stores import DiskStore, is_mapped
from diffusion_core.offload.transfer import Transfer
from tests.offload.toys import IDS, picture, same, toy, traces
from tests.pipelines import tiny

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]


def run(model, *args):
    with torch.no_grad():
        return model(*args)["x"].cpu()


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("streams", [False, True])
def test_weights_on_disk(tmp_path, kind, streams):
    model = toy()
    want, before, left = run(model, IDS), picture(model), traces(model)
    apply_group_offloading(model, "sim:0", "cpu", kind, use_stream=streams, offload_to_disk_path=str(tmp_path))
    assert files(tmp_path) and all(is_mapped(parameter) for parameter in model.parameters())
    for _ in range(3):
        assert torch.equal(run(model, IDS), want)
    remove_group_offloading(model)
    assert list(tmp_path.iterdir()) == [] and not any(is_mapped(parameter) for parameter in model.parameters())
    assert same(before, picture(model), addresses=False) and traces(model) == left


def test_each_group_on_disk_is_read_once_a_call(simulated_devices, tmp_path, monkeypatch):
    model, fetched = toy(), []
    apply_group_offloading(model, "sim:0", offload_to_disk_path=str(tmp_path))
    run(model, IDS), run(model, IDS)
    fetch = Transfer.fetch
    monkeypatch.setattr(Transfer, "fetch", lambda self, homes: fetched.extend(homes) or fetch(self, homes))
    before = simulated_devices.statistics().h2d
    run(model, IDS)
    assert all(is_mapped(home) for home in fetched)
    addresses = [home.data_ptr() for home in fetched]
    assert len(addresses) == len(set(addresses)) > 10  # `extra` is not called
    copied = simulated_devices.statistics().h2d - before
    assert copied == sum(home.nbytes for home in fetched) + IDS.nbytes


def test_two_models_with_one_folder_do_not_mix(tmp_path):
    first, second = toy(1), toy(2)
    want = [run(model, IDS) for model in (first, second)]
    for model in (first, second):
        apply_group_offloading(model, "sim:0", offload_to_disk_path=str(tmp_path))
    assert [path.is_dir() for path in tmp_path.iterdir()] == [True, True]
    assert all(torch.equal(run(model, IDS), value) for model, value in zip((first, second), want, strict=True))
    del first, model
    remove_group_offloading(second)
    assert list(tmp_path.iterdir()) == []


def test_changed_weights_are_never_old_ones_from_disk(tmp_path):
    model, reference = toy(), toy()
    apply_group_offloading(model, "sim:0", offload_to_disk_path=str(tmp_path))
    for each in (model, reference):
        each.first.weight.data += 1
        each.load_state_dict({"loose": torch.ones(16)}, strict=False)
    assert torch.equal(run(model, IDS), run(reference, IDS))
    apply_group_offloading(model, "sim:0", offload_to_disk_path=str(tmp_path))
    assert torch.equal(run(model, IDS), run(reference, IDS))
    for each in (model, reference):
        each.double()
    assert torch.equal(run(model, IDS), run(reference, IDS)) and is_mapped(model.first.weight)


def test_a_mapped_model_needs_no_file_and_stays_mapped(tmp_path):
    tiny.unet(diffusion_core).save_pretrained(tmp_path / "model")
    model = diffusion_core.UNet2DConditionModel.from_pretrained(tmp_path / "model")
    before = picture(model)
    large = [parameter for parameter in model.parameters() if is_mapped(parameter)]
    assert len(large) > 0.9 * len(list(model.parameters()))
    for options in ({"offload_to_disk_path": str(tmp_path / "away")}, {}, {"use_stream": True}):
        model.enable_group_offload("sim:0", **options)
        with torch.inference_mode():
            model(torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 5, 32))
        assert all(is_mapped(parameter) for parameter in large)
        assert files(tmp_path / "away") == []
        model.disable_group_offload()
        assert same(before, picture(model), addresses="use_stream" not in options)


def test_equal_content_is_stored_once_and_layouts_are_kept(tmp_path):
    store = DiskStore(str(tmp_path))
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    strange = torch.randn(8, 8)[::2, ::2]
    first = store.put([weight, strange, torch.empty(0, 3)])
    store.put([weight.clone(), strange.clone(), torch.empty(0, 3)])
    assert len(files(tmp_path)) == 1
    assert torch.equal(first[0], weight) and first[0].stride() == weight.stride()
    assert torch.equal(first[1], strange) and first[2].shape == (0, 3)
    store.close()
    assert torch.equal(first[0], weight) and list(tmp_path.iterdir()) == []


SCRIPT = """
import sys, torch
from torch import nn
from diffusion_core.offload.simulator import simulator
from diffusion_core.hooks import apply_group_offloading
with simulator():
    model = nn.Sequential(nn.Linear(4, 4))
    apply_group_offloading(model, "sim:0", offload_to_disk_path=sys.argv[1])
    model(torch.ones(1, 4))
"""


def test_no_file_is_left_at_exit(tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's count of anonymous memory")
@pytest.mark.parametrize("megabytes", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_mapped_model_takes_no_anonymous_memory(megabytes):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_memory", str(megabytes)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    added = [float(line.split("|")[2]) for line in done.stdout.splitlines()[2:]]
    assert len(added) == 3 and max(added) < 100, done.stdout


def test_the_placement_says_what_is_on_the_device():
    model = toy()
    apply_group_offloading(model, "sim:0")
    assert placement_of(model).resident_bytes == 0 and placement_of(model).execution_device.type == "sim"
