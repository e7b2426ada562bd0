"""What it takes to begin: an import, and the first picture of a fresh process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..meters import MB, memory
from . import OURS


def _total() -> int:
    return memory()["all"]


def import_pipeline(side: str, folder: Path) -> dict[str, float]:
    """Processor time and memory of the import, without those of torch."""
    import torch  # noqa: F401

    busy, before = time.process_time(), _total()
    _pipeline_class(side)
    return {"cpu_seconds": time.process_time() - busy, "memory_mb": (_total() - before) / MB}


def first_picture(side: str, folder: Path) -> dict[str, float]:
    """From the start of Python (torch included) to a picture of two steps."""
    begun, before = time.perf_counter(), _total()
    pipe = _pipeline_class(side).from_pretrained(folder / "tiny", safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    pipe("a red cat", num_inference_steps=2, height=64, width=64)
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time(),
        "memory_mb": (_total() - before) / MB,
    }


def _pipeline_class(side: str) -> Any:
    if side == OURS:
        from diffusion_core import StableDiffusionPipeline
    else:
        from diffusers import StableDiffusionPipeline
    return StableDiffusionPipeline


def save_tiny(folder: Path) -> None:
    """A Stable Diffusion checkpoint with real structure and few channels."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    import diffusion_core as dc

    torch.manual_seed(0)
    text = CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=1000
    )
    pipe = dc.StableDiffusionPipeline(
        unet=dc.UNet2DConditionModel(
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            sample_size=32,
        ),
        vae=dc.AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        text_encoder=CLIPTextModel(text),
        tokenizer=_tokenizer(folder),
        scheduler=dc.DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder / "tiny")


def _tokenizer(folder: Path) -> Any:
    """One that knows letters."""
    import json
    import string

    from transformers import CLIPTokenizer

    letters = string.ascii_lowercase
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    place = folder / "tokenizer"
    place.mkdir()
    (place / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}), encoding="utf-8")
    (place / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return CLIPTokenizer(str(place / "vocab.json"), str(place / "merges.txt"), model_max_length=77)
