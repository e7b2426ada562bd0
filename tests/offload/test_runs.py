"""What does not change in a run is computed once, and nothing of it is left behind."""

import threading

import pytest
import torch
from torch import nn

from diffusion_core.offload.runs import cached_run, current_run, once, told


class Counting(nn.Module):
    """A layer that counts how often it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        self.count += 1
        return self.linear(tokens) * factor


@pytest.fixture
def layer() -> Counting:
    torch.manual_seed(0)
    return Counting().eval()


@torch.no_grad()
def test_the_same_input_is_computed_once(layer: Counting) -> None:
    text = torch.randn(2, 4)
    with cached_run():
        first = once(layer, text)
        assert once(layer, text) is first
        assert once(layer, text, 2.0) is not first
    assert layer.count == 2
    assert torch.equal(first, layer(text))


@torch.no_grad()
def test_equal_but_other_tensors_are_others(layer: Counting) -> None:
    text = torch.randn(2, 4)
    with cached_run():
        once(layer, text)
        once(layer, text.clone())
    assert layer.count == 2


@torch.no_grad()
def test_an_edited_tensor_is_computed_anew(layer: Counting) -> None:
    text = torch.randn(2, 4)
    with cached_run():
        once(layer, text)
        text.mul_(2)
        assert torch.equal(once(layer, text), layer(text))


@torch.no_grad()
def test_outside_of_a_run_nothing_is_kept(layer: Counting) -> None:
    text = torch.randn(2, 4)
    once(layer, text)
    once(layer, text)
    assert layer.count == 2
    with cached_run() as memory:
        once(layer, text)
    assert memory._kept == {}
    assert current_run() is None


def test_where_gradients_are_recorded_nothing_is_kept(layer: Counting) -> None:
    text = torch.randn(2, 4)
    with cached_run():
        once(layer, text).sum().backward()
        once(layer, text).sum().backward()
    assert layer.count == 2


@torch.no_grad()
def test_an_error_ends_the_run(layer: Counting) -> None:
    with pytest.raises(KeyError), cached_run():
        once(layer, torch.randn(2, 4))
        raise KeyError
    assert current_run() is None


@torch.no_grad()
def test_runs_within_runs_and_in_other_threads_are_apart(layer: Counting) -> None:
    text, seen = torch.randn(2, 4), []
    with cached_run() as outer:
        once(layer, text)
        with cached_run() as inner:
            assert current_run() is inner
            once(layer, text)
        assert current_run() is outer
        thread = threading.Thread(target=lambda: seen.append(current_run()))
        thread.start()
        thread.join()
    assert layer.count == 2
    assert seen == [None]


@torch.no_grad()
def test_no_more_bytes_than_the_limit(layer: Counting) -> None:
    first, second = torch.randn(2, 4), torch.randn(2, 4)
    with cached_run(limit=2 * 4 * 4):
        for _ in range(2):
            once(layer, first)
            once(layer, second)
    assert layer.count == 3
    with cached_run(limit=0):
        once(layer, first)
        once(layer, first)
    assert layer.count == 5
    with pytest.raises(ValueError, match="limit=-1"), cached_run(limit=-1):
        pass


@torch.no_grad()
def test_inputs_that_change_in_each_step_do_not_pile_up(layer: Counting) -> None:
    with cached_run() as memory:
        for _ in range(20):
            once(layer, torch.randn(2, 4))
        assert len(memory._kept[layer]) == 4
        assert memory._size == 4 * 2 * 4 * 4


def share(timestep: torch.Tensor, count: int) -> torch.Tensor:
    return (timestep / 1000).expand(count)


def test_what_a_model_is_told_is_the_same_tensor_for_a_step() -> None:
    steps = torch.tensor([900.0, 500.0, 100.0]).unbind()
    with cached_run(steps) as memory:
        first = told(share, steps[1], 2)
        assert told(share, steps[1], 2) is first
        assert told(share, steps[1], 3) is not first
        assert torch.equal(first, share(steps[1], 2))
        every = memory.schedule(first)
        assert every is not None
        assert [each[0].item() for each in every] == pytest.approx([0.9, 0.5, 0.1])
        assert memory.schedule(torch.tensor(0.5)) is None
        assert torch.equal(told(share, torch.tensor(300.0), 2), torch.tensor([0.3, 0.3]))
    assert torch.equal(told(share, steps[1], 2), first)
