"""Loading and saving of a UNet of one gigabyte, whose class and names both libraries know."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ..meters import MB, Peak
from . import OURS

# A quarter of a billion parameters: Stable Diffusion 1.5's UNet, a little over half as wide.
CONFIG = {"block_out_channels": (192, 384, 704, 704), "cross_attention_dim": 768, "attention_head_dim": 8}


def save_unet(folder: Path) -> None:
    """Write it whole and in five shards."""
    if (folder / "whole").exists():
        return
    import diffusion_core as dc

    model = dc.UNet2DConditionModel(**CONFIG)
    model.save_pretrained(folder / "sharded", max_shard_size="250MB")
    model.save_pretrained(folder / "whole")


def _class(side: str) -> Any:
    if side == OURS:
        from diffusion_core import UNet2DConditionModel
    else:
        from diffusers import UNet2DConditionModel
    return UNet2DConditionModel


def _load(side: str, place: Path, dtype: str, forward: bool = False, cold: bool = False) -> dict[str, float]:
    import torch

    cls = _class(side)
    if cold:
        for file in place.glob("*.safetensors"):
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    with Peak() as peak:
        begun = time.perf_counter()
        model = cls.from_pretrained(place, dtype=getattr(torch, dtype))
        if forward:
            with torch.no_grad():
                model(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 77, 768))
        seconds = time.perf_counter() - begun
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()) / MB
    return {
        "seconds": seconds,
        "model_mb": size,
        "anonymous_mb": peak.grown("anonymous"),
        "mapped_mb": peak.grown("mapped"),
        "peak_of_model": peak.grown("anonymous") / size,
        "all_of_model": peak.grown("all") / size,
    }


def load_same(side: str, folder: Path) -> dict[str, float]:
    return _load(side, folder / "whole", "float32")


def load_sharded(side: str, folder: Path) -> dict[str, float]:
    return _load(side, folder / "sharded", "float32")


def load_cast(side: str, folder: Path) -> dict[str, float]:
    return _load(side, folder / "whole", "bfloat16")


def load_cold(side: str, folder: Path) -> dict[str, float]:
    return _load(side, folder / "whole", "float32", forward=True, cold=True)


def save(side: str, folder: Path) -> dict[str, float]:
    """Save the loaded model next to where it came from."""
    import tempfile

    model = _class(side).from_pretrained(folder / "whole")
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()) / MB
    with tempfile.TemporaryDirectory(dir=folder) as target, Peak() as peak:
        begun = time.perf_counter()
        model.save_pretrained(target)
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "peak_of_model": peak.grown("anonymous") / size}
