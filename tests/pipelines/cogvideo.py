"""Tiny components of CogVideoX, in this library or in the reference."""

from types import ModuleType
from typing import Any

import torch

from . import t5

LENGTH = 16  # tokens of a prompt
DDIM = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SCHEDULERS = (("CogVideoXDDIMScheduler", DDIM), ("CogVideoXDPMScheduler", DDIM))
EMBEDS = ("prompt_embeds", "negative_prompt_embeds")


def transformer(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """A transformer of CogVideoX-2b for films of 9 frames of 32 x 32 pixels that takes text of width 32."""
    torch.manual_seed(seed)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 4,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 9,
        "patch_size": 2,
        "max_text_seq_length": LENGTH,
    }
    return library.CogVideoXTransformer3DModel(**{**config, **changes}).eval()


def vae(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """An autoencoder with three levels: a latent is 4 pixels wide, and 4 frames long past the first."""
    torch.manual_seed(seed)
    config = {
        "block_out_channels": (8, 8, 16),
        "down_block_types": ("CogVideoXDownBlock3D",) * 3,
        "up_block_types": ("CogVideoXUpBlock3D",) * 3,
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "sample_height": 32,
        "sample_width": 32,
        "temporal_compression_ratio": 4,
    }
    return library.AutoencoderKLCogVideoX(**{**config, **changes}).eval()


def parts(library: ModuleType, vae_changes: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The components of 2B; `changes` are of the transformer."""
    return {
        "tokenizer": t5.tokenizer(),
        "text_encoder": t5.encoder(),
        "vae": vae(library, **(vae_changes or {})),
        "transformer": transformer(library, **changes),
        "scheduler": library.CogVideoXDDIMScheduler(**DDIM),
    }


def rotary_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 5B."""
    return parts(library, use_rotary_positional_embeddings=True, use_learned_positional_embeddings=False)


def image_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 5B I2V, whose transformer has learned positions too."""
    return parts(library, in_channels=8, use_rotary_positional_embeddings=True, use_learned_positional_embeddings=True)


def image_15_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 1.5 I2V: patches of two latents, `ofs`, and latents of pictures divided by the factor."""
    return parts(
        library,
        {"invert_scale_latents": True},
        in_channels=8,
        patch_size_t=2,
        ofs_embed_dim=4,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=False,
        patch_bias=False,
    )


def text_15_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 1.5."""
    return parts(
        library,
        patch_size_t=2,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=False,
        patch_bias=False,
    )


def embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    embeds = made.encode_prompt(prompts, negatives, max_sequence_length=LENGTH)
    return dict(zip(EMBEDS, embeds, strict=True))
