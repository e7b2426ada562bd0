"""FLUX.1 steered by a ControlNet, against the reference."""

import inspect
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from .flux import SIDE, pair, pipe, vaes
from .sd import difference, fresh, image, seeded

NAME = "FluxControlNetPipeline"
UNION = {"num_mode": 3}

GUIDED = {"guidance_embeds": True}


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "prompt": "a red cat",
        "height": SIDE,
        "width": 2 * SIDE,
        "num_inference_steps": 4,
        "max_sequence_length": 12,
        "control_image": image(),
        "generator": fresh(seeded),
        **changes,
    }


@pytest.mark.parametrize(
    ("net", "changes"),
    [
        ({}, {}),
        (GUIDED, {"controlnet_conditioning_scale": 0.6}),
        ({"num_single_layers": 0}, {"prompt": ["a cat", "a dog"], "num_images_per_prompt": 2}),
        (UNION, {"control_mode": 2}),
        ({}, {"control_guidance_start": 0.25, "control_guidance_end": 0.75}),
        ({}, {"negative_prompt": "ugly", "true_cfg_scale": 3.0}),
    ],
)
@pytest.mark.parametrize("scheduler", ["dynamic", "static"])
def test_agrees_with_the_reference(scheduler: str, net: dict[str, Any], changes: dict[str, Any]) -> None:
    ours, theirs = pair(NAME, scheduler, net=net)
    assert difference(ours, theirs, **arguments(**changes)) < 1e-4


def test_one_that_reads_pixels_agrees() -> None:
    pipes = pair(NAME, net={"conditioning_embedding_channels": 4, "patch_size": 2})
    # Its convolutions make an eighth of the size, as real autoencoders do.
    made = [type(one)(**{**one.components, "vae": vae}) for one, vae in zip(pipes, vaes(levels=4), strict=True)]
    for one in made:
        one.set_progress_bar_config(disable=True)
    assert difference(*made, **arguments(height=64, width=96)) < 1e-4


def test_arguments_are_the_reference_s() -> None:
    for method in ("__init__", "__call__"):
        found, expected = (
            [
                (each.name, tuple(each.default) if isinstance(each.default, list) else each.default)
                for each in inspect.signature(getattr(getattr(library, NAME), method)).parameters.values()
            ]
            for library in (diffusion_core, diffusers)
        )
        assert found == expected
    assert pipe(NAME)._callback_tensor_inputs == diffusers.FluxControlNetPipeline._callback_tensor_inputs


def test_without_strength_it_is_the_plain_pipeline() -> None:
    given = arguments(output_type="pt", controlnet_conditioning_scale=0.0, generator=None)
    latents = torch.randn(1, 128, 16, generator=seeded(5))
    steered = pipe(NAME)(**{**given, "latents": latents}).images
    plain = {
        name: value for name, value in given.items() if name not in ("control_image", "controlnet_conditioning_scale")
    }
    assert torch.allclose(pipe()(**{**plain, "latents": latents, "guidance_scale": 7.0}).images, steered, atol=1e-6)


def test_saves_and_loads(tmp_path: Any) -> None:
    ours, theirs = pair(NAME)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = diffusion_core.Pipeline.from_pretrained(tmp_path / "theirs")
    assert type(loaded) is diffusion_core.FluxControlNetPipeline
    assert difference(loaded, diffusers.FluxControlNetPipeline.from_pretrained(tmp_path / "ours"), **arguments()) < 1e-4


@pytest.mark.parametrize(
    ("net", "changes", "word"),
    [
        ({}, {"control_image": None}, "control_image"),
        ({}, {"control_mode": 1}, "control_mode"),
        (UNION, {}, "control_mode=None must be a whole number from 0 to 2"),
        (UNION, {"control_mode": 3}, "control_mode"),
        ({}, {"control_guidance_start": 0.5, "control_guidance_end": 0.5}, "control_guidance_start"),
        ({}, {"control_guidance_end": 1.5}, "control_guidance_end"),
        ({}, {"controlnet_conditioning_scale": float("nan")}, "controlnet_conditioning_scale"),
        ({}, {"ip_adapter_image": image()}, "ip_adapter_image"),
    ],
)
def test_wrong_arguments_are_refused(net: dict[str, Any], changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pipe(NAME, net=net)(**{**arguments(**changes), "generator": seeded()})


def test_one_is_taken() -> None:
    made = pipe(NAME)
    with pytest.raises(TypeError, match="controlnet"):
        diffusion_core.FluxControlNetPipeline(**{**made.components, "controlnet": [made.controlnet]})
