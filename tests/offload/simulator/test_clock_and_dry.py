"""The clock's predictions follow from its table; dry runs are the same runs without memory."""

import dataclasses
import resource

import pytest
import torch
from torch import nn

from diffusion_core.offload.simulator import HARDWARE, Hardware

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]
ROUND = Hardware(
    name="round",
    half_flops=2e12,
    single_flops=1e12,
    memory_bandwidth=1e12,
    pinned_bandwidth=1e9,
    pageable_bandwidth=5e8,
    peer_bandwidth=2e9,
    launch=0.0,
    memory=2**40,
    efficiency=1.0,
)
MEGA = 250_000  # float32 elements in a megabyte
timed = pytest.mark.simulated_devices(devices=2, hardware=ROUND, dry=True)


@timed
def test_durations_follow_from_the_table(simulated_devices):
    pinned = torch.empty(MEGA).pin_memory().to("sim:0")
    torch.empty(MEGA).to("sim:0")
    pinned.to("sim:1")
    pinned + 1
    torch.empty(1000, 1000, device="sim:0") @ torch.empty(1000, 1000, device="sim:0")
    half = torch.empty(1000, 1000, device="sim:0", dtype=torch.float16)
    half @ half
    spans = [(s.name, s.kind, s.bytes, s.end - s.start) for s in simulated_devices.spans("sim:0")]
    expected = [
        ("copy", "h2d", 1_000_000, 1e-3),
        ("copy", "h2d", 1_000_000, 2e-3),
        ("copy", "d2d", 1_000_000, 5e-4),
        ("aten::add.out", "compute", 2_000_000, 2e-6),
        ("aten::matmul", "compute", 12_000_000, 2e-3),
        ("aten::matmul", "compute", 6_000_000, 1e-3),
    ]
    assert len(spans) == len(expected)
    for (*found, seconds), (*right, predicted) in zip(spans, expected, strict=True):
        assert found == right and seconds == pytest.approx(predicted)


@timed
@pytest.mark.parametrize("pinned", [True, False])
def test_only_pinned_copies_overlap_computing(simulated_devices, pinned):
    module = torch.get_device_module("sim")
    home = torch.empty(MEGA).pin_memory() if pinned else torch.empty(MEGA)
    square = torch.empty(1000, 1000, device="sim:0")
    with module.stream(module.Stream()):
        kept = home.to("sim:0", non_blocking=True)
    square @ square
    copy, work = simulated_devices.spans(0)
    assert (copy.kind, work.kind) == ("h2d", "compute") and copy.stream != work.stream
    assert work.start == pytest.approx(0 if pinned else copy.end)
    module.synchronize("sim:0")
    assert simulated_devices.elapsed == pytest.approx(2e-3 if pinned else 4e-3)
    assert kept.device.type == "sim"


@timed
def test_a_wait_moves_the_start_and_events_measure(simulated_devices):
    module = torch.get_device_module("sim")
    side, home = module.Stream(), torch.empty(MEGA).pin_memory()
    before, after = module.Event(enable_timing=True), module.Event(enable_timing=True)
    before.record()
    with module.stream(side):
        weight = home.to("sim:0", non_blocking=True)
    arrived = side.record_event()
    assert not arrived.query() and not side.query()
    module.current_stream().wait_event(arrived)
    weight + 1
    after.record()
    copy, work = simulated_devices.spans(0)
    assert work.start == pytest.approx(copy.end)
    assert before.elapsed_time(after) == pytest.approx(1 + 2e-3)
    after.synchronize()
    assert arrived.query() and simulated_devices.elapsed == pytest.approx(1e-3 + 2e-6)


@timed
def test_one_engine_a_direction(simulated_devices):
    module, home = torch.get_device_module("sim"), torch.empty(MEGA).pin_memory()
    kept = []
    for _ in range(2):
        with module.stream(module.Stream()):
            kept.append(home.to("sim:0", non_blocking=True))
    with module.stream(module.Stream()):
        out = torch.empty(MEGA).pin_memory()
        out.copy_(torch.empty(MEGA, device="sim:0"), non_blocking=True)
    first, second, back = simulated_devices.spans(0)
    assert second.start == pytest.approx(first.end) and back.start == 0


def test_polling_an_event_ends(simulated_devices):
    module, home = torch.get_device_module("sim"), torch.zeros(MEGA).pin_memory()
    x = home.to("sim:0", non_blocking=True)
    event = module.current_stream().record_event()
    polls = 0
    while not event.query():
        polls += 1
    assert polls > 0
    home.zero_()
    assert simulated_devices.races == [] and x.sum().item() == 0


