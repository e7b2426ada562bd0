"""The score of a text-to-image pipeline on prompts never trained on: `python -m benchmarks.shapes.evaluate`.

Draws one picture for each of 200 prompts that name a held-out pair of shape and colour, lets the judge read them, and
prints how many have every attribute right. `--grid FILE` also writes a grid of the first 30.
"""

import argparse
import random
from collections import Counter
from typing import Any

import torch
from PIL import Image

from diffusion_core.shapes import GUIDANCE_SCALE, STEPS

from .judge import verdict
from .scenes import SIZE, Scene, sample_scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="folder or repository; the embedded model by default")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--guidance-scale", type=float, default=GUIDANCE_SCALE)
    parser.add_argument("--scheduler", default=None, help="class name of another scheduler")
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--trained-on", action="store_true", help="use combinations that training has seen")
    parser.add_argument("--grid", default=None, help="write the first 30 pictures to this file")
    arguments = parser.parse_args()

    import diffusion_core
    from diffusion_core.shapes import shapes_folder

    pipeline = diffusion_core.Pipeline.from_pretrained(arguments.model or shapes_folder())
    if arguments.scheduler:
        pipeline.scheduler = getattr(diffusion_core, arguments.scheduler).from_config(pipeline.scheduler.config)
    rng = random.Random(arguments.seed)
    scenes = [sample_scene(rng, held_out=not arguments.trained_on) for _ in range(arguments.prompts)]
    verdicts, images = evaluate(pipeline, scenes, arguments.steps, arguments.guidance_scale)
    if arguments.grid:
        grid_of(images[:30], columns=6).save(arguments.grid)
    print(f"verdicts: {dict(verdicts.most_common())}")
    print(f"every attribute right: {verdicts['ok']} of {len(scenes)} ({verdicts['ok'] / len(scenes):.1%})")


def held_out_scenes(count: int, seed: int = 99) -> list[Scene]:
    rng = random.Random(seed)
    return [sample_scene(rng, held_out=True) for _ in range(count)]


def evaluate(
    pipeline: Any, scenes: list[Scene], steps: int = STEPS, guidance_scale: float = GUIDANCE_SCALE, batch: int = 50
) -> tuple[Counter[str], list[Image.Image]]:
    """Draw every scene's prompt, the k-th with seed k, and count the judge's verdicts."""
    images: list[Image.Image] = []
    pipeline.set_progress_bar_config(disable=True)
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        generators = [torch.Generator().manual_seed(start + index) for index in range(len(part))]
        images += pipeline(
            [scene.prompt for scene in part],
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            generator=generators,
        ).images
    return Counter(verdict(image, scene) for image, scene in zip(images, scenes, strict=True)), images


def grid_of(images: list[Image.Image], columns: int, scale: int = 2, gap: int = 4) -> Image.Image:
    """Pictures side by side, enlarged without smoothing, with a thin white gap."""
    cell = SIZE * scale
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * (cell + gap) - gap, rows * (cell + gap) - gap), "white")
    for index, image in enumerate(images):
        place = ((index % columns) * (cell + gap), (index // columns) * (cell + gap))
        grid.paste(image.resize((cell, cell), Image.Resampling.NEAREST), place)
    return grid


if __name__ == "__main__":
    main()
