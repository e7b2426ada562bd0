"""The embedded checkpoint `shapes`: a small text-to-image model that draws one or two coloured shapes.

It lies beside this file in the Hub layout. `benchmarks/shapes/` holds the program that trained it.
"""

from pathlib import Path

# What the model draws best with; measured in docs/shapes.md.
STEPS = 20
GUIDANCE_SCALE = 2.0


def shapes_folder() -> Path:
    """The folder of the embedded checkpoint, for `Pipeline.from_pretrained`."""
    return Path(__file__).resolve().parent / "checkpoint"
