"""The parts of a tiny Stable Diffusion 3, in this library or in the reference."""

from types import ModuleType
from typing import Any

import torch

from . import t5, tiny


def transformer(library: ModuleType, **changes: Any) -> Any:
    """A transformer with what 3.5 medium has: norms of queries and keys, and a block with a second attention."""
    torch.manual_seed(3)
    config = {
        "sample_size": 8,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 56,
        "pos_embed_max_size": 12,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    }
    return library.SD3Transformer2DModel(**{**config, **changes}).eval()


def parts(library: ModuleType) -> dict[str, Any]:
    from .families import projecting_encoder, tokenizer

    # The reference inpaints with 16 channels of latents only, and forgets the shift then.
    vae = {"latent_channels": 16, "shift_factor": 0.0, "scaling_factor": 1.5, "use_quant_conv": False}
    return {
        "transformer": transformer(library),
        "scheduler": library.FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": tiny.vae(library, use_post_quant_conv=False, **vae),
        "text_encoder": projecting_encoder(),
        "tokenizer": tokenizer(),
        "text_encoder_2": projecting_encoder(24, seed=2),
        "tokenizer_2": tokenizer(),
        "text_encoder_3": t5.encoder(64),
        "tokenizer_3": t5.tokenizer(),
    }


def embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    embeds = made.encode_prompt(prompts, None, None, negative_prompt=negatives, max_sequence_length=20)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return dict(zip(names, embeds, strict=True))
