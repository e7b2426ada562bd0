"""Train the denoiser and text encoder of the embedded model: `python -m benchmarks.shapes.denoiser --work DIR`.

Needs the autoencoder of `DIR/autoencoder.pt`. Latents of the training scenes are encoded once; the denoiser then learns
the velocity (Salimans and Ho 2022, appendix D) under captions that are dropped one time in ten, for classifier-free
guidance (Ho and Salimans 2022). The text encoder first learns by itself to answer which thing lies where (`layout.py`),
and is asked the same beside the denoiser's loss. Stopped at any time, it goes on from `DIR/denoiser.pt`.
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion_core.models import AutoencoderKL
from diffusion_core.pipelines import StableDiffusionPipeline

from .autoencoder import CONFIG, to_input
from .evaluate import evaluate, held_out_scenes
from .layout import ASKED, UNKNOWN, LayoutHeads, answers_of, batch_of
from .parts import TOKENS, UNET, load_tokenizer, make_scheduler, make_text_encoder, make_unet
from .scenes import caption, pixels, sample_scene
from .training import Average, Clock, load_state, save_state

PEAK_RATE, WARMUP, BATCH, SCENES, DROPPED = 8e-4, 200, 64, 60_000, 0.1
TEXT_STEPS, TEXT_RATE, TEXT_BATCH, LAYOUT_WEIGHT = 800, 1e-3, 128, 0.02
LAYOUT_ONLY = 0.5  # of the pictures are drawn from the six tokens alone, until LAYOUT_UNTIL of the steps are done
LAYOUT_UNTIL = 0.85
NOISY = 0.5  # of the timesteps are taken where the layout is decided: from FIRST_NOISY on
FIRST_NOISY = 550


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints of this training")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--score-minutes", type=float, default=15, help="time between two scores of 60 prompts")
    arguments = parser.parse_args()
    train(arguments.work, arguments.steps, arguments.score_minutes)


def load_autoencoder(work: Path) -> AutoencoderKL:
    model = AutoencoderKL(**CONFIG).to(memory_format=torch.channels_last)
    load_state(work / "autoencoder.pt", model=model)
    load_state(work / "decoder.pt", model=torch.nn.ModuleList([model.post_quant_conv, model.decoder]))
    return model.eval().requires_grad_(False)


def train(work: Path, steps: int, score_minutes: float) -> None:
    torch.manual_seed(0)
    clock = Clock()
    tokenizer = load_tokenizer(work / "tokenizer")
    vae, scheduler = load_autoencoder(work), make_scheduler()
    latents, ids, answers, scale = training_set(work, vae, tokenizer)
    vae.register_to_config(scaling_factor=scale)
    torch.save(scale, work / "scale.pt")
    unet = make_unet().to(memory_format=torch.channels_last)
    parts = torch.nn.ModuleDict({"unet": unet, "text_encoder": make_text_encoder(tokenizer)})
    optimizer = torch.optim.AdamW(parts.parameters(), PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    average = Average(parts)
    step = load_state(work / "denoiser.pt", model=parts, optimizer=optimizer, average=average)
    torch.manual_seed(step)
    heads = LayoutHeads(UNET["cross_attention_dim"])
    heads_optimizer = torch.optim.AdamW(heads.parameters(), TEXT_RATE, betas=(0.9, 0.99))
    if not load_state(work / "heads.pt", heads=heads, optimizer=heads_optimizer):
        learn_layout(parts["text_encoder"], heads, tokenizer, clock)
    begun = step
    nothing = torch.tensor(tokenizer("", padding="max_length", max_length=TOKENS)["input_ids"])
    clock.say(f"{len(latents)} scenes, {sum(p.numel() for p in parts.parameters()):,} parameters, step {step}")
    score_at = time.monotonic() + 60 * score_minutes
    total = 0.0
    while step < steps:
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step - begun) / WARMUP) * (1 - 0.98 * step / steps)
        chosen = torch.randint(len(latents), (BATCH,))
        caption = torch.randint(ids.shape[1], (BATCH,))
        tokens, asked = ids[chosen, caption].long(), answers[chosen, caption].long()
        dropped = torch.rand(BATCH) < DROPPED
        tokens[dropped], asked[dropped] = nothing, UNKNOWN
        layout_only = LAYOUT_ONLY if step < LAYOUT_UNTIL * steps else 0.0
        loss, states = loss_of(parts, scheduler, latents[chosen] * scale, tokens, layout_only)
        reading, _ = heads(states, asked)
        optimizer.zero_grad()
        heads_optimizer.zero_grad()
        (loss + LAYOUT_WEIGHT * reading).backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        heads_optimizer.step()
        average.update(parts, step)
        step += 1
        total += loss.item()
        if step % 200 == 0:
            clock.say(f"denoiser step {step}, mean loss {total / 200:.4f}")
            total = 0.0
        if step % 500 == 0 or step == steps:
            save_state(work / "denoiser.pt", step, model=parts, optimizer=optimizer, average=average)
            save_state(work / "heads.pt", step, heads=heads, optimizer=heads_optimizer)
        if time.monotonic() > score_at:
            with average.in_place(parts):
                pipeline = StableDiffusionPipeline(
                    vae, parts["text_encoder"], tokenizer, unet, scheduler, None, None, requires_safety_checker=False
                )
                clock.say(f"step {step}, verdicts {evaluate(pipeline, held_out_scenes(60))[0]}")
            score_at = time.monotonic() + 60 * score_minutes


def loss_of(
    parts: torch.nn.ModuleDict, scheduler: object, latents: torch.Tensor, tokens: torch.Tensor, layout_only: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The denoiser's loss on one batch, and the text encoder's hidden states (N, tokens, C)."""
    noise = torch.randn_like(latents)
    timesteps = torch.randint(0, 1000, (len(latents),))
    noisy = torch.rand(len(latents)) < NOISY
    timesteps[noisy] = torch.randint(FIRST_NOISY, 1000, (int(noisy.sum()),))
    shown = torch.ones_like(tokens, dtype=torch.bool)
    shown[torch.rand(len(latents)) < layout_only, : TOKENS - ASKED] = False
    sample = scheduler.add_noise(latents, noise, timesteps)
    # The flash kernel's backward took 45% of a step on the CPU; the plain one does not.
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
        states = parts["text_encoder"](tokens)[0]
        velocity = parts["unet"](sample, timesteps, states, encoder_attention_mask=shown).sample
    return F.mse_loss(velocity.float(), scheduler.get_velocity(latents, noise, timesteps)), states


