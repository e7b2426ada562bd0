"""Callbacks at the end of a step: checked before the first model call, and their answers too."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# callback(pipeline, step, timestep, tensors) -> changed tensors, or None for no change
Callback = Callable[[Any, int, Any, dict[str, Any]], Mapping[str, Any] | None]


class StepCallback:
    """A user's callback with the names of the tensors that it is shown. Without a callback it does nothing.

    Args:
        pipe: handed to the callback as its first argument; its `_callback_tensor_inputs` are the names allowed.
        callback: called as `callback(pipe, step, timestep, tensors)`. An object with a `tensor_inputs` attribute
            names its tensors itself.
        names: the tensors to show, `["latents"]` if None.

    Raises:
        TypeError: if `callback` cannot be called, or `names` is a single string.
        ValueError: if a name is not among those that the pipeline offers.
    """

    def __init__(self, pipe: Any, callback: Callback | None, names: Sequence[str] | None) -> None:
        if callback is not None and not callable(callback):
            raise TypeError(f"callback_on_step_end={callback!r} is not callable; pass a function or None")
        names = getattr(callback, "tensor_inputs", names)
        if isinstance(names, str):
            raise TypeError(f"callback_on_step_end_tensor_inputs={names!r} is a string; pass a list of names")
        self.pipe, self.callback = pipe, callback
        self.names = ["latents"] if names is None else list(names)
        offered = list(pipe._callback_tensor_inputs)
        unknown = [name for name in self.names if name not in offered]
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs has {unknown}; {type(pipe).__name__} offers {offered}"
            )

    def __call__(self, step: int, timestep: Any, **tensors: Any) -> dict[str, Any]:
        """Call the callback after `step` (counted from 0) and return `tensors` with its changes.

        Args:
            step: the step that has ended.
            timestep: its timestep.
            tensors: all that a callback may see or change, by name.

        Raises:
            TypeError: if the callback returns something other than a dict or None.
            ValueError: if it returns a name that is not among `tensors`.
        """
        if self.callback is None:
            return tensors
        shown = {name: tensors.get(name) for name in self.names}
        changed = self.callback(self.pipe, step, timestep, shown)
        if changed is None:
            return tensors
        if not isinstance(changed, Mapping):
            raise TypeError(
                f"callback_on_step_end returned {type(changed).__name__}; return a dict of the tensors that it"
                " changed, or None"
            )
        unknown = sorted(changed.keys() - tensors.keys())
        if unknown:
            raise ValueError(f"callback_on_step_end returned {unknown}; it may change {sorted(tensors)}")
        return {**tensors, **changed}
