"""This machine's own peak: its rate in large products and convolutions. `python -m benchmarks.machine`"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def peak_rate(kind: str, dtype: Any, repeats: int = 3) -> float:
    """Floating point operations a second, the best of some runs.

    Args:
        kind: "product" of 2048 x 3072 and 3072 x 3072, or "convolution", 3 x 3, 512 channels, 64 x 64, channels last.
        dtype: of both operands.
    """
    import torch

    if kind == "product":
        left, right = torch.randn(2048, 3072).to(dtype), torch.randn(3072, 3072).to(dtype)
        return _best(lambda: torch.nn.functional.linear(left, right), 2 * 2048 * 3072 * 3072, repeats)
    layer = torch.nn.Conv2d(512, 512, 3, padding=1).to(dtype).to(memory_format=torch.channels_last)
    picture = torch.randn(1, 512, 64, 64).to(dtype).to(memory_format=torch.channels_last)
    return _best(lambda: layer(picture), 2 * 512 * 512 * 9 * 64 * 64, repeats)


def _best(call: Callable[[], Any], work: int, repeats: int) -> float:
    call()
    times: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return work / min(times)


def describe() -> dict[str, Any]:
    """The processor, its cores and vector instructions, and torch."""
    import os

    import torch

    model, flags = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = dict(line.split(":", 1) for line in cpuinfo.read_text(encoding="utf-8").splitlines() if ":" in line)
        lines = {key.strip(): value.strip() for key, value in lines.items()}
        model, flags = lines.get("model name", model), lines.get("flags", "")
    wide = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags.split()]
    return {"processor": model, "cores": os.cpu_count(), "instructions": wide, "torch": torch.__version__}


def main() -> None:
    import torch

    for name, value in describe().items():
        print(f"{name}: {value}")
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            for kind in ("product", "convolution"):
                print(f"{kind}, {dtype}: {peak_rate(kind, dtype) / 1e9:.0f} GFLOPS")


if __name__ == "__main__":
    main()
