"""What both trainings share: a clock for the log, and states that are written beside and renamed into place."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
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


class Average:
    """An exponential moving average of a module's parameters, which samples better than the last ones.

    The decay starts low and approaches 0.999, so that early steps do not weigh on the average.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._values = [parameter.detach().clone() for parameter in module.parameters()]

    @torch.no_grad()
    def update(self, module: torch.nn.Module, step: int) -> None:
        decay = min(0.999, (1 + step) / (10 + step))
        torch._foreach_mul_(self._values, decay)
        torch._foreach_add_(self._values, list(module.parameters()), alpha=1 - decay)

    @contextmanager
    def in_place(self, module: torch.nn.Module) -> Iterator[None]:
        """The module computes with the average inside the block, in eval mode, and gets its own values back."""
        kept = [parameter.detach().clone() for parameter in module.parameters()]
        self.copy_to(module)
        module.eval()
        try:
            yield
        finally:
            self._copy(kept, module)
            module.train()

    def copy_to(self, module: torch.nn.Module) -> None:
        """Put the average into the module."""
        self._copy(self._values, module)

    @staticmethod
    @torch.no_grad()
    def _copy(values: list[torch.Tensor], module: torch.nn.Module) -> None:
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = state["values"]
