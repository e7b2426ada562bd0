"""What the Stable Diffusion pipelines return."""

from dataclasses import dataclass
from typing import Any

from diffusion_core.outputs import BaseOutput


@dataclass
class StableDiffusionPipelineOutput(BaseOutput):
    """Pictures, and what is to be known about them.

    Args:
        images: N pictures in the form that `output_type` asked for.
        nsfw_content_detected: for each picture, whether the safety checker took it out (it is black then); None
            without a checker.
        truncated_prompts: for each prompt, the end that the text encoder did not see, "" if it saw all; None if all
            prompts were seen whole.
    """

    images: Any
    nsfw_content_detected: list[bool] | None = None
    truncated_prompts: list[str] | None = None
