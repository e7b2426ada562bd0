"""What the Stable Diffusion XL pipelines return."""

from dataclasses import dataclass

from ..picture import PictureOutput


@dataclass
class StableDiffusionXLPipelineOutput(PictureOutput):
    """Pictures, and what was cut from their prompts; see `PictureOutput`."""
