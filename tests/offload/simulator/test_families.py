"""The pipelines of every family under every memory mode: bit for bit the pictures that they draw on the CPU."""

from functools import cache

import pytest
import torch

from diffusion_core.offload.simulator import simulator, unavailable
from tests.pipelines.families import CASES, FAMILIES, Family, loaded, pipe

from .test_pipeline_modes import MODES, allocated, undo

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
CAPACITY = 64_000_000  # bytes; the largest tiny pipeline takes less
OTHERS = [(family, task) for family, task in CASES if task != family.main]
KINDS = ["model", "sequential", "two blocks, streams"]  # a mode of each kind
# Families that are others with a part more. What they add is seen by a mode of each kind; all modes took two minutes.
VARIANTS = {
    "stable-diffusion-inpainting",
    "stable-diffusion-xl-refiner",
    "pixart-alpha",
    "flux-fill",
    "flux-kontext",
    "flux-control",
    "cogvideox-image",
    "ltx-timed",
    "wan-two",
    "wan-image",
    "wan-timed",
}
# What stays on the device between calls, on purpose.
RESIDENT = {"on the device", "all but the vae"}


def draw(made, family: Family, task: str) -> torch.Tensor:
    return made(**family.call(task))[0].cpu()


@cache
def expected(family: Family, task: str, mapped: bool = False) -> torch.Tensor:
    """What the CPU draws. Weights in a mapped file are aligned otherwise than copies, which its sums may notice."""
    return draw(loaded(family, task) if mapped else pipe(family, task), family, task)


def compare(family: Family, task: str, mode: str) -> None:
    """Two calls under a mode, and one after it was taken back."""
    wanted, afterwards = expected(family, task), expected(family, task, mapped=True)
    with simulator(devices=2, capacity=CAPACITY) as sim:
        made = loaded(family, task)
        MODES[mode](made)
        for _ in range(2):
            assert torch.equal(draw(made, family, task), wanted)
        if mode not in RESIDENT:
            assert allocated(sim) == [0, 0]
        undo(made)
        made.to("cpu")
        drawn = draw(made, family, task)
        assert torch.equal(drawn, afterwards) or torch.equal(drawn, wanted)
        assert allocated(sim) == [0, 0]


def is_slow(family: Family, mode: str) -> bool:
    return family.name in VARIANTS and mode not in KINDS


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, id=f"{family}-{mode}", marks=[pytest.mark.slow] if is_slow(family, mode) else [])
        for family in FAMILIES
        for mode in MODES
    ],
)
def test_a_task_of_each_family_in_each_mode(family: Family, mode: str) -> None:
    compare(family, family.main, mode)


def test_variants_are_families() -> None:
    assert {family.name for family in FAMILIES} > VARIANTS
    assert set(MODES) > set(KINDS)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize(("family", "task"), OTHERS, ids=[f"{family}-{task}" for family, task in OTHERS])
def test_other_tasks_in_a_mode_of_each_kind(family: Family, task: str, mode: str) -> None:
    compare(family, task, mode)
