"""Callback objects, ours and the reference's, on both libraries' Stable Diffusion."""

from typing import Any

import diffusers
import numpy as np
import pytest
from diffusers.callbacks import SDCFGCutoffCallback as ReferenceCutoff

from diffusion_core import Pipeline
from diffusion_core.callbacks import MultiPipelineCallbacks, PipelineCallback, SDCFGCutoffCallback

from . import tiny


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("saved")
    there = diffusers.StableDiffusionPipeline(**tiny.components(diffusers, folder), requires_safety_checker=False)
    there.save_pretrained(folder)
    here = Pipeline.from_pretrained(folder)
    for pipe in (here, there):
        pipe.set_progress_bar_config(disable=True)
    return here, there


def pictures(pipe: Any, callback: Any, prompt: str | list[str] = "red cat") -> np.ndarray:
    options = {"callback_on_step_end_tensor_inputs": ["prompt_embeds"]} if callback else {}
    return pipe(
        prompt,
        num_inference_steps=5,
        latents=tiny.noise(len(prompt) if isinstance(prompt, list) else 1),
        callback_on_step_end=callback,
        output_type="np",
        **options,
    ).images


def halve(pipe, step, timestep, tensors):
    """What the documentation of the reference shows."""
    if step == int(pipe.num_timesteps * 0.4):
        tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
        pipe._guidance_scale = 0.0
    return tensors


@pytest.mark.parametrize("callback", [halve, ReferenceCutoff(0.4)], ids=["function", "object"])
def test_callbacks_of_the_reference_end_guidance(pipes, callback) -> None:
    here, there = pipes
    found = pictures(here, callback)
    np.testing.assert_allclose(found, pictures(there, callback), atol=1e-4)
    assert np.abs(found - pictures(here, None)).max() > 1e-4


@pytest.mark.parametrize("cutoff", [SDCFGCutoffCallback(0.4), SDCFGCutoffCallback(cutoff_step_index=2)])
def test_our_cutoff_does_the_same(pipes, cutoff) -> None:
    here, there = pipes
    np.testing.assert_allclose(pictures(here, cutoff), pictures(there, halve), atol=1e-4)
    both = MultiPipelineCallbacks([PipelineCallback(), cutoff])
    assert both.tensor_inputs == ["prompt_embeds"]
    np.testing.assert_array_equal(pictures(here, both), pictures(here, cutoff))


def test_a_cutoff_keeps_every_prompt(pipes) -> None:
    """The reference's object fails with two prompts, for it keeps the last one alone."""
    here, _ = pipes
    found = pictures(here, SDCFGCutoffCallback(0.4), ["red cat", "red car"])
    np.testing.assert_allclose(found, pictures(here, halve, ["red cat", "red car"]), atol=1e-6)
    assert len(found) == 2


def test_a_cutoff_without_guidance_or_at_the_end_changes_nothing(pipes) -> None:
    here, _ = pipes
    np.testing.assert_array_equal(pictures(here, SDCFGCutoffCallback()), pictures(here, None))
    plain = {"num_inference_steps": 2, "latents": tiny.noise(1), "guidance_scale": 1.0, "output_type": "np"}
    cut = here("red", callback_on_step_end=SDCFGCutoffCallback(0.5), **plain).images
    np.testing.assert_array_equal(cut, here("red", **plain).images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cutoff_step_ratio": 0.4, "cutoff_step_index": 3}, "pass one of them"),
        ({"cutoff_step_ratio": 1.5}, "from 0.0 to 1.0"),
        ({"cutoff_step_index": -1}, "must not be negative"),
    ],
)
def test_cutoffs_that_make_no_sense(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        SDCFGCutoffCallback(**arguments)
