"""`plan_memory` says which mode fits into a budget, and `fit_memory` applies it: same numbers, within the budget."""

import pytest
import torch

from diffusion_core.errors import PlacementError
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.simulator import simulator, unavailable
from tests.offload.drawing import allocated, draw, expected, load

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
NAMES = ["all on the device", "model offload", "blocks, stream", "leaves, stream", "leaves"]
ROOM = 1_500_000  # bytes for what is computed


@pytest.mark.parametrize("name", NAMES)
def test_each_mode_is_chosen_when_it_just_fits(name):
    whole = expected()
    with simulator(capacity="1GB") as sim:
        pipe = load()
        options = pipe.plan_memory("1GB").options
        assert [option.name for option in options] == NAMES
        option = options[NAMES.index(name)]
        budget = option.least + ROOM
        if any(other.least <= option.least for other in options[: NAMES.index(name)]):
            pytest.skip("in a model this small, a faster mode takes no more")
        assert placement_of(pipe.unet) is None
        plan = pipe.fit_memory(budget, reserve=ROOM)
        assert plan.chosen is not None and plan.chosen.name == name and plan.chosen.most <= option.least
        for _ in range(3):
            assert torch.equal(draw(pipe), whole)
        assert sim.statistics().peak <= budget
        assert pipe.device == torch.device("sim:0")
        pipe.remove_all_hooks()
        assert torch.equal(draw(pipe), whole) and allocated(sim) == [0]


def test_spare_room_keeps_a_part_of_the_denoiser_there():
    whole = expected()
    with simulator(capacity="1GB") as sim:
        pipe = load()
        blocks = pipe.plan_memory("1GB").options[2]
        model = pipe.plan_memory("1GB").options[1]
        room = (blocks.least + model.least) // 2
        plan = pipe.fit_memory(room + ROOM, reserve=ROOM)
        assert plan.chosen is not None and plan.chosen.name == "blocks, stream"
        assert blocks.least < plan.chosen.most <= room
        denoiser = sum(parameter.nbytes for parameter in pipe.unet.parameters())
        assert plan.chosen.moved == denoiser - (plan.chosen.most - blocks.least)
        draw(pipe)
        before = sim.statistics().h2d
        resident = allocated(sim)[0]
        assert 0 < resident <= room
        assert torch.equal(draw(pipe), whole)
        others = sum(p.nbytes for part in (pipe.text_encoder, pipe.vae) for p in part.parameters())
        assert plan.chosen.moved <= sim.statistics().h2d - before <= plan.chosen.moved + others + 100_000


def test_what_fits_nowhere_is_refused_and_changes_nothing():
    with simulator(capacity="1GB"):
        pipe = load()
        with pytest.raises(PlacementError, match=r"no memory mode fits .* leaves takes the least.*raise memory to"):
            pipe.fit_memory("100KB")
        assert placement_of(pipe.unet) is None and pipe.device == torch.device("cpu")
        text = str(pipe.plan_memory("100KB"))
        assert text.count("does not fit") == 5 and "at least" in text
        assert "chosen" in str(pipe.plan_memory("1GB"))
        with pytest.raises(ValueError, match="leaves nothing"):
            pipe.fit_memory("1GB", reserve="2GB")
        with pytest.raises(ValueError, match="memory"):
            pipe.plan_memory("plenty")
        assert pipe.plan_memory().memory == 1_000_000_000  # what is free


def test_it_replaces_a_mode_is_replaced_and_refuses_a_device_map():
    whole = expected()
    with simulator(devices=2, capacity="1GB") as sim:
        pipe = load()
        pipe.enable_sequential_cpu_offload()
        pipe.fit_memory("1GB", "sim:1")
        assert pipe.device == torch.device("sim:1") and torch.equal(draw(pipe), whole)
        with pytest.raises(PlacementError, match=r"a memory budget.*remove_all_hooks\(\)"):
            pipe.to("sim:0")
        pipe.enable_model_cpu_offload()
        assert torch.equal(draw(pipe), whole) and allocated(sim) == [0, 0]
        mapped = load(device_map="balanced", max_memory={0: 4_000_000, 1: 4_000_000})
        with pytest.raises(PlacementError, match=r"reset_device_map\(\)"):
            mapped.fit_memory("1GB")
