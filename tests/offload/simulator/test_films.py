"""Films under memory modes: autoencoders that decode and encode in tiles, sliced, from the first call on."""

import pytest
import torch

import diffusion_core
from diffusion_core.offload.simulator import simulator, unavailable
from tests.pipelines import cogvideo
from tests.pipelines.families import COGVIDEOX, FAMILIES, Family, loaded

from .test_families import CAPACITY
from .test_pipeline_modes import MODES, allocated, undo

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
FILMS = [family for family in FAMILIES if family.frames is not None]
# Films are cut in two in height and in time.
TILES = {"tile_sample_min_height": 24, "tile_sample_min_num_frames": 8}


def film(family: Family, made) -> torch.Tensor:
    made.vae.enable_tiling(**TILES)
    made.vae.enable_slicing()
    return made(**family.call(family.main))[0].cpu()


@pytest.mark.parametrize("mode", ["leaf, streams", "two blocks, streams"])
@pytest.mark.parametrize("family", FILMS, ids=str)
def test_tiles_and_streams_go_together_from_the_first_call_on(family: Family, mode: str) -> None:
    """Case 55. The reference needs a run without tiles before one with them."""
    plain = loaded(family)
    wanted = film(family, plain)
    assert wanted.shape == family.shape()
    with simulator(devices=2, capacity=CAPACITY) as sim:
        made = loaded(family)
        MODES[mode](made)
        torch.testing.assert_close(film(family, made), wanted, atol=2e-5, rtol=0)
        assert allocated(sim) == [0, 0]
        undo(made)


def test_model_offload_moves_each_weight_once_also_where_modulation_is_made_before_the_run() -> None:
    # Its layers have norms that stay among the other weights; these must not come in for each of them.
    made = diffusion_core.CogVideoXPipeline(**cogvideo.parts(diffusion_core, time_embed_dim=64))
    made.set_progress_bar_config(disable=True)
    parts = (made.text_encoder, made.transformer, made.vae)
    weights = sum(each.numel() * each.element_size() for part in parts for each in part.parameters())
    with simulator(devices=1, capacity=CAPACITY) as sim:
        made.enable_model_cpu_offload()
        made(**COGVIDEOX.call("text"))
        assert weights <= sim.statistics(0).h2d < 1.1 * weights
