"""Row 26 of the guide "Precision and compilation" on a simulated device: the host waits for nothing within the loop."""

import itertools
from collections import Counter
from typing import Any

import pytest

from diffusion_core.offload.simulator import simulator, unavailable
from tests.pipelines.families import CASES, Family, pipe

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
STEPS = 4


@pytest.mark.parametrize(("family", "task"), CASES, ids=[f"{family}-{task}" for family, task in CASES])
def test_row_26_no_sync_within_the_loop(family: Family, task: str) -> None:
    """A copy to the host waits for the device, and one to the device for the host's memory: `.item()`, `if tensor`,
    `torch.tensor(..., device=...)`. Between the ends of two steps there is none, nor any other wait."""
    counts: list[Counter[str]] = []
    with simulator() as sim:
        made = pipe(family, task)

        def count(pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            kinds = Counter(span.kind for span in sim.spans("sim:0"))
            counts.append(Counter({kind: kinds[kind] for kind in ("d2h", "h2d")}, waits=sim.synchronizations))
            return tensors

        made.to("sim:0")
        try:
            made(**family.call(task, num_inference_steps=STEPS, callback_on_step_end=count))
        finally:
            made.to("cpu")
    assert len(counts) >= 2
    assert all(later - earlier == Counter() for earlier, later in itertools.pairwise(counts))
