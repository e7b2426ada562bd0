"""Sharpen the decoder of the embedded model: `python -m benchmarks.shapes.decoder --work DIR`.

The encoder stays as it is, so the denoiser can be trained meanwhile. The loss weighs edges more than plain areas, and
the latents get a little noise, as they have after denoising. Stopped at any time, it goes on from `DIR/decoder.pt`.
"""

import argparse
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from diffusion_core.models import AutoencoderKL

from .autoencoder import evaluate, to_input
from .denoiser import load_autoencoder
from .scenes import doodle, pixels, sample_scene
from .training import Clock, load_state, save_state

PEAK_RATE, WARMUP, BATCH = 8e-4, 100, 8
SCENES, DOODLES = 20_000, 2_000
NOISE = 0.06  # of the latents' deviation
EDGE_WEIGHT = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints of this training")
    parser.add_argument("--steps", type=int, default=8000)
    arguments = parser.parse_args()
    train(arguments.work, arguments.steps)


def train(work: Path, steps: int) -> None:
    torch.manual_seed(0)
    clock = Clock()
    model = load_autoencoder(work)
    learned = torch.nn.ModuleList([model.post_quant_conv, model.decoder]).requires_grad_(True)
    optimizer = torch.optim.AdamW(learned.parameters(), PEAK_RATE, betas=(0.9, 0.99))
    step = load_state(work / "decoder.pt", model=learned, optimizer=optimizer)
    rng = random.Random(2)
    scenes = pixels([sample_scene(rng) for _ in range(SCENES)])
    doodles = np.stack([doodle(rng) for _ in range(DOODLES)])
    pictures = torch.from_numpy(np.concatenate([scenes, doodles])).permute(0, 3, 1, 2)
    clock.say(f"decoder, {len(pictures)} pictures, step {step}")
    total = 0.0
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / WARMUP) * (1 - 0.98 * step / steps)
        loss = loss_of(model, to_input(pictures[torch.randint(len(pictures), (BATCH,))]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimizer.step()
        step += 1
        total += loss.item()
        if step % 250 == 0:
            clock.say(f"decoder step {step}, mean loss {total / 250:.4f}")
            total = 0.0
        if step % 1000 == 0 or step == steps:
            save_state(work / "decoder.pt", step, model=learned, optimizer=optimizer)
            clock.say(f"reconstructions that the judge reads right: {evaluate(model):.1%}")


def loss_of(model: AutoencoderKL, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            latents = model.encode(batch).latent_dist.mode().float()
            latents += NOISE * latents.std() * torch.randn_like(latents)
        restored = model.decode(latents).sample.float()
    error = (restored - batch).abs() + 0.5 * (restored - batch) ** 2
    weight = 1 + EDGE_WEIGHT * edges(batch)
    return (error * weight).sum() / (weight.sum() * error.shape[1])


def edges(batch: torch.Tensor) -> torch.Tensor:
    """1 within two pixels of a change of colour, else 0; shape (N, 1, H, W)."""
    high, low = F.max_pool2d(batch, 5, 1, 2), -F.max_pool2d(-batch, 5, 1, 2)
    return ((high - low).amax(1, keepdim=True) > 0.1).float()


if __name__ == "__main__":
    main()
