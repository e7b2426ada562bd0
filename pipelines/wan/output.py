"""What the Wan pipelines return."""

from dataclasses import dataclass

from ..film import FilmOutput


@dataclass
class WanPipelineOutput(FilmOutput):
    """Films, and what is to be known about them.

    Args:
        frames: N films in the form that `output_type` asked for; latents are (N, C, f, h, w).
        truncated_prompts: for each prompt, the end that UMT5 did not see, "" if it saw all; None if all prompts were
            seen whole.
        rounded_from: the number of frames that was asked for, or that `video` has, if `frames` has another; else None.
    """
