"""DDPM and DDIM pipelines, with the reference beside them."""

import inspect
from functools import cache
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from .sd import seeded


@cache
def unets() -> tuple[Any, Any]:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    config = {"sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, **blocks}
    theirs = diffusers.UNet2DModel(**config).eval()
    ours = diffusion_core.UNet2DModel(**config).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def pair(name: str, scheduler: str = "DDPMScheduler") -> list[Any]:
    made = []
    for library, unet in zip((diffusion_core, diffusers), unets(), strict=True):
        made.append(getattr(library, name)(unet=unet, scheduler=getattr(library, scheduler)()))
        made[-1].set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("name", ["DDPMPipeline", "DDIMPipeline"])
def test_arguments_and_defaults_are_those_of_the_reference(name: str) -> None:
    for method in ("__init__", "__call__"):
        theirs = inspect.signature(getattr(getattr(diffusers, name), method)).parameters
        ours = inspect.signature(getattr(getattr(diffusion_core, name), method)).parameters
        assert {key: each.default for key, each in ours.items()} == {key: each.default for key, each in theirs.items()}


@pytest.mark.parametrize("generator", [seeded, lambda: [seeded(1), seeded(2)]])
@pytest.mark.parametrize("name", ["DDPMPipeline", "DDIMPipeline"])
def test_equals_the_reference(name: str, generator: Any) -> None:
    ours, theirs = pair(name)
    arguments = {"batch_size": 2, "num_inference_steps": 3}
    images = torch.from_numpy(theirs(**arguments, generator=generator(), output_type="np").images)
    drawn = ours(**arguments, generator=generator(), output_type="pt").images
    assert torch.allclose(drawn.permute(0, 2, 3, 1), images, atol=1e-4)


@pytest.mark.parametrize("options", [{"eta": 0.5}, {"use_clipped_model_output": True, "eta": 1.0}])
def test_options_of_ddim_equal_the_reference(options: dict[str, Any]) -> None:
    ours, theirs = pair("DDIMPipeline", "DDIMScheduler")
    shared = {"num_inference_steps": 3, "output_type": "np", **options}
    drawn, expected = (torch.from_numpy(each(generator=seeded(), **shared).images) for each in (ours, theirs))
    assert torch.allclose(drawn, expected, atol=1e-4)


def test_ddim_takes_the_config_of_another_scheduler() -> None:
    assert type(pair("DDIMPipeline")[0].scheduler) is diffusion_core.DDIMScheduler


def test_output_types() -> None:
    made = pair("DDPMPipeline")[0]
    assert made(num_inference_steps=1).images[0].size == (8, 8)
    assert made(num_inference_steps=1, output_type="np", return_dict=False)[0].shape == (1, 8, 8, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"output_type": "latent"}, "output_type='latent'"),
        ({"generator": [seeded()], "batch_size": 2}, "list of 1, but 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair("DDPMPipeline")[0](**arguments)
