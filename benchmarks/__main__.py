"""Benchmarks beside the reference.

python -m benchmarks list
python -m benchmarks run [NAME ...] [--short] [--against diffusers] [--rounds N] [--output FOLDER]

Each library runs in fresh processes, in turn; the tables hold medians, and ratios with their spread.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .cases import CASES


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the names of all benchmarks")
    running = commands.add_parser("run", help="run some, or all")
    running.add_argument("names", nargs="*", metavar="NAME", help="or the beginning of names; all by default")
    running.add_argument("--short", action="store_true", help="only those that `make bench` runs")
    running.add_argument("--against", choices=["diffusers"], help="run the reference beside; it must be installed")
    running.add_argument("--rounds", type=int, help="of each side, in place of each benchmark's own number")
    running.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="where the files go")
    given = parser.parse_args()
    if given.command == "list":
        for case in CASES.values():
            print(f"{case.name:<24}{case.about}{' (short set)' if case.short else ''}")
        return
    unknown = [name for name in given.names if not any(case.startswith(name) for case in CASES)]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; `python -m benchmarks list` names them")
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds must be 1 or more")
    wanted = [name for name in CASES if not given.names or any(name.startswith(each) for each in given.names)]
    _run([name for name in wanted if CASES[name].short or not given.short], given)


def _run(names: list[str], given: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from .machine import describe
    from .report import HEAD, rows, write
    from .runner import run

    console = Console(width=None if sys.stdout.isatty() else 170)
    results = run(names, given.against is not None, given.rounds, lambda text: print(text, flush=True))
    table = Table(*HEAD)
    for row in rows(results):
        table.add_row(*row)
    console.print(table)
    command = "python -m benchmarks " + " ".join(sys.argv[1:])
    for file in write(results, describe(), command, given.output):
        print(file)
    if any("diffusion_core" in result.failed for result in results):
        raise SystemExit("some benchmarks of ours did not run")


if __name__ == "__main__":
    main()
