"""Bytes are counted by storage, caps hold, and memory that is let go is given back."""

import contextlib
import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion_core.offload.simulator import RaceError, simulator, unavailable
from diffusion_core.offload.sizes import format_bytes, parse_bytes

pytestmark = pytest.mark.simulator


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("8GiB", 2**33), ("1.5 kib", 1536), ("12", 12), (7, 7), ("0MB", 0)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["8 gigs", "GB", "-1GB", "", "1e3"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="capacity"):
        parse_bytes(text, "capacity")
    with pytest.raises(ValueError, match="negative"):
        parse_bytes(-1)
    for wrong in (1.5, None, True):
        with pytest.raises(TypeError, match="size"):
            parse_bytes(wrong)


def test_sizes_in_words():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**20, 3 * 2**40)] == [
        "0 bytes",
        "1023 bytes",
        "1.50 KiB",
        "1.00 MiB",
        "3072.00 GiB",
    ]


def test_views_share_and_copies_count(simulated_devices):
    sim = torch.get_device_module("sim")
    assert sim.memory_allocated("sim:0") == 0
    x = torch.zeros(256, 4, device="sim:0")
    assert sim.memory_allocated(0) == 4096
    views = [x[1:], x.T, x.view(-1), x.view(torch.int32), torch.view_as_complex(x.view(256, 2, 2)), x.detach()]
    views.append(views[-2].real)
    assert sim.memory_allocated(0) == 4096
    del x
    assert sim.memory_allocated(0) == 4096
    del views
    assert sim.memory_allocated(0) == 0 and sim.max_memory_allocated(0) == 4096
    sim.reset_peak_memory_stats(0)
    assert sim.max_memory_allocated(0) == 0
    y = torch.ones(1, device="sim:0")
    assert sim.memory_allocated(0) == 512
    z = y + y
    assert sim.memory_allocated(0) == 1024 and sim.mem_get_info(0) == (16 * 2**30 - 1024, 16 * 2**30)
    del z
    y.data = torch.zeros(1)
    assert sim.memory_allocated(0) == 0


