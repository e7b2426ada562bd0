"""The examples of docs/simulator.md run."""

import re
from pathlib import Path

import pytest
import torch

from diffusion_core.offload.simulator import simulator, unavailable

pytestmark = pytest.mark.simulator
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "simulator.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (0, r"h2d=267264.*\npredicted: 0\.\d\d ms, races: 0\n"),
        (1, "use before arrival on sim:0: aten::add.out on stream"),
        (2, r"peak 4\.30 GB, predicted \d\.\d+ s\nSpan\(name='copy', kind='h2d'"),
    ],
)
def test_examples(example, said, capsys):
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    exec(compile(EXAMPLES[example], str(GUIDE), "exec"), {})
    assert re.search(said, capsys.readouterr().out)


def test_the_test_example(request):
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    assert len(EXAMPLES) == 4
    names: dict[str, object] = {}
    exec(compile(EXAMPLES[3], str(GUIDE), "exec"), names)
    with simulator(devices=2, capacity="1GB") as running:
        names["test_runs_on_the_second_device"](running)
        assert torch.accelerator.device_count() == 2
