"""What users write in `device_map` and `max_memory`, on a machine without accelerator; the rest is tested simulated."""

import pytest
import torch
from torch import nn

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.offload.device_map import (
    Budgets,
    collapse,
    find_place,
    place_of,
    read_budgets,
    read_map,
    read_reserve,
    units,
)
from diffusion_core.offload.layout import Layout, read_layout

ZERO, ONE = torch.device("cuda", 0), torch.device("cuda", 1)
CPU = torch.device("cpu")

without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) + x


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight


class Declared(Toy):
    _no_split_modules = ["Block"]  # noqa: RUF012


def test_units_of_a_module():
    found = {unit.names: unit.size for unit in units(Declared())}
    assert found == {
        ("scale",): 12,
        ("first",): 80,
        ("blocks.0",): 128,
        ("blocks.1",): 128,
        ("blocks.2",): 128,
        ("last",): 0,  # tied to the first, counted there
    }
    assert units(Toy()) == units(Declared())
    assert len(units(Declared(), limit=128)) == 6
    # A block that no device can hold is split, though its class asks not to.
    assert len(units(Toy(), limit=127)) == len(units(Declared(), limit=127)) == 9
    assert [unit.piece for unit in units(Declared())] == [12, 80, 64, 64, 64, 64]
    assert sum(unit.size for unit in units(Toy(), lambda name, tensor: tensor.numel())) == 3 + 20 + 96


def test_every_model_class_can_be_spread():
    models = [getattr(diffusion_core, name) for name in diffusion_core.__all__]
    models = [each for each in models if isinstance(each, type) and issubclass(each, diffusion_core.ModelMixin)]
    # A base, lists of models and an old name are not built by themselves.
    lists = {diffusion_core.MultiControlNetModel, diffusion_core.FluxMultiControlNetModel}
    not_built = {diffusion_core.ModelMixin, diffusion_core.Transformer2DModel, *lists}
    for cls in set(models) - not_built:
        with torch.device("meta"):
            model = cls()
        found = units(model)
        assert len(found) > 1
        assert sum(unit.size for unit in found) == model.get_memory_footprint()


def test_collapse_says_the_same_in_fewer_words():
    assert collapse({"": ZERO}) == {"": ZERO}
    assert collapse({"a": ZERO, "b.0": ZERO, "b.1": ZERO}) == {"": ZERO}
    mixed = {"a": ZERO, "b.0.x": ZERO, "b.0.y": ZERO, "b.1": ONE, "b.2": ONE, "bb.c": ONE, "bb.d": ONE}
    assert collapse(mixed) == {"a": ZERO, "b.0": ZERO, "b.1": ONE, "b.2": ONE, "bb": ONE}
    for name, place in mixed.items():
        assert place_of(collapse(mixed), f"{name}.weight") == place


def test_maps_of_users():
    toy = Toy()
    assert read_map({"": "cpu", "blocks.1": "disk"}, toy) == {"": CPU, "blocks.1": "disk"}
    assert place_of({"": CPU, "blocks.1": "disk"}, "blocks.1.a.weight") == "disk"
    assert place_of({"blocks.1": CPU}, "blocks.10.a.weight") is None
    with pytest.raises(ValueError, match=r"scale, first.weight, first.bias and 3 more without any device set"):
        read_map({"blocks.0": "cpu", "blocks.1": "cpu"}, toy)
    with pytest.raises(ValueError, match=r"'blocks.3', which is not there; did you mean blocks"):
        read_map({"": "cpu", "blocks.3": "cpu"}, toy)
    with pytest.raises(PlacementError, match="no values"):
        read_map({"": "meta"}, toy)


