"""What loading a 1 GB model costs in memory of its own: `python -m benchmarks.load_memory`.

Each case runs in a process of its own. A thread there samples the anonymous memory of the process (RssAnon of
/proc/self/status: what can only live in RAM; mapped files do not count) while the model loads.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from torch import nn

from diffusion_core.models.base import Model
from diffusion_core.progress import disable_progress_bar

MB = 1e6
WIDTH = 2048
ALLOWANCE = 100 * MB


class Ladder(Model):
    """Linear layers of 16.8 MB in float32, and one of ten times that size: 1 GB with 50 layers."""

    def __init__(self, layers: int = 50) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 10 * WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))


def anonymous_bytes() -> int:
    """The anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell the anonymous memory of a process")


class Peak:
    """Samples anonymous memory every millisecond while it is open."""

    def __enter__(self) -> "Peak":
        self.before = self.highest = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = anonymous_bytes()
        self.highest = max(self.highest, self.after)


def measure(folder: str, dtype: str | None, disable_mmap: bool) -> dict[str, float]:
    """Load once in this process, and report in bytes."""
    disable_progress_bar()
    with Peak() as peak:
        start = time.perf_counter()
        model = Ladder.from_pretrained(folder, dtype=dtype, disable_mmap=disable_mmap)
        seconds = time.perf_counter() - start
    return {
        "grown": peak.after - peak.before,
        "peak": peak.highest - peak.before,
        "model": model.get_memory_footprint(),
        "seconds": seconds,
    }


def run_cases(folder: str, layers: int = 50) -> dict[str, dict[str, float]]:
    """Save a model of 1 GB to `folder`, plain and sharded, and measure every case in a process of its own."""
    model = Ladder(layers)
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(f"{folder}/plain")
    model.save_pretrained(f"{folder}/sharded", max_shard_size="300MB")
    del model
    cases = {
        "same dtype": ("plain", "float32", False),
        "same dtype, sharded": ("sharded", "float32", False),
        "float32 to bfloat16": ("plain", "bfloat16", False),
        "float32 to bfloat16, sharded": ("sharded", "bfloat16", False),
        "float32 to bfloat16, read": ("plain", "bfloat16", True),
    }
    results: dict[str, dict[str, float]] = {}
    for name, (kind, dtype, disable_mmap) in cases.items():
        command = [sys.executable, "-m", "benchmarks.load_memory", "--one", f"{folder}/{kind}", "--dtype", dtype]
        output = subprocess.run([*command, *(["--read"] if disable_mmap else [])], check=True, capture_output=True)
        results[name] = json.loads(output.stdout.splitlines()[-1])
        results[name]["limit"] = 50 * MB if dtype == "float32" else results[name]["model"] + largest + ALLOWANCE
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="measure one load of this folder and print it as JSON")
    parser.add_argument("--dtype")
    parser.add_argument("--read", action="store_true", help="read the file rather than map it")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.dtype, arguments.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(folder)
    print(f"{'case':<32}{'model MB':>10}{'peak MB':>10}{'limit MB':>10}{'seconds':>10}")
    for name, result in results.items():
        figures = [result["model"] / MB, result["peak"] / MB, result["limit"] / MB]
        print(f"{name:<32}" + "".join(f"{figure:>10.1f}" for figure in figures) + f"{result['seconds']:>10.2f}")


if __name__ == "__main__":
    main()
