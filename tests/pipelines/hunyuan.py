"""Tiny components of HunyuanVideo, in this library or in the reference."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast
from transformers.utils import logging

from . import tiny

LENGTH = 24  # tokens of a prompt
TEMPLATE = {"template": "<s>describe:{}</s>", "crop_start": 10}
SCHEDULERS = (
    ("FlowMatchEulerDiscreteScheduler", {"shift": 7.0}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 1.0, "shift_terminal": 0.1}),
)
KINDS = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")


@cache
def tokenizer() -> Any:
    """A tokenizer that knows single characters and the marks of a chat, and pads at the end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    marks = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = [chr(code) for code in range(ord(" "), ord("~") + 1)]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*marks, *letters])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    folder = Path(mkdtemp(prefix="llama-tokenizer-"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=made, padding_side="right", **names).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def text_encoder(size: int = 16, seed: int = 3) -> Any:
    """A Llama of that width for the tokenizer."""
    logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=size,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaModel(config).eval()


def transformer(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """A transformer that takes text of width 16 and pooled text of width 32."""
    torch.manual_seed(seed)
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "patch_size": 2,
        "text_embed_dim": 16,
        "pooled_projection_dim": 32,
        "rope_axes_dim": (4, 6, 6),
    }
    return library.HunyuanVideoTransformer3DModel(**{**config, **changes}).eval()


def vae(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """An autoencoder with three levels: a latent is 4 pixels wide, and 4 frames long past the first."""
    torch.manual_seed(seed)
    config = {
        "block_out_channels": (8, 8, 16),
        "down_block_types": ("HunyuanVideoDownBlock3D",) * 3,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 3,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "spatial_compression_ratio": 4,
    }
    return library.AutoencoderKLHunyuanVideo(**{**config, **changes}).eval()


def parts(library: ModuleType, **changes: Any) -> dict[str, Any]:
    """All components; `changes` are of the transformer."""
    return {
        "text_encoder": text_encoder(),
        "tokenizer": tokenizer(),
        "transformer": transformer(library, **changes),
        "vae": vae(library),
        "scheduler": library.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": tiny.text_encoder(),
        "tokenizer_2": tiny.tokenizer(Path(mkdtemp(prefix="tokenizer-"))),
    }


def embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    options = {"max_sequence_length": LENGTH, "prompt_template": TEMPLATE}
    found = {"": made.encode_prompt(prompts, **options), "negative_": made.encode_prompt(negatives, **options)}
    return {f"{sign}{kind}": value for sign, each in found.items() for kind, value in zip(KINDS, each, strict=True)}
