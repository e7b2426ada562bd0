"""Tiny components of PixArt and AuraFlow, in this library or in the reference."""

from types import ModuleType
from typing import Any

import torch

from . import t5, tiny

BETAS = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
# What keeps pictures of 32 x 32 pixels and prompts of a few tokens.
PIXART_ARGUMENTS = {"use_resolution_binning": False, "max_sequence_length": 16}
AURAFLOW_ARGUMENTS = {"height": 32, "width": 32, "max_sequence_length": 16}
EMBEDS = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")


def pixart(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """A transformer of PixArt that learned a variance and takes text of width 32."""
    torch.manual_seed(seed)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 2,
        "cross_attention_dim": 24,
        "caption_channels": 32,
        "sample_size": 8,
    }
    return library.PixArtTransformer2DModel(**{**config, **changes}).eval()


def auraflow(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """A transformer of AuraFlow that takes text of width 32."""
    torch.manual_seed(seed)
    config = {
        "sample_size": 8,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 16,
        "pos_embed_max_size": 256,
    }
    return library.AuraFlowTransformer2DModel(**{**config, **changes}).eval()


def pixart_parts(library: ModuleType, **changes: Any) -> dict[str, Any]:
    """The components of Sigma; changes are of the transformer."""
    return {
        "tokenizer": t5.tokenizer(),
        "text_encoder": t5.encoder(),
        "vae": tiny.vae(library),
        "transformer": pixart(library, **changes),
        "scheduler": library.DPMSolverMultistepScheduler(**BETAS),
    }


def pixart_alpha_parts(library: ModuleType) -> dict[str, Any]:
    """The components of alpha for 1024 pixels, whose transformer takes sizes."""
    return pixart_parts(library, sample_size=128)


def auraflow_parts(library: ModuleType) -> dict[str, Any]:
    return {
        **pixart_parts(library),
        "transformer": auraflow(library),
        "scheduler": library.FlowMatchEulerDiscreteScheduler(shift=1.73),
    }


def pixart_embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    """As `__call__` encodes them."""
    embeds = made.encode_prompt(prompts, True, negatives, clean_caption=True, max_sequence_length=16)
    return dict(zip(EMBEDS, embeds, strict=True))


def auraflow_embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    return dict(zip(EMBEDS, made.encode_prompt(prompts, negatives, max_sequence_length=16), strict=True))
