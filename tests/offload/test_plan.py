"""Plans and the strategies that make them; the learned order; the host's memory."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.models.unets.unet_2d_condition import UNet2DConditionOutput
from diffusion_core.offload.host_memory import available_memory, default_pinned_budget, pinned_size
from diffusion_core.offload.order import END, Order
from diffusion_core.offload.plan import Group, Plan, Until
from diffusion_core.offload.send import first_device, send
from diffusion_core.offload.strategies import Settings, blocks, by_map, group_sizes, leaves, whole, within
from diffusion_core.offload.structure import find_blocks, find_leaves, submodules, tensor_names
from tests.offload.toys import toy
from tests.pipelines import tiny

CPU = torch.device("cpu")
SETTINGS = Settings(CPU)


@st.composite
def modules(draw):
    """Modules with lists, sequences, loose parameters and ties at any depth."""
    shared = nn.Linear(2, 2)

    def make(depth):
        kind = draw(st.sampled_from(["linear", "norm", "list", "sequence", "shared", "part", "nothing"]))
        if kind == "shared":
            return shared
        if kind == "linear" or (depth == 0 and kind not in ("norm", "nothing")):
            return nn.Linear(2, 2)
        if kind in ("norm", "nothing"):
            return nn.BatchNorm1d(2) if kind == "norm" else nn.Identity()
        parts = [make(depth - 1) for _ in range(draw(st.integers(0, 3)))]
        if kind == "list":
            return nn.ModuleList(parts)
        if kind == "sequence":
            return nn.Sequential(*parts)
        module = nn.Module()
        module.own = nn.Parameter(torch.ones(3))
        for index, part in enumerate(parts):
            module.add_module(f"part{index}", part)
        return module

    root = nn.Module()
    for index in range(draw(st.integers(1, 4))):
        root.add_module(f"child{index}", make(3))
    return root


@settings(deadline=None, max_examples=50)
@given(modules(), st.integers(1, 4))
def test_every_tensor_is_in_exactly_one_group_of_every_strategy(module, count):
    names = dict(submodules(module))
    for strategy in (whole(SETTINGS), leaves(SETTINGS), blocks(SETTINGS, count), by_map(SETTINGS, {"": "cpu"})):
        plan = strategy(module, ())
        plan.check(tensor_names(module), names)
        total = sum(tensor.numel() * tensor.element_size() for tensor in {*module.parameters(), *module.buffers()})
        assert sum(group_sizes(module, plan.groups).values()) == total
        lists = (nn.ModuleList, nn.ParameterList)
        assert not any(isinstance(names[name], lists) for group in plan.groups for name in group.modules)
        bounded = within(SETTINGS, strategy, 2 * total)(module, ())
        assert all(group.until is Until.REMOVED for group in bounded.groups)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(50, 1000))
def test_a_budget_is_never_exceeded_and_well_used(sizes, budget):
    module = nn.Module()
    for index, size in enumerate(sizes):
        module.add_module(f"m{index}", nn.Linear(size, 1, bias=False))
    plan = within(SETTINGS, leaves(SETTINGS), 4 * budget)(module, ())
    bytes_of = group_sizes(module, plan.groups)
    resident = sum(bytes_of[group.name] for group in plan.groups if group.until is Until.REMOVED)
    largest = max(bytes_of.values())
    assert resident + largest <= 4 * budget or resident == sum(bytes_of.values())
    moving = [bytes_of[group.name] for group in plan.groups if group.until is not Until.REMOVED]
    assert not moving or resident + largest + min(moving) > 4 * budget


def test_resident_groups_are_spread_evenly():
    module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(12)])
    plan = within(SETTINGS, leaves(SETTINGS), 256 * 5)(module, ())
    kept = [index for index, group in enumerate(plan.groups) if group.until is Until.REMOVED]
    assert len(kept) == 4 and {after - before for before, after in pairwise(kept)} == {3}


def test_blocks_are_found_at_any_depth():
    unet_blocks, loose = find_blocks(tiny.unet(diffusion_core))
    assert "up_blocks.0.attentions.1.transformer_blocks.0" in unet_blocks and "mid_block.resnets.1" in unet_blocks
    assert "conv_in" in loose and "up_blocks.0.attentions.1.proj_in" in loose
    vae_blocks, _ = find_blocks(tiny.vae(diffusion_core))
    assert {"encoder.mid_block.attentions.0", "decoder.up_blocks.1.upsamplers.0"} <= set(vae_blocks)
    encoder_blocks, beside = find_blocks(tiny.text_encoder())
    assert [name for name in encoder_blocks if "layers." in name] == encoder_blocks[1:] and len(encoder_blocks) == 3
    assert [name.rpartition(".")[2] for name in beside] == ["final_layer_norm"]
    assert find_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)))[0] == ["0", "2"]


def test_runs_of_blocks_follow_the_order_of_calls_once_it_is_known():
    module = nn.Module()
    module.late = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    module.early = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    plan = blocks(SETTINGS, 2)(module, ("", "early.0", "late.0", "early.1", "late.1"))
    assert [group.modules for group in plan.groups] == [("early.0", "late.0"), ("early.1", "late.1")]


def test_modules_that_read_their_childrens_weights_are_one_leaf():
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False)
    assert find_leaves(module) == ["layers.0", "layers.1"]
    assert find_leaves(nn.Sequential(nn.MultiheadAttention(4, 2))) == ["0"]


def test_tied_tensors_are_one_and_needed_by_all_who_have_them():
    groups = {group.name: group for group in leaves(SETTINGS)(toy(), ()).groups}
    assert groups["table"].modules == ("table", "head") and "head" not in groups
    assert sum("table" in name for group in groups.values() for name in group.tensors) == 1


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("a", ["x"], [""])], "says nothing about y"),
        ([("a", ["x", "y"], [""]), ("b", ["y"], [""])], "'y' is in the groups 'a' and 'b'"),
        ([("a", ["x", "y", "z"], [""])], "lists 'z', which does not exist"),
        ([("a", ["x", "y"], ["m"])], "waits for calls of 'm'"),
        ([("a", ["x"], [""]), ("a", ["y"], [""])], "two groups of a placement are called 'a'"),
    ],
)
def test_plans_that_are_no_partition_are_refused(groups, message):
    plan = Plan(tuple(Group(name, tuple(t), tuple(m), CPU) for name, t, m in groups), CPU)
    with pytest.raises(PlacementError, match=message):
        plan.check(["x", "y"], [""])


# ---- the learned order ----


def test_the_order_is_learned_and_forgotten():
    order, seen = Order(), [0, 1, 2, 1, 3]
    for before, call, following in zip([None, *seen[:-1]], seen, [*seen[1:], END], strict=True):
        order.note(before, call, following)
    assert [*order.chain(None, 0, 9)] == [1, 2, 1, 3] and [*order.chain(2, 1, 9)] == [3]
    assert [*order.chain(None, 0, 2)] == [1, 2] and order.after(1, 3) == END and order.after(3, 3) is None
    order.note(None, 0, 3)
    assert [*order.chain(None, 0, 9)] == [3]


# ---- arguments and results ----


def test_values_without_a_tensor_to_move_stay_the_same_objects():
    cache = [torch.ones(1), {"a": (torch.ones(1), None)}, "text", 3]
    assert send(cache, CPU) is cache
    output = UNet2DConditionOutput(sample=torch.ones(1))
    moved = send({"out": [output], "n": 1}, torch.device("meta"))
    assert moved["out"][0].sample.is_meta and type(moved["out"][0]) is type(output)
    assert first_device({"a": [1, {"b": torch.ones(1, device="meta")}]}) == torch.device("meta")
    assert first_device(["a", 1, None]) is None


# ---- the host's memory ----


def test_pinned_sizes_are_powers_of_two():
    assert [pinned_size(n) for n in (0, 1, 5, 4096, 4097)] == [0, 1, 8, 4096, 8192]


def system(root, files):
    for name, content in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return available_memory(root)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1_024_000),
        ({"sys/fs/cgroup/memory.max": "max"}, 1_024_000),
        ({"sys/fs/cgroup/memory.max": "500000", "sys/fs/cgroup/memory.current": "200000"}, 300_000),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "700000",
                "sys/fs/cgroup/a/memory.current": "600000",
                "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 50000\n",
                "sys/fs/cgroup/a/b/memory.max": "max",
            },
            150_000,
        ),
        (
            {
                "proc/self/cgroup": "12:cpu:/x\n5:memory:/docker/1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "400000",
                "sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes": "100000",
            },
            300_000,
        ),
    ],
)
def test_the_containers_limit_counts(tmp_path, files, expected):
    assert system(tmp_path, files) == expected


def test_a_budget_is_found_on_this_machine():
    assert 0 < default_pinned_budget() == pytest.approx(available_memory() / 4, rel=0.5)
