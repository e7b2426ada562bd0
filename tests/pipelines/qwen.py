"""The parts of a tiny Qwen-Image, in this library or in the reference."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

SCHEDULER = {"use_dynamic_shifting": True, "shift_terminal": 0.02, "base_shift": 0.5, "max_shift": 0.9}


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer that knows single characters and the marks of a chat."""
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocabulary = {word: number for number, word in enumerate([*marks, *letters, "Ġ", "Ċ", "Ġa"])}
    folder = Path(mkdtemp(prefix="qwen-tokenizer-"))
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[("Ġ", "a")], additional_special_tokens=marks[1:])
    made.save_pretrained(folder)
    return Qwen2Tokenizer.from_pretrained(folder)


def text_encoder(seed: int = 7) -> Any:
    """A language model of width 16 for the tokenizer."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 128,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def transformer(library: ModuleType) -> Any:
    torch.manual_seed(4)
    return library.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def vae(library: ModuleType) -> Any:
    """An autoencoder in which a latent is 4 pixels wide."""
    torch.manual_seed(5)
    numbers = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.8, 1.0, 2.0]}
    levels = {"dim_mult": [1, 2, 2], "temperal_downsample": [False, True]}
    return library.AutoencoderKLQwenImage(base_dim=8, z_dim=4, num_res_blocks=1, **levels, **numbers).eval()


def parts(library: ModuleType) -> dict[str, Any]:
    return {
        "scheduler": library.FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        "vae": vae(library),
        "text_encoder": text_encoder(),
        "tokenizer": tokenizer(),
        "transformer": transformer(library),
    }


def embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    names = ("prompt_embeds", "prompt_embeds_mask")
    positive, negative = (dict(zip(names, made.encode_prompt(each), strict=True)) for each in (prompts, negatives))
    return {**positive, **{f"negative_{name}": value for name, value in negative.items()}}
