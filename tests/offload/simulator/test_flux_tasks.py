"""The tasks of FLUX.1 that only this family has, under a memory mode of each kind."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from diffusion_core.offload.simulator import simulator, unavailable
from tests.pipelines import test_flux, test_flux_controlnet, test_flux_redux
from tests.pipelines.flux import pipe
from tests.pipelines.sd import image

from .test_families import CAPACITY
from .test_pipeline_modes import MODES, allocated, undo

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
NAMES = ["FluxFillPipeline", "FluxKontextPipeline", "FluxControlPipeline", "FluxControlNetPipeline"]


def own_parts(made: Any) -> dict[str, Any]:
    """Copies of the components, which tests share."""
    return {
        name: deepcopy(part) if isinstance(part, torch.nn.Module) else part for name, part in made.components.items()
    }


def draw(made: Any, name: str) -> torch.Tensor:
    steered = name == test_flux_controlnet.NAME
    given = test_flux_controlnet.arguments() if steered else test_flux.arguments(name)
    given = {key: value() if getattr(value, "fresh", False) else value for key, value in given.items()}
    return made(**{**given, "num_inference_steps": 2, "output_type": "pt"}).images.cpu()


@pytest.mark.parametrize("mode", ["model", "sequential", "two blocks, streams"])
@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_that_of_the_cpu(name: str, mode: str) -> None:
    plain = pipe(name)
    wanted = draw(plain, name)
    with simulator(devices=2, capacity=CAPACITY) as sim:
        made = type(plain)(**own_parts(plain))
        made.set_progress_bar_config(disable=True)
        MODES[mode](made)
        for _ in range(2):
            assert torch.equal(draw(made, name), wanted)
        assert allocated(sim) == [0, 0]
        undo(made)


@pytest.mark.parametrize("mode", ["model", "sequential", "two blocks, streams"])
def test_pictures_are_read_as_on_the_cpu(mode: str) -> None:
    plain, _ = test_flux_redux.pair()
    given = {"image": image(), "prompt": "a red cat", "return_dict": False}
    wanted = plain(**given)
    with simulator(devices=2, capacity=CAPACITY):
        made = type(plain)(**own_parts(plain))
        MODES[mode](made)
        for one, other in zip(made(**given), wanted, strict=True):
            assert torch.equal(one.cpu(), other)
        undo(made)
