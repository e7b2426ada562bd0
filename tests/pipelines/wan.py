"""Tiny components of Wan, in this library or in the reference."""

import importlib
import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from . import t5

LENGTH = 16  # tokens of a prompt
# That of the published checkpoints, and a plain one.
UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0, "num_train_timesteps": 1000}
SCHEDULERS = (("UniPCMultistepScheduler", UNIPC), ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}))
EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
MEAN, STD = [-0.5, 0.2, 0.1, 0.4], [1.5, 2.0, 0.8, 1.2]
# As Wan 2.2's 5B, whose autoencoder has patches of pixels.
PATCHES = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 8}

# Without this package, which mends letters, two pipelines of the reference end in a NameError; others do without it.
if importlib.util.find_spec("ftfy") is None:
    for module in ("pipeline_wan_i2v", "pipeline_wan_video2video"):
        vars(importlib.import_module(f"diffusers.pipelines.wan.{module}"))["ftfy"] = SimpleNamespace(fix_text=str)


def transformer(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """A transformer that takes text of width 32."""
    torch.manual_seed(seed)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 16,
        "ffn_dim": 24,
        "num_layers": 2,
    }
    return library.WanTransformer3DModel(**{**config, **changes}).eval()


def vae(library: ModuleType, seed: int = 0, **changes: Any) -> Any:
    """An autoencoder for latents of 4 pixels (8 in patches), and of 4 frames past the first."""
    torch.manual_seed(seed)
    config = {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": MEAN,
        "latents_std": STD,
        "scale_factor_spatial": 4,
    }
    return library.AutoencoderKLWan(**{**config, **changes}).eval()


def text_encoder(size: int = 32, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=128, d_model=size, d_kv=8, d_ff=37, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return UMT5EncoderModel(config).eval()


def image_encoder(seed: int = 6) -> Any:
    """CLIP's vision model: 5 tokens of width 16 for a picture."""
    torch.manual_seed(seed)
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    return CLIPVisionModel(config).eval()


def parts(library: ModuleType, **changes: Any) -> dict[str, Any]:
    """The components of 2.1; `changes` are of the transformer."""
    return {
        "tokenizer": t5.tokenizer(),
        "text_encoder": text_encoder(),
        "vae": vae(library),
        "scheduler": library.UniPCMultistepScheduler(**UNIPC),
        "transformer": transformer(library, **changes),
    }


def two_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 2.2 A14B."""
    return {**parts(library), "transformer_2": transformer(library, seed=9)}


def timed_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 2.2's 5B."""
    return {**parts(library), "vae": vae(library, **PATCHES)}


def image_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 2.1 I2V, which sees pictures through CLIP."""
    return {
        **parts(library, in_channels=12, image_dim=16, added_kv_proj_dim=32),
        "image_encoder": image_encoder(),
        "image_processor": CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
    }


def ends_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 2.1 for a first and a last frame."""
    changes = {"in_channels": 12, "image_dim": 16, "added_kv_proj_dim": 32, "pos_embed_seq_len": 10}
    return {**image_parts(library), "transformer": transformer(library, **changes)}


def two_image_parts(library: ModuleType) -> dict[str, Any]:
    """Those of 2.2 A14B I2V, which does not."""
    return {**parts(library, in_channels=12), "transformer_2": transformer(library, seed=9, in_channels=12)}


def embed(made: Any, prompts: list[str], negatives: list[str], length: int = LENGTH) -> dict[str, Any]:
    return dict(zip(EMBEDS, made.encode_prompt(prompts, negatives, max_sequence_length=length), strict=True))


def embed_long(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    return embed(made, prompts, negatives, 512)
