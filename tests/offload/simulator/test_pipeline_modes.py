"""A tiny Stable Diffusion pipeline under every memory mode, and every pair of them: the same numbers as on the CPU."""

import contextlib
import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.simulator import simulator, unavailable
from tests.offload.drawing import CAPACITY, MODES, allocated, draw, expected, load, saved, undo
from tests.pipelines import tiny

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


@pytest.fixture
def sim():
    expected()
    with simulator(devices=2, capacity=CAPACITY) as running:
        yield running


# ---- the same numbers ----


@pytest.mark.parametrize("mode", MODES)
def test_three_calls_of_each_mode_are_bit_identical_to_the_cpu(sim, mode):
    pipe = load()
    MODES[mode](pipe)
    for _ in range(3):
        assert torch.equal(draw(pipe), expected())
    device = torch.device("sim", 1 if mode in ("model on the second", "recorded streams") else 0)
    assert pipe._execution_device == pipe.device == device
    assert pipe.dtype == torch.float32
    if mode not in ("on the device", "all but the vae"):
        assert allocated(sim) == [0, 0]
    undo(pipe)
    assert pipe.to("cpu").device == torch.device("cpu")
    assert torch.equal(draw(pipe), expected())
    assert allocated(sim) == [0, 0]
    assert not any(placement_of(part) for part in pipe.unet.modules())


def switched(first: str, second: str, batch: int, height: int) -> None:
    """From one mode to another, with calls before, between and after."""
    with simulator(devices=2, capacity=CAPACITY):
        pipe = load()
        MODES[first](pipe)
        assert torch.equal(draw(pipe), expected())
        if second == "on the device" != first:
            with pytest.raises(PlacementError, match=r"call disable_\w+\(\) first"):
                MODES[second](pipe)
            assert torch.equal(draw(pipe, batch, height), expected(batch, height))
            undo(pipe)
        MODES[second](pipe)
        assert torch.equal(draw(pipe, batch, height), expected(batch, height))
        undo(pipe)
        pipe.to("cpu")
        assert torch.equal(draw(pipe), expected())


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(MODES)), st.sampled_from(sorted(MODES)), st.integers(1, 2), st.sampled_from([32, 40]))
def test_pairs_of_modes(first, second, batch, height):
    expected(batch, height), expected()
    switched(first, second, batch, height)


@pytest.mark.slow
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_every_pair_of_modes(first, second):
    expected(2, 40), expected()
    switched(first, second, 2, 40)


@pytest.mark.parametrize(
    "scheduler", ["UniPCMultistep", "DPMSolverMultistep", "DEISMultistep", "EulerAncestralDiscrete", "PNDM", "Heun"]
)
def test_schedulers_do_not_mix_devices_under_offload(sim, scheduler):
    name = "HeunDiscreteScheduler" if scheduler == "Heun" else f"{scheduler}Scheduler"
    plain, pipe = load(), load()
    for each in (plain, pipe):
        each.scheduler = getattr(diffusion_core, name).from_config(each.scheduler.config)
    pipe.enable_model_cpu_offload()
    call = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(0)}
    right = draw(plain, **call)
    call["generator"].manual_seed(0)
    assert torch.equal(draw(pipe, **call), right)


@pytest.mark.parametrize("mode", ["model", "two blocks, streams", "disk"])
def test_an_autoencoder_that_overflows_changes_its_dtype_in_the_middle_of_a_call(sim, mode):
    plain, pipe = load(), load()
    for each in (plain, pipe):
        with torch.no_grad():
            each.vae.decoder.conv_in.weight.mul_(1e5)
        each.vae.half()
    right = draw(plain)
    MODES[mode](pipe)
    for _ in range(2):
        assert torch.equal(draw(pipe), right)
        assert pipe.vae.dtype == torch.float16


@pytest.mark.parametrize("mode", ["model", "sequential", "two blocks, streams"])
def test_a_mode_on_one_component_joins_a_mode_of_the_pipeline(sim, mode):
    pipe = load()
    MODES[mode](pipe)
    pipe.vae.enable_group_offload("sim:0", offload_type="leaf_level", use_stream=True)
    for _ in range(3):
        assert torch.equal(draw(pipe), expected())
    assert allocated(sim) == [0, 0]
    MODES[mode](pipe)  # covers all of them again
    assert placement_of(pipe.vae) is placement_of(pipe.unet)
    assert torch.equal(draw(pipe), expected())


