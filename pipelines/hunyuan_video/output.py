"""What the HunyuanVideo pipeline returns."""

from dataclasses import dataclass

from ..film import FilmOutput


@dataclass
class HunyuanVideoPipelineOutput(FilmOutput):
    """Films, and what is to be known about them.

    Args:
        frames: N films in the form that `output_type` asked for; latents are (N, C, f, h, w).
        truncated_prompts: for each prompt, the end that Llama did not see, "" if it saw all; None if all prompts were
            seen whole.
        rounded_from: the number of frames that was asked for, if `frames` has another; else None.
    """
