"""What the Stable Diffusion 3 pipelines return."""

from dataclasses import dataclass

from ..picture import PictureOutput


@dataclass
class StableDiffusion3PipelineOutput(PictureOutput):
    """Pictures, and what is to be known about them.

    Args:
        images: N pictures in the form that `output_type` asked for.
        truncated_prompts: for each prompt, the end that T5 did not see (CLIP, where there is no T5), "" if it saw all;
            None if all prompts were seen whole. CLIP sees 77 tokens at most.
    """
