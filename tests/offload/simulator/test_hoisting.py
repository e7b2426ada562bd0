"""Tables of modulation: the same numbers bit for bit, and the weights that made them stay off the device."""

import threading
from functools import partial
from typing import Any

import pytest
import torch

import diffusion_core
from benchmarks.memory_modes import FAMILIES, MODES, measure
from diffusion_core.errors import PlacementError
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.hoisting import is_serving, modulating_layers
from diffusion_core.offload.layout import read_request
from diffusion_core.offload.runs import cached_run
from diffusion_core.offload.simulator import simulator, unavailable
from tests.support import needs_shared

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
TIMES = (0.9, 0.6, 0.2)
SIZES = {"attention_head_dim": 16, "num_attention_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "dual_attention_layers": (0,),
        },
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
        },
    ),
    "qwen": (
        "QwenImageTransformer2DModel",
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)},
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 5,
        },
    ),
}


def build(kind: str = "flux") -> Any:
    name, config = MODELS[kind]
    torch.manual_seed(0)
    return getattr(diffusion_core, name)(**SIZES, **config).eval()


def inputs(kind: str = "flux", batch: int = 2, side: int = 4, seed: int = 0) -> dict[str, Any]:
    luck = torch.Generator().manual_seed(seed)
    rand = partial(torch.randn, generator=luck)
    text = {"encoder_hidden_states": rand(batch, 5, 32)}
    pooled = {"pooled_projections": rand(batch, 32)}
    if kind == "flux":
        ids = torch.zeros(side * side, 3)
        ids[:, 1] = torch.arange(side * side)
        guidance = torch.full((batch,), 3.5)
        more = {"img_ids": ids, "txt_ids": torch.zeros(5, 3), "guidance": guidance}
        return {"hidden_states": rand(batch, side * side, 16), **text, **pooled, **more}
    if kind == "qwen":
        return {"hidden_states": rand(batch, side * side, 16), **text, "img_shapes": [[(1, side, side)]] * batch}
    if kind == "cogvideox":
        return {"hidden_states": rand(batch, 2, 4, 2 * side, 2 * side), **text}
    return {"hidden_states": rand(batch, 4, 2 * side, 2 * side), **text, **(pooled if kind == "sd3" else {})}


@torch.no_grad()
def steps(model: Any, given: dict[str, Any], device: str = "cpu", run: bool = True) -> list[torch.Tensor]:
    """The results of three steps, as one run."""
    batch = len(given["hidden_states"])
    times = [torch.full((batch,), time, device=device) for time in TIMES]
    placed = {name: each.to(device) if torch.is_tensor(each) else each for name, each in given.items()}
    if not run:
        return [model(**placed, timestep=time, return_dict=False)[0].cpu() for time in times]
    with cached_run(times):
        return [model(**placed, timestep=time, return_dict=False)[0].cpu() for time in times]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def hoisted_groups(model: Any) -> list[Any]:
    placement = placement_of(model)
    return [] if placement is None else [group for group in placement._groups if group.spec.hoisted]


PLACEMENTS = {
    "blocks": lambda model: model.enable_group_offload("sim:0"),
    "two blocks": lambda model: model.enable_group_offload("sim:0", num_blocks_per_group=2),
    "blocks, stream": lambda model: model.enable_group_offload("sim:0", use_stream=True),
    "leaves, stream": lambda model: model.enable_group_offload("sim:0", offload_type="leaf_level", use_stream=True),
    "disk": lambda model: model.enable_group_offload("sim:0", offload_to_disk_path="disk"),
    "resident": lambda model: (model.to("sim:0"), model.hoist_modulation()),
}


