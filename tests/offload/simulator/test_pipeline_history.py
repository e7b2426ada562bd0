"""Whatever is done to a pipeline, in whatever order: it draws what a twin on the CPU draws, bit by bit.

The twin is never placed. Casting, layouts, tiles and dtypes are applied to both.
"""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.simulator import simulator, unavailable
from tests.offload.drawing import CAPACITY, MODES, allocated, draw, load, saved, undo

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
MAPS = ("balanced", "auto", "sequential", {"": 0, "unet.up_blocks": 1, "vae": 1}, {"unet": 1, "": "disk"})
LIMITS = {0: "4.2MB", 1: "3.9MB"}
PARTS = ("unet", "vae", "text_encoder")

modes = st.tuples(st.just("mode"), st.sampled_from(sorted(MODES)))
maps = st.tuples(st.just("map"), st.sampled_from(MAPS))
changes = st.tuples(
    st.sampled_from(["cast", "layout", "tiles", "slices"]), st.sampled_from(["plain", "int8", "fp8_scaled"])
)
plain = st.tuples(st.sampled_from(["undo", "fail", "reload", "uncast"]), st.none())
steps = st.lists(
    st.tuples(modes | maps | changes | plain, st.integers(1, 2), st.sampled_from([32, 40])), min_size=2, max_size=4
)


class History:
    """A pipeline and its twin on the CPU."""

    def __init__(self, sim) -> None:
        self.sim, self.pipe, self.twin = sim, load(), load()

    def mode(self, name: str) -> None:
        placed = any(placement_of(getattr(self.pipe, part)) for part in PARTS)
        mapped = self.pipe.hf_device_map is not None
        if placed and (mapped or name == "on the device"):
            with pytest.raises(PlacementError, match=r"call \w+\(\) first"):
                MODES[name](self.pipe)
            self.undo()
        MODES[name](self.pipe)

    def map(self, device_map) -> None:
        """Maps are for loading, so it is saved and loaded; casting and layouts are not saved, or only partly."""
        limits = {"max_memory": LIMITS} if isinstance(device_map, str) else {}
        self.reload(device_map=device_map, **limits)

    def undo(self, _=None) -> None:
        undo(self.pipe)
        self.pipe.reset_device_map()
        self.pipe.to("cpu")
        assert not any(placement_of(getattr(self.pipe, part)) for part in PARTS)
        assert allocated(self.sim) == [0, 0]

    def fail(self, _=None) -> None:
        def stop(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            draw(self.pipe, callback_on_step_end=stop)

    def reload(self, _=None, **options) -> None:
        with TemporaryDirectory() as folder:
            for name, more in (("pipe", options), ("twin", {})):
                getattr(self, name).save_pretrained(Path(folder) / name)
                # Two of them do not fit on the devices.
                setattr(self, name, None)
                gc.collect()
                again = diffusion_core.StableDiffusionPipeline.from_pretrained(Path(folder) / name, **more)
                again.set_progress_bar_config(disable=True)
                setattr(self, name, again)
            ours, right = Path(folder) / "pipe", Path(folder) / "twin"
            for path in right.rglob("*.safetensors"):
                assert path.read_bytes() == (ours / path.relative_to(right)).read_bytes()

    def cast(self, storage: str) -> None:
        if any(getattr(self.pipe, part).device.type != "cpu" for part in PARTS) and self.resident():
            # What is only on the device has no file to come back from.
            self.undo()
            self.reload()
        for pipe in (self.pipe, self.twin):
            pipe.unet.enable_layerwise_casting(storage=storage)

    def resident(self) -> bool:
        placements = [placement_of(getattr(self.pipe, part)) for part in PARTS]
        return self.pipe.hf_device_map is not None or any(each is None or each.resident_bytes for each in placements)

    def uncast(self, _=None) -> None:
        for pipe in (self.pipe, self.twin):
            pipe.unet.disable_layerwise_casting()

    def layout(self, _=None) -> None:
        for pipe in (self.pipe, self.twin):
            pipe.unet.to(memory_format=torch.channels_last)

    def tiles(self, _=None) -> None:
        for pipe in (self.pipe, self.twin):
            pipe.vae.enable_tiling(24, 24)

    def slices(self, _=None) -> None:
        for pipe in (self.pipe, self.twin):
            pipe.vae.enable_slicing()

    def compare(self, batch: int, height: int) -> None:
        right = draw(self.twin, batch, height)
        for _ in range(2):
            assert torch.equal(draw(self.pipe, batch, height), right)


def run(history) -> None:
    saved()
    with simulator(devices=2, capacity=CAPACITY) as sim:
        both = History(sim)
        for (action, argument), batch, height in history:
            getattr(both, action)(argument)
            both.compare(batch, height)
        both.undo()
        both.compare(1, 32)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps)
def test_any_history(history) -> None:
    run(history)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps)
def test_many_histories(history) -> None:
    run(history)
