"""What compilation costs and brings: a cut-down FLUX.1 as it is, compiled by block, and compiled whole.

Run ``OMP_NUM_THREADS=1 python -m benchmarks.compilation``. The transformer has 1 double and 4 single blocks, a quarter
of FLUX.1's width, and sees 256 image and 64 text tokens in bfloat16. Each way runs in a process of its own without
inductor's cache on disk. Seconds are those of the processor, the C++ compiler's included, so other work on the machine
counts little. "first step" includes compilation; a step is the median of 10 more.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from typing import Any

import torch
import torch._inductor.config

from diffusion_core import FluxTransformer2DModel

WAYS = ("as it is", "by block", "whole")
CONFIG: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 4,
    "num_attention_heads": 6,
    "joint_attention_dim": 768,
    "pooled_projection_dim": 128,
}


def inputs() -> dict[str, torch.Tensor]:
    """One picture of 256 tokens and 64 tokens of text."""
    grid = torch.cartesian_prod(torch.arange(16), torch.arange(16)).float()
    return {
        "hidden_states": torch.randn(1, 256, 64).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 64, 768).bfloat16(),
        "pooled_projections": torch.randn(1, 128).bfloat16(),
        "timestep": torch.tensor([0.5]).bfloat16(),
        "img_ids": torch.cat([torch.zeros(256, 1), grid], dim=1),
        "txt_ids": torch.zeros(64, 3),
    }


@torch.no_grad()
def measure(way: str) -> tuple[float, float]:
    """Seconds of the first step and of a later one."""
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # compilers are then children of this process
    model: Any = FluxTransformer2DModel(**CONFIG).bfloat16().eval()
    if way == "whole":
        model = torch.compile(model, fullgraph=True)
    elif way == "by block":
        model.compile_repeated_blocks(fullgraph=True)
    given, seconds = inputs(), list[float]()
    for _ in range(11):
        start = sum(os.times()[:4])
        model(**given)
        seconds.append(sum(os.times()[:4]) - start)
    return seconds[0], statistics.median(seconds[1:])


def main() -> None:
    """Print the table, in Markdown."""
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| | first step | a step |\n|---|---|---|")
    context = multiprocessing.get_context("spawn")
    for way in WAYS:
        with context.Pool(1) as pool:
            first, later = pool.apply(measure, (way,))
        print(f"| {way} | {first:.2f} s | {later * 1000:.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
