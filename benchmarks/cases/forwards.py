"""Forwards of models at real size, or at full depth and tiny width, with weights that mean nothing."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..machine import peak_rate
from ..meters import MB, Peak, floating_point_operations, operations, peak_activations, python_calls, timed
from . import TUNED

UNET = {"cross_attention_dim": 768, "attention_head_dim": 8}
SDXL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
    "use_linear_projection": True,
}
DECODER = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}


def _model(side: str, kind: str, config: dict[str, Any], dtype: Any) -> Any:
    """The model with weights of one small table, repeated: drawing a billion of them would take longer than the run."""
    import torch

    library = importlib.import_module(side.partition(",")[0])
    with torch.device("meta"):
        model = getattr(library, kind).from_config(config)
    model = model.to_empty(device="cpu").eval()
    table = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0), device="cpu") * 0.02
    for tensor in (*model.parameters(), *model.buffers()):
        count = tensor.numel()
        tensor.data.copy_(table.repeat(count // len(table) + 1)[:count].view(tensor.shape))
    model = model.to(dtype)
    if side == TUNED:
        model.to(memory_format=torch.channels_last)
    return model.requires_grad_(False)


def _unet_call(side: str, model: Any, dtype: Any, size: int, text: int = 768, added: int = 0) -> Callable[[], Any]:
    import torch

    sample = torch.randn(1, 4, size, size).to(dtype)
    if side == TUNED:
        sample = sample.to(memory_format=torch.channels_last)
    words = torch.randn(1, 77, text).to(dtype)
    more = {}
    if added:
        more = {"added_cond_kwargs": {"text_embeds": torch.randn(1, added).to(dtype), "time_ids": torch.ones(1, 6)}}
    return lambda: model(sample, torch.tensor(500), words, return_dict=False, **more)


def _flux_call(model: Any, dtype: Any, image: int, text: int, words: int, pooled: int) -> Callable[[], Any]:
    import torch

    inputs = {
        "hidden_states": torch.randn(1, image, 64).to(dtype),
        "encoder_hidden_states": torch.randn(1, text, words).to(dtype),
        "pooled_projections": torch.randn(1, pooled).to(dtype),
        "timestep": torch.full((1,), 0.5).to(dtype),
        "guidance": torch.full((1,), 3.5),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(32.0), torch.arange(image // 32 * 1.0)),
        "txt_ids": torch.zeros(text, 3),
    }
    return lambda: model(**inputs, return_dict=False)


# ---- full depth, tiny width: what Python and the dispatcher cost ----


def _depth(call: Callable[[], Any]) -> dict[str, float]:
    import torch

    with torch.no_grad():
        figures = timed(call, repeats=3)
        return {**figures, "python_calls": python_calls(call), "operations": operations(call)}


def depth_sd15(side: str, folder: Path) -> dict[str, float]:
    import torch

    config = {**UNET, "block_out_channels": (8, 16, 32, 32), "norm_num_groups": 4, "cross_attention_dim": 16}
    model = _model(side, "UNet2DConditionModel", {**config, "attention_head_dim": 2}, torch.float32)
    return _depth(_unet_call(side, model, torch.float32, 16, text=16))


def depth_sdxl(side: str, folder: Path) -> dict[str, float]:
    import torch

    config = {**SDXL, "block_out_channels": (8, 16, 32), "norm_num_groups": 4, "cross_attention_dim": 16}
    model = _model(side, "UNet2DConditionModel", {**config, "attention_head_dim": (2, 4, 8)}, torch.float32)
    return _depth(_unet_call(side, model, torch.float32, 16, text=16, added=32))


def depth_flux(side: str, folder: Path) -> dict[str, float]:
    import torch

    config = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6), "guidance_embeds": True}
    config |= {"joint_attention_dim": 32, "pooled_projection_dim": 16}
    model = _model(side, "FluxTransformer2DModel", config, torch.float32)
    return _depth(_flux_call(model, torch.float32, 64, 16, 32, 16))


# ---- real size ----


def _real(call: Callable[[], Any], dtype: Any, repeats: int, kind: str) -> dict[str, float]:
    """Time, and the rate as a part of the machine's own peak, taken in the same process just before."""
    import torch

    with torch.inference_mode():
        rate = peak_rate(kind, dtype)
        work = floating_point_operations(call)
        with Peak() as peak:
            figures = timed(call, repeats, warm=False)
    figures |= {"tflop": work / 1e12, "anonymous_mb": peak.grown("anonymous")}
    return {**figures, "of_peak": work / figures["seconds"] / rate}


def _unet(side: str, dtype_name: str) -> dict[str, float]:
    import torch

    dtype = getattr(torch, dtype_name)
    model = _model(side, "UNet2DConditionModel", UNET, dtype)
    return _real(_unet_call(side, model, dtype, 64), dtype, 2, "convolution")


def _flux_model(side: str, dtype: Any) -> Any:
    config = {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True}
    return _model(side, "FluxTransformer2DModel", config, dtype)


def _flux(side: str, dtype_name: str) -> dict[str, float]:
    import torch

    dtype = getattr(torch, dtype_name)
    return _real(_flux_call(_flux_model(side, dtype), dtype, 1024, 128, 4096, 768), dtype, 2, "product")


def _decode(side: str, latents: int, dtype_name: str) -> dict[str, float]:
    import torch

    dtype = getattr(torch, dtype_name)
    model = _model(side, "AutoencoderKL", DECODER, dtype)
    sample = torch.randn(1, 4, latents, latents).to(dtype)
    if side == TUNED:
        sample = sample.to(memory_format=torch.channels_last)
    return _real(lambda: model.decode(sample, return_dict=False), dtype, 1, "convolution")


def decode_activations(side: str, folder: Path) -> dict[str, float]:
    """Counted in a run on tensors without values."""
    import torch

    library = importlib.import_module(side)
    with torch.device("meta"), torch.inference_mode():
        model = library.AutoencoderKL.from_config(DECODER).to(torch.bfloat16).eval()
        sample = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16)
        return {"activations_mb": peak_activations(lambda: model.decode(sample, return_dict=False)) / MB}


def flux_cast(side: str, folder: Path) -> dict[str, float]:
    """Weights kept in 8 bits, brought to bfloat16 for each layer's work."""
    import torch

    model = _flux_model(side, torch.bfloat16)
    begun = time.perf_counter()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    enabling = time.perf_counter() - begun
    call = _flux_call(model, torch.bfloat16, 1024, 128, 4096, 768)
    with torch.inference_mode():
        return {**timed(call, repeats=1), "enabling_seconds": enabling}


def unet_bfloat16(side: str, folder: Path) -> dict[str, float]:
    return _unet(side, "bfloat16")


def unet_float32(side: str, folder: Path) -> dict[str, float]:
    return _unet(side, "float32")


def flux_bfloat16(side: str, folder: Path) -> dict[str, float]:
    return _flux(side, "bfloat16")


def flux_float32(side: str, folder: Path) -> dict[str, float]:
    return _flux(side, "float32")


def decode_64_bfloat16(side: str, folder: Path) -> dict[str, float]:
    return _decode(side, 64, "bfloat16")


def decode_64_float32(side: str, folder: Path) -> dict[str, float]:
    return _decode(side, 64, "float32")


def decode_128_bfloat16(side: str, folder: Path) -> dict[str, float]:
    return _decode(side, 128, "bfloat16")


def decode_128_float32(side: str, folder: Path) -> dict[str, float]:
    return _decode(side, 128, "float32")