@pytest.mark.simulated_devices(devices=2, capacity=["64KiB", 4096], granularity=1)
def test_each_device_has_its_cap(simulated_devices):
    kept = torch.zeros(4096, dtype=torch.uint8, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(10, dtype=torch.uint8, device="sim:1")
    assert str(caught.value) == (
        "sim:1 is out of memory. Tried to allocate 10 bytes. The device has a total capacity of 4.00 KiB, "
        "of which 4.00 KiB are in use and 0 bytes are free."
    )
    with pytest.raises(torch.OutOfMemoryError):
        kept + 1
    assert (torch.zeros(4097, dtype=torch.uint8, device="sim:0") + 1).sum().item() == 4097
    del kept
    assert torch.zeros(4096, dtype=torch.uint8, device="sim:1").numel() == 4096
    with pytest.raises(torch.OutOfMemoryError):
        nn.Linear(1024, 1024).to("sim:1")
    gc.collect()
    assert simulated_devices.statistics(1).allocated == 0


def test_weak_references_and_memory_go(simulated_devices):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("sim:0")
    references = [weakref.ref(p) for p in module.parameters()]
    assert simulated_devices.statistics().allocated == 4 * 512
    del module
    gc.collect()
    assert all(reference() is None for reference in references)
    assert simulated_devices.statistics().allocated == 0


def test_pinned_memory_is_counted_in_powers_of_two(simulated_devices):
    a = torch.arange(300.0).pin_memory()
    assert a.is_pinned() and a[3:].is_pinned() and not torch.zeros(3).is_pinned()
    assert torch.equal(a, torch.arange(300.0)) and a.device.type == "cpu"
    assert simulated_devices.pinned.allocated == 2048
    b = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    c = torch.zeros(3, pin_memory=True)
    assert b.is_pinned() and c.is_pinned() and simulated_devices.pinned.allocated == 2048 + 64 + 16
    del a, b, c
    assert simulated_devices.pinned.allocated == 0 and simulated_devices.pinned.peak == 2048 + 64 + 16


@pytest.mark.simulated_devices(devices=2)
def test_copies_are_counted(simulated_devices):
    x = torch.zeros(1000)
    y = x.to("sim:0")
    z = y.to("sim:1")
    z.cpu()
    y.to(torch.float64).cpu()
    first, second = simulated_devices.statistics(0), simulated_devices.statistics("sim:1")
    assert (first.h2d, first.d2h, first.d2d, first.copies) == (4000, 8000, 4000, 2)
    assert (second.h2d, second.d2h, second.d2d, second.copies) == (0, 4000, 4000, 2)
    simulated_devices.reset()
    assert simulated_devices.statistics(0).copies == 0 and simulated_devices.statistics(0).allocated == 4096


def test_the_accelerator_functions(simulated_devices):
    accelerator, module = torch.accelerator, torch.get_device_module("sim:0")
    assert accelerator.is_available() and accelerator.current_accelerator() == torch.device("sim")
    assert accelerator.device_count() == module.device_count() == 1
    x = torch.zeros(128, device="sim")
    assert accelerator.memory_allocated() == module.memory_allocated() == 512
    assert accelerator.max_memory_allocated("sim:0") == 512 and accelerator.get_memory_info(0)[1] == 16 * 2**30
    assert accelerator.current_stream() == module.current_stream() == module.default_stream()
    accelerator.synchronize()
    accelerator.empty_cache()
    assert (simulated_devices.synchronizations, simulated_devices.cache_clears) == (1, 1)
    assert module.get_device_properties(x.device).total_memory == 16 * 2**30
    with accelerator.device_index(0):
        assert accelerator.current_device_index() == 0


def test_only_one_simulator_runs(simulated_devices):
    with pytest.raises(RuntimeError, match="already running"), simulator():
        pass
    assert torch.accelerator.is_available()


@pytest.fixture
def possible():
    """Skips where the device type cannot be registered; starts nothing."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("possible")
def test_dry_runs_count_what_real_runs_count():
    counted = []
    for dry in (False, True):
        with simulator(dry=dry) as running, torch.inference_mode():
            model = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to("sim:0")
            y = torch.zeros(2, 64, 2, 64, device="sim:0")
            out = model(torch.randn(2, 64, 128).to("sim:0")) + F.scaled_dot_product_attention(y, y, y).flatten(2)
            assert out.shape == (2, 64, 128)
            running.synchronize()
            counted.append((running.statistics(), running.elapsed, len(running.spans())))
            assert running.statistics().operators == 7
    assert counted[0] == counted[1]


@pytest.mark.usefixtures("possible")
def test_a_swallowed_race_is_raised_on_leaving():
    with pytest.raises(RaceError, match="use before arrival"), simulator():
        module = torch.get_device_module("sim")
        with module.stream(module.Stream()):
            x = torch.ones(64).pin_memory().to("sim:0", non_blocking=True)
        with contextlib.suppress(RuntimeError):
            x + 1


@pytest.mark.usefixtures("possible")
def test_leaving_restores_torch():
    names = ("data", "record_stream", "__deepcopy__", "numpy", "tolist")
    before = [getattr(torch.Tensor, name) for name in names] + [vars(torch.accelerator)["synchronize"]]
    with simulator(capacity=1024) as first:
        left = torch.ones(3, device="sim:0")
    after = [getattr(torch.Tensor, name) for name in names] + [vars(torch.accelerator)["synchronize"]]
    assert before == after
    assert not torch.accelerator.is_available() and not torch.zeros(1).is_pinned()
    assert left.cpu().tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="No simulator is running"):
        left + 1
    with pytest.raises(RuntimeError, match="has run before"), first:
        pass
    with simulator(devices=2, capacity=2048) as second:
        assert second.statistics(0).allocated == 0 and first.statistics(0).allocated == 512
        assert torch.ones(3, device="sim:1").sum().item() == 3
        assert (left + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 0}, "devices"),
        ({"capacity": "many"}, "capacity"),
        ({"devices": 3, "capacity": ["1GB"]}, "1 sizes for 3 devices"),
        ({"hardware": "abacus"}, "rtx-4090"),
        ({"races": "ignore"}, "races"),
        ({"granularity": 0}, "granularity"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        simulator(**arguments)


def test_importing_registers_nothing():
    code = (
        "import torch, diffusion_core.offload.simulator, diffusion_core.offload.simulator.pytest_plugin;"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone';"
        "assert not torch.accelerator.is_available() or torch.cuda.is_available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_older_torch_is_named():
    code = (
        "from torch.utils import backend_registration as b;"
        "del b._setup_privateuseone_for_python_backend;"
        "from diffusion_core.offload.simulator import simulator\n"
        "try:\n    simulator().__enter__()\n"
        "except RuntimeError as error:\n    assert 'torch 2.13 or newer' in str(error), error\n"
        "else:\n    raise AssertionError('no error')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
