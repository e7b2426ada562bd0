"""The benchmark runner: both libraries in fresh processes, ratios, tables; and that its meters count right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.cases import CASES, OURS, THEIRS, TUNED, Case
from benchmarks.gpu import SMALL, Report, models
from benchmarks.meters import Peak, floating_point_operations, operations, peak_activations, python_calls, timed
from benchmarks.report import draw, markdown, rows
from benchmarks.runner import Result, run

ROOT = Path(__file__).resolve().parents[1]


def result(name: str = "decode-activations") -> Result:
    return Result(
        name,
        CASES[name].about,
        {OURS: {"activations_mb": [2.0, 3.0, 4.0]}, THEIRS: {"activations_mb": [4.0, 4.0, 4.0]}},
    )


def test_meters_count_what_is_known() -> None:
    values = torch.ones(1024, 1024)

    def chain() -> torch.Tensor:
        return (values + 1) * 2 - 1

    assert operations(chain) == 3
    assert peak_activations(chain) == 2 * values.nbytes  # an operation's input and its output
    assert floating_point_operations(lambda: values @ values) == 2 * 1024**3
    assert python_calls(lambda: [str.upper("a"), chain()]) == 2  # the lambda and `chain`; C functions do not count
    assert timed(chain, repeats=3)["seconds"] > 0


def test_the_peak_is_seen_although_it_is_gone() -> None:
    with Peak() as peak:
        held = bytearray(200_000_000)
        del held
    assert peak.grown("anonymous") > 150
    assert (peak.after["anonymous"] - peak.before["anonymous"]) / 1e6 < 50


def test_ratios_are_those_of_pairs() -> None:
    assert result().ratio("activations_mb", THEIRS) == (0.75, 0.5, 1.0)
    assert result().ratio("activations_mb", "nobody") is None
    (row,) = rows([result()])
    assert row == ("decode-activations", "MB of tensors", "3", THEIRS, "4", "0.75 (0.5 to 1)", "0.75")


def test_the_table_names_command_machine_and_failures() -> None:
    found = result()
    found.failed["diffusers, tuned"] = "Traceback\nValueError: why"
    text = markdown([found], {"processor": "a fast one"}, "python -m benchmarks run decode-activations")
    assert text.startswith("`python -m benchmarks run decode-activations`")
    assert "processor a fast one" in text
    assert "| decode-activations | MB of tensors | 3 | diffusers | 4 | 0.75 (0.5 to 1) | 0.75 |" in text
    assert "- decode-activations, diffusers, tuned: ValueError: why" in text


def test_the_picture_has_a_bar_for_each_ratio(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw([result()], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000
    assert not draw([Result("import", "")], tmp_path / "none.png")


def test_goals_name_their_side() -> None:
    case = Case(
        "a", "", "a:b", sides=(OURS, THEIRS, "diffusers, tuned"), goals={"s": 0.5, "t": (1.0, "diffusers, tuned")}
    )
    assert case.goal("s") == (0.5, THEIRS)
    assert case.goal("t") == (1.0, TUNED)
    assert case.goal("u") is None


def test_an_import_of_a_pipeline_costs_a_fraction_of_the_reference() -> None:
    (found,) = run(["import"], against=True, rounds=1, tell=lambda text: None)
    assert not found.failed
    for figure, limit in (("cpu_seconds", 0.15), ("memory_mb", 0.25)):
        ratio = found.ratio(figure, THEIRS)
        assert ratio is not None and ratio[0] <= limit


def test_a_load_with_a_cast_holds_hardly_more_than_the_model() -> None:
    (found,) = run(["load-cast"], against=False, rounds=1, tell=lambda text: None)
    share = found.median(OURS, "all_of_model")
    assert share is not None and share <= 1.05


@pytest.mark.parametrize("name", ["depth-sd15", "depth-sdxl", "depth-flux"])
def test_a_forward_takes_half_the_python_calls_of_the_reference(name: str, tmp_path: Path) -> None:
    ours, theirs = (CASES[name].measure(side, tmp_path)["python_calls"] for side in (OURS, THEIRS))
    assert ours <= 0.5 * theirs


def test_schedulers_take_a_third_of_the_operations(tmp_path: Path) -> None:
    ours, theirs = (CASES["scheduler-step"].measure(side, tmp_path)["operations"] for side in (OURS, THEIRS))
    assert ours <= 0.35 * theirs


def test_the_command_writes_its_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "run", "decode-act", "--against", "diffusers", "--output", tmp_path]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    content = json.loads((tmp_path / "benchmarks.json").read_text(encoding="utf-8"))
    (found,) = content["results"]
    ours, theirs = (found["figures"][side]["activations_mb"][0] for side in (OURS, THEIRS))
    assert ours <= 0.75 * theirs
    assert content["machine"]["torch"] == torch.__version__
    assert "decode-activations" in (tmp_path / "benchmarks.md").read_text(encoding="utf-8")


def test_wrong_names_are_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "run", "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "there is no benchmark nothing" in ran.stderr


def test_importing_the_list_of_cases_imports_no_library() -> None:
    code = "import sys, benchmarks.worker; print([name for name in ('torch', 'diffusers') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_script_for_gpus_measures_and_ends_in_time() -> None:
    report = Report(torch.device("cpu"), deadline=float("inf"))
    report.measure("a sum", lambda: torch.ones(8).sum(), repeats=2)
    report.measure("an error", lambda: torch.ones(2) @ torch.ones(3))
    report.deadline = 0.0
    models(report, SMALL)
    assert report.rows[0]["milliseconds"] > 0
    assert "failed" in report.rows[1]
    assert all("skipped" in row for row in report.rows[2:]) and len(report.rows) > 4
