"""`LTXConditionPipeline`: against the reference, and on input that does not fit."""

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.ltx import pipeline_ltx_condition

import diffusion_core
from diffusion_core import LTXConditionPipeline, LTXVideoCondition
from diffusion_core.pipelines.ltx.condition import linear_quadratic_levels

from . import ltx, sd

PICTURES = [sd.image(32, 32), sd.image(40, 50, seed=3)]
FILM = [sd.image(32, 32, seed=index) for index in range(20)]
LATENTS = torch.randn(1, 8, 5, 4, 4, generator=sd.seeded(7))


def make(library: Any) -> Any:
    parts = {**ltx.timed_parts(library), "scheduler": library.FlowMatchEulerDiscreteScheduler()}
    made = library.LTXConditionPipeline(**parts)
    made.set_progress_bar_config(disable=True)
    return made


def call(made: Any, **changes: Any) -> Any:
    arguments = {
        "prompt": ["a red cat"],
        "negative_prompt": ["ugly"],
        "num_inference_steps": 5,
        "output_type": "pt",
        "max_sequence_length": ltx.LENGTH,
        "height": 32,
        "width": 32,
        "num_frames": 17,
        "decode_timestep": 0.05,
        "generator": sd.seeded(),
        **changes,
    }
    return made(**arguments)


def several(condition: Callable[..., Any]) -> list[Any]:
    return [condition(image=PICTURES[0]), condition(video=FILM, frame_index=4, strength=0.7)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image": PICTURES[1], "guidance_scale": 1.0},
        {"image": PICTURES[0], "image_cond_noise_scale": 0.0, "frame_rate": 10, "guidance_rescale": 0.5},
        {"image": PICTURES[0], "frame_index": 8, "output_type": "latent"},
        {"video": [FILM], "frame_index": [4]},
        {"conditions": several},
        {"latents": LATENTS, "denoise_strength": 0.6, "image": PICTURES[0]},
    ],
    ids=["text", "first", "quiet", "later", "film", "several", "edit"],
)
def test_films_are_those_of_the_reference(changes: dict[str, Any]) -> None:
    ours, theirs = make(diffusion_core), make(diffusers)
    for name in ("vae", "transformer"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    given = [changes, changes]
    if "conditions" in changes:
        kinds = (LTXVideoCondition, pipeline_ltx_condition.LTXVideoCondition)
        given = [{"conditions": changes["conditions"](kind)} for kind in kinds]
    found, wanted = (call(made, **each).frames for made, each in zip((ours, theirs), given, strict=True))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_noise_levels_are_the_reference_s(count: int) -> None:
    wanted = pipeline_ltx_condition.linear_quadratic_schedule(count)
    torch.testing.assert_close(torch.tensor(linear_quadratic_levels(count)), wanted, rtol=0, atol=1e-6)


def test_arguments_and_defaults_are_those_of_the_reference() -> None:
    ours, theirs = (
        inspect.signature(each.__call__).parameters for each in (LTXConditionPipeline, diffusers.LTXConditionPipeline)
    )
    assert list(ours) == list(theirs)
    for name, each in ours.items():
        default = list(each.default) if each.default == ("latents",) else each.default
        assert default == theirs[name].default, name


def test_lists_of_pictures_are_all_shown() -> None:
    """The reference drops all but the first."""
    made = make(diffusion_core)
    listed = call(made, image=PICTURES, frame_index=[0, 8], strength=[1.0, 0.5]).frames
    conditions = [LTXVideoCondition(PICTURES[0]), LTXVideoCondition(PICTURES[1], frame_index=8, strength=0.5)]
    assert torch.equal(listed, call(made, conditions=conditions).frames)


def test_several_prompts_with_their_generators() -> None:
    made = make(diffusion_core)
    shown = {"conditions": several(LTXVideoCondition)}
    films = call(
        made, prompt=["a dog", "a red cat"], negative_prompt="ugly", **shown, generator=[sd.seeded(1), sd.seeded()]
    ).frames
    assert torch.allclose(films[1:], call(made, **shown).frames, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": PICTURES[0], "frame_index": 17}, "frame_index=17 must be a frame of the film, from 0 to 16"),
        ({"image": PICTURES[0], "strength": 2.0}, "strength=2.0"),
        ({"image": PICTURES[0], "video": FILM}, "image and video exclude each other"),
        ({"image": PICTURES[0], "conditions": LTXVideoCondition(PICTURES[0])}, "conditions exclude image"),
        ({"conditions": LTXVideoCondition()}, "either an image or a video"),
        ({"image": PICTURES, "frame_index": [0]}, "frame_index has 1 entries for 2"),
        ({"denoise_strength": 0.5}, "pass these"),
        ({"latents": LATENTS[:, :4]}, "latents has shape"),
        ({"image_cond_noise_scale": float("nan")}, "image_cond_noise_scale"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    made = make(diffusion_core)
    with pytest.raises((TypeError, ValueError), match=words):
        call(made, **changes)


def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    made = make(diffusion_core)
    made.save_pretrained(tmp_path)
    again = diffusion_core.Pipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again) is LTXConditionPipeline
    torch.testing.assert_close(
        call(again, image=PICTURES[0]).frames, call(made, image=PICTURES[0]).frames, atol=2e-5, rtol=0
    )
