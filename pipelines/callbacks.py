"""Callbacks at the end of a step: checked before the first model call, and their answers too."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from diffusion_core.config import ConfigMixin

from ..offload.runs import current_run

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
        if names is not None and not isinstance(names, list | tuple):
            raise TypeError(f"callback_on_step_end_tensor_inputs={names!r} is no list; pass a list of names")
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
        memory = current_run()
        if memory is not None and any(_hides_edits(name, each) for name, each in shown.items()):
            memory.forget_results()
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


def _hides_edits(name: str, tensor: Any) -> bool:
    """Whether nothing tells that a tensor was edited, of which results may be kept."""
    return name != "latents" and isinstance(tensor, torch.Tensor) and tensor.is_inference()


class PipelineCallback(ConfigMixin):
    """Base of callbacks that do something once, at one step of a call.

    A subclass lists the tensors it needs in `tensor_inputs`, and in `callback_fn(pipe, step, timestep, tensors)`
    compares `step` with `cutoff_step(pipe)` and returns `tensors`.

    Args:
        cutoff_step_ratio: after which share of the steps, from 0.0 to 1.0; 1.0, which is never, if both are None.
        cutoff_step_index: at which step, counted from 0, in place of a share.

    Raises:
        ValueError: if both are given, or one is out of range.
    """

    config_name = "callback_config.json"
    tensor_inputs: ClassVar[Sequence[str]] = ()

    def __init__(self, cutoff_step_ratio: float | None = None, cutoff_step_index: int | None = None) -> None:
        if cutoff_step_ratio is not None and cutoff_step_index is not None:
            raise ValueError("cutoff_step_ratio and cutoff_step_index say the same thing; pass one of them")
        if cutoff_step_ratio is not None and not 0 <= cutoff_step_ratio <= 1:
            raise ValueError(f"cutoff_step_ratio={cutoff_step_ratio} must be from 0.0 to 1.0")
        if cutoff_step_index is not None and cutoff_step_index < 0:
            raise ValueError(f"cutoff_step_index={cutoff_step_index} must not be negative")

    def cutoff_step(self, pipe: Any) -> int:
        """The step of the current call of `pipe` at which to act."""
        if self.config.cutoff_step_index is not None:
            return self.config.cutoff_step_index
        ratio = self.config.cutoff_step_ratio
        return pipe.num_timesteps if ratio is None else int(pipe.num_timesteps * ratio)

    def callback_fn(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """What to do after each step; the base changes nothing."""
        return tensors

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return self.callback_fn(pipe, step, timestep, tensors)


class _GuidanceCutoff(PipelineCallback):
    """Ends guidance after a part of the steps: the rest take half the time."""

    def callback_fn(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Drop the negative half of what the denoiser is told and set the guidance scale to zero."""
        if step == self.cutoff_step(pipe) and pipe.do_classifier_free_guidance:
            tensors |= {name: tensors[name].chunk(2)[-1] for name in self.tensor_inputs}
            pipe._guidance_scale = 0.0
        return tensors


class SDCFGCutoffCallback(_GuidanceCutoff):
    """Ends guidance in Stable Diffusion after a part of the steps: the rest take half the time."""

    tensor_inputs = ("prompt_embeds",)


class SDXLCFGCutoffCallback(_GuidanceCutoff):
    """Ends guidance in Stable Diffusion XL after a part of the steps: the rest take half the time."""

    tensor_inputs = ("prompt_embeds", "add_text_embeds", "add_time_ids")


class SD3CFGCutoffCallback(_GuidanceCutoff):
    """Ends guidance in Stable Diffusion 3 after a part of the steps: the rest take half the time."""

    tensor_inputs = ("prompt_embeds", "pooled_prompt_embeds")


class MultiPipelineCallbacks:
    """Several callback objects as one, called in their order; each sees what those before it changed."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self.callbacks = list(callbacks)

    @property
    def tensor_inputs(self) -> list[str]:
        """The tensors that any of them needs."""
        return list(dict.fromkeys(name for callback in self.callbacks for name in callback.tensor_inputs))

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        for callback in self.callbacks:
            tensors = {**tensors, **(callback(pipe, step, timestep, tensors) or {})}
        return tensors
