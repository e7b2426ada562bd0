"""What only pipelines with ControlNets have: several of them, guess mode, and their part of the way."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from . import sd, tiny
from .families import CONTROLNET, CONTROLNET_XL, SD, Family, pair, pipe, saved
from .steered import controlnet


def difference(family: Family, pipes: Any, task: str = "text", count: int = 1, **changes: Any) -> float:
    results = [made(**family.call(task, count, generator=sd.seeded(), **changes)).images for made in pipes]
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


def two(family: Family, task: str = "text", **changes: Any) -> Any:
    """Pipelines with two ControlNets."""
    found = []
    for library, made in zip((diffusion_core, diffusers), pair(family, task), strict=True):
        second = controlnet(library, made.unet, seed=1, **changes)
        parts = {**made.components, "controlnet": [made.controlnet, second]}
        settings = dict(family.settings)
        found.append(getattr(library, family.tasks[task])(**parts, **settings))
        found[-1].set_progress_bar_config(disable=True)
    ours, theirs = found
    ours.controlnet.load_state_dict(theirs.controlnet.state_dict())
    return ours, theirs


VARIATIONS: dict[str, dict[str, Any]] = {
    "guess mode": {"guess_mode": True},
    "guess mode without guidance": {"guess_mode": True, "guidance_scale": 1.0},
    "weak": {"controlnet_conditioning_scale": 0.3},
    "a part of the way": {"control_guidance_start": 0.25, "control_guidance_end": 0.8, "num_inference_steps": 5},
    "another size": {"height": 40, "width": 48},
    "its own size": {"image": sd.image(45, 38)},
    "images": {"num_images_per_prompt": 2},
}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("family", [CONTROLNET, CONTROLNET_XL], ids=str)
def test_arguments_work_as_in_the_reference(family: Family, variation: str) -> None:
    assert difference(family, pair(family), **VARIATIONS[variation]) < 1e-4


@pytest.mark.parametrize("family", [CONTROLNET, CONTROLNET_XL], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"controlnet_conditioning_scale": [0.5, 1.5], "guess_mode": True},
        {"control_guidance_start": [0.0, 0.5], "control_guidance_end": [0.5, 1.0], "num_inference_steps": 4},
    ],
    ids=["plain", "scales", "parts"],
)
def test_two_together_equal_the_reference(family: Family, changes: dict[str, Any]) -> None:
    images = [sd.image(32, 32), sd.image(32, 32, seed=4)]
    assert difference(family, two(family), image=images, **changes) < 1e-4


def test_global_pooling_equals_the_reference() -> None:
    pipes = pair(
        CONTROLNET,
        controlnet=lambda library: controlnet(library, tiny.unet(library), global_pool_conditions=True),
    )
    assert difference(CONTROLNET, pipes) < 1e-4


def test_inpainting_equals_the_reference() -> None:
    pipes = pair(CONTROLNET, "inpaint", unet=lambda library: tiny.unet(library, in_channels=9))
    assert difference(CONTROLNET, pipes, "inpaint") < 1e-4
    ours, theirs = (
        bytes(
            made(**CONTROLNET.call("inpaint", generator=sd.seeded(), padding_mask_crop=4, output_type="pil"))
            .images[0]
            .tobytes()
        )
        for made in pair(CONTROLNET, "inpaint")
    )
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1


def test_two_are_saved_and_loaded_on_both_sides(tmp_path: Path) -> None:
    ours, theirs = two(CONTROLNET)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "ours" / "controlnet_1" / "config.json").is_file()
    there = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "ours", safety_checker=None)
    here = diffusion_core.Pipeline.from_pretrained(tmp_path / "theirs", safety_checker=None)
    assert isinstance(here.controlnet, diffusion_core.MultiControlNetModel)
    images = [sd.image(32, 32), sd.image(32, 32, seed=4)]
    for made in (here, there):
        made.set_progress_bar_config(disable=True)
    assert difference(CONTROLNET, (here, there), image=images) < 1e-4


@pytest.mark.parametrize("auto", ["Text2Image", "Image2Image", "Inpainting"])
def test_the_choice_by_task_takes_controlnets(auto: str) -> None:
    chooser, plain, net = getattr(diffusion_core, f"AutoPipelineFor{auto}"), saved(SD), pipe(CONTROLNET).controlnet
    task = {"Text2Image": "text", "Image2Image": "image", "Inpainting": "inpaint"}[auto]
    for given in (net, [net, net]):
        made = chooser.from_pretrained(plain, controlnet=given, safety_checker=None)
        assert type(made).__name__ == CONTROLNET.tasks[task]
    assert type(chooser.from_pipe(pipe(SD), controlnet=net)) is type(made)
    assert type(chooser.from_pipe(pipe(CONTROLNET))) is type(made)


def test_a_net_that_does_not_steer_at_a_step_is_not_called() -> None:
    made, steps = pipe(CONTROLNET), []
    hook = made.controlnet.register_forward_pre_hook(lambda *_: steps.append(1))
    made(**CONTROLNET.call("text", num_inference_steps=4, control_guidance_end=0.5))
    hook.remove()
    assert len(steps) == 2


def test_each_prompt_goes_with_its_picture() -> None:
    made = pipe(CONTROLNET)
    images = [sd.image(32, 32), sd.image(32, 32, seed=4)]
    batch = made(**CONTROLNET.call("text", 2, image=images)).images
    arguments = CONTROLNET.call("text", 2)
    for index in range(2):
        alone = {name: arguments[name][index] for name in ("prompt", "negative_prompt")}
        single = made(**{**arguments, **alone, "image": images[index], "generator": sd.seeded(index)}).images
        torch.testing.assert_close(batch[index : index + 1], single, atol=2e-5, rtol=0)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "the control picture is missing"),
    ({"image": 5}, "the control picture cannot be used"),
    ({"image": [sd.image(32, 32)] * 3}, "the control picture has 3 entries for 1 prompts"),
    ({"controlnet_conditioning_scale": [1.0, 0.5]}, "controlnet_conditioning_scale has 2 entries for 1 ControlNets"),
    ({"controlnet_conditioning_scale": "strong"}, "controlnet_conditioning_scale='strong'"),
    ({"control_guidance_start": 0.5, "control_guidance_end": 0.5}, "control_guidance_start=0.5 must be less"),
    ({"control_guidance_end": 1.5}, "control_guidance_end=1.5"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pipe(CONTROLNET)(**CONTROLNET.call("text", **changes))


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a ControlNetModel as controlnet, not NoneType"):
        pipe(CONTROLNET, controlnet=None)(**CONTROLNET.call("text"))
    both = two(CONTROLNET)[0]
    with pytest.raises(ValueError, match="2 ControlNets need a list of 2 control pictures"):
        both(**CONTROLNET.call("text"))
    with pytest.raises(ValueError, match="must be a list of ControlNetModel"):
        diffusion_core.MultiControlNetModel([])
