"""What the FLUX.1 pipelines return."""

from dataclasses import dataclass

from ..picture import PictureOutput


@dataclass
class FluxPipelineOutput(PictureOutput):
    """Pictures, and what is to be known about them.

    Args:
        images: N pictures in the form that `output_type` asked for; latents are packed, (N, tokens, channels).
        truncated_prompts: for each prompt, the end that T5 did not see, "" if it saw all; None if all prompts were
            seen whole. CLIP, which gives one vector for each prompt, sees 77 tokens at most.
    """
