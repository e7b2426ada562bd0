"""Pipelines and models that are spread over simulated devices: the same numbers as on the CPU, and where things are."""

import gc
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.offload.device_map import Budgets, read_budgets
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.simulator import simulator, unavailable
from tests.pipelines import tiny

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
CPU = torch.device("cpu")
UNET_BYTES = 3_876_752


@cache
def saved() -> Path:
    folder = Path(mkdtemp())
    parts = tiny.components(diffusion_core, folder)
    diffusion_core.StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(folder / "saved")
    return folder / "saved"


def load(**options):
    pipe = diffusion_core.DiffusionPipeline.from_pretrained(saved(), **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe) -> torch.Tensor:
    return pipe("cat", num_inference_steps=1, latents=tiny.noise(1), output_type="pt").images.cpu()


@cache
def expected() -> torch.Tensor:
    return draw(load())


@pytest.fixture
def sim(request):
    expected()
    capacity = getattr(request, "param", "1GB")
    with simulator(devices=2, capacity=capacity) as running, torch.no_grad():
        yield running


def allocated(sim) -> list[int]:
    gc.collect()
    return [sim.statistics(index).allocated for index in range(sim.device_count)]


# ---- pipelines ----


@pytest.mark.parametrize(
    ("device_map", "max_memory", "places"),
    [
        ("balanced", None, {"text_encoder": 1, "unet": 0, "vae": 1}),
        ("auto", None, {"text_encoder": 0, "unet": 0, "vae": 0}),
        ("sequential", {0: "3.5MB", 1: "4MB"}, {"text_encoder": 0, "unet": 1, "vae": 0}),
        ("auto", {1: "1GB"}, {"text_encoder": 1, "unet": 1, "vae": 1}),
        (
            {"unet": 0, "vae": "sim:1", "text_encoder": 1},
            None,
            {"text_encoder": 1, "unet": 0, "vae": 1},
        ),
        ({"": 0, "unet.up_blocks": 1}, None, {"text_encoder": 0, "unet": 0, "unet.up_blocks": 1, "vae": 0}),
        ({"unet": 1, "vae": "cpu", "text_encoder": "disk"}, None, {"text_encoder": "disk", "unet": 1, "vae": "cpu"}),
        ("balanced", {0: 0, 1: 0}, {"text_encoder": "cpu", "unet": "cpu", "vae": "cpu"}),
    ],
)
def test_pipelines_over_devices(sim, device_map, max_memory, places):
    pipe = load(device_map=device_map, max_memory=max_memory)
    assert pipe.hf_device_map == places
    for _ in range(3):
        assert torch.equal(draw(pipe), expected())
    used = {place for place in places.values() if isinstance(place, int)}
    assert [size > 0 for size in allocated(sim)] == [index in used for index in (0, 1)]
    pipe.reset_device_map()
    assert pipe.hf_device_map is None
    assert allocated(sim) == [0, 0]
    pipe.enable_model_cpu_offload()
    assert torch.equal(draw(pipe), expected())
    pipe.disable_model_cpu_offload()
    pipe.to("sim:1")
    assert torch.equal(draw(pipe), expected())


@pytest.mark.parametrize("strategy", ["balanced", "auto", "sequential"])
def test_what_fits_nowhere_whole_is_split_and_the_rest_is_said_to_stay_on_the_cpu(sim, strategy, caplog):
    halves = load(device_map=strategy, max_memory={0: "3.7MB", 1: "3.8MB"})
    assert set(halves.hf_device_map.values()) == {0, 1}
    assert any(name.startswith("unet.") for name in halves.hf_device_map)
    assert "cpu" not in caplog.text
    assert torch.equal(draw(halves), expected())
    part = load(device_map=strategy, max_memory={0: "1MB", 1: "1MiB"})
    assert set(part.hf_device_map.values()) == {0, 1, "cpu"}
    assert "stay on cpu" in caplog.text
    assert torch.equal(draw(part), expected())


@pytest.mark.parametrize("sim", [[4_900_000, 3_900_000]], indirect=True)
def test_without_limits_a_tenth_of_each_device_is_left_free(sim):
    first, second = torch.device("sim", 0), torch.device("sim", 1)
    assert read_budgets(None) == Budgets({first: 4_410_000, second: 3_510_000})
    held = torch.empty(1_000_000, device="sim:0")
    assert read_budgets(None).devices[first] < 820_000
    del held
    pipe = load(device_map="balanced")
    assert torch.equal(draw(pipe), expected())
    assert all(sim.statistics(index).allocated < sim.statistics(index).capacity * 0.91 for index in (0, 1))


def test_weights_are_read_straight_to_their_devices(sim):
    # As many bytes travel to the devices as the weights have, and none come back or go from one to the other.
    load(device_map={"unet": 0, "unet.up_blocks": 1, "vae": 1, "text_encoder": 0}, torch_dtype=torch.float16)
    books = [sim.statistics(index) for index in (0, 1)]
    assert sum(each.h2d for each in books) == pytest.approx(6_960_000 / 2, rel=0.02)
    assert sum(each.d2h + each.d2d for each in books) == 0