def test_group_offload_of_one_component_leaves_the_others_where_they_are(sim):
    # The text encoder and the autoencoder compute on the cpu, the UNet on the device.
    pipe = load()
    pipe.unet.enable_group_offload("sim:0", offload_type="leaf_level")
    assert pipe._execution_device == torch.device("sim", 0)
    embeds = pipe.encode_prompt("cat", None, 1, False)[0]
    assert embeds.device == torch.device("sim", 0)
    pipe.vae.to("sim:0")
    assert torch.equal(draw(pipe), expected())


# ---- memory ----


def peak(mode: str, capacity: int = 10**9) -> int:
    with simulator(devices=2, capacity=capacity) as running:
        pipe = load()
        MODES[mode](pipe)
        for _ in range(2):
            assert torch.equal(draw(pipe), expected())
        return running.statistics(0).peak


def test_peaks_are_in_order_and_a_device_just_so_large_is_enough():
    expected()
    modes = ["leaf", "leaf, streams", "block", "three blocks", "model", "on the device"]
    peaks = [peak(mode) for mode in modes]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.1 * peaks[-1] and peaks[-2] < 0.65 * peaks[-1]
    for index in (0, 4):
        peak(modes[index], peaks[index])


def test_copies_go_one_way_only(sim):
    # What comes back are pictures and latents, never weights.
    pipe = load()
    for enable in (pipe.enable_model_cpu_offload, partial(pipe.enable_group_offload, "sim:0", use_stream=True)):
        enable()
        draw(pipe)
        sim.reset()
        draw(pipe)
        books = sim.statistics(0)
        assert books.h2d > 5_500_000  # leaves of the encoder are not called
        assert books.d2h < 100_000


def test_a_dropped_pipeline_is_gone(sim):
    for mode in ("model", "leaf, streams", "disk"):
        pipe = load()
        MODES[mode](pipe)
        draw(pipe)
        gone = [weakref.ref(pipe.unet), weakref.ref(pipe.unet.conv_in.weight), weakref.ref(pipe.text_encoder)]
        del pipe
        gc.collect()
        assert [reference() for reference in gone] == [None, None, None]
        assert allocated(sim) == [0, 0]


# ---- calls that end early, and calls of parts ----


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("model", RuntimeError("out of memory")),
        ("model", KeyboardInterrupt()),
        ("sequential", KeyboardInterrupt()),
        ("two blocks, streams", RuntimeError("out of memory")),
        ("disk", RuntimeError("out of memory")),
    ],
)
def test_after_an_exception_nothing_stays_and_the_next_call_is_right(sim, mode, error):
    pipe = load()
    MODES[mode](pipe)

    def fail(*_):
        raise error

    with pytest.raises(type(error)):
        draw(pipe, callback_on_step_end=fail)
    # Latents may live on in the traceback; weights do not stay.
    assert sum(allocated(sim)) < 100_000
    assert {each.device.type for part in (pipe.unet, pipe.vae, pipe.text_encoder) for each in part.parameters()} == {
        "cpu"
    }
    assert torch.equal(draw(pipe), expected())


def test_an_interrupted_call_lets_go(sim):
    pipe = load()
    pipe.enable_model_cpu_offload()

    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = True
        return tensors

    draw(pipe, callback_on_step_end=stop)
    assert allocated(sim) == [0, 0]


@pytest.mark.parametrize("mode", ["model", "sequential", "leaf, streams"])
def test_encode_prompt_by_itself(sim, mode):
    plain = load().encode_prompt("cat", None, 1, True)
    pipe = load()
    MODES[mode](pipe)
    for _ in range(2):
        embeds = pipe.encode_prompt("cat", None, 1, True)
        assert all(torch.equal(ours.cpu(), right) for ours, right in zip(embeds, plain, strict=True))
        del embeds
        assert allocated(sim) == [0, 0]
    embeds = pipe.encode_prompt("cat", pipe._execution_device, 1, True)
    drawn = pipe(
        prompt_embeds=embeds[0],
        negative_prompt_embeds=embeds[1],
        latents=torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)),
        num_inference_steps=1,
        output_type="pt",
    )
    assert torch.equal(drawn.images.cpu(), expected())


