"""Step caches: what they leave out, that they forget, and what they cost in exactness."""

import dataclasses
import inspect
import threading
from typing import Any

import diffusers
import diffusers.hooks
import pytest
import torch

import diffusion_core
from diffusion_core import (
    FLUX_MAG_RATIOS,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    cached_run,
)
from diffusion_core.errors import UnsupportedError
from diffusion_core.offload.chain_caches import TaylorSeries, chain_of
from diffusion_core.offload.gates import watchers_of

HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
UNET = {
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 2,
    "layers_per_block": 1,
}
TEXT_32 = {"joint_attention_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {
            **(HEADS | TEXT_32),
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **(HEADS | TEXT_32),
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
        },
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {
            **(HEADS | TEXT_32),
            "sample_size": 8,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "caption_projection_dim": 32,
        },
    ),
    "qwen": (
        "QwenImageTransformer2DModel",
        {
            **(HEADS | TEXT_32),
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "num_layers": 3,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 5,
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 3,
            "cross_attention_dim": 32,
            "sample_size": 8,
            "caption_channels": 32,
        },
    ),
    "wan": (
        "WanTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_dim": 32, "ffn_dim": 64, "num_layers": 3},
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "num_layers": 3,
        },
    ),
    "unet": ("UNet2DConditionModel", UNET),
}
RATIOS = [1.0] * 8


def fbc(threshold: float = 1e9) -> FirstBlockCacheConfig:
    return FirstBlockCacheConfig(threshold)


def mag(**changes: Any) -> MagCacheConfig:
    return MagCacheConfig(**{"num_inference_steps": 8, "mag_ratios": RATIOS, **changes})


def taylor(**changes: Any) -> TaylorSeerCacheConfig:
    return TaylorSeerCacheConfig(**{"cache_interval": 3, "disable_cache_before_step": 1, **changes})


def broadcast() -> PyramidAttentionBroadcastConfig:
    return PyramidAttentionBroadcastConfig(2, None, 3, current_timestep_callback=lambda: 500)


CONFIGS = {
    "first block": fbc,
    "mag": mag,
    "taylor": taylor,
    "lite": lambda: taylor(use_lite_mode=True),
    "pab": broadcast,
}


def build(kind: str) -> Any:
    name, config = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(diffusion_core, name)(**config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def inputs(kind: str, side: int = 4, seed: int = 0) -> dict[str, Any]:
    luck = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=luck)

    text = {"encoder_hidden_states": rand(1, 5, 32)}
    if kind == "flux":
        ids = torch.zeros(side * side, 3)
        more = {"img_ids": ids, "txt_ids": torch.zeros(5, 3), "pooled_projections": rand(1, 32)}
        return {"hidden_states": rand(1, side * side, 16), **text, **more}
    if kind == "qwen":
        return {"hidden_states": rand(1, side * side, 16), **text, "img_shapes": [(1, side, side)]}
    if kind == "cogvideox":
        return {"hidden_states": rand(1, 2, 4, 2 * side, 2 * side), **text}
    if kind == "wan":
        return {"hidden_states": rand(1, 4, 2, 2 * side, 2 * side), **text}
    if kind == "ltx":
        return {"hidden_states": rand(1, side * side, 4), **text, "num_frames": 1, "height": side, "width": side}
    name = "sample" if kind == "unet" else "hidden_states"
    pooled = {"pooled_projections": rand(1, 32)} if kind == "sd3" else {}
    return {name: rand(1, 4, 2 * side, 2 * side), **text, **pooled}


@torch.no_grad()
def steps(model: Any, given: dict[str, Any], count: int = 8, drift: float = 0.01) -> list[torch.Tensor]:
    """A run whose sample changes a little from step to step."""
    name = next(iter(given))
    found = []
    with cached_run():
        for index in range(count):
            sample = given[name] * (1 - drift * index)
            time = torch.tensor([0.9 - 0.05 * index]) * (1 if "hidden_states" in given else 1000)
            found.append(model(**{**given, name: sample}, timestep=time, return_dict=False)[0])
    return found


def counted(model: Any, names: list[str]) -> dict[str, int]:
    """How often parts compute from now on."""
    counts = dict.fromkeys(names, 0)

    def count(name: str) -> Any:
        def note(*_: Any) -> None:
            counts[name] += 1

        return note

    for name in names:
        model.get_submodule(name).register_forward_hook(count(name))
    return counts


