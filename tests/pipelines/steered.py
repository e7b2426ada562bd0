"""Tiny ControlNets for the tiny UNets, and pictures that steer."""

from types import ModuleType
from typing import Any

import torch

from . import sd


def controlnet(library: ModuleType, unet: Any, seed: int = 0, **changes: Any) -> Any:
    """A ControlNet for a UNet, whose joints are not zero as they are before training."""
    torch.manual_seed(seed)
    plain = library.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16, 16))
    made = library.ControlNetModel.from_config({**plain.config, **changes}).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        if not parameter.any():
            parameter.data.normal_(0, 0.2, generator=generator)
    return made


def pictures() -> dict[str, dict[str, Any]]:
    """What each task is steered by."""
    steering = sd.image(32, 32, seed=9)
    return {"text": {"image": steering}, "image": {"control_image": steering}, "inpaint": {"control_image": steering}}