def test_sizes_follow_the_dtype(sim):
    limits = {"device_map": "auto", "max_memory": {0: "3.6MB", 1: "8MB"}}
    assert set(load(**limits, dtype="float16").hf_device_map.values()) == {0}
    assert set(load(**limits).hf_device_map.values()) == {0, 1}
    assert set(load(**limits, dtype="auto").hf_device_map.values()) == {0, 1}


def test_a_reserve_keeps_room_for_what_is_computed(sim):
    limits = {"device_map": "auto", "max_memory": {0: "8MB", 1: "8MB"}}
    assert set(load(**limits).hf_device_map.values()) == {0}
    assert load(**limits, reserve={"vae": "2MB"}).hf_device_map == {"text_encoder": 0, "unet": 0, "vae": 1}
    with pytest.raises(PlacementError, match="reserve is for weights that are spread"):
        load(reserve="2MB")


def test_a_mapped_pipeline_refuses_modes_and_moves_and_goes_on(sim):
    pipe = load(device_map="balanced")
    before = placement_of(pipe.unet)
    for change in (
        lambda: pipe.to("cpu"),
        lambda: pipe.to("sim:0", torch.float16),
        pipe.enable_model_cpu_offload,
        pipe.enable_sequential_cpu_offload,
        lambda: pipe.enable_group_offload("sim:0"),
    ):
        with pytest.raises(PlacementError, match=r"call reset_device_map\(\) first"):
            change()
        assert placement_of(pipe.unet) is before
        assert pipe.dtype == torch.float32
    assert pipe.hf_device_map == {"text_encoder": 1, "unet": 0, "vae": 1}
    assert torch.equal(draw(pipe), expected())


@pytest.mark.parametrize("device_map", ["balanced", {"unet": "cpu", "vae": 1, "text_encoder": 0}])
def test_tasks_that_encode_pictures_move_what_they_make(sim, device_map):
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    mask = (picture[:, :1] > 0.5).float()

    def drawn(**options) -> list[torch.Tensor]:
        parts, found = load(**options).components, []
        for name, more in (("Img2Img", {}), ("Inpaint", {"mask_image": mask})):
            made = getattr(diffusion_core, f"StableDiffusion{name}Pipeline")(**parts, requires_safety_checker=False)
            made.set_progress_bar_config(disable=True)
            call = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0), "output_type": "pt"}
            found.append(made("cat", image=picture, **more, **call).images.cpu())
        return found

    assert all(torch.equal(a, b) for a, b in zip(drawn(device_map=device_map), drawn(), strict=True))


def test_a_component_may_leave_the_map_for_a_mode_of_its_own(sim):
    pipe = load(device_map={"": 0, "unet.up_blocks": 1, "vae": 1})
    pipe.vae.enable_group_offload("sim:1")
    assert pipe.hf_device_map == {"text_encoder": 0, "unet": 0, "unet.up_blocks": 1}
    assert torch.equal(draw(pipe), expected())
    pipe.reset_device_map()
    assert pipe.hf_device_map is None and placement_of(pipe.unet) is None
    assert placement_of(pipe.vae).plan.name == "group offload"
    assert torch.equal(draw(pipe), expected())
    pipe.remove_all_hooks()
    assert torch.equal(draw(pipe.to("sim:0")), expected())


def test_one_device_needs_no_hooks(sim):
    for device_map in ("sim:1", 1, torch.device("sim", 1), {"": "sim:1"}):
        pipe = load(device_map=device_map)
        assert set(pipe.hf_device_map.values()) == {1}
        assert placement_of(pipe.unet) is None
        assert torch.equal(draw(pipe), expected())
        assert torch.equal(draw(pipe.to("sim:0")), expected())
        assert pipe.hf_device_map is None


def test_a_given_component_takes_part_in_the_map(sim):
    other = tiny.unet(diffusion_core, seed=5)
    pipe = load(unet=other, device_map="balanced")
    assert pipe.unet is other and pipe.hf_device_map["unet"] == 0
    right = draw(load(unet=tiny.unet(diffusion_core, seed=5)))
    assert torch.equal(draw(pipe), right)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_map": {"unet": 2, "": 0}}, "no device 2; this machine has devices 0 to 1"),
        ({"device_map": {"unet": 0, "vae": 1}}, "says nothing about text_encoder"),
        ({"device_map": {"": 0, "unet.up_blocks.7": 1}}, "up_blocks.7"),
        ({"device_map": "balanced", "max_memory": {7: "1GB"}}, "max_memory: there is no device 7"),
        ({"device_map": "balanced", "max_memory": {"gpu": "1GB"}}, "max_memory: 'gpu'"),
        ({"device_map": "balanced", "max_memory": {0: "100KB", 1: "100KB"}}, "has a layer that needs"),
        ({"device_map": "sim:1", "max_memory": {0: "1GB"}}, "max_memory is for weights that are spread"),
    ],
)
def test_what_is_refused_before_a_weight_is_read(sim, arguments, message, monkeypatch):
    monkeypatch.setattr("diffusion_core.pipelines.loading.load_component", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=message):
        load(**arguments)


# ---- models ----


