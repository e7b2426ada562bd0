# pyright: reportMissingImports=false
"""A familiar import path: callback objects for `callback_on_step_end`."""

from diffusion_core.pipelines.callbacks import (
    MultiPipelineCallbacks,
    PipelineCallback,
    SD3CFGCutoffCallback,
    SDCFGCutoffCallback,
    SDXLCFGCutoffCallback,
)

__all__ = [
    "MultiPipelineCallbacks",
    "PipelineCallback",
    "SD3CFGCutoffCallback",
    "SDCFGCutoffCallback",
    "SDXLCFGCutoffCallback",
]
