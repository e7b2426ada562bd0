"""FLUX.1 steered by a ControlNet, against the reference."""

import inspect
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from .flux import SIDE, controlnets, pair, pipe, vaes
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


# ---- several ----


def several(*nets: dict[str, Any]) -> tuple[Any, Any]:
    """Pipelines with a ControlNet of each of these configs."""
    made = pair(NAME, net=nets[0])
    others = [controlnets(**changes) for changes in nets]
    found = [
        type(one)(**{**one.components, "controlnet": [net[side] for net in others]}) for side, one in enumerate(made)
    ]
    for one in found:
        one.set_progress_bar_config(disable=True)
    return found[0], found[1]


TWO = {"control_image": [image(), image(seed=5)], "controlnet_conditioning_scale": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("nets", "changes"),
    [
        (({}, {}), {}),
        (({}, {"num_single_layers": 0}), {"negative_prompt": "ugly", "true_cfg_scale": 3.0}),
        (({}, {}), {"control_guidance_start": [0.0, 0.5], "control_guidance_end": [0.5, 1.0]}),
        (({}, {}), {"controlnet_conditioning_scale": [0.0, 0.7]}),
        ((UNION, {}), {"control_mode": [1, None]}),
        # Without lists of start and end, one union ControlNet looks at the first picture only, in the reference.
        (
            (UNION,),
            {"control_mode": [0, 2], "control_guidance_start": [0.0] * 2, "control_guidance_end": [1.0] * 2},
        ),
        (
            ({}, {}),
            {
                "prompt": ["a cat", "a dog"],
                "control_image": [[image(), image(seed=2)], [image(seed=3), image(seed=4)]],
            },
        ),
    ],
)
def test_several_agree_with_the_reference(nets: Any, changes: dict[str, Any]) -> None:
    ours, theirs = several(*nets)
    assert isinstance(ours.controlnet, diffusion_core.FluxMultiControlNetModel)
    given = arguments(**{"control_mode": [None] * 2, **TWO, **changes})
    assert difference(ours, theirs, **given) < 1e-4


@pytest.mark.parametrize(
    ("nets", "modes"), [(({}, {}), [torch.tensor([-1])] * 2), ((UNION,), [torch.tensor([0]), torch.tensor([2])])]
)
def test_the_models_agree(nets: Any, modes: list[Any]) -> None:
    ours, theirs = (made.controlnet for made in several(*nets))
    assert set(ours.state_dict()) == set(theirs.state_dict())
    source = seeded(3)
    given = {
        "hidden_states": torch.randn(1, 16, 16, generator=source),
        "controlnet_cond": [torch.randn(1, 16, 16, generator=source) for _ in range(2)],
        "controlnet_mode": modes,
        "conditioning_scale": [0.5, 2.0],
        "encoder_hidden_states": torch.randn(1, 5, 32, generator=source),
        "pooled_projections": torch.randn(1, 32, generator=source),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    with torch.no_grad():
        found, expected = ours(**given, return_dict=False), theirs(**given, return_dict=False)
    for ones, others in zip(found, expected, strict=True):
        for one, other in zip(ones, others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert isinstance(ours(**given).controlnet_block_samples, list)


def test_one_strength_serves_all() -> None:
    ours, _ = several({}, {})
    pictures = [
        ours(**{**arguments(**TWO, output_type="pt"), "generator": seeded(), "controlnet_conditioning_scale": scale})
        for scale in (0.5, [0.5, 0.5])
    ]
    assert torch.equal(pictures[0].images, pictures[1].images)


def test_several_are_saved_and_loaded(tmp_path: Any) -> None:
    ours, _ = several({}, {"num_single_layers": 0})
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "controlnet_1" / "config.json").is_file()
    again = diffusion_core.Pipeline.from_pretrained(tmp_path)
    assert [net.config.num_single_layers for net in again.controlnet.nets] == [1, 0]
    given = [{**arguments(**TWO, output_type="pt"), "generator": seeded()} for _ in range(2)]
    assert torch.allclose(again(**given[0]).images, ours(**given[1]).images, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"control_image": image()}, "2 ControlNets need a list of 2 control pictures"),
        ({"control_image": [image()]}, "2 ControlNets need a list of 2"),
        ({"control_mode": [1]}, "control_mode has 1 entries for 2 ControlNets"),
        ({"control_mode": [None, 1]}, "control_mode=1 must be None"),
        ({"controlnet_conditioning_scale": [1.0]}, "controlnet_conditioning_scale has 1 entries for 2"),
        ({"control_guidance_end": [1.0, 0.0]}, "control_guidance_start=0.0 must be less"),
    ],
)
def test_wrong_lists_are_refused(changes: dict[str, Any], word: str) -> None:
    ours, _ = several({}, {})
    with pytest.raises(ValueError, match=word):
        ours(**{**arguments(**{**TWO, **changes}), "generator": seeded()})


def test_what_is_no_controlnet_is_refused() -> None:
    made = pipe(NAME)
    with pytest.raises(ValueError, match="controlnets must be a list of FluxControlNetModel"):
        diffusion_core.FluxControlNetPipeline(**{**made.components, "controlnet": [made.transformer]})
    with pytest.raises(ValueError, match="controlnet_mode has 1 entries for 2"):
        net = diffusion_core.FluxMultiControlNetModel([made.controlnet] * 2)
        net(torch.zeros(1, 4, 16), [torch.zeros(1, 4, 16)] * 2, [None], [1.0, 1.0])
