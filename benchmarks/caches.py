"""Caches: what each saves, and what the lossy ones cost in quality.

python -m benchmarks.caches exact             milliseconds a step with and without what is computed once, in turn
python -m benchmarks.caches tables [FOLDER]   FLUX.1-dev at full size, dry: with and without modulation tables
python -m benchmarks.caches steps [PROMPTS]   step caches on the embedded model: its score, distance and time

`tables` needs the configs of public checkpoints in the Hub layout, without weights.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffusion_core import (
    DiffusionPipeline,
    FirstBlockCacheConfig,
    FluxTransformer2DModel,
    MagCacheConfig,
    PixArtTransformer2DModel,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    UNet2DConditionModel,
    cached_run,
)
from diffusion_core.shapes import GUIDANCE_SCALE, STEPS, shapes_folder

ROUNDS, STEPS_A_RUN = 5, 4
# Cut-downs: fewer layers, small pictures, and of FLUX a third of the width; bfloat16 as they are used.
SD15 = {
    "sample_size": 32,
    "block_out_channels": (320, 640),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
FLUX = {
    "num_layers": 1,
    "num_single_layers": 2,
    "num_attention_heads": 8,
    "guidance_embeds": True,
}
PIXART = {"num_layers": 2, "cross_attention_dim": 1152, "caption_channels": 4096, "sample_size": 64}


def _sd15() -> tuple[Any, dict[str, Any]]:
    latents, text = torch.randn(2, 4, 16, 16), torch.randn(2, 77, 768)
    return UNet2DConditionModel(**SD15), {"sample": latents, "encoder_hidden_states": text}


def _flux() -> tuple[Any, dict[str, Any]]:
    ids = torch.zeros(256, 3)
    ids[:, 1], ids[:, 2] = torch.arange(256) // 16, torch.arange(256) % 16
    given = {
        "hidden_states": torch.randn(1, 256, 64),
        "encoder_hidden_states": torch.randn(1, 512, 4096),
        "pooled_projections": torch.randn(1, 768),
        "guidance": torch.tensor([3.5]),
    }
    return FluxTransformer2DModel(**FLUX), {**given, "img_ids": ids, "txt_ids": torch.zeros(512, 3)}


def _pixart() -> tuple[Any, dict[str, Any]]:
    latents, text = torch.randn(2, 4, 32, 32), torch.randn(2, 300, 4096)
    return PixArtTransformer2DModel(**PIXART), {"hidden_states": latents, "encoder_hidden_states": text}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "SD 1.5 cut-down, 2 x 16 x 16 latents, 77 words": _sd15,
    "PixArt cut-down, 2 x 32 x 32 latents, 300 words": _pixart,
    "FLUX cut-down, 256 tokens, 512 words": _flux,
}


@torch.no_grad()
def _run(model: Any, given: dict[str, Any], limit: int) -> tuple[float, int, torch.Tensor]:
    """Milliseconds of a step after the first one, bytes kept, and the last prediction."""
    took: list[float] = []
    result = torch.empty(0)
    with cached_run(limit=limit) as memory:
        for index in range(STEPS_A_RUN):
            time_now = torch.tensor([0.9 - 0.1 * index])
            begun = time.perf_counter()
            result = model(**given, timestep=time_now, return_dict=False)[0]
            took.append(1000 * (time.perf_counter() - begun))
        return statistics.median(took[1:]), memory.size, result


def exact() -> None:
    """Print the time of a step with and without, measured in turn, and whether the results are the same."""
    print("| model | GFLOP a step | ms a step | ratio (least to most) | kept, MB | same bits |")
    print("|---|---|---|---|---|---|")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, given = build()
        model = model.to(torch.bfloat16).to(memory_format=torch.channels_last).eval()
        given = {key: each if key.endswith("_ids") else each.to(torch.bfloat16) for key, each in given.items()}
        _run(model, given, 0)
        pairs = [(_run(model, given, 0), _run(model, given, 1 << 28)) for _ in range(ROUNDS)]
        without, kept = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
        ratios = sorted(pair[1][0] / pair[0][0] for pair in pairs)
        same = all(torch.equal(pair[0][2], pair[1][2]) for pair in pairs)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        work = " -> ".join(f"{_flops(model, given, limit) / 1e9:.1f}" for limit in (0, 1 << 28))
        size = pairs[0][1][1] / 1e6
        print(f"| {name} | {work} | {without:.0f} -> {kept:.0f} | {spread} | {size:.1f} | {same} |", flush=True)


@torch.no_grad()
def _flops(model: Any, given: dict[str, Any], limit: int) -> int:
    """Floating-point operations of the second step of a run."""
    operations = 0
    with cached_run(limit=limit):
        for step_time in (0.9, 0.8):
            with FlopCounterMode(display=False) as counter:
                model(**given, timestep=torch.tensor([step_time]))
            operations = counter.get_total_flops()
    return operations


def tables(folder: str | None = None) -> None:
    """Print what FLUX.1-dev needs and moves in a few modes, with modulation tables and without."""
    from .memory_modes import FAMILIES, HUB, MODES, Mode, Result, measure

    def run(mode: Mode, hoists: bool) -> Result:
        def enable(pipe: Any, family: Any) -> None:
            mode.enable(pipe, family)
            (pipe.transformer.hoist_modulation if hoists else pipe.transformer.unhoist_modulation)()

        return measure(FAMILIES["flux"], Mode(mode.name, enable, mode.prepare), Path(folder) if folder else HUB)

    print("| mode | peak, GB | moved a step, GB | a step, s |\n|---|---|---|---|")
    chosen = ("all on the device", "model offload", "group offload, blocks", "group offload, blocks, stream")
    for mode in [each for each in MODES if each.name in (*chosen, "group offload, leaves, stream")]:
        before, after = run(mode, False), run(mode, True)
        peaks = f"{before.peaks[0] / 1e9:.2f} -> {after.peaks[0] / 1e9:.2f}"
        moved = f"{before.moved_a_step / 1e9:.2f} -> {after.moved_a_step / 1e9:.2f}"
        print(f"| {mode.name} | {peaks} | {moved} | {before.step:.2f} -> {after.step:.2f} |", flush=True)


def step_caches(mag_ratios: list[float], steps: int) -> dict[str, Any]:
    """Settings of each cache that are worth a look on the embedded model."""
    mag = {"num_inference_steps": steps, "mag_ratios": mag_ratios}
    return {
        "none": None,
        "FirstBlockCacheConfig(0.2)": FirstBlockCacheConfig(0.2),
        "FirstBlockCacheConfig(0.4)": FirstBlockCacheConfig(0.4),
        "MagCacheConfig(0.2, ...)": MagCacheConfig(0.2, **mag),
        "TaylorSeerCacheConfig(2)": TaylorSeerCacheConfig(2),
        "TaylorSeerCacheConfig(2, use_lite_mode=True)": TaylorSeerCacheConfig(2, use_lite_mode=True),
        "PyramidAttentionBroadcastConfig(2, None, 3)": PyramidAttentionBroadcastConfig(2, None, 3),
    }


def steps(prompts: str = "16") -> None:
    """Print the embedded model's score, and how far its pictures are from those without a cache."""
    from .shapes.evaluate import evaluate, held_out_scenes

    scenes = held_out_scenes(int(prompts))
    pipe = DiffusionPipeline.from_pretrained(shapes_folder())
    config = MagCacheConfig(calibrate=True, num_inference_steps=STEPS)
    pipe.unet.enable_cache(config)
    evaluate(pipe, scenes[:8])
    pipe.unet.disable_cache()
    exact_pictures: list[np.ndarray] = []
    print(f"{len(scenes)} prompts, {STEPS} steps, guidance {GUIDANCE_SCALE}\n")
    print("| cache | score | distance | inner blocks computed | time |\n|---|---|---|---|---|")
    whole = 0.0
    for name, chosen in step_caches(list(config.mag_ratios), STEPS).items():
        computed = [0]
        handle = pipe.unet.mid_block.register_forward_hook(
            lambda *_, count=computed: count.__setitem__(0, count[0] + 1)
        )
        if chosen is not None:
            pipe.unet.enable_cache(chosen)
        begun = time.process_time()
        verdicts, images = evaluate(pipe, scenes)
        took = time.process_time() - begun
        pipe.unet.disable_cache()
        handle.remove()
        pictures = [np.asarray(image, dtype=np.float64) / 255 for image in images]
        exact_pictures, whole = exact_pictures or pictures, whole or took
        pairs = zip(pictures, exact_pictures, strict=True)
        distance = float(np.sqrt(np.mean([np.mean((a - b) ** 2) for a, b in pairs])))
        share = computed[0] / (STEPS * -(-len(scenes) // 50))
        print(
            f"| {name} | {verdicts['ok'] / len(scenes):.0%} | {distance:.3f} | {share:.0%} | {took / whole:.2f} |",
            flush=True,
        )


def _counting(calls: list[int]) -> Callable[..., None]:
    def count(*_: Any) -> None:
        calls[0] += 1

    return count


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"exact": exact, "tables": tables, "steps": steps}
    name, *more = sys.argv[1:] or ["exact"]
    if name not in commands:
        raise SystemExit(__doc__)
    commands[name](*more)
