"""What diffusion transformers return."""

from dataclasses import dataclass

from torch import Tensor

from diffusion_core.outputs import BaseOutput


@dataclass
class Transformer2DModelOutput(BaseOutput):
    """The prediction of a transformer for pictures.

    Attributes:
        sample: the prediction (noise, velocity or image, as trained): latents (B, out_channels, H, W), or tokens
            (B, S, patch channels) of models that take tokens.
    """

    sample: Tensor