@pytest.mark.parametrize("cache", CONFIGS)
@pytest.mark.parametrize("kind", MODELS)
def test_each_cache_on_each_model(kind: str, cache: str) -> None:
    """Close to the exact result, not equal to it, fewer calls; and exact again when disabled."""
    model, given = build(kind), inputs(kind)
    wanted = steps(model, given)
    assert not model.is_cache_enabled
    model.enable_cache(CONFIGS[cache]())
    assert model.is_cache_enabled
    found = steps(model, given)
    assert torch.equal(found[0], wanted[0])
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    assert 0 < max(errors) < 0.25, errors
    again = steps(model, given)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
    model.disable_cache()
    model.disable_cache()
    assert not model.is_cache_enabled
    assert all(torch.equal(*pair) for pair in zip(steps(model, given), wanted, strict=True))
    assert not any(watchers_of(part) for part in model.modules())


@pytest.mark.parametrize("kind", MODELS)
def test_a_first_block_that_never_changes_enough_leaves_out_the_rest(kind: str) -> None:
    model, given = build(kind), inputs(kind)
    names, is_unet = chain_of(model)
    counts = counted(model, names)
    model.enable_cache(fbc())
    steps(model, given)
    assert counts == {name: 8 if name == names[0] else 1 for name in names}
    assert is_unet == (kind == "unet")


