"""Small models for the tests of quantisation."""

from typing import Any

import torch

from diffusion_core import FluxTransformer2DModel

SIZES: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}


def tiny_flux(seed: int = 0, **sizes: Any) -> FluxTransformer2DModel:
    torch.manual_seed(seed)
    return FluxTransformer2DModel(**{**SIZES, **sizes}).eval()


def flux_inputs(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, 4, generator=g).to(dtype),
        "encoder_hidden_states": torch.randn(1, 5, 32, generator=g).to(dtype),
        "pooled_projections": torch.randn(1, 32, generator=g).to(dtype),
        "timestep": torch.tensor([0.5]).to(dtype),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


@torch.no_grad()
def run(model: Any, **changes: Any) -> torch.Tensor:
    inputs = {name: tensor.to(model.device) for name, tensor in flux_inputs(model.dtype).items()}
    return model(**{**inputs, **changes}).sample.cpu()


def kinds(model: torch.nn.Module) -> dict[str, str]:
    """The names of weights that are not plain, with their classes."""
    return {
        name: type(tensor).__name__
        for name, tensor in model.state_dict().items()
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    }