@timed
def test_memory_over_time(simulated_devices):
    first = torch.empty(MEGA).to("sim:0")
    second = torch.empty(MEGA).to("sim:0")
    del first
    times, sizes = zip(*simulated_devices.memory_over_time(0), strict=True)
    assert sizes == (1_000_448, 2_000_896, 1_000_448)
    assert times == pytest.approx((0, 2e-3, 4e-3)) and second.numel() == MEGA


@pytest.mark.parametrize("name", HARDWARE)
def test_the_table_is_sane(name):
    hardware = HARDWARE[name]
    assert hardware.name == name and 0 < hardware.efficiency <= 1
    assert hardware.pageable_bandwidth < hardware.pinned_bandwidth < hardware.memory_bandwidth
    for field in dataclasses.fields(hardware)[1:]:
        assert getattr(hardware, field.name) > 0


class Block(nn.Module):
    """Half a transformer block: attention without projections, and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unflatten(-1, (-1, 64)).transpose(-3, -2)
        x = x + nn.functional.scaled_dot_product_attention(y, y, y).transpose(-3, -2).flatten(-2)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _block(width: int) -> nn.Module:
    with torch.device("meta"):
        return Block(width).to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)


@pytest.mark.simulated_devices(dry=True, capacity="60GB", hardware="h100")
def test_a_big_model_runs_without_its_memory(simulated_devices):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = nn.Sequential(*[_block(8192) for _ in range(24)])  # 12.9 billion parameters
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights > 25e9
    model.to("sim:0")
    x = torch.randn(1, 4096, 8192, dtype=torch.bfloat16).to("sim:0")
    with torch.inference_mode():
        out = model(x)
    assert out.shape == x.shape and out.device == x.device and not torch.isnan(out).any().item()
    assert torch.isfinite(out).all().item()
    books = simulated_devices.statistics()
    assert books.h2d == weights + x.numel() * 2
    assert weights < books.peak < weights + 3e9
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 300e6
    flops = 2 * 4096 * (weights / 2)
    assert simulated_devices.elapsed > flops / 989e12


@pytest.mark.simulated_devices(dry=True, capacity="1GB")
def test_dry_runs_hit_the_cap_too(simulated_devices):
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.50 GiB"):
        torch.empty(3 * 2**29, dtype=torch.uint8, device="sim:0")
    x = torch.empty(2**28, dtype=torch.uint8, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError):
        x.float()


@pytest.mark.simulated_devices(dry=True)
def test_small_tensors_stay_real(simulated_devices):
    sigmas = torch.linspace(0, 1, 1000, device="sim:0")
    assert (sigmas * 2)[-1].item() == 2
    assert torch.arange(8192, device="sim:0")[-1].item() == 8191
    large = torch.zeros(100, 100, device="sim:0")
    assert large.sum().item() == 0 and torch.equal(large, large)
    large[0, :3] = torch.ones(3, device="sim:0")
    assert (large.float() + 1).shape == (100, 100)
    for values in (large.nonzero, lambda: large[large > 0], lambda: torch.unique(large)):
        with pytest.raises(RuntimeError, match="depends on values"):
            values()


@pytest.mark.simulated_devices(dry=True)
def test_dry_out_arguments_and_views(simulated_devices):
    x = torch.empty(100, 100, device="sim:0")
    assert torch.add(x, x, out=torch.empty(0, device="sim:0")).shape == (100, 100)
    before = simulated_devices.statistics().allocated
    view = torch.view_as_real(torch.view_as_complex(x.view(100, 50, 2)))
    assert view.shape == (100, 50, 2) and simulated_devices.statistics().allocated == before
    values, indices = x.max(dim=0)
    assert values.shape == indices.shape == (100,) and [c.shape for c in x.chunk(2)] == [(50, 100)] * 2
    assert x.mul_(2) is x and x.to("cpu").shape == x.shape


@pytest.mark.simulated_devices(dry=True)
def test_dry_runs_remember_shapes_not_calls(simulated_devices):
    x = torch.empty(100, 100, device="sim:0", dtype=torch.int32)
    for _ in range(2):
        assert (x * 1).dtype == torch.int32 and (x * 1.0).dtype == torch.float32 and (x > 1).dtype == torch.bool
        assert x.T.contiguous().stride() == (100, 1) and (x.T + 1).stride() == (1, 100)
        assert x.sum(0).shape == (100,) and x.sum((0, 1)).shape == () and x.sum().dtype == torch.int64
        assert torch.add(x, x, out=torch.empty(0, device="sim:0", dtype=torch.int32)).shape == (100, 100)
        torch._foreach_add_([x, x.clone()], 1)
        assert x.add_(1) is x and [c.shape for c in x.split([30, 70])] == [(30, 100), (70, 100)]
        assert torch.randn(100, 100, device="sim:0").shape == (100, 100)
        assert torch.all(x == x).item() and not torch.any(x != x).item()
        assert torch.std_mean(x.float(), dim=0)[1].shape == (100,)