@pytest.mark.parametrize("kind", MODELS)
def test_a_threshold_of_zero_changes_nothing(kind: str) -> None:
    model, given = build(kind), inputs(kind)
    wanted = steps(model, given)
    model.enable_cache(fbc(0.0))
    assert all(torch.equal(*pair) for pair in zip(steps(model, given), wanted, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_that_is_the_same_again_is_exact(kind: str) -> None:
    """Where neither sample nor time change, what the blocks add is what they would have added."""
    model, given = build(kind), inputs(kind)
    with torch.no_grad(), cached_run():
        model.enable_cache(fbc())
        time = torch.tensor([0.5])
        first, second = (model(**given, timestep=time, return_dict=False)[0] for _ in range(2))
    assert torch.allclose(first, second, atol=1e-5)


def test_taylor_computes_at_its_interval() -> None:
    model, given = build("flux"), inputs("flux")
    counts = counted(model, ["transformer_blocks.0.attn", "single_transformer_blocks.1.proj_mlp", "norm_out"])
    model.enable_cache(taylor(disable_cache_after_step=10))
    steps(model, given, 12)
    # In full: 0 and 1, then every third step, 4 and 7, and from 10 on.
    assert list(counts.values()) == [6, 6, 12]
    config = taylor(disable_cache_after_step=10)
    assert [index for index in range(12) if config.computes(index)] == [0, 1, 4, 7, 10, 11]


def test_taylor_by_names() -> None:
    model, given = build("pixart"), inputs("pixart")
    counts = counted(model, ["transformer_blocks.0.attn1", "transformer_blocks.0.ff", "transformer_blocks.1.ff"])
    model.enable_cache(taylor(cache_identifiers=[r"transformer_blocks\.\d+\.ff"], skip_predict_identifiers=[]))
    steps(model, given)
    assert list(counts.values()) == [8, 4, 4]


def test_a_series_is_exact_for_straight_lines() -> None:
    series = TaylorSeries(1, None)
    for index in (0, 2):
        series.learn(index, [torch.tensor([3.0 + 2 * index])])
    assert series.forecast(5)[0].item() == 13.0
    constant = TaylorSeries(0, torch.bfloat16)
    constant.learn(0, [torch.tensor([3.0])])
    constant.learn(2, [torch.tensor([7.0])])
    assert constant.forecast(5)[0].item() == 7.0
    assert constant.forecast(5)[0].dtype == torch.float32


def test_mag_skips_while_the_size_is_known() -> None:
    model, given = build("sd3"), inputs("sd3")
    counts = counted(model, ["transformer_blocks.0"])
    model.enable_cache(mag(max_skip_steps=2, retention_ratio=0.25))
    steps(model, given)
    assert counts["transformer_blocks.0"] == 4  # 0 and 1, then after two skipped steps each: 4 and 7
    model.disable_cache()
    model.enable_cache(mag(mag_ratios=[1.2] * 8))
    steps(model, given)
    assert counts["transformer_blocks.0"] == 12


def test_mag_measures_its_ratios() -> None:
    model, given = build("flux"), inputs("flux")
    wanted = steps(model, given)
    config = MagCacheConfig(calibrate=True, num_inference_steps=8)
    model.enable_cache(config)
    assert all(torch.equal(*pair) for pair in zip(steps(model, given), wanted, strict=True))
    assert len(config.mag_ratios) == 8
    assert config.mag_ratios[0] == 1.0
    assert all(0.8 < ratio < 1.2 for ratio in config.mag_ratios)
    model.disable_cache()
    model.enable_cache(mag(mag_ratios=config.mag_ratios))
    assert not all(torch.equal(*pair) for pair in zip(steps(model, given), wanted, strict=True))
    assert [MagCacheConfig(num_inference_steps=4, mag_ratios=[1, 2, 3, 4, 5, 6, 7]).ratio(k) for k in range(5)] == [
        *(1, 3, 5, 7),
        7,
    ]


def test_broadcast_by_kind_and_timestep() -> None:
    model, given = build("pixart"), inputs("pixart")
    counts = counted(model, ["transformer_blocks.0.attn1", "transformer_blocks.0.attn2"])
    times = iter([900, 700, 600, 500, 400, 300, 200, 50])
    model.enable_cache(PyramidAttentionBroadcastConfig(2, None, 3, current_timestep_callback=lambda: next(times)))
    steps(model, given)
    # Not at 900 and 50; in between every second, and every third step.
    assert list(counts.values()) == [5, 4]


# ---- what belongs together ----


def test_an_aborted_call_leaves_nothing_behind() -> None:
    """Case 176: the next call may have another size, and is what it would have been."""
    model = build("flux")
    small, large = inputs("flux"), inputs("flux", side=6)
    wanted = [steps(model, each) for each in (small, large)]
    model.enable_cache(fbc())
    handle = model.norm_out.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        steps(model, small)
    handle.remove()
    for given, exact in zip((large, small), wanted[::-1], strict=True):
        assert torch.equal(steps(model, given)[0], exact[0])


@torch.no_grad()
def test_a_call_that_failed_within_a_run_is_forgotten() -> None:
    model, given = build("flux"), inputs("flux")
    time = torch.tensor([0.5])
    wanted = model(**given, timestep=time, return_dict=False)[0]
    model.enable_cache(fbc())
    with cached_run() as memory:
        handle = model.norm_out.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**given, timestep=time)
        handle.remove()
        assert memory.states == {}
        assert torch.equal(model(**given, timestep=time, return_dict=False)[0], wanted)


@torch.no_grad()
def test_other_prompts_sizes_and_runs_start_anew() -> None:
    """Case 176: outside of a run, and for another text, nothing of an earlier one is used."""
    model = build("flux")
    model.enable_cache(fbc())
    first, second = inputs("flux"), inputs("flux", seed=1)
    time = torch.tensor([0.5])
    plain = build("flux")
    with cached_run():
        for given in (first, second, inputs("flux", side=5)):
            found = model(**given, timestep=time, return_dict=False)[0]
            assert torch.equal(found, plain(**given, timestep=time, return_dict=False)[0])
    for given in (first, second):
        found = model(**given, timestep=time, return_dict=False)[0]
        assert torch.equal(found, plain(**given, timestep=time, return_dict=False)[0])


@torch.no_grad()
def test_predictions_with_and_without_the_prompt_are_told_apart() -> None:
    def run(model: Any, named: bool) -> list[torch.Tensor]:
        prompts = {"with": inputs("flux"), "without": inputs("flux", seed=1)}
        found = []
        with cached_run():
            for index in range(3):
                for name, given in prompts.items():
                    changed = {**given, "hidden_states": given["hidden_states"] * (1 - 0.01 * index)}
                    if named:  # as in pipelines that make the text anew for each step
                        changed["encoder_hidden_states"] = given["encoder_hidden_states"].clone()
                        with model.cache_context(name):
                            found.append(model(**changed, timestep=torch.tensor([0.5]), return_dict=False)[0])
                    else:
                        found.append(model(**changed, timestep=torch.tensor([0.5]), return_dict=False)[0])
        return found

    model = build("flux")
    exact = run(model, False)
    model.enable_cache(fbc())
    found = run(model, False)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    assert 0 < max(errors) < 0.05
    assert all(torch.equal(*pair) for pair in zip(run(model, True), found, strict=True))


def test_two_threads_do_not_mix() -> None:
    model = build("flux")
    model.enable_cache(taylor())
    asked = [inputs("flux", seed=seed) for seed in (1, 2)]
    wanted = [steps(model, given) for given in asked]
    found: dict[int, bool] = {}

    def run(index: int) -> None:
        found[index] = all(
            all(torch.equal(*pair) for pair in zip(steps(model, asked[index]), wanted[index], strict=True))
            for _ in range(3)
        )

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: True, 1: True}


