"""Tiny pipelines with random weights, in this library or in the reference, that need nothing from outside."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

SIDE = 32  # pixels; latents have 8


def tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer that knows single characters and a few merges, made from files written to `folder`."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    merges = ["r e", "re d</w>", "c a", "ca t</w>"]
    joined = [merge.replace(" ", "") for merge in merges]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *joined, "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    return CLIPTokenizer.from_pretrained(str(folder), model_max_length=77)


def text_encoder(seed: int = 0) -> CLIPTextModel:
    """A CLIP text encoder for that tokenizer, width 32."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=194,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        bos_token_id=192,
        eos_token_id=193,
    )
    return CLIPTextModel(config).eval()


def unet(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """A UNet with two levels that takes text of width 32."""
    torch.manual_seed(seed)
    config = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "sample_size": SIDE // 4,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
    }
    return library.UNet2DConditionModel(**{**config, **changes}).eval()


def vae(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """An autoencoder with three levels: a latent pixel is 4 pixels wide."""
    torch.manual_seed(seed)
    config = {
        "block_out_channels": (32, 32, 64),
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "latent_channels": 4,
        "sample_size": SIDE,
    }
    return library.AutoencoderKL(**{**config, **changes}).eval()


def scheduler(library: ModuleType, **changes: Any) -> Any:
    """DDIM with the settings of Stable Diffusion 1.x."""
    config = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "steps_offset": 1,
    }
    return library.DDIMScheduler(**{**config, **changes})


def noise(count: int, seed: int = 3) -> torch.Tensor:
    """Latents for `count` pictures."""
    return torch.randn(count, 4, SIDE // 4, SIDE // 4, generator=torch.Generator().manual_seed(seed))


def components(library: ModuleType, folder: Path, seed: int = 0) -> dict[str, Any]:
    """The components of a tiny Stable Diffusion pipeline, without safety checker and image encoder."""
    return {
        "vae": vae(library, seed),
        "text_encoder": text_encoder(seed),
        "tokenizer": tokenizer(folder / "tokenizer-files"),
        "unet": unet(library, seed),
        "scheduler": scheduler(library),
        "safety_checker": None,
        "feature_extractor": None,
        "image_encoder": None,
    }
