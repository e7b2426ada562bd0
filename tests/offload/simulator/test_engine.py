"""The engine's contracts on simulated devices: numbers, homes, reversal, order, failure, entry points."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.hooks import apply_group_offloading, remove_group_offloading
from diffusion_core.offload.engine import apply_plan, at_home, free, placement_of
from diffusion_core.offload.plan import Transfers
from diffusion_core.offload.strategies import Settings, blocks, leaves, whole
from tests.offload.toys import IDS, WIDTH, picture, same, toy, traces
from tests.pipelines import tiny

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]
two_devices = pytest.mark.simulated_devices(devices=2)
SIM = torch.device("privateuseone", 0)  # the name of "sim" before a simulator has run

MODES = {
    "leaf": {"offload_type": "leaf_level"},
    "leaf+stream": {"offload_type": "leaf_level", "use_stream": True},
    "block": {},
    "block+stream": {"use_stream": True},
    "block 2+stream": {"num_blocks_per_group": 2, "use_stream": True},
    "block 3": {"num_blocks_per_group": 3, "non_blocking": True},
    "stream+record": {"use_stream": True, "record_stream": True},
    "leaf+stream+ring": {"offload_type": "leaf_level", "use_stream": True, "low_cpu_mem_usage": True},
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def run(module, *args, **kwargs):
    with torch.no_grad():
        return module(*args, **kwargs)["x"].cpu()


def strategy(name, transfers=None):
    options = Settings(SIM, transfers=transfers or Transfers())
    return {"whole": whole(options), "leaf": leaves(options), "block": blocks(options), "block 3": blocks(options, 3)}[
        name
    ]


# ---- same numbers ----


@modes
def test_numbers_are_those_of_the_cpu_over_calls_branches_and_failures(simulated_devices, mode):
    model = toy()
    plain, extra, longer = run(model, IDS), run(model, IDS, extra=True), run(model, IDS.repeat(2, 3))
    apply_group_offloading(model, "sim:0", **mode)
    for _ in range(3):
        assert torch.equal(run(model, IDS), plain)
    assert torch.equal(run(model, IDS, extra=True), extra)
    with pytest.raises(KeyboardInterrupt):
        run(model, IDS, fail=True)
    assert simulated_devices.statistics().allocated == 0
    assert torch.equal(run(model, IDS.repeat(2, 3)), longer)
    assert torch.equal(run(model, IDS), plain)
    assert simulated_devices.statistics().allocated == 0
    assert simulated_devices.statistics().d2h < 20 * plain.nbytes  # results only, no weight


@modes
def test_everything_is_as_before_after_removal(mode):
    model = toy()
    before, left = picture(model), traces(model)
    want = run(model, IDS)
    apply_group_offloading(model, "sim:0", **mode)
    run(model, IDS)
    remove_group_offloading(model)
    pinned = mode.get("use_stream") and not mode.get("low_cpu_mem_usage")
    assert same(before, picture(model), addresses=not pinned)
    assert traces(model) == left
    assert not any(tensor.is_pinned() for tensor in model.state_dict().values())
    assert placement_of(model) is placement_of(model.blocks[0]) is None
    assert torch.equal(run(model, IDS), want)
    remove_group_offloading(model)  # nothing to do


def test_no_pinned_memory_stays(simulated_devices):
    model = toy()
    apply_group_offloading(model, "sim:0", use_stream=True)
    assert simulated_devices.pinned.allocated > 0
    run(model, IDS)
    remove_group_offloading(model)
    assert simulated_devices.pinned.allocated == 0


actions = st.lists(
    st.tuples(
        st.sampled_from(["whole", "leaf", "block", "block 3"]),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["plain", "extra", "long", "fail", "encode", "replace"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_any_history_of_modes_and_calls_keeps_the_numbers(simulated_devices, history):
    model = toy()
    before, left = picture(model), traces(model)
    for name, streams, record, action in history:
        apply_plan(model, strategy(name, Transfers(streams=streams, record_stream=streams and record)))
        ids, extra = (IDS.repeat(1, 5) if action == "long" else IDS), action == "extra"
        if action == "fail":
            with pytest.raises(KeyboardInterrupt):
                run(model, IDS, fail=True)
        if action == "encode":
            assert model.encode(IDS).device == SIM
        reference = toy()
        for _ in range(2):
            assert torch.equal(run(model, ids, extra=extra), run(reference, ids, extra=extra))
    remove_group_offloading(model)
    assert same(before, picture(model)) and traces(model) == left
    assert simulated_devices.statistics().allocated == 0


# ---- models of this library ----


def model_and_call(kind):
    if kind == "unet":
        args = torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 5, 32)
        return tiny.unet(diffusion_core), lambda model: model(*args).sample
    if kind == "vae":
        latents = torch.randn(1, 4, 8, 8)
        return tiny.vae(diffusion_core), lambda model: model.decode(latents).sample
    ids = torch.arange(7)[None]
    return tiny.text_encoder(), lambda model: model(ids).last_hidden_state


@modes
@pytest.mark.parametrize("kind", ["unet", "vae", "text encoder"])
def test_models_compute_the_same(simulated_devices, kind, mode):
    model, call = model_and_call(kind)
    with torch.inference_mode():
        want = call(model)
        apply_group_offloading(model, "sim:0", **mode)
        for _ in range(3):
            got = call(model)
            assert got.device == SIM and torch.equal(got.cpu(), want)
        del got
    assert simulated_devices.statistics().allocated == 0


def peaks(simulated_devices, make, call, **extra):
    found = []
    for mode in ("leaf", "leaf+stream", "block", "block+stream", "block 3"):
        model = make()
        apply_group_offloading(model, "sim:0", **MODES[mode], **extra)
        simulated_devices.reset_peak()
        for _ in range(3):
            call(model)
        found.append(simulated_devices.statistics().peak)
    model = make().to("sim:0")
    simulated_devices.reset_peak()
    call(model)
    return [*found, simulated_devices.statistics().peak]


def check_order(found):
    leaf, leaf_stream, block, block_stream, block_3, none = found
    assert leaf <= leaf_stream < block <= block_stream < block_3 < none, found


def test_finer_groups_take_less_memory(simulated_devices):
    args = (torch.randn(1, 4, 8, 8, device=SIM), torch.tensor(3, device=SIM), torch.randn(1, 5, 32, device=SIM))
    with torch.inference_mode():
        check_order(peaks(simulated_devices, lambda: tiny.unet(diffusion_core), lambda model: model(*args)))


@pytest.mark.slow
@pytest.mark.simulated_devices(dry=True, capacity="24GB")
def test_finer_groups_take_less_memory_at_full_size(simulated_devices):
    def make():
        with torch.device("meta"):
            model = diffusion_core.UNet2DConditionModel(cross_attention_dim=768).half()
        return model.to_empty(device="cpu").eval()

    args = [torch.empty(size, dtype=torch.float16, device=SIM) for size in ((1, 4, 64, 64), (1,), (1, 77, 768))]
    with torch.inference_mode():
        found = peaks(simulated_devices, make, lambda model: model(*args), low_cpu_mem_usage=True)
    check_order(found)


@modes
def test_each_weight_comes_in_once_a_call_when_the_order_is_known(simulated_devices, mode):
    model, call = model_and_call("unet")
    apply_group_offloading(model, "sim:0", **mode)
    with torch.inference_mode():
        for _ in range(3):
            simulated_devices.reset()
            call(model)
    inputs = 2 * 4 * 8 * 8 * 4 + 8 + 2 * 5 * 32 * 4
    assert simulated_devices.statistics().h2d - inputs <= 1.15 * model.get_memory_footprint()
    assert simulated_devices.statistics().d2h == 0


# ---- entry points ----


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tiling", [False, True])
def test_encode_and_decode_bring_weights_in_without_a_dummy_pass(simulated_devices, streams, tiling):
    vae = tiny.vae(diffusion_core)
    vae.enable_slicing()
    if tiling:
        vae.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16)
    image, latents = torch.randn(2, 3, 24, 16), torch.randn(2, 4, 6, 4)
    with torch.inference_mode():
        want = vae.encode(image).latent_dist.mean, vae.decode(latents).sample
        vae.enable_group_offload("sim:0", use_stream=streams)
        for _ in range(2):
            got = vae.encode(image).latent_dist.mean, vae.decode(latents).sample
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
        assert got[0].device == SIM
        larger = torch.randn(1, 4, 6, 9)
        assert torch.equal(vae.decode(larger).sample.cpu(), tiny_decode(vae, larger))


def tiny_decode(like, latents):
    vae = tiny.vae(diffusion_core)
    vae._axes, vae.use_tiling, vae.use_slicing = like._axes, like.use_tiling, like.use_slicing
    return vae.decode(latents).sample


def test_a_part_can_be_called_by_itself(simulated_devices):
    model = toy()
    want = model.blocks[1](torch.ones(1, WIDTH))
    apply_group_offloading(model, "sim:0", use_stream=True)
    assert torch.equal(model.blocks[1](torch.ones(1, WIDTH)).cpu(), want)
    assert simulated_devices.statistics().allocated == 0 or free(model) is None


# ---- model offload: one component at a time ----


def test_one_component_is_in_at_a_time(simulated_devices):
    parts = {"a": toy(1), "b": toy(2)}
    want = {name: run(part, IDS) for name, part in parts.items()}
    size = sum(-(-p.nbytes // 512) * 512 for p in (*parts["a"].parameters(), *parts["a"].buffers()))
    placement = apply_plan(parts, whole(Settings(SIM)))
    for _ in range(2):
        for name, part in parts.items():
            assert torch.equal(run(part, IDS), want[name])
            assert part.first.weight.device == SIM and simulated_devices.statistics().allocated < 1.5 * size
            other = parts["b" if name == "a" else "a"]
            assert other.first.weight.device.type == "cpu"
    assert placement.resident_bytes > 0
    placement.free()
    assert simulated_devices.statistics().allocated == 0 and placement.resident_bytes == 0


def test_two_placements_share_a_component(simulated_devices):
    shared, first, second = toy(1), toy(2), toy(3)
    want = {part: run(part, IDS) for part in (shared, first, second)}
    one = apply_plan({"shared": shared, "first": first}, whole(Settings(SIM)))
    two = apply_plan({"shared": shared, "second": second}, whole(Settings(SIM)))
    for parts in ((shared, first), (shared, second), (second, shared), (first, shared)):
        for part in parts:
            assert torch.equal(run(part, IDS), want[part])
            inside = [p for p in (shared, first, second) if p.first.weight.device == SIM]
            assert inside == [part]
        one.free()
        assert simulated_devices.statistics().allocated == 0
    assert set(one.modules) == {"first"}
    one.remove()
    assert torch.equal(run(shared, IDS), want[shared]) and placement_of(shared) is two
    two.remove()
    assert all(placement_of(part) is None for part in (shared, first, second))


def test_the_master_is_what_is_edited_between_calls(simulated_devices):
    model = toy()
    apply_plan(model, whole(Settings(SIM)))
    run(model, IDS)
    with at_home(model):
        model.first.weight.data += 1
    reference = toy()
    reference.first.weight.data += 1
    assert torch.equal(run(model, IDS), run(reference, IDS))
    with torch.no_grad():
        model.first.weight.mul_(2)  # on the device; noticed, and copied home
        model.first.bias.data = torch.ones(WIDTH, device=SIM)  # the same
        reference.first.weight.mul_(2)
        reference.first.bias.data = torch.ones(WIDTH)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    )
    assert torch.equal(run(model, IDS), run(reference, IDS))


# ---- lossless ----


@pytest.mark.parametrize("name", ["whole", "leaf", "block 3"])
def test_state_dicts_dtypes_and_edits_concern_the_master(simulated_devices, tmp_path, name):
    model, call = model_and_call("unet")
    reference, _ = model_and_call("unet")
    apply_plan(model, strategy(name, Transfers(streams=True)))
    with torch.inference_mode():
        call(model)
    for key, value in model.state_dict().items():
        assert value.device.type == "cpu" and torch.equal(value, reference.state_dict()[key])
    for each in (model, reference):
        each.to(torch.bfloat16)
    with torch.no_grad():
        for each in (model, reference):
            each.conv_in.weight.mul_(3)
    args = [torch.ones(1, 4, 8, 8).bfloat16(), torch.tensor(3), torch.ones(1, 5, 32).bfloat16()]
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(*args).sample.cpu(), reference(*args).sample)
    assert model.dtype == torch.bfloat16 and model.device == SIM
    model.save_pretrained(tmp_path)
    loaded = diffusion_core.UNet2DConditionModel.from_pretrained(tmp_path, dtype="auto")
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, reference.state_dict()[key])
    model.load_state_dict(tiny.unet(diffusion_core, seed=5).state_dict())
    reference.load_state_dict(tiny.unet(diffusion_core, seed=5).state_dict())
    with torch.inference_mode():
        assert torch.equal(model(*args).sample.cpu(), reference(*args).sample)


def test_moving_to_another_device_is_refused_with_the_remedy():
    model = tiny.unet(diffusion_core)
    model.enable_group_offload("sim:0")
    with pytest.raises(PlacementError, match=r"under group offload.*disable_group_offload\(\) first"):
        model.to("sim:0")
    with pytest.raises(PlacementError, match="cannot be moved"):
        nn.ModuleList([model]).to("sim:0")
    model.to("cpu")
    model.to(torch.float64)
    assert model.conv_in.weight.dtype == torch.float64
    model.disable_group_offload()
    model.to("sim:0")
    assert model.device == model.conv_in.weight.device == SIM


def test_channels_last_is_kept(simulated_devices):
    model, call = model_and_call("unet")
    model.to(memory_format=torch.channels_last)
    with torch.inference_mode():
        want = call(model)
        model.enable_group_offload("sim:0", use_stream=True, low_cpu_mem_usage=True)
        seen = []
        model.conv_out.register_forward_hook(lambda layer, *_: seen.append(layer.weight.stride()))
        assert torch.equal(call(model).cpu(), want)
    assert seen == [model.conv_out.weight.stride()] and seen[0][1] == 1


def test_parameters_and_layers_may_be_replaced(simulated_devices):
    model, reference = toy(), toy()
    apply_group_offloading(model, "sim:0", use_stream=True)
    run(model, IDS)
    for each in (model, reference):
        torch.manual_seed(9)
        each.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        each.blocks[3] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        each.blocks[1].inner[0].register_parameter("unused", nn.Parameter(torch.ones(2)))
    for _ in range(3):
        assert torch.equal(run(model, IDS), run(reference, IDS))
    remove_group_offloading(model)
    assert traces(model) == traces(reference)


# ---- replacing, copying, dropping, threads ----


def test_applying_again_replaces(simulated_devices):
    model = toy()
    left = traces(model)
    apply_group_offloading(model, "sim:0", offload_type="leaf_level")
    first = placement_of(model)
    apply_group_offloading(model, "sim:0", use_stream=True)
    assert placement_of(model) is not first and first.modules == {}
    remove_group_offloading(model)
    assert traces(model) == left


def test_a_part_of_a_placed_module_is_refused_and_a_whole_replaces_its_parts():
    model = toy()
    apply_group_offloading(model, "sim:0")
    with pytest.raises(PlacementError, match="a part of a module that is under group offload"):
        apply_group_offloading(model.blocks[0], "sim:0")
    assert torch.equal(run(model, IDS), run(toy(), IDS))
    with pytest.raises(PlacementError, match="part of what is under"):
        remove_group_offloading(model.blocks[0])
    remove_group_offloading(model)
    apply_group_offloading(model.blocks[0], "sim:0")
    apply_group_offloading(model, "sim:0", use_stream=True)
    assert torch.equal(run(model, IDS), run(toy(), IDS))
    remove_group_offloading(model)
    assert traces(model) == traces(toy())


@modes
def test_dropping_a_model_frees_it_at_once(simulated_devices, mode):
    gc.collect()
    gc.disable()
    try:
        model = toy()
        apply_group_offloading(model, "sim:0", **mode)
        run(model, IDS)
        dead = [weakref.ref(model), weakref.ref(model.first.weight), weakref.ref(placement_of(model))]
        del model
        assert [reference() for reference in dead] == [None] * 3
        assert simulated_devices.pinned.allocated == simulated_devices.statistics().allocated == 0
    finally:
        gc.enable()


def test_copies_and_pickles_are_plain_modules():
    model = toy()
    want = run(model, IDS)
    apply_group_offloading(model, "sim:0", use_stream=True)
    run(model, IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, IDS), want) and placement_of(other) is None
        assert other.encode(IDS).device.type == "cpu"
        other.to("sim:0")
        assert torch.equal(run(other, IDS.to("sim:0")), want)
    assert torch.equal(run(model, IDS), want)


def test_threads_share_a_module(simulated_devices):
    model = toy()
    want = run(model, IDS)
    apply_group_offloading(model, "sim:0", num_blocks_per_group=2)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(model, IDS), range(16)):
            assert torch.equal(got, want)
    assert simulated_devices.statistics().allocated == 0
