"""Pictures that become embeddings of prompts for FLUX.1, under a memory mode of each kind."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from diffusion_core.offload.simulator import simulator, unavailable
from tests.pipelines import test_flux_redux
from tests.pipelines.sd import image

from .test_families import CAPACITY
from .test_pipeline_modes import MODES, undo

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


def own_parts(made: Any) -> dict[str, Any]:
    """Copies of the components, which tests share."""
    return {
        name: deepcopy(part) if isinstance(part, torch.nn.Module) else part for name, part in made.components.items()
    }


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
