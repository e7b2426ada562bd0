"""The examples of docs/group-offload.md run, in one namespace."""

import re
from pathlib import Path

import pytest

from diffusion_core.offload.simulator import unavailable

pytestmark = pytest.mark.simulator
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "group-offload.md"


def test_examples(tmp_path, monkeypatch, capsys):
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for example in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(example, str(GUIDE), "exec"), names)
    said = capsys.readouterr().out
    assert re.search(r"the device held (4|8|9|1\d)\.\d MB at most", said)
    assert re.search(r"resident: (8|1\d)\.\d MB of 20 MB", said)
