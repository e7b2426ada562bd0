"""Tiny components of LTX-Video, in this library or in the reference."""

from types import ModuleType
from typing import Any

import torch

from . import t5

LENGTH = 16  # tokens of a prompt
# Those of the published checkpoints, and a plain one.
DYNAMIC = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
SCHEDULERS = (
    ("FlowMatchEulerDiscreteScheduler", DYNAMIC),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
)
EMBEDS = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")


def transformer(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """A transformer that takes text of width 32."""
    torch.manual_seed(seed)
    config = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 32,
    }
    return library.LTXVideoTransformer3DModel(**{**config, **changes}).eval()


def vae(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """An autoencoder of 0.9.0, for latents of 8 pixels, and of 4 frames past the first."""
    torch.manual_seed(seed)
    config = {
        "block_out_channels": (8, 8),
        "down_block_types": ("LTXVideoDownBlock3D",) * 2,
        "decoder_block_out_channels": (8, 8),
        "layers_per_block": (1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1),
        "latent_channels": 8,
        "spatio_temporal_scaling": (True, True),
        "decoder_spatio_temporal_scaling": (True, True),
        "decoder_inject_noise": (False,) * 3,
        "downsample_type": ("conv",) * 2,
        "upsample_residual": (False,) * 2,
        "upsample_factor": (1, 1),
        "patch_size": 2,
    }
    made = library.AutoencoderKLLTXVideo(**{**config, **changes}).eval()
    made.latents_mean.copy_(torch.linspace(-1, 1, 8))
    made.latents_std.copy_(torch.linspace(0.5, 2, 8))
    return made


def timed_vae(library: ModuleType) -> Any:
    """One of 0.9.5, whose decoder is told a time."""
    return vae(
        library,
        block_out_channels=(8, 8, 16),
        down_block_types=("LTXVideo095DownBlock3D",) * 2,
        decoder_block_out_channels=(8, 16),
        downsample_type=("spatiotemporal",) * 2,
        upsample_residual=(True,) * 2,
        upsample_factor=(2, 2),
        timestep_conditioning=True,
    )


def parts(library: ModuleType) -> dict[str, Any]:
    """The components of 0.9.0."""
    return {
        "scheduler": library.FlowMatchEulerDiscreteScheduler(**DYNAMIC),
        "vae": vae(library),
        "text_encoder": t5.encoder(),
        "tokenizer": t5.tokenizer(),
        "transformer": transformer(library),
    }


def timed_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 0.9.5."""
    return {**parts(library), "vae": timed_vae(library)}


def embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    return dict(zip(EMBEDS, made.encode_prompt(prompts, negatives, max_sequence_length=LENGTH), strict=True))