# ---- with memory modes and compilation ----


@pytest.mark.parametrize("cache", ["first block", "lite", "taylor"])
def test_with_group_offload_whatever_comes_first(cache: str) -> None:
    given = inputs("flux")
    model = build("flux")
    model.enable_cache(CONFIGS[cache]())
    wanted = steps(model, given)
    model.enable_group_offload("cpu")
    assert all(torch.equal(*pair) for pair in zip(steps(model, given), wanted, strict=True))
    other = build("flux")
    other.enable_group_offload("cpu")
    other.enable_cache(CONFIGS[cache]())
    assert all(torch.equal(*pair) for pair in zip(steps(other, given), wanted, strict=True))


def test_with_compiled_blocks() -> None:
    given, model = inputs("flux"), build("flux")
    model.enable_cache(fbc())
    wanted = steps(model, given)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    found = steps(model, given)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, wanted, strict=True))


# ---- names and refusals ----


@pytest.mark.parametrize(
    "name", ["FirstBlockCacheConfig", "TaylorSeerCacheConfig", "MagCacheConfig", "PyramidAttentionBroadcastConfig"]
)
def test_settings_are_those_of_the_reference(name: str) -> None:
    ours, theirs = getattr(diffusion_core, name), getattr(diffusers, name)
    assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters]
    for mine, other in zip(dataclasses.fields(ours), dataclasses.fields(theirs), strict=True):
        assert mine.default == other.default, mine.name


def test_names_of_the_reference_lead_here() -> None:
    import diffusion_core.hooks as hooks

    for name in hooks.__all__:
        place = diffusers.hooks if hasattr(diffusers.hooks, name) else diffusers.hooks.mag_cache
        assert hasattr(place, name) or name.startswith("remove_")
    assert pytest.approx(FLUX_MAG_RATIOS, abs=1e-5) == diffusers.hooks.mag_cache.FLUX_MAG_RATIOS.tolist()
    model = build("flux")
    hooks.apply_first_block_cache(model, fbc())
    assert model.is_cache_enabled
    with pytest.raises(TypeError, match="must be a MagCacheConfig"):
        hooks.apply_mag_cache(model, fbc())
    for switch in ("enable_cache", "disable_cache", "cache_context"):
        theirs = inspect.signature(getattr(diffusers.FluxTransformer2DModel, switch))
        assert [*inspect.signature(getattr(model, switch)).parameters] == [*theirs.parameters][1:2]


def test_twice_is_refused_and_so_are_other_things() -> None:
    model = build("flux")
    model.enable_cache(fbc())
    with pytest.raises(ValueError, match=r"disable_cache\(\) first"):
        model.enable_cache(mag())
    model.disable_cache()
    with pytest.raises(TypeError, match="takes the config of a cache"):
        model.enable_cache(0.1)
    with pytest.raises(UnsupportedError, match="diffusers's FirstBlockCacheConfig"):
        model.enable_cache(diffusers.FirstBlockCacheConfig())
    for name in ("FasterCacheConfig", "SeaCacheConfig", "TextKVCacheConfig"):
        with pytest.raises(UnsupportedError, match="is not supported"):
            getattr(diffusion_core, name)()
    vae = diffusion_core.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    with pytest.raises(ValueError, match="AutoencoderKL has no chain of blocks"):
        vae.enable_cache(fbc())
    assert not vae.is_cache_enabled


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FirstBlockCacheConfig(-1), "threshold=-1"),
        (lambda: MagCacheConfig(), "mag_ratios are needed"),
        (lambda: mag(retention_ratio=2), "retention_ratio=2"),
        (lambda: mag(num_inference_steps=0), "num_inference_steps"),
        (lambda: TaylorSeerCacheConfig(cache_interval=0), "cache_interval"),
        (lambda: TaylorSeerCacheConfig(cache_identifiers=["("]), "no regular expression"),
        (lambda: TaylorSeerCacheConfig(use_lite_mode=True, cache_identifiers=["a"]), "leave the identifiers out"),
        (lambda: PyramidAttentionBroadcastConfig(0), "spatial_attention_block_skip_range=0"),
        (lambda: PyramidAttentionBroadcastConfig(2, spatial_attention_timestep_skip_range=(8, 1)), "must rise"),
    ],
)
def test_settings_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_broadcast_needs_to_know_the_timestep() -> None:
    model = build("pixart")
    model.enable_cache(PyramidAttentionBroadcastConfig(2))
    with pytest.raises(ValueError, match="current_timestep_callback"):
        steps(model, inputs("pixart"))
