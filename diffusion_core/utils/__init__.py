"""Familiar import paths: code written for the reference finds its helpers here. They live one folder up."""

from diffusion_core.images import load_image, make_image_grid, numpy_to_pil, pt_to_pil
from diffusion_core.outputs import BaseOutput
from diffusion_core.videos import export_to_gif, export_to_video, load_video

from . import logging, torch_utils
from .import_utils import (
    is_accelerate_available,
    is_torch_available,
    is_transformers_available,
    is_xformers_available,
)

__all__ = [
    "BaseOutput",
    "export_to_gif",
    "export_to_video",
    "is_accelerate_available",
    "is_torch_available",
    "is_transformers_available",
    "is_xformers_available",
    "load_image",
    "load_video",
    "logging",
    "make_image_grid",
    "numpy_to_pil",
    "pt_to_pil",
    "torch_utils",
]
