"""The older form of callbacks, and arguments of adapters, in the pipelines whose reference takes any keyword."""

import warnings
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from .families import CONTROLNET, CONTROLNET_XL, SD, SD_INPAINT, SDXL, VP, Family, pair, pipe

FAMILIES = [SD, SD_INPAINT, SDXL, CONTROLNET, CONTROLNET_XL]
CASES = [(family, task) for family in FAMILIES for task in family.tasks]


def seen(made: Any, family: Family, task: str, every: int, **changes: Any) -> list[tuple[int, float, torch.Tensor]]:
    """What the callback is shown."""
    found: list[tuple[int, float, torch.Tensor]] = []

    def look(step: int, timestep: Any, latents: torch.Tensor) -> None:
        found.append((step, float(timestep), latents.clone()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made(**family.call(task, callback=look, callback_steps=every, num_inference_steps=4, **changes))
    return found


def compare(pipes: Any, family: Family, task: str, every: int) -> None:
    ours, theirs = (seen(made, family, task, every) for made in pipes)
    assert ours
    assert [each[:2] for each in ours] == [each[:2] for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[2], other[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(("family", "task"), CASES, ids=[f"{family}-{task}" for family, task in CASES])
def test_callbacks_are_called_as_by_the_reference(family: Family, task: str, every: int) -> None:
    compare(pair(family, task), family, task, every)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_warm_up_is_no_step(every: int) -> None:
    pipes, name = pair(SD), "PNDMScheduler"
    for made, library in zip(pipes, (diffusion_core, diffusers), strict=True):
        made.scheduler = getattr(library, name)(**VP, skip_prk_steps=True)
    compare(pipes, SD, "text", every)


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3]), (2, [0, 2])])
def test_a_step_of_two_calls_counts_once(every: int, steps: list[int]) -> None:
    """In the reference every second call of the denoiser is counted, of which some are in the middle of a step."""
    made = pipe(SD, scheduler=diffusion_core.HeunDiscreteScheduler(**VP))
    assert [each[0] for each in seen(made, SD, "text", every)] == steps


def test_both_forms_work_together() -> None:
    """The older one is called last, and sees what the newer one changed."""

    def clear(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": torch.zeros_like(tensors["latents"])}

    assert all(not latents.any() for _, _, latents in seen(pipe(SD), SD, "text", 1, callback_on_step_end=clear))


@pytest.mark.parametrize(("family", "task"), CASES, ids=[f"{family}-{task}" for family, task in CASES])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"callback": 5}, TypeError, "callback=5 is not callable"),
        ({"callback_steps": 0}, ValueError, "callback_steps=0 must be 1 at least"),
        ({"callback_steps": 1.5}, TypeError, "callback_steps must be a whole number"),
        ({"callbak": None}, TypeError, "no argument 'callbak'; did you mean callback"),
        ({"ip_adapter_image": 1}, ValueError, "ip_adapter_image has nothing to act on"),
        ({"cross_attention_kwargs": {"gligen": 1}}, ValueError, "cross_attention_kwargs has .'gligen'."),
    ],
)
def test_what_makes_no_sense_is_refused(
    family: Family, task: str, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = pipe(family, task)
    called: list[str] = []
    hook = made.text_encoder.register_forward_pre_hook(lambda *_: called.append("text_encoder"))
    with pytest.raises(error, match=message):
        made(**family.call(task, **given))
    hook.remove()
    assert called == []


def test_arguments_of_adapters_may_be_none_or_idle() -> None:
    plain = pipe(SD)(**SD.call("text")).images
    given = {"cross_attention_kwargs": {"scale": 0.5}, "ip_adapter_image": None, "callback": None}
    assert torch.equal(pipe(SD)(**SD.call("text", **given)).images, plain)