def test_parts_can_be_called_by_themselves(sim):
    pipe = load()
    pipe.enable_model_cpu_offload()
    picture = torch.zeros(1, 3, 32, 32)
    right = load().vae.encode(picture).latent_dist.mean
    assert torch.equal(pipe.vae.encode(picture.to("sim:0")).latent_dist.mean.cpu(), right)
    assert sum(allocated(sim)) > 0  # the next component takes its place
    pipe.maybe_free_model_hooks()
    assert allocated(sim) == [0, 0]


# ---- settings and sharing ----


def test_enabling_again_is_the_same_as_once(sim):
    pipe = load()
    for _ in range(3):
        pipe.enable_model_cpu_offload()
    pipe.disable_model_cpu_offload()
    pipe.disable_model_cpu_offload()
    assert pipe.to("sim:0")._execution_device == torch.device("sim", 0)
    assert torch.equal(draw(pipe), expected())


def test_the_device_that_was_asked_for_stays(sim):
    pipe = load()
    pipe.enable_model_cpu_offload(gpu_id=1)
    draw(pipe), draw(pipe)
    assert pipe._execution_device == torch.device("sim", 1)
    assert sim.statistics(0).operators == 0
    pipe.enable_model_cpu_offload(gpu_id=0)
    assert pipe._execution_device == torch.device("sim", 0)
    for arguments in ({"device": "sim:1"}, {"device": torch.device("sim", 1)}, {"device": "sim", "gpu_id": 1}):
        pipe.enable_sequential_cpu_offload(**arguments)
        assert pipe._execution_device == torch.device("sim", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_id": 0, "device": "sim:1"}, "gpu_id=0 and device='sim:1' name different devices"),
        ({"gpu_id": 2}, "gpu_id: there is no device 2; this machine has devices 0 to 1"),
        ({"gpu_id": -1}, "no device -1"),
        ({"device": "cuda:7"}, "cuda:7"),
        ({"device": "nowhere"}, "nowhere"),
        ({"device": "meta"}, "no values"),
    ],
)
def test_devices_that_are_refused_change_nothing(sim, arguments, message):
    pipe = load()
    pipe.enable_sequential_cpu_offload()
    before = placement_of(pipe.unet)
    with pytest.raises(ValueError, match=message):
        pipe.enable_model_cpu_offload(**arguments)
    assert placement_of(pipe.unet) is before
    assert torch.equal(draw(pipe), expected())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offload_type": "row_level"}, "offload_type"),
        ({"offload_type": "block_level", "num_blocks_per_group": 0}, "num_blocks_per_group"),
        ({"record_stream": True}, "record_stream"),
        ({"exclude_modules": ["vae", "unett"]}, r"exclude_modules names \['unett'\]"),
        ({"onload_device": "sim:9"}, "onload_device"),
        ({"onload_device": "cpu", "use_stream": True}, "use_stream"),
    ],
)
def test_group_offload_refuses_arguments_before_anything_changes(sim, arguments, message):
    pipe = load()
    with pytest.raises(ValueError, match=message):
        pipe.enable_group_offload(**{"onload_device": "sim:0", **arguments})
    assert not any(placement_of(part) for part in (pipe.unet, pipe.vae, pipe.text_encoder))


def test_excluded_components_stay_on_the_device(sim):
    pipe = load()
    MODES["all but the vae"](pipe)
    held = sum(tensor.numel() * 4 for tensor in pipe.vae.parameters())
    assert held < allocated(sim)[0] < 1.05 * held
    pipe.disable_group_offload()
    assert allocated(sim) == [0, 0]


def test_two_pipelines_that_share_components(sim):
    first = load()
    first.enable_model_cpu_offload()
    other = tiny.unet(diffusion_core, seed=5)
    second = diffusion_core.DiffusionPipeline.from_pipe(first, unet=other)
    second.set_progress_bar_config(disable=True)
    second.enable_model_cpu_offload()
    right = draw(diffusion_core.DiffusionPipeline.from_pipe(load(), unet=tiny.unet(diffusion_core, seed=5)))
    for _ in range(2):
        assert torch.equal(draw(first), expected())
        assert torch.equal(draw(second), right)
        assert allocated(sim) == [0, 0]
    assert sim.statistics(0).peak < 5_000_000  # one component at a time, across both
    del second, other
    gc.collect()
    assert torch.equal(draw(first), expected())
    first.disable_model_cpu_offload()
    assert torch.equal(draw(first.to("sim:1")), expected())


