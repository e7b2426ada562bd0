"""A familiar import path: how weights are quantised. That lives in `models` and `pipelines`."""

# pyright: reportMissingImports=false
from diffusion_core.models.quantization import BitsAndBytesConfig, GGUFQuantizationConfig, QuantoConfig, TorchAoConfig
from diffusion_core.pipelines.quantization import PipelineQuantizationConfig

__all__ = [
    "BitsAndBytesConfig",
    "GGUFQuantizationConfig",
    "PipelineQuantizationConfig",
    "QuantoConfig",
    "TorchAoConfig",
]
