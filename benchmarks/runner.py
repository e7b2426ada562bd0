"""Runs benchmarks: each side of a case in fresh processes, in turn (A B A B ...), and pairs the figures up."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .cases import CASES, OURS, Case
from .worker import MARK

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Result:
    """What came of a case.

    Attributes:
        case: its name.
        about: what was measured.
        figures: by side and name, one value a round.
        failed: by side, the end of what it printed where it could not run.
    """

    case: str
    about: str
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def median(self, side: str, figure: str) -> float | None:
        values = self.figures.get(side, {}).get(figure)
        return statistics.median(values) if values else None

    def ratio(self, figure: str, against: str) -> tuple[float, float, float] | None:
        """Ours divided by the other side's, round by round: median, least and greatest."""
        ours = self.figures.get(OURS, {}).get(figure, [])
        theirs = self.figures.get(against, {}).get(figure, [])
        pairs = [mine / other for mine, other in zip(ours, theirs, strict=False) if other]
        return (statistics.median(pairs), min(pairs), max(pairs)) if pairs else None


def run(names: Sequence[str], against: bool, rounds: int | None, tell: Callable[[str], None]) -> list[Result]:
    """Run the cases of these names.

    Args:
        names: of `CASES`.
        against: whether the reference runs too.
        rounds: of each side, in place of each case's own number.
        tell: is told what runs.
    """
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            case = CASES[name]
            tell(f"{name}: {case.about}")
            _run_prepare(name, place)
            results.append(_run_case(case, against, rounds or case.rounds, place, tell))
    return results


def _run_case(case: Case, against: bool, rounds: int, place: str, tell: Callable[[str], None]) -> Result:
    result = Result(case.name, case.about)
    sides = [side for side in case.sides if against or side == OURS]
    for _ in range(rounds):
        for side in sides:
            if side in result.failed:
                continue
            figures, error = _measure(case, side, place)
            if error:
                result.failed[side] = error
                tell(f"  {side} did not run: {error.splitlines()[-1]}")
                continue
            kept = result.figures.setdefault(side, {})
            for figure, value in figures.items():
                kept.setdefault(figure, []).append(value)
    return result


def _environment(threads: int) -> dict[str, str]:
    environment = dict(os.environ)
    if threads:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment


def _run_prepare(name: str, place: str) -> None:
    """In a process of its own too: what it leaves in memory would count for what is started later."""
    code = f"from pathlib import Path; from benchmarks.cases import CASES; CASES[{name!r}].make(Path({place!r}))"
    if CASES[name].prepare is not None:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def _measure(case: Case, side: str, place: str) -> tuple[dict[str, float], str]:
    command = [sys.executable, "-m", "benchmarks.worker", case.name, side, place]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=_environment(case.threads))
    lines = [line for line in ran.stdout.splitlines() if line.startswith(MARK)]
    if ran.returncode or not lines:
        return {}, (ran.stderr.strip() or f"ended with {ran.returncode}")[-2000:]
    return json.loads(lines[-1][len(MARK) :]), ""
