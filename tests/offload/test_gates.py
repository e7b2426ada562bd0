"""Gates before calls: order of watchers, ways out, compiled modules, and that nothing of them is left."""

import copy
import inspect

import pytest
import torch
from torch import nn

from diffusion_core.hooks import apply_group_offloading, remove_group_offloading
from diffusion_core.offload.engine import apply_plan
from diffusion_core.offload.gates import CALL, unwatch, watch, watchers_of
from diffusion_core.offload.strategies import Settings, whole
from tests.offload.toys import IDS, toy, traces


class Log:
    def __init__(self, name, log, order=0, fail=False):
        self.name, self.log, self.order, self.fail = name, log, order, fail

    def enter(self, args, kwargs):
        if self.fail:
            raise RuntimeError("not now")
        self.log.append(f"{self.name} in")
        return (*args[:-1], args[-1] + 1), kwargs

    def result(self, output):
        return output * 10

    def leave(self):
        self.log.append(f"{self.name} out")


class Add(nn.Module):
    def forward(self, x):
        return x + 1

    def encode(self, x):
        if x > 100:
            raise KeyboardInterrupt
        return x + 2


def test_watchers_stand_in_their_order_and_change_arguments_and_results():
    module, log = Add(), []
    inner, outer = Log("inner", log, order=10), Log("outer", log)
    watch(module, CALL, inner)
    watch(module, CALL, outer)
    assert module(0) == 300 and log == ["outer in", "inner in", "inner out", "outer out"]
    assert watchers_of(module) == (outer, inner)
    unwatch(module, CALL, lambda watcher: watcher is outer)
    assert module(0) == 20
    unwatch(module, CALL, lambda watcher: watcher is inner)
    assert module(0) == 1 and traces(module) == traces(Add()) and watchers_of(module) == ()


def test_leave_is_called_on_every_way_out():
    module, log = Add(), []
    watch(module, "encode", Log("a", log))
    watch(module, "encode", Log("b", log, order=1, fail=True))
    with pytest.raises(RuntimeError, match="not now"):
        module.encode(1)
    assert log == ["a in", "a out"]
    unwatch(module, "encode", lambda watcher: watcher.name == "b")
    with pytest.raises(KeyboardInterrupt):
        module.encode(500)
    assert log == ["a in", "a out"] * 2


def test_signatures_and_other_hooks_are_kept():
    module, log = Add(), []
    module.register_forward_pre_hook(lambda *_: log.append("hook"))
    watch(module, CALL, Log("gate", log))
    module(0)
    assert log == ["gate in", "hook", "gate out"]
    assert str(inspect.signature(module.forward)) == "(x)"
    other = copy.deepcopy(module)
    other(0)
    assert log[3:] == ["hook"]


def test_what_others_put_on_top_stays_when_the_gate_goes():
    module, log = Add(), []
    watcher = Log("gate", log)
    watch(module, "encode", watcher)
    gated = module.encode
    module.encode = lambda x: gated(x) + 0.5
    assert module.encode(0) == 30.5
    unwatch(module, "encode", lambda _: True)
    assert module.encode(0) == 2.5


@pytest.fixture
def compiles():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("compile_first", [True, False])
def test_compiled_blocks_stay_one_graph(compiles, compile_first):
    model = toy()
    want = model(IDS)["x"]
    if compile_first:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
    apply_group_offloading(model, "cpu")
    if not compile_first:
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(model(IDS)["x"], want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    remove_group_offloading(model)
    assert model.blocks[0]._compiled_call_impl is not None
    assert torch.equal(model(IDS)["x"], want)


class Seen(Log):
    def enter(self, args, kwargs):
        self.log.append(self.name)
        return args, kwargs

    def result(self, output):
        return output


def test_a_graph_around_a_gate_ends_there(compiles):
    model, log = toy(), []
    want = model(IDS)["x"]
    for index, block in enumerate(model.blocks):
        watch(block, CALL, Seen(index, log))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        log.clear()
        assert torch.equal(compiled(IDS)["x"], want)
        assert [entry for entry in log if isinstance(entry, int)] == [0, 1, 2, 3, 4]


def test_a_compiled_model_can_be_placed_as_a_whole(compiles):
    model = toy()
    want = model(IDS)["x"]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    placement = apply_plan(compiled, whole(Settings(torch.device("cpu"))))
    for _ in range(2):
        assert torch.equal(compiled(IDS)["x"], want)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    placement.remove()
    assert torch.equal(compiled(IDS)["x"], want)
