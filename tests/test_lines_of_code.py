"""Families stay short: text to image under 250 lines, the denoiser under 400, and all less than in the reference."""

from pathlib import Path

import diffusers
import pytest

from benchmarks import lines_of_code

REFERENCE = Path(diffusers.__file__).parent


@pytest.mark.parametrize("family", lines_of_code.FAMILIES)
def test_families_are_short(family: str) -> None:
    alone, text, their_text, tasks, their_tasks, denoiser, their_denoiser = lines_of_code.row(family, REFERENCE)
    assert 50 < alone < 250
    assert alone <= text < their_text
    assert text <= tasks < their_tasks
    assert 100 < denoiser < min(400, their_denoiser)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines_of_code.main()
    table = capsys.readouterr().out.splitlines()
    assert [line[:22].strip() for line in table[2:-1]] == list(lines_of_code.FAMILIES)
    assert table[-1].startswith("shared by all")


def test_files_that_are_imported_count_once(tmp_path: Path) -> None:
    for name, text in {
        "pipeline": "from .base import a\nfrom .output import b\n",
        "base": "from ..picture import c\nfrom .output import b\nif x:\n    from .rare import d\n",
        "output": "b = 1\n",
        "rare": "d = 1\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = lines_of_code.used_by(tmp_path / "pipeline.py", tmp_path)
    assert {path.stem for path in found} == {"pipeline", "base", "output"}
