"""Streams and pinned memory: overlap, budgets, and that every missing wait in the engine would be found."""

import pytest
import torch
from torch import nn

from diffusion_core.hooks import apply_group_offloading
from diffusion_core.offload.engine import apply_plan, placement_of
from diffusion_core.offload.plan import Transfers
from diffusion_core.offload.simulator import inject
from diffusion_core.offload.strategies import Settings, blocks, leaves
from diffusion_core.offload.transfer import StreamTransfer

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]
collect = pytest.mark.simulated_devices(races="collect")
SIM = torch.device("privateuseone", 0)  # the name of "sim" before a simulator has run
WIDTH = 128


def stack(layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def run(model):
    with torch.no_grad():
        return model(torch.ones(2, WIDTH))


def kinds(simulated_devices):
    return {race.kind for race in simulated_devices.races}


# ---- injected faults: the detector sees what the engine's waits are for ----


@collect
@pytest.mark.parametrize(
    ("drop", "options", "kind"),
    [
        ("wait", {}, "use before arrival"),
        ("record_event", {}, "use before arrival"),
        ("wait", {"low_cpu_mem_usage": True}, "use before arrival"),
        ("record_stream", {"record_stream": True}, "freed while in use"),
        ("synchronize", {"low_cpu_mem_usage": True}, "host access during a copy"),
    ],
)
def test_a_dropped_wait_is_found(simulated_devices, drop, options, kind):
    model = stack()
    apply_group_offloading(model, "sim:0", "cpu", "leaf_level", use_stream=True, **options)
    run(model), run(model)
    assert simulated_devices.races == []
    with inject(drop=drop) as fault:
        run(model)
    assert fault.dropped > 0 and kind in kinds(simulated_devices)
    simulated_devices.races.clear()


@collect
@pytest.mark.parametrize("record_stream", [False, True])
def test_letting_go_without_a_word_to_the_allocator_is_found(simulated_devices, monkeypatch, record_stream):
    model = stack()
    apply_group_offloading(model, "sim:0", "cpu", "leaf_level", use_stream=True, record_stream=record_stream)
    run(model)
    monkeypatch.setattr(StreamTransfer, "give_back", lambda *_: None)
    run(model)
    assert "freed while in use" in kinds(simulated_devices)
    simulated_devices.races.clear()


class Late(nn.Linear):
    """A layer that has read its weights, and launches its kernel after something else has happened."""

    between = staticmethod(lambda: None)

    def forward(self, x):
        weight, bias = self.weight.data, self.bias.data
        self.between()
        return nn.functional.linear(x, weight, bias)


@collect
@pytest.mark.parametrize("record_stream", [False, True])
def test_freeing_before_use_is_found(simulated_devices, record_stream):
    """The engine lets go in full, with every wait, but before the kernel that reads is launched: the memory goes to
    the next group while it is still read. With `record_stream` the allocator keeps it until then, which is no race."""
    model = nn.Sequential(*[Late(WIDTH, WIDTH) for _ in range(6)])
    apply_group_offloading(model, "sim:0", "cpu", "leaf_level", use_stream=True, record_stream=record_stream)
    run(model), run(model)
    assert simulated_devices.races == []
    groups = {group.spec.name: group for group in placement_of(model)._groups}
    model[2].between = groups["2"].let_go
    run(model)
    assert kinds(simulated_devices) == (set() if record_stream else {"freed while in use"})
    assert all(race.earlier_stream != race.stream for race in simulated_devices.races)
    simulated_devices.races.clear()
    del model[2].between
    run(model)
    assert simulated_devices.races == []


@collect
def test_reading_before_arrival_is_found(simulated_devices):
    model = stack()
    apply_group_offloading(model, "sim:0", "cpu", "leaf_level", use_stream=True)
    run(model)
    group = placement_of(model)._groups[0]
    group.bring_in()
    model[0].weight.data.sum()  # by someone who did not wait
    assert kinds(simulated_devices) == {"use before arrival"}
    simulated_devices.races.clear()
    group.let_go()
    run(model)


@collect
def test_evicting_a_group_in_use_is_found(simulated_devices, monkeypatch):
    model = stack()
    apply_group_offloading(model, "sim:0", "cpu", "leaf_level", use_stream=True)
    run(model)
    placement = placement_of(model)
    groups = {group.spec.name: group for group in placement._groups}

    def evict(layer, args):
        held = layer.weight.data  # a kernel that was launched reads it
        held @ args[0].T
        with monkeypatch.context() as patch:
            patch.setattr(StreamTransfer, "give_back", lambda *_: None)
            groups["2"].let_go()
            del held
        groups["2"].bring_in()
        groups["2"].wait()

    model[2].register_forward_pre_hook(evict)
    run(model)
    assert "freed while in use" in kinds(simulated_devices)
    simulated_devices.races.clear()


def test_a_group_in_use_is_never_evicted(simulated_devices):
    model = stack()
    want = run(model)
    apply_group_offloading(model, "sim:0", "cpu", "leaf_level", use_stream=True)
    model[2].register_forward_pre_hook(lambda *_: placement_of(model).free())
    for _ in range(3):
        assert torch.equal(run(model).cpu(), want)


# ---- overlap ----


def test_streams_hide_copies_behind_computing(simulated_devices):
    times = {}
    for streams in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
        apply_group_offloading(model, "sim:0", "cpu", "leaf_level", use_stream=streams)
        x = torch.ones(2048, 512, device="sim:0")
        for _ in range(3):
            simulated_devices.synchronize()
            begin = simulated_devices.elapsed
            with torch.no_grad():
                model(x)
            simulated_devices.synchronize()
            times[streams] = simulated_devices.elapsed - begin
    assert times[True] < 0.85 * times[False]


def test_several_groups_are_fetched_ahead(simulated_devices):
    model = stack()
    options = Settings(SIM, transfers=Transfers(streams=True, ahead=3, ahead_bytes=1 << 30))
    placement = apply_plan(model, blocks(options))
    run(model)
    seen = []
    model[1].register_forward_pre_hook(lambda *_: seen.append([group.is_in for group in placement._groups]))
    run(model)
    assert seen == [[False, True, True, True, False, False]]  # fetched when the first one had been launched


def test_a_branch_that_was_expected_but_not_taken_is_let_go(simulated_devices):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x, skip):
            for index in (0, 3, 1) if skip else (0, 1, 2, 3):
                x = self.blocks[index](x)
            return x

    model, x = Branches(), torch.ones(1, 4)
    want = {skip: model(x, skip) for skip in (False, True)}
    placement = apply_plan(model, leaves(Settings(SIM, transfers=Transfers(streams=True))))
    for skip in (False, True, True, False, True, False, False):
        assert torch.equal(model(x, skip).cpu(), want[skip])
        assert placement.resident_bytes == 0


