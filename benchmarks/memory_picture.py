"""Device memory over time in each memory mode, as a picture, from the traces of dry runs at full size.

python -m benchmarks.memory_picture [FAMILY] [--output FILE] [--hub FOLDER] [--hardware NAME]

Each panel shows a picture drawn in two steps: the prompt is encoded, the denoiser runs twice, the picture is decoded.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion_core.logging import set_verbosity_error

from .memory_modes import FAMILIES, HUB, MODES, Family, Result, measure

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "memory.png"
SHOWN = (
    "all on the device",
    "fp8 denoiser, all on the device",
    "model offload",
    "model offload, denoiser by blocks, stream",
    "group offload, blocks, stream",
    "group offload, leaves, stream",
    "sequential offload",
    "fp8, leaves, stream, VAE tiling",
)
COLOUR, STEP_COLOUR = "#31688e", "#e8eef3"


def draw(family: Family, results: Mapping[str, Result], output: Path) -> None:
    """Small multiples, a panel a mode, with one scale of bytes; the time line is each mode's own."""
    from matplotlib.figure import Figure

    columns = 2
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(9, 2.05 * rows + 0.8), dpi=150, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    top = max(result.peaks[0] for result in results.values()) / 1e9 * 1.15
    for axes, (mode, result) in zip(grid.flat, results.items(), strict=False):
        _panel(axes, mode, result, top)
    for axes in grid.flat[len(results) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("memory, GB")
    for axes in grid[-1]:
        axes.set_xlabel("predicted time, s")
    figure.suptitle(f"{family.repo.rpartition('/')[2]}, {family.shown} pixels, two steps", fontsize=11)
    figure.savefig(output)


def _panel(axes: Any, mode: str, result: Result, top: float) -> None:
    times = [when for when, _ in result.trace]
    sizes = [size / 1e9 for _, size in result.trace]
    axes.fill_between(times, sizes, step="post", color=COLOUR, alpha=0.75, linewidth=0)
    peak = result.peaks[0] / 1e9
    axes.axhline(peak, color=COLOUR, linewidth=0.8, linestyle="--")
    axes.text(0.01 * times[-1], peak + 0.01 * top, f"{peak:.2f} GB", ha="left", va="bottom", fontsize=9, color=COLOUR)
    last = result.marks[-1]
    begin = max(0.0, result.marks[0] - (last - result.marks[0]))
    axes.axvspan(begin, last, color=STEP_COLOUR, zorder=0)
    for mark in result.marks[:-1]:
        axes.axvline(mark, color="white", linewidth=1.2, zorder=0.5)
    axes.text((begin + last) / 2, top * 0.985, "steps", ha="center", va="top", fontsize=8, color="#5a6b7a")
    axes.text((last + times[-1]) / 2, top * 0.985, "decode", ha="center", va="top", fontsize=8, color="#5a6b7a")
    axes.set_title(mode, fontsize=9.5, loc="left")
    axes.set_xlim(0, times[-1])
    axes.set_ylim(0, top)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", default="sdxl", choices=FAMILIES)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--hub", type=Path, default=HUB, help="the folder of configs, OWNER/NAME below it")
    parser.add_argument("--hardware", default="rtx-4090", help="of the simulated card")
    given = parser.parse_args()
    set_verbosity_error()
    family, modes = FAMILIES[given.family], {mode.name: mode for mode in MODES}
    draw(family, {name: measure(family, modes[name], given.hub, given.hardware) for name in SHOWN}, given.output)
    print(given.output)


if __name__ == "__main__":
    main()