@without_accelerator
def test_devices_that_are_not_there():
    with pytest.raises(PlacementError, match=r"no device 0; this machine has no accelerator: write 'cpu'"):
        find_place(0)
    with pytest.raises(PlacementError, match="'cuda:0' is not a device that can be used here"):
        find_place("cuda:0")
    with pytest.raises(PlacementError, match=r"Valid are .*'auto', 'balanced', 'balanced_low_0', 'sequential'"):
        read_layout("auto2", {"": Toy()}, Budgets({}))
    with pytest.raises(ValueError, match="no device -1"):
        read_layout(-1, {"": Toy()}, Budgets({}))
    with pytest.raises(ValueError, match="no device 0"):
        read_budgets({0: "1GB"})


@without_accelerator
def test_budgets():
    assert read_budgets(None) == Budgets({})
    assert read_budgets({"cpu": "30GB"}) == Budgets({}, 30 * 10**9)
    assert read_budgets({"cpu": "30GiB"}) == Budgets({}, 30 * 2**30)
    with pytest.raises(ValueError, match="gpu"):
        read_budgets({"gpu": 1})
    with pytest.raises(ValueError, match=r"max_memory\['cpu'\]"):
        read_budgets({"cpu": "30 parsecs"})
    with pytest.raises(TypeError, match="dict"):
        read_budgets("8GB")  # type: ignore[arg-type]


def test_reserves():
    assert read_reserve(None, ["a"]) == {"a": 0}
    assert read_reserve("1KB", ["a", "b"]) == {"a": 1000, "b": 1000}
    assert read_reserve({"b": 5}, ["a", "b"]) == {"a": 0, "b": 5}
    with pytest.raises(ValueError, match="did you mean unet"):
        read_reserve({"unett": 5}, ["unet"])


def test_layouts_of_strategies():
    parts = {"text": nn.Linear(4, 4, bias=False), "toy": Declared()}
    whole = read_layout("balanced", parts, Budgets({ZERO: 600, ONE: 600}))
    assert whole.places == {"text": {"": ONE}, "toy": {"": ZERO}}
    assert whole.device == ZERO
    halves = read_layout("balanced", parts, Budgets({ZERO: 300, ONE: 300}))
    assert halves.places["toy"] == {
        "scale": ZERO,
        "first": ZERO,
        "blocks.0": ZERO,
        "blocks.1": ONE,
        "blocks.2": ONE,
        "last": ONE,
    }
    assert halves.single is None
    assert read_layout("auto", {"": Toy()}, Budgets({ZERO: 1000})).single == ZERO


def test_what_fits_nowhere_is_at_home_on_the_cpu_then_on_disk_and_said(caplog):
    layout = read_layout("auto", {"unet": Declared()}, Budgets({ZERO: 400}, cpu=150))
    places = layout.places["unet"]
    assert [places[f"blocks.{index}"] for index in range(3)] == [ZERO, CPU, "disk"]
    assert "unet: 128 bytes fit on no device and stay on cpu" in caplog.text
    assert layout.device == ZERO
    everything = read_layout("auto", {"unet": Toy()}, Budgets({}, cpu=10**6))
    assert everything == Layout({"unet": {"": CPU}}, CPU)


def test_layouts_of_dicts():
    parts = {"unet": Toy(), "vae": Block()}
    layout = read_layout({"unet": "cpu", "unet.blocks": "disk", "vae": CPU}, parts, Budgets({}))
    assert layout.flat == {"unet": CPU, "unet.blocks": "disk", "vae": CPU}
    assert layout.shown == {"unet": "cpu", "unet.blocks": "disk", "vae": "cpu"}
    general = read_layout({"": "cpu", "unet.blocks.1": "disk"}, parts, Budgets({}))
    assert general.flat == {"unet": CPU, "unet.blocks.1": "disk", "vae": CPU}
    with pytest.raises(ValueError, match="says nothing about vae"):
        read_layout({"unet": "cpu"}, parts, Budgets({}))
    with pytest.raises(ValueError, match="did you mean vae"):
        read_layout({"unet": "cpu", "va": "cpu"}, parts, Budgets({}))
    with pytest.raises(TypeError, match="names of parts, not 0"):
        read_layout({0: "unet"}, parts, Budgets({}))
