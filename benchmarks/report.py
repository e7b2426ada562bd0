"""What benchmarks found, as JSON, as a table in Markdown, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cases import CASES, OURS
from .runner import Result

_UNITS = {
    "seconds": "s",
    "cpu_seconds": "s of all cores",
    "modelled_seconds": "s, modelled",
    "microseconds": "µs a step",
    "operations": "tensor operations",
    "python_calls": "Python calls",
    "memory_mb": "MB",
    "anonymous_mb": "MB anonymous",
    "activations_mb": "MB of tensors",
    "peak_mb": "MB at most",
    "peak_of_model": "anonymous memory at most, of the model's size",
    "all_of_model": "memory at most with mapped files, of the model's size",
    "of_peak": "of the machine's peak",
}


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Case, figure, ours, the other's median, ratio with its spread, goal: a row for each figure and other side."""
    found: list[tuple[str, ...]] = []
    for result in results:
        case = CASES[result.case]
        for figure in dict.fromkeys((*case.shown, *case.goals)):
            ours = result.median(OURS, figure)
            others = [side for side in case.sides if side != OURS and side in result.figures] or [""]
            for side in others:
                found.append(_row(result, figure, ours, side))
    return found


def _row(result: Result, figure: str, ours: float | None, side: str) -> tuple[str, ...]:
    theirs = result.median(side, figure) if side else None
    ratio = result.ratio(figure, side) if side else None
    goal = CASES[result.case].goal(figure)
    wanted = f"{goal[0]:g}" if goal is not None and goal[1] == side else ""
    shown = "" if ratio is None else f"{ratio[0]:.3g} ({ratio[1]:.3g} to {ratio[2]:.3g})"
    return (result.case, f"{_UNITS.get(figure, figure)}", _number(ours), side, _number(theirs), shown, wanted)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


HEAD = ("benchmark", "figure", "ours", "beside", "theirs", "ours / theirs", "goal")


def markdown(results: Sequence[Result], machine: dict[str, Any], command: str) -> str:
    """The table, with the command that made it and the machine."""
    lines = [
        f"`{command}`",
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()),
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(row) + " |" for row in rows(results)),
    ]
    failed = [
        f"- {result.case}, {side}: {error.splitlines()[-1]}"
        for result in results
        for side, error in result.failed.items()
    ]
    return "\n".join([*lines, *(["", "Did not run:", "", *failed] if failed else []), ""])


def write(results: Sequence[Result], machine: dict[str, Any], command: str, folder: Path) -> list[Path]:
    """`benchmarks.json`, `benchmarks.md`, and, where matplotlib is installed, `benchmarks.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "machine": machine, "results": [asdict(result) for result in results]}
    files = [folder / "benchmarks.json", folder / "benchmarks.md"]
    files[0].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    files[1].write_text(markdown(results, machine, command), encoding="utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return files
    picture = folder / "benchmarks.png"
    if draw(results, picture):
        files.append(picture)
    return files


def draw(results: Sequence[Result], path: Path) -> bool:
    """Ratios as bars on a logarithmic axis, with their spread; left of 1 is better. False if there is none."""
    from matplotlib.figure import Figure

    bars: list[tuple[str, tuple[float, float, float], float | None]] = []
    for result in results:
        case = CASES[result.case]
        for figure in dict.fromkeys((*case.shown, *case.goals)):
            for side in case.sides[1:]:
                ratio = None if figure == "of_peak" else result.ratio(figure, side)
                if ratio is not None:
                    goal = case.goal(figure)
                    label = f"{result.case}: {_UNITS.get(figure, figure)}" + (", tuned" if "tuned" in side else "")
                    bars.append((label, ratio, goal[0] if goal is not None and goal[1] == side else None))
    if not bars:
        return False
    figure = Figure(figsize=(9, 0.28 * len(bars) + 1.2), dpi=140, layout="constrained")
    axes: Any = figure.subplots()
    for place, (_, (middle, least, greatest), goal) in enumerate(reversed(bars)):
        better = middle <= 1
        axes.barh(place, middle - 1, left=1, height=0.66, color="#31688e" if better else "#c44e52")
        axes.plot([least, greatest], [place, place], color="black", linewidth=1)
        if goal is not None:
            axes.plot([goal, goal], [place - 0.42, place + 0.42], color="#e3a020", linewidth=2.4)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in reversed(bars)], fontsize=7.5)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ours / the reference's: less is better\nyellow: the aim; black: the spread of the rounds")
    least, greatest = axes.get_xlim()
    ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if least <= tick <= greatest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(-0.8, len(bars) - 0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
    return True