def test_a_pipeline_made_of_offloaded_components_computes_where_they_do(sim):
    first = load()
    first.enable_model_cpu_offload()
    second = diffusion_core.DiffusionPipeline.from_pipe(first)
    assert second._execution_device == torch.device("sim", 0)
    assert torch.equal(draw(second), expected())
    assert allocated(sim) == [0, 0]


def test_remove_all_hooks_and_moves_under_a_mode(sim):
    pipe = load()
    for enable in (pipe.enable_model_cpu_offload, pipe.enable_sequential_cpu_offload):
        enable()
        for move in (("sim:1",), ("sim:1", torch.float16)):
            with pytest.raises(PlacementError, match=r"call disable_\w+\(\) first"):
                pipe.to(*move)
        assert pipe.dtype == torch.float32
        assert torch.equal(draw(pipe), expected())
    pipe.remove_all_hooks()
    assert torch.equal(draw(pipe.to("sim:1")), expected())


def test_to_the_cpu_lets_go_and_leaves_the_mode_on(sim):
    # Users of the reference write it to free the device before the next pipeline.
    pipe = load()
    for enable in (pipe.enable_model_cpu_offload, pipe.enable_group_offload):
        enable(**({"onload_device": "sim:0"} if enable == pipe.enable_group_offload else {}))
        pipe.unet.conv_in.weight.sum()
        pipe.vae.decode(torch.zeros(1, 4, 8, 8, device="sim:0"))
        pipe.to("cpu")
        assert allocated(sim) == [0, 0]
        assert torch.equal(draw(pipe), expected()) and pipe.device == torch.device("sim", 0)
    pipe.enable_group_offload("sim:0", exclude_modules="vae")
    with pytest.raises(PlacementError, match=r"vae is under group offload.*call disable_group_offload\(\) first"):
        pipe.to("cpu")


def test_a_pipeline_on_the_device_goes_home_and_comes_back(sim):
    pipe = load().to("sim:0")
    pipe.enable_model_cpu_offload()
    assert allocated(sim) == [0, 0]
    assert torch.equal(draw(pipe), expected())
    pipe.disable_model_cpu_offload()
    assert pipe.unet.conv_in.weight.device == torch.device("sim", 0)
    assert torch.equal(draw(pipe), expected())


@pytest.mark.parametrize("mode", ["model", "leaf, streams", "disk"])
def test_a_new_dtype_under_a_mode(sim, mode):
    right = draw(load().to(torch.bfloat16))
    pipe = load()
    MODES[mode](pipe)
    draw(pipe)
    pipe.to(torch.bfloat16)
    assert pipe.dtype == pipe.unet.dtype == torch.bfloat16
    assert torch.equal(draw(pipe), right)
    undo(pipe)
    assert torch.equal(draw(pipe), right)


# ---- saving ----


@pytest.mark.parametrize("mode", ["on the device", "model", "two blocks, streams", "disk"])
def test_what_is_saved_does_not_depend_on_the_mode(sim, mode, tmp_path):
    pipe = load()
    MODES[mode](pipe)
    draw(pipe)
    plain = load()
    for name in ("unet", "vae", "text_encoder"):
        states = getattr(pipe, name).state_dict(), getattr(plain, name).state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key].cpu(), states[1][key]) for key in states[1])
    del states
    pipe.save_pretrained(tmp_path)
    for path in saved().rglob("*.safetensors"):
        assert (tmp_path / path.relative_to(saved())).read_bytes() == path.read_bytes()
    assert torch.equal(draw(pipe), expected())
    with contextlib.suppress(ValueError):
        pipe.to("cpu")
    reloaded = diffusion_core.DiffusionPipeline.from_pretrained(tmp_path)
    reloaded.set_progress_bar_config(disable=True)
    MODES[mode](reloaded)
    assert torch.equal(draw(reloaded), expected())