# ---- pinned memory ----


def test_buffers_stay_within_the_budget_whatever_the_sizes(simulated_devices):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 7), nn.Linear(7, 300))
    want = model(torch.ones(1, 300))
    for budget in (1 << 20, 50_000, 16_384, 9_000, 0):
        options = Transfers(streams=True, pinned_budget=budget)
        placement = apply_plan(model, leaves(Settings(SIM, transfers=options)))
        simulated_devices.pinned.peak = simulated_devices.pinned.allocated
        for _ in range(2):
            assert torch.equal(model(torch.ones(1, 300)).cpu(), want)
        assert simulated_devices.pinned.peak <= budget
        placement.remove()
        assert simulated_devices.pinned.allocated == 0


def test_pinned_homes_replace_the_masters_within_the_budget(simulated_devices):
    model = stack(4)  # a weight takes 64 KiB
    options = Transfers(streams=True, pin_homes=True, pinned_budget=200_000)
    placement = apply_plan(model, leaves(Settings(SIM, transfers=options)))
    pinned = [parameter.is_pinned() for parameter in model.parameters()]
    assert any(pinned) and not all(pinned)
    assert simulated_devices.pinned.allocated <= 200_000
    want = run(stack(4))
    for _ in range(2):
        assert torch.equal(run(model).cpu(), want)
    placement.remove()
    assert simulated_devices.pinned.allocated == 0 and not any(p.is_pinned() for p in model.parameters())


def test_weights_that_share_strange_memory_travel_too(simulated_devices):
    model = nn.Linear(6, 6)
    base = torch.randn(12, 12)
    model.weight.data = base[::2, ::2]  # with gaps
    model.bias.data = torch.ones(1).expand(6)  # with overlaps
    want = model(torch.ones(1, 6))
    for options in ({}, {"use_stream": True}, {"use_stream": True, "low_cpu_mem_usage": True}):
        apply_group_offloading(model, "sim:0", "cpu", "leaf_level", **options)
        torch.testing.assert_close(model(torch.ones(1, 6)).cpu(), want)  # laid out anew, so it may round otherwise
