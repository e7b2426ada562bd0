"""Pairs of FLUX.1 pipelines with the same weights, ours and the reference's."""

from functools import cache
from typing import Any

import diffusers
import torch

import diffusion_core

from . import sd, t5, tiny

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True, "shift": 3.0}),
    "static": ("FlowMatchEulerDiscreteScheduler", {"shift": 1.7}),
    "unipc": (
        "UniPCMultistepScheduler",
        {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 2.0},
    ),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
}
# Channels of a token: 4 for each of 4 latent channels, then what each kind of model is shown besides.
CHANNELS = {"FluxFillPipeline": 16 + 16 + 16, "FluxControlPipeline": 32}
SIDE = 32


@cache
def transformers(in_channels: int = 16, guidance_embeds: bool = True) -> tuple[Any, Any]:
    """Ours and the reference's."""
    torch.manual_seed(0)
    config = {
        "in_channels": in_channels,
        "out_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "guidance_embeds": guidance_embeds,
        "axes_dims_rope": (4, 6, 6),
    }
    theirs = diffusers.FluxTransformer2DModel(**config).eval()
    ours = diffusion_core.FluxTransformer2DModel(**config).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@cache
def controlnets(**changes: Any) -> tuple[Any, Any]:
    """Ours and the reference's, with joints that are not zero."""
    torch.manual_seed(1)
    config = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 6, 6),
        **changes,
    }
    theirs = diffusers.FluxControlNetModel(**config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    ours = diffusion_core.FluxControlNetModel(**config).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@cache
def vaes(levels: int = 2) -> tuple[Any, Any]:
    """With two levels a latent pixel is 2 pixels wide, and a token 4."""
    config = {
        "block_out_channels": (16, 32, 32, 32)[:levels],
        "norm_num_groups": 8,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    theirs, ours = tiny.vae(diffusers, **config), tiny.vae(diffusion_core, **config)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@cache
def text_encoder_2() -> Any:
    return t5.encoder()


def scheduler(library: Any, name: str = "dynamic") -> Any:
    kind, config = SCHEDULERS[name]
    return getattr(library, kind)(**config)


def pipe(name: str = "FluxPipeline", scheduler_name: str = "dynamic", **changes: Any) -> Any:
    """Our pipeline; changes are components, or `guidance_embeds`."""
    return _made(diffusion_core, 0, name, scheduler_name, changes)


def pair(name: str = "FluxPipeline", scheduler_name: str = "dynamic", **changes: Any) -> tuple[Any, Any]:
    """Our pipeline, and the reference's with the same weights."""
    libraries = (diffusion_core, diffusers)
    ours, theirs = (_made(library, side, name, scheduler_name, changes) for side, library in enumerate(libraries))
    return ours, theirs


def _made(library: Any, side: int, name: str, scheduler_name: str, changes: dict[str, Any]) -> Any:
    changes = dict(changes)
    guidance = changes.pop("guidance_embeds", True)
    if name == "FluxControlNetPipeline":
        changes["controlnet"] = controlnets(**changes.pop("net", {}))[side]
    parts = {
        "scheduler": scheduler(library, scheduler_name),
        "vae": vaes()[side],
        "text_encoder": sd.text_encoder(),
        "tokenizer": sd.tokenizer(),
        "text_encoder_2": text_encoder_2(),
        "tokenizer_2": t5.tokenizer(),
        "transformer": transformers(CHANNELS.get(name, 16), guidance)[side],
    }
    made = getattr(library, name)(**{**parts, **changes})
    made.set_progress_bar_config(disable=True)
    return made


# ---- for the tests that all families share ----


def parts(library: Any, name: str = "FluxPipeline") -> dict[str, Any]:
    """The components, from one library or the other."""
    made = _made(library, 0 if library is diffusion_core else 1, name, "dynamic", {})
    return {name: part for name, part in made.components.items() if name not in ("image_encoder", "feature_extractor")}


def fill_parts(library: Any) -> dict[str, Any]:
    return parts(library, "FluxFillPipeline")


def control_parts(library: Any) -> dict[str, Any]:
    return parts(library, "FluxControlPipeline")


def controlnet_parts(library: Any) -> dict[str, Any]:
    return parts(library, "FluxControlNetPipeline")


def embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    names = ("prompt_embeds", "pooled_prompt_embeds")
    found: dict[str, Any] = {}
    for sign, texts in (("", prompts), ("negative_", negatives)):
        embeds = made.encode_prompt(texts, max_sequence_length=20)[:2]
        found |= {f"{sign}{name}": each for name, each in zip(names, embeds, strict=True)}
    return found