def learn_layout(text_encoder: torch.nn.Module, heads: LayoutHeads, tokenizer: object, clock: Clock) -> None:
    """Teach the text encoder and the heads to read the layout from new captions, before any picture is seen."""
    learned = torch.nn.ModuleList([text_encoder, heads])
    optimizer = torch.optim.AdamW(learned.parameters(), TEXT_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    rng = random.Random(3)
    for step in range(1, TEXT_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = TEXT_RATE * min(1.0, step / WARMUP) * (1 - 0.9 * step / TEXT_STEPS)
        ids, answers = batch_of(tokenizer, rng, TEXT_BATCH)
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
            states = text_encoder(ids)[0]
        loss, right = heads(states, answers)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0:
            clock.say(f"text encoder step {step}, loss {loss.item():.4f}, captions read whole {right.item():.1%}")


@torch.no_grad()
def training_set(
    work: Path, vae: AutoencoderKL, tokenizer: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Latents (N, 8, 8, 8), two captions each as ids (N, 2, 32), what their layout is (N, 2, 16), and the scale that
    makes latents of unit deviation.
    """
    rng = random.Random(1)
    scenes = [sample_scene(rng) for _ in range(SCENES)]
    texts = [(scene.prompt, caption(scene, rng)) for scene in scenes]
    file = work / "latents.pt"
    if not file.exists():
        latents = []
        for start in range(0, SCENES, 100):
            batch = torch.from_numpy(pixels(scenes[start : start + 100])).permute(0, 3, 1, 2)
            latents.append(vae.encode(to_input(batch)).latent_dist.mode())
        save = torch.cat(latents).contiguous(memory_format=torch.channels_last)
        torch.save({"latents": save}, file)
    latents = torch.load(file, weights_only=True)["latents"]
    flat = [text for pair in texts for text in pair]
    ids = torch.tensor(tokenizer(flat, padding="max_length", max_length=TOKENS)["input_ids"], dtype=torch.int16)
    answers = [[answers_of(scene, text) for text in pair] for scene, pair in zip(scenes, texts, strict=True)]
    scale = round(1 / latents.std().item(), 5)
    return latents, ids.view(SCENES, 2, TOKENS), torch.tensor(answers, dtype=torch.int16), scale


if __name__ == "__main__":
    main()