@pytest.mark.parametrize("mode", PLACEMENTS)
@pytest.mark.parametrize("kind", MODELS)
def test_bit_for_bit_and_each_weight_comes_in_once(
    kind: str, mode: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    given = inputs(kind)
    wanted = steps(build(kind), given, run=False)
    with simulator():
        model = build(kind)
        PLACEMENTS[mode](model)
        groups = hoisted_groups(model)
        assert len(groups) == len(modulating_layers(model)) > 0
        counts = dict.fromkeys(range(len(groups)), 0)
        for index, group in enumerate(groups):

            def bring_in(index: int = index, original: Any = group.bring_in) -> None:
                counts[index] += 1
                original()

            group.bring_in = bring_in
        for count in (1, 2):
            assert equal(steps(model, given, "sim:0"), wanted)
            assert set(counts.values()) == {count}
            assert not any(group.is_in for group in groups)
        # Without a run there are no tables: as before, and the numbers too.
        assert equal(steps(model, given, "sim:0", run=False), wanted)
        assert not is_serving()


def test_another_size_another_batch_and_an_aborted_run() -> None:
    with simulator():
        model = build()
        model.enable_group_offload("sim:0", use_stream=True)
        for changes in ({}, {"side": 5}, {"batch": 1, "seed": 1}):
            given = inputs(**changes)
            assert equal(steps(model, given, "sim:0"), steps(build(), given))
            with pytest.raises(ValueError, match="expected"):
                steps(model, {**given, "img_ids": torch.zeros(1, 3)}, "sim:0")
            assert not is_serving()


def test_many_pictures_make_their_modulation_themselves() -> None:
    """Tables that take more memory than the weights are not made."""
    given = inputs(batch=11)  # 3 steps of 11, for vectors made of 32 numbers
    with simulator():
        model = build()
        model.enable_group_offload("sim:0")
        assert equal(steps(model, given, "sim:0"), steps(build(), given))


def test_edited_inputs_make_other_tables() -> None:
    def run(model: Any, device: str) -> list[torch.Tensor]:
        given = {name: each.to(device) for name, each in inputs().items()}
        times = [torch.full((2,), time, device=device) for time in TIMES]
        found: list[torch.Tensor] = []
        with torch.no_grad(), cached_run(times):
            for time in times:
                found.append(model(**given, timestep=time, return_dict=False)[0].cpu())
                given["pooled_projections"].mul_(0.5)
                given["guidance"] = given["guidance"] + 1
        return found

    with simulator():
        model = build()
        model.enable_group_offload("sim:0")
        assert equal(run(model, "sim:0"), run(build(), "cpu"))


@pytest.mark.parametrize("storage", ["plain", "int8"])
def test_with_casting(storage: str) -> None:
    given, found = inputs(), []
    with simulator():
        for hoists in (True, False):
            model = build()
            model.enable_layerwise_casting(storage=storage, skip_modules_pattern=["^proj_out$"])
            model.enable_group_offload("sim:0", use_stream=True)
            if not hoists:
                model.unhoist_modulation()
            assert bool(hoisted_groups(model)) == hoists
            found.append(steps(model, given, "sim:0"))
    assert equal(*found)


def test_under_a_device_map_on_request() -> None:
    given = inputs()
    wanted = steps(build(), given)
    with simulator(devices=2):
        model = build()
        places = {"": 0, "transformer_blocks": 1, "single_transformer_blocks.1": 1}
        request = read_request(places, None, None, None)
        request.apply(model, request.layout({"": model}))
        assert not hoisted_groups(model)
        model.hoist_modulation()
        assert len(hoisted_groups(model)) == 5
        for _ in range(2):
            assert equal(steps(model, given, "sim:0"), wanted)
        assert {each.device.type for each in model.transformer_blocks[0].norm1.linear.parameters()} == {"cpu"}
        model.unhoist_modulation()
        assert not hoisted_groups(model)
        assert equal(steps(model, given, "sim:0"), wanted)


def test_on_its_device_and_back() -> None:
    given = inputs()
    wanted = steps(build(), given)
    with simulator() as sim:
        model = build()
        before = {name: each.clone() for name, each in model.state_dict().items()}
        model.to("sim:0")
        whole = sim.statistics("sim:0").allocated
        model.hoist_modulation()
        model.hoist_modulation()
        weights = sum(each.numel() * 4 for layer in modulating_layers(model) for each in _own(model, layer.name))
        assert sim.statistics("sim:0").allocated <= whole - weights
        assert equal(steps(model, given, "sim:0"), wanted)
        with pytest.raises(PlacementError, match=r"unhoist_modulation\(\)"):
            model.to("sim:0", torch.float32).to("cpu")
        model.unhoist_modulation()
        assert placement_of(model) is None
        assert {each.device.type for each in model.parameters()} == {"sim"}
        assert sim.statistics("sim:0").allocated >= whole
        for name, each in model.to("cpu").state_dict().items():
            assert torch.equal(each, before[name])
        assert equal(steps(model, given), wanted)


def _own(model: Any, name: str) -> Any:
    return model.get_submodule(name).linear.parameters()


def test_on_the_cpu_without_an_accelerator() -> None:
    given = inputs()
    model = build()
    wanted = steps(model, given)
    model.hoist_modulation()
    assert equal(steps(model, given), wanted)
    model.enable_group_offload("cpu")
    assert len(hoisted_groups(model)) == 5
    assert equal(steps(model, given), wanted)


def test_models_without_such_weights_say_so() -> None:
    model = diffusion_core.UNet2DConditionModel(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
    )
    with pytest.raises(ValueError, match="UNet2DConditionModel has no weights"):
        model.hoist_modulation()


def test_compiled_blocks_stay_one_graph() -> None:
    given, graphs = inputs(), []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = build()
    wanted = steps(build(), given)
    model.enable_group_offload("cpu")
    model.compile_repeated_blocks(fullgraph=True, backend=count)
    for _ in range(2):
        assert equal(steps(model, given), wanted)
    assert len(graphs) == 2  # one for each kind of block


def test_two_threads_with_other_prompts() -> None:
    asked = [inputs(seed=1), inputs(seed=2)]
    wanted = [steps(build(), given) for given in asked]
    found: dict[int, bool] = {}
    with simulator():
        model = build()
        model.enable_group_offload("sim:0")

        def run(index: int) -> None:
            found[index] = all(equal(steps(model, asked[index], "sim:0"), wanted[index]) for _ in range(3))

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: True, 1: True}


@needs_shared
def test_flux_at_full_size_needs_six_gigabytes_less() -> None:
    """A dry run of FLUX.1-dev in bfloat16: peak of model offload, bytes that a step moves in group offload."""

    def run(mode: str, hoists: bool) -> Any:
        found = next(each for each in MODES if each.name == mode)

        def enable(pipe: Any, family: Any) -> None:
            pipe.transformer.__dict__["_hoists"] = hoists
            found.enable(pipe, family)

        return measure(FAMILIES["flux"], type(found)(mode, enable))

    with_tables, without = (run("model offload", hoists).peaks[0] for hoists in (True, False))
    assert without - with_tables >= 6e9
    with_tables, without = (run("group offload, blocks, stream", hoists) for hoists in (True, False))
    assert with_tables.moved_a_step <= 0.75 * without.moved_a_step
    assert with_tables.step < without.step
    assert with_tables.peaks[0] < without.peaks[0]
