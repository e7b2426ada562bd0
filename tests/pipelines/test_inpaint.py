"""Stable Diffusion inpainting: UNets that see the mask and UNets that do not."""

from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import diffusion_core

from . import sd, tiny
from .sd import difference, fresh, pair, pipe, seeded

NAME = "StableDiffusionInpaintPipeline"
BASE: dict[str, Any] = {
    "prompt": ["red", "cat"],
    "image": sd.image(),
    "mask_image": sd.mask(),
    "num_inference_steps": 3,
    "generator": fresh(seeded),
}


@pytest.mark.parametrize("in_channels", [4, 9])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"strength": 0.7, "guidance_scale": 1.0},
        {"height": 24, "width": 40, "num_images_per_prompt": 2},
        {"latents": torch.randn(2, 4, 8, 8, generator=seeded(4))},
    ],
)
def test_equals_the_reference(in_channels: int, arguments: dict[str, Any]) -> None:
    assert difference(*pair(NAME, in_channels=in_channels), **{**BASE, **arguments}) < 1e-4


@pytest.mark.parametrize("in_channels", [4, 9])
@pytest.mark.parametrize("scheduler", ["EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_other_schedulers_equal_the_reference(scheduler: str, in_channels: int) -> None:
    assert difference(*pair(NAME, scheduler, in_channels), **BASE, strength=0.7) < 1e-4


def test_masked_image_latents_equal_the_reference() -> None:
    latents = torch.randn(1, 4, 8, 8, generator=seeded(2))
    assert difference(*pair(NAME, in_channels=9), **BASE, masked_image_latents=latents) < 1e-4


def test_a_crop_equals_the_reference() -> None:
    arguments = {**BASE, "prompt": "cat", "mask_image": sd.mask(box=(12, 4, 20, 12)), "padding_mask_crop": 3}
    pictures = [np.asarray(each(**{**arguments, "generator": seeded()}).images[0]).astype(int) for each in pair(NAME)]
    assert pictures[0].shape == (40, 36, 3)
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
    # What the mask leaves alone is the picture as it was.
    outside = np.asarray(sd.mask(box=(12, 4, 20, 12))) == 0
    assert np.array_equal(pictures[0][outside], np.asarray(sd.image()).astype(int)[outside])


def test_an_asymmetric_autoencoder_sees_the_surroundings() -> None:
    config = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "down_block_out_channels": (32, 32, 32),
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "up_block_out_channels": (32, 32, 32),
    }
    torch.manual_seed(0)
    theirs = diffusers.AsymmetricAutoencoderKL(**config).eval()
    ours = diffusion_core.AsymmetricAutoencoderKL(**config).eval()
    ours.load_state_dict(theirs.state_dict())
    pipes = pair(NAME)
    pipes[0].vae, pipes[1].vae = ours, theirs
    assert difference(*pipes, **{**BASE, "prompt": "cat", "height": 32, "width": 32}) < 1e-4


@pytest.mark.parametrize("in_channels", [4, 9])
def test_each_picture_of_a_batch_equals_the_one_drawn_alone(in_channels: int) -> None:
    made = pipe(NAME, in_channels=in_channels)
    arguments = {**BASE, "strength": 0.7, "output_type": "pt"}
    generators = [seeded(1), seeded(2)]
    together = made(**{**arguments, "generator": generators}).images
    for index, prompt in enumerate(BASE["prompt"]):
        alone = made(**{**arguments, "prompt": prompt, "generator": seeded(index + 1)}).images
        assert torch.allclose(together[index], alone[0], atol=1e-5)


def test_latents_as_picture() -> None:
    made = pipe(NAME, vae=None)
    arguments = {**BASE, "image": torch.randn(1, 4, 8, 8), "generator": seeded(), "output_type": "latent"}
    made.register_to_config(vae_scale_factor=4)
    latents = made(**arguments).images
    # Outside of the mask they stay what they were.
    assert torch.allclose(latents[0, :, 0], arguments["image"][0, :, 0])


def test_callbacks_see_the_mask() -> None:
    seen: list[Any] = []
    names = ["latents", "mask", "masked_image_latents"]

    def watch(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        seen.append({name: tuple(value.shape) for name, value in tensors.items()})

    arguments = {**BASE, "generator": seeded(), "num_inference_steps": 1, "output_type": "latent"}
    pipe(NAME)(**arguments, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names)
    assert seen == [{"latents": (2, 4, 8, 8), "mask": (2, 1, 8, 8), "masked_image_latents": (2, 4, 8, 8)}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image": None}, "image is missing"),
        ({"mask_image": None}, "mask_image is missing"),
        ({"mask_image": [sd.mask()] * 3}, "mask_image has 3 entries for 2 prompts"),
        ({"mask_image": 5}, "mask_image cannot be used"),
        ({"mask_image": torch.rand(1, 2, 32, 32)}, "mask_image has 2 channels"),
        ({"masked_image_latents": 5}, "masked_image_latents must be a tensor"),
        ({"height": 30}, "height=30 must be a positive multiple of 4"),
        ({"strength": 2}, "strength=2"),
        ({"latents": torch.zeros(1, 4, 8, 8)}, r"expected \(2, 4, 8, 8\)"),
        ({"masked_image_latents": torch.zeros(1, 4, 9, 8)}, r"masked_image_latents has shape"),
        ({"image": torch.zeros(1, 4, 9, 9)}, r"image has shape \(1, 4, 9, 9\), expected \(1, 4, 8, 8\)"),
        ({"padding_mask_crop": -1}, "padding_mask_crop=-1"),
        ({"padding_mask_crop": 4, "output_type": "np"}, "pass output_type='pil'"),
        ({"padding_mask_crop": 4, "image": torch.zeros(3, 32, 32)}, "needs one PIL image as image"),
        ({"padding_mask_crop": 4, "image": sd.image(8, 8)}, "differ in size"),
        ({"padding_mask_crop": 4, "mask_image": sd.mask(box=(0, 0, 0, 0))}, "black everywhere"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pipe(NAME)(**{**BASE, "generator": seeded(), "output_type": "pil", **arguments})


def test_a_unet_that_cannot_inpaint_is_refused() -> None:
    made = pipe(NAME, unet=tiny.unet(diffusion_core, in_channels=5))
    with pytest.raises(ValueError, match="5 input channels; inpainting needs 4, or 9"):
        made(**{**BASE, "generator": seeded()})
