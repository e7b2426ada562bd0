"""Memory modes on the simulated card: the reference's code on the same device beside ours, in dry runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..meters import MB
from .forwards import UNET

DEVICE = "sim:0"


def _run(side: str, enable: Callable[[Any], None]) -> dict[str, float]:
    """Two calls of SD 1.5's UNet at batch 2 in float16: the first shows the order of layers, the second counts."""
    import torch

    from diffusion_core.offload.simulator import simulator

    library = importlib.import_module(side)
    with torch.device("meta"):
        model = library.UNet2DConditionModel.from_config(UNET).to(torch.float16)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    for tensor in model.parameters():
        tensor.zero_()  # casting looks into weights: what the memory held before may be no number
    with simulator(1, dry=True, hardware="rtx-4090") as sim, torch.inference_mode():
        device = torch.device(DEVICE)
        enable(model)
        sample = torch.zeros(2, 4, 64, 64, dtype=torch.float16, device=device)
        words = torch.zeros(2, 77, 768, dtype=torch.float16, device=device)
        for _ in range(2):
            sim.synchronize(device)
            sim.reset()
            begun = sim.elapsed
            model(sample, torch.tensor(500, device=device), words, return_dict=False)
            sim.synchronize(device)
        books = sim.statistics(device)
        return {
            "peak_mb": books.peak / MB,
            "modelled_seconds": sim.elapsed - begun,
            "moved_mb": (books.h2d + books.d2h) / MB,
        }


def resident(side: str, folder: Path) -> dict[str, float]:
    return _run(side, lambda model: model.to(DEVICE))


def _offload(model: Any, **options: Any) -> None:
    import torch

    model.enable_group_offload(torch.device(DEVICE), offload_device=torch.device("cpu"), **options)


def blocks(side: str, folder: Path) -> dict[str, float]:
    return _run(side, lambda model: _offload(model, offload_type="block_level", num_blocks_per_group=1))


def leaves(side: str, folder: Path) -> dict[str, float]:
    return _run(side, lambda model: _offload(model, offload_type="leaf_level"))


def leaves_stream(side: str, folder: Path) -> dict[str, float]:
    return _run(side, lambda model: _offload(model, offload_type="leaf_level", use_stream=True))


def casting(side: str, folder: Path) -> dict[str, float]:
    import torch

    def enable(model: Any) -> None:
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float16)
        model.to(DEVICE)

    return _run(side, enable)