def unet_inputs() -> dict[str, object]:
    text = torch.randn(1, 77, 32, generator=torch.Generator().manual_seed(1))
    return {"sample": tiny.noise(1), "timestep": 10, "encoder_hidden_states": text}


def load_unet(**options):
    return diffusion_core.AutoModel.from_pretrained(saved(), subfolder="unet", **options)


@pytest.mark.parametrize(
    ("sim", "limit", "places"),
    [(2_600_000, 2_200_000, {0, 1}), (UNET_BYTES // 2, 1_200_000, {0, 1, "cpu"})],
    indirect=["sim"],
)
@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
def test_a_model_larger_than_any_device_is_split_over_two(sim, limit, places, device_map):
    right = load_unet()(**unet_inputs()).sample
    unet = load_unet(device_map=device_map, max_memory={0: limit, 1: limit})
    assert set(unet.hf_device_map.values()) == places
    for _ in range(3):
        found = unet(**unet_inputs()).sample
        assert found.device == CPU  # where the inputs came from
        assert torch.equal(found, right)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_strategies_for_a_model(sim, device_map):
    unet = load_unet(device_map=device_map)
    shares = {
        "auto": (1.0, 0.0),
        "balanced": (0.5, 0.5),
        "balanced_low_0": (0.0, 1.0),
        "sequential": (1.0, 0.0),
    }
    found = [size / UNET_BYTES for size in allocated(sim)]
    assert found == pytest.approx(shares[device_map], abs=0.2)
    right = load_unet()(**unet_inputs()).sample
    inputs = {name: value if name == "timestep" else value.to(unet.device) for name, value in unet_inputs().items()}
    assert torch.equal(unet(**inputs).sample.cpu(), right)
    if device_map == "auto":
        assert unet.hf_device_map == {"": torch.device("sim", 0)}
        assert placement_of(unet) is None
        unet.to("sim:1")


def test_a_map_of_a_model_with_cpu_and_disk(sim, tmp_path):
    right = load_unet()(**unet_inputs()).sample
    places = {"": 0, "conv_in": 1, "down_blocks.1": 1, "mid_block": "cpu", "up_blocks.0": "disk"}
    for options in ({}, {"torch_dtype": torch.bfloat16}):
        unet = load_unet(device_map=places, offload_folder=tmp_path / "disk", **options)
        assert unet.hf_device_map == places
        assert [str(layer.weight.device) for layer in (unet.conv_in, unet.conv_out)] == ["sim:1", "sim:0"]
        assert unet.mid_block.resnets[0].conv1.weight.device == CPU
        inputs = {name: value.to(unet.dtype) if name != "timestep" else value for name, value in unet_inputs().items()}
        found = unet(**inputs).sample
        assert torch.equal(found, load_unet(**options)(**inputs).sample)
        assert options or torch.equal(found, right)
        assert unet.state_dict().keys() == load_unet().state_dict().keys()


def test_a_mode_takes_the_place_of_a_models_map(sim):
    unet = load_unet(device_map={"": 0, "mid_block": 1})
    right = load_unet()(**unet_inputs()).sample
    with pytest.raises(PlacementError, match=r"under a device map, so it cannot be moved to sim:0"):
        unet.to("sim:0")
    assert unet.hf_device_map == {"": 0, "mid_block": 1}
    unet.enable_group_offload("sim:0", use_stream=True)
    assert not hasattr(unet, "hf_device_map")
    assert torch.equal(unet(**unet_inputs()).sample.cpu(), right)
    unet.disable_group_offload()
    assert torch.equal(unet.to("cpu")(**unet_inputs()).sample, right)


def test_what_is_over_the_limit_of_the_cpu_goes_to_disk(sim, caplog):
    unet = load_unet(device_map="auto", max_memory={0: "1.5MB", "cpu": "1MB"})
    assert set(unet.hf_device_map.values()) == {0, "cpu", "disk"}
    assert "stay on disk" in caplog.text
    assert torch.equal(unet(**unet_inputs()).sample.cpu(), load_unet()(**unet_inputs()).sample)


def test_a_model_of_transformers_can_be_spread(sim):
    words = torch.arange(10)[None]
    right = load().text_encoder(words).last_hidden_state
    encoder = diffusion_core.AutoModel.from_pretrained(saved(), subfolder="text_encoder", device_map="balanced")
    assert set(encoder.hf_device_map.values()) == {0, 1}
    assert torch.equal(encoder(words).last_hidden_state.cpu(), right)


def test_a_map_that_leaves_something_out_or_splits_what_belongs_together(sim):
    with pytest.raises(PlacementError, match=r"conv_norm_out.* without any device set|without any device set"):
        load_unet(device_map={"conv_in": 0})
    with pytest.raises(PlacementError, match="conv_in holds tensors itself"):
        load_unet(device_map={"": 0, "conv_in.bias": 1})


def test_saving_a_mapped_model_gives_the_same_files(sim, tmp_path):
    unet = load_unet(device_map={"": 0, "up_blocks": 1, "mid_block": "cpu"})
    unet(**unet_inputs())
    unet.save_pretrained(tmp_path)
    for path in (saved() / "unet").glob("*.safetensors"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
