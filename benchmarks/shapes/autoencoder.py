"""Train the autoencoder of the embedded model: `python -m benchmarks.shapes.autoencoder --work DIR`.

64x64 pictures become latents of 8x8 with 8 channels. The loss is L1 plus half the squared error, plus a small
Kullback-Leibler term (Kingma and Welling 2013, equation 10) that keeps the latents near unit scale and the decoder
tolerant of the noise that a denoiser leaves. Stopped at any time, it goes on from `DIR/autoencoder.pt`.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from diffusion_core.models import AutoencoderKL

from .judge import verdict
from .scenes import Scene, doodle, pixels, sample_scene
from .training import Clock, load_state, save_state

CONFIG = {
    "block_out_channels": (32, 48, 64, 96),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 8,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 64,
    "mid_block_add_attention": False,
}
KL_WEIGHT = 3e-5  # per latent element; ten times as much slowed the learning of colours
PEAK_RATE, WARMUP, BATCH = 1e-3, 100, 8
SCENES, DOODLES = 30_000, 12_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints of this training")
    parser.add_argument("--steps", type=int, default=12000)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    train(arguments.work, arguments.steps)


def train(work: Path, steps: int) -> None:
    torch.manual_seed(0)
    clock = Clock()
    model = AutoencoderKL(**CONFIG).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, betas=(0.9, 0.99))
    step = load_state(work / "autoencoder.pt", model=model, optimizer=optimizer)
    rng = random.Random(0)
    scenes = pixels([sample_scene(rng) for _ in range(SCENES)])
    doodles = np.stack([doodle(rng) for _ in range(DOODLES)])
    pictures = torch.from_numpy(np.concatenate([scenes, doodles])).permute(0, 3, 1, 2)
    clock.say(f"{len(pictures)} pictures, {sum(p.numel() for p in model.parameters()):,} parameters, step {step}")
    total = 0.0
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, step / WARMUP) * (1 - 0.98 * step / steps)
        batch = to_input(pictures[torch.randint(len(pictures), (BATCH,))])
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        total += loss.item()
        if step % 250 == 0:
            clock.say(f"autoencoder step {step}, mean loss {total / 250:.4f}")
            total = 0.0
        if step % 1000 == 0 or step == steps:
            save_state(work / "autoencoder.pt", step, model=model, optimizer=optimizer)
            clock.say(f"reconstructions that the judge reads right: {evaluate(model):.1%}")


def loss_of(model: AutoencoderKL, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        posterior = model.encode(batch).latent_dist
        restored = model.decode(posterior.sample()).sample.float()
    error = (restored - batch).abs().mean() + 0.5 * F.mse_loss(restored, batch)
    latent_elements = batch[0].numel() // 3 // 64 * CONFIG["latent_channels"]
    return error + KL_WEIGHT * posterior.kl().mean() / latent_elements


@torch.no_grad()
def evaluate(model: AutoencoderKL, count: int = 200, seed: int = 99) -> float:
    """The share of held-out pictures that the judge reads right after encoding and decoding."""
    rng = random.Random(seed)
    scenes = [sample_scene(rng, held_out=True) for _ in range(count)]
    right = 0
    for start in range(0, count, 50):
        part: list[Scene] = scenes[start : start + 50]
        batch = to_input(torch.from_numpy(pixels(part)).permute(0, 3, 1, 2))
        restored = model.decode(model.encode(batch).latent_dist.mode()).sample
        right += sum(verdict(image, scene) == "ok" for image, scene in zip(to_images(restored), part, strict=True))
    return right / count


def to_input(pictures: torch.Tensor) -> torch.Tensor:
    """Bytes (N, 3, H, W) to floats in [-1, 1]."""
    return (pictures.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def to_images(batch: torch.Tensor) -> list[Image.Image]:
    bytes_ = ((batch.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(picture) for picture in bytes_.permute(0, 2, 3, 1).numpy()]


if __name__ == "__main__":
    main()
