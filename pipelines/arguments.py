"""Arguments of calls that only adapters would act on, and those of old."""

from collections.abc import Callable, Mapping
from typing import Any

from ..models.transformers.checks import check_attention_kwargs
from .loading import close_matches
from .loop import Steps, check_count

_IMAGE_PROMPTS = ("ip_adapter_image", "ip_adapter_image_embeds")


def refuse_adapters(**given: Any) -> None:
    """Refuse what only adapters would act on, such as `lora_scale` and `ip_adapter_image`."""
    found = [name for name, value in given.items() if value is not None]
    if found:
        raise ValueError(f"{found[0]} has nothing to act on and must be None: no adapter is loaded")


def check_old_arguments(given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that calls do not take; what follows they take, as they did of old.

    `callback(step, timestep, latents)` is called after every `callback_steps` steps, after `callback_on_step_end`.
    Arguments of adapters must be None; `cross_attention_kwargs={"scale": x}` is the strength of LoRA layers.

    Raises:
        TypeError: for any other argument, or a callback that cannot be called.
        ValueError: if `callback_steps` is less than 1, or an adapter is asked for.
    """
    known = {"callback", "callback_steps", "cross_attention_kwargs", *_IMAGE_PROMPTS}
    for name in given:
        if name not in known:
            raise TypeError(f"the call has no argument {name!r}; {close_matches(name, known)}")
    check_count("callback_steps", given.get("callback_steps", 1))
    callback = given.get("callback")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback={callback!r} is not callable; pass a function or None")
    check_attention_kwargs(given.get("cross_attention_kwargs"), "cross_attention_kwargs")
    refuse_adapters(**{name: given.get(name) for name in _IMAGE_PROMPTS})


def with_old_form(
    first: Callable[..., dict[str, Any]], steps: Steps, callback: Any = None, callback_steps: int = 1, **_: Any
) -> Callable[..., dict[str, Any]]:
    """A `StepCallback` with a callback of the old form called after it, if there is one."""
    if callback is None:
        return first

    def both(index: int, timestep: Any, **tensors: Any) -> dict[str, Any]:
        tensors = first(index, timestep, **tensors)
        step = index // steps.scheduler.order
        if steps.ends_at(index) and step % callback_steps == 0:
            callback(step, timestep, tensors["latents"])
        return tensors

    return both
