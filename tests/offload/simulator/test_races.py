"""The race detector finds every dropped wait, and nothing in code that waits as it should."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from diffusion_core.offload.simulator import RaceError, inject

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]
collect = pytest.mark.simulated_devices(races="collect")
SIZE = 4096


def kinds(simulated_devices):
    """The kinds of races found, each once; the list is emptied."""
    found = {race.kind for race in simulated_devices.races}
    simulated_devices.races.clear()
    return found


class Prefetcher:
    """Layers whose weights are pinned; each is copied on a side stream while the one before computes."""

    def __init__(self, ahead: str) -> None:
        self.module = torch.get_device_module("sim")
        self.homes = [torch.randn(SIZE // 64, 64).pin_memory() for _ in range(6)]
        self.side = self.module.Stream("sim:0")
        self.ahead = ahead

    def bring(self, index: int) -> tuple[torch.Tensor, object]:
        with self.module.stream(self.side):
            weight = self.homes[index].to("sim:0", non_blocking=True)
        return weight, self.side.record_event()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """`ahead` says how a weight is let go: by `record_stream`, or by letting the side stream wait."""
        coming = self.bring(0)
        for index in range(len(self.homes)):
            weight, arrived = coming
            self.module.current_stream().wait_event(arrived)
            if index + 1 < len(self.homes):
                coming = self.bring(index + 1)
            x = x + x @ weight.T @ weight
            if self.ahead == "record_stream":
                weight.record_stream(self.module.current_stream())
                del weight
            else:
                del weight
                self.side.wait_stream(self.module.current_stream())
        return x


@pytest.mark.parametrize("ahead", ["record_stream", "wait"])
def test_a_correct_prefetch_is_clean(simulated_devices, ahead):
    prefetcher = Prefetcher(ahead)
    x = torch.randn(8, 64)
    expected = x
    for weight in prefetcher.homes:
        expected = expected + expected @ weight.T @ weight
    for _ in range(3):
        assert torch.equal(prefetcher.run(x.to("sim:0")).cpu(), expected)
    assert simulated_devices.races == []


@collect
@pytest.mark.parametrize(
    ("ahead", "drop", "kind"),
    [
        ("record_stream", "record_stream", "freed while in use"),
        ("record_stream", "wait", "use before arrival"),
        ("record_stream", "record_event", "use before arrival"),
        ("wait", "wait", "freed while in use"),
    ],
)
def test_each_injected_fault_is_found(simulated_devices, ahead, drop, kind):
    prefetcher, x = Prefetcher(ahead), torch.randn(8, 64, device="sim:0")
    prefetcher.run(x)
    assert simulated_devices.races == []
    with inject(drop=drop) as fault:
        prefetcher.run(x)
    assert fault.dropped > 0
    assert kind in kinds(simulated_devices)


@collect
def test_one_dropped_wait_among_many_is_found(simulated_devices):
    prefetcher, x = Prefetcher("record_stream"), torch.randn(8, 64, device="sim:0")
    with simulated_devices.inject(drop="wait", after=3, count=1) as fault:
        prefetcher.run(x)
    assert fault.dropped == 1
    assert Counter(race.kind for race in simulated_devices.races) == {"use before arrival": 1}
    text = str(simulated_devices.races[0])
    assert text.startswith("use before arrival on sim:0: aten::matmul on stream")
    assert "is not ordered after copy on stream" in text and "wait for stream" in text
    simulated_devices.races.clear()


def test_a_race_is_raised_where_it_happens(simulated_devices):
    module = torch.get_device_module("sim")
    home = torch.ones(SIZE).pin_memory()
    with module.stream(module.Stream()):
        x = home.to("sim:0", non_blocking=True)
    with pytest.raises(RaceError, match="use before arrival"):
        x + 1
    simulated_devices.races.clear()


@collect
def test_overwriting_what_another_stream_reads(simulated_devices):
    module = torch.get_device_module("sim")
    side, home = module.Stream(), torch.ones(SIZE).pin_memory()
    buffer = torch.zeros(SIZE, device="sim:0")
    side.wait_stream(module.current_stream())
    out = buffer * 2
    with module.stream(side):
        buffer.copy_(home, non_blocking=True)
    assert kinds(simulated_devices) == {"overwritten while in use"}
    module.synchronize()
    out = buffer * 2
    side.wait_event(module.current_stream().record_event())
    with module.stream(side):
        buffer.copy_(home, non_blocking=True)
    assert not kinds(simulated_devices) and out.numel() == SIZE


@collect
def test_the_halves_of_a_double_buffer_are_independent(simulated_devices):
    module = torch.get_device_module("sim")
    side, home = module.Stream(), torch.ones(SIZE).pin_memory()
    buffer = torch.zeros(2, SIZE, device="sim:0")
    side.wait_stream(module.current_stream())
    for index in range(6):
        with module.stream(side):
            buffer[index % 2].copy_(home, non_blocking=True)
        arrived = side.record_event()
        buffer[(index + 1) % 2] + 1
        module.current_stream().wait_event(arrived)
        side.wait_stream(module.current_stream())
    assert not kinds(simulated_devices)
    buffer[0] + 1
    with module.stream(side):
        buffer[1].copy_(home, non_blocking=True)
    assert not kinds(simulated_devices)
    with module.stream(side):
        buffer[0].copy_(home, non_blocking=True)
    assert kinds(simulated_devices) == {"overwritten while in use"}


@collect
def test_memory_from_another_streams_pool_needs_a_wait(simulated_devices):
    module = torch.get_device_module("sim")
    side, home = module.Stream(), torch.ones(SIZE).pin_memory()
    torch.ones(SIZE, device="sim:0") + 1  # used and let go on the default stream, which may still be busy with it
    fresh = torch.empty(SIZE, device="sim:0")
    with module.stream(side):
        fresh.copy_(home, non_blocking=True)
    assert kinds(simulated_devices) == {"use before the memory was free"}
    module.synchronize()
    fresh = torch.empty(SIZE, device="sim:0")
    with module.stream(side):
        fresh.copy_(home, non_blocking=True)
    assert not kinds(simulated_devices)


@collect
def test_memory_let_go_and_waited_for_later_is_fine(simulated_devices):
    module = torch.get_device_module("sim")
    side, home = module.Stream(), torch.ones(SIZE).pin_memory()
    with module.stream(side):
        x = home.to("sim:0", non_blocking=True)
    module.current_stream().wait_stream(side)
    x * 2
    del x
    side.wait_stream(module.current_stream())
    with module.stream(side):
        home.to("sim:0", non_blocking=True)
    assert not kinds(simulated_devices)


@collect
def test_the_host_must_wait_for_copies(simulated_devices):
    module = torch.get_device_module("sim")
    home = torch.zeros(2 * SIZE).pin_memory()
    x = torch.ones(SIZE, device="sim:0")
    read = (
        lambda: home[:4] + 1,
        lambda: home[0].item(),
        lambda: home.numpy(),
        lambda: home.tolist(),
        lambda: home[:4].clone(),
        lambda: home.fill_(1),
    )
    for touch in read:
        home[:SIZE].copy_(x, non_blocking=True)
        touch()
        assert kinds(simulated_devices) == {"host access during a copy"}
        home[:SIZE].copy_(x, non_blocking=True)
        home[SIZE:].sum()
        with inject(drop="synchronize"):
            module.synchronize()
        touch()
        assert kinds(simulated_devices) == {"host access during a copy"}
        home[:SIZE].copy_(x, non_blocking=True)
        module.synchronize()
        touch()
        assert not kinds(simulated_devices)


@collect
def test_the_host_may_read_but_not_write_what_is_copied_in(simulated_devices):
    home = torch.zeros(SIZE).pin_memory()
    event = torch.get_device_module("sim").Event()
    x = home.to("sim:0", non_blocking=True)
    event.record()
    home.sum()
    assert not kinds(simulated_devices)
    home.zero_()
    assert kinds(simulated_devices) == {"host access during a copy"}
    x.copy_(home, non_blocking=True)
    event.record()
    event.synchronize()
    home.zero_()
    assert not kinds(simulated_devices)


def test_ordinary_memory_is_copied_before_the_host_goes_on(simulated_devices):
    home = torch.zeros(SIZE)
    x = home.to("sim:0", non_blocking=True)
    home.add_(1)
    home.copy_(x, non_blocking=True)
    assert home.sum() == 0


@collect
def test_a_non_blocking_copy_to_the_host_is_pinned_and_not_waited_for(simulated_devices):
    x = torch.ones(SIZE, device="sim:0")
    back = x.to("cpu", non_blocking=True)
    assert back.is_pinned() and not x.cpu().is_pinned()
    back = x.to("cpu", torch.bfloat16, non_blocking=True)
    back.sum()
    assert not kinds(simulated_devices)  # a copy that also casts blocks
    back = x.to("cpu", non_blocking=True)
    back.sum()
    assert kinds(simulated_devices) == {"host access during a copy"}


@pytest.mark.simulated_devices(devices=2, races="collect")
def test_copies_between_devices_join_both_streams(simulated_devices):
    a = torch.ones(SIZE, device="sim:0")
    b = (a + 1).to("sim:1")
    a.add_(b.to("sim:0"))
    assert not kinds(simulated_devices) and a[0].item() == 3


@collect
def test_a_module_moved_on_a_side_stream(simulated_devices):
    module, layer = torch.get_device_module("sim"), nn.Linear(64, 64)
    for parameter in layer.parameters():
        parameter.data = parameter.data.pin_memory()
    side = module.Stream()
    with module.stream(side):
        layer.to("sim:0", non_blocking=True)
    with inject(drop="wait") as fault:
        module.current_stream().wait_stream(side)
    assert fault.dropped == 1
    layer(torch.ones(1, 64, device="sim:0"))
    assert kinds(simulated_devices) == {"use before arrival"}
    module.current_stream().wait_stream(side)
    layer(torch.ones(1, 64, device="sim:0"))
    assert not kinds(simulated_devices)


def test_unknown_faults_are_refused():
    with pytest.raises(ValueError, match="record_stream"), inject(drop="everything"):
        pass


def test_a_race_says_where(simulated_devices):
    home = torch.ones(SIZE).pin_memory()
    with torch.get_device_module("sim").stream(torch.get_device_module("sim").Stream()):
        x = home.to("sim:0", non_blocking=True)
    with pytest.raises(RaceError):
        x + 1
    race = simulated_devices.races.pop()
    assert race.device == 0 and race.stream == torch.get_device_module("sim").current_stream().stream_id


def test_two_threads_have_their_own_current_stream(simulated_devices):
    module = torch.get_device_module("sim")
    layer = nn.Linear(64, 64).to("sim:0")
    inputs = [torch.randn(4, 64) for _ in range(4)]
    expected = [layer.cpu()(x) for x in inputs]
    layer.to("sim:0")
    module.synchronize()

    def work(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        side = module.Stream()
        with module.stream(side):
            out = layer(x.pin_memory().to("sim:0", non_blocking=True))
            assert module.current_stream() == side
            return out.cpu(), side.stream_id

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, inputs))
    assert module.current_stream() == module.default_stream() and len({name for _, name in results}) == 4
    for (result, _), right in zip(results, expected, strict=True):
        assert torch.equal(result, right)
