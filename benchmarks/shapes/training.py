"""What both trainings share: a clock for the log, and states that are written beside and renamed into place."""

import time
from pathlib import Path
from typing import Any

import torch


class Clock:
    """Prints lines stamped with the minutes since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{(time.monotonic() - self._start) / 60:6.1f} min  {text}", flush=True)


def save_state(path: Path, step: int, **parts: Any) -> None:
    """Write the step and the `state_dict()` of each part; the old file stays whole until the new one is."""
    beside = path.with_suffix(".new")
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, beside)
    beside.replace(path)


def load_state(path: Path, **parts: Any) -> int:
    """Restore the parts from `path` and return the step to go on from; 0 and untouched parts without a file."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["step"]
