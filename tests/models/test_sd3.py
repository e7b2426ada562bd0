"""`SD3Transformer2DModel` against the reference, on real sizes, compiled, and on input that does not fit."""

import inspect
import json
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core import SD3Transformer2DModel
from tests.support import hub_config

TINY: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 10,
    "pos_embed_max_size": 6,
}
# What tells the published models apart: 3 medium, 3.5 large, 3.5 medium.
SHAPES = {
    "3": {},
    "3.5-large": {"qk_norm": "rms_norm"},
    "3.5-medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
}
# The configs of 3.5 as published.
REAL = {
    "3.5-large": {
        "num_layers": 38,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    },
    "3.5-medium": {
        "num_layers": 24,
        "num_attention_heads": 24,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 384,
        "qk_norm": "rms_norm",
        "dual_attention_layers": tuple(range(13)),
    },
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(batch: int = 2, height: int = 8, width: int = 8) -> dict[str, Any]:
    return {
        "hidden_states": seeded(batch, 4, height, width),
        "encoder_hidden_states": seeded(batch, 5, 12, seed=1),
        "pooled_projections": seeded(batch, 10, seed=2),
        "timestep": torch.linspace(120.5, 900, batch),
    }


def pair(**changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.SD3Transformer2DModel(**{**TINY, **changes}).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = SD3Transformer2DModel(**{**TINY, **changes}).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tiny(**changes: Any) -> SD3Transformer2DModel:
    torch.manual_seed(0)
    return SD3Transformer2DModel(**{**TINY, **changes}).eval()


@torch.no_grad()
def agree(ours: Any, theirs: Any, **given: Any) -> None:
    expected, found = theirs(**given, return_dict=False)[0], ours(**given, return_dict=False)[0]
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("size", [(8, 8), (12, 4), (2, 10)])
def test_agrees_with_the_reference(kind: str, size: tuple[int, int]) -> None:
    agree(*pair(**SHAPES[kind]), **inputs(2, *size))


@pytest.mark.parametrize(
    "changes",
    [
        {"out_channels": 8},
        {"out_channels": None},
        {"patch_size": 1, "pos_embed_max_size": 8},
        {"num_layers": 1},
        {"qk_norm": "rms_norm", "dual_attention_layers": (2,)},
    ],
)
def test_other_configs_agree(changes: dict[str, Any]) -> None:
    agree(*pair(**changes), **inputs())


@pytest.mark.parametrize("skipped", [[], [0], [2], [0, 1, 2]])
@pytest.mark.parametrize("kind", SHAPES)
def test_skipped_layers_agree(kind: str, skipped: list[int]) -> None:
    agree(*pair(**SHAPES[kind]), **inputs(), skip_layers=skipped)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("skipped", [None, [1], [2]])
def test_controlnet_residuals_agree(count: int, skipped: list[int] | None) -> None:
    residuals = [seeded(2, 16, 16, seed=seed) for seed in range(5, 5 + count)]
    ours, theirs = pair(num_layers=4)
    agree(ours, theirs, **inputs(), block_controlnet_hidden_states=residuals, skip_layers=skipped)


def test_residuals_change_the_result() -> None:
    model = tiny()
    changed = model(**inputs(), block_controlnet_hidden_states=[seeded(2, 16, 16)]).sample
    assert not torch.allclose(changed, model(**inputs()).sample)


@torch.no_grad()
def test_timesteps_of_any_kind() -> None:
    model, given = tiny(), inputs()
    expected = model(**{**given, "timestep": torch.tensor([500, 500])}).sample
    for timestep in (500, 500.0, torch.tensor(500), torch.tensor([500.0])):
        assert torch.equal(model(**{**given, "timestep": timestep}).sample, expected)


@torch.no_grad()
def test_a_batch_is_its_singles() -> None:
    model, given = tiny(**SHAPES["3.5-medium"]), inputs()
    whole = model(**given).sample
    for index in range(2):
        one = {name: value[index : index + 1] for name, value in given.items()}
        assert torch.allclose(model(**one).sample, whole[index : index + 1], atol=1e-6)


@torch.no_grad()
def test_half_precision_stays_near() -> None:
    model = tiny(**SHAPES["3.5-medium"])
    exact = model(**inputs()).sample
    given = {name: value.bfloat16() for name, value in inputs().items()}
    near = model.to(torch.bfloat16)(**given).sample
    assert near.dtype == torch.bfloat16
    assert float((near - exact).abs().max() / exact.abs().max()) < 0.05


@torch.no_grad()
def test_memory_format_changes_nothing() -> None:
    model, given = tiny(**SHAPES["3.5-medium"]), inputs()
    expected = model(**given).sample
    model.to(memory_format=torch.channels_last)
    given["hidden_states"] = given["hidden_states"].to(memory_format=torch.channels_last)
    assert torch.allclose(model(**given).sample, expected, atol=1e-6)


def test_signatures_are_the_reference_s() -> None:
    for ours, theirs in (
        (SD3Transformer2DModel.__init__, diffusers.SD3Transformer2DModel.__init__),
        (SD3Transformer2DModel.forward, diffusers.SD3Transformer2DModel.forward),
    ):
        found, expected = (inspect.signature(each).parameters.values() for each in (ours, theirs))
        assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]
    for name in ("_no_split_modules", "_keep_in_fp32_modules", "_skip_layerwise_casting_patterns"):
        assert getattr(SD3Transformer2DModel, name) == getattr(diffusers.SD3Transformer2DModel, name)


@pytest.mark.parametrize("name", ["3", *REAL])
def test_real_sizes_have_the_same_tensors(name: str) -> None:
    if name == "3":
        path = hub_config("stabilityai/stable-diffusion-3-medium-diffusers/transformer/config.json")
        config = json.loads(path.read_text())
    else:
        config = REAL[name]
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in (SD3Transformer2DModel, diffusers.SD3Transformer2DModel))
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    assert ours.num_parameters() == theirs.num_parameters()
    assert dict(ours.config).items() >= {key: value for key, value in config.items() if key[0] != "_"}.items()


@torch.no_grad()
def test_compiles_whole_with_one_graph_for_all_steps() -> None:
    from torch._dynamo.backends.debugging import aot_eager

    model, graphs = tiny(**SHAPES["3.5-medium"]), []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for time in (900.5, 500.0, 12.0):
        given = {**inputs(), "timestep": torch.full((2,), time)}
        assert torch.allclose(compiled(**given).sample, model(**given).sample, atol=1e-6)
    assert len(graphs) == 1


@torch.no_grad()
def test_blocks_compile_alone() -> None:
    model = tiny(**SHAPES["3.5-medium"])
    torch._dynamo.reset()
    expected = model(**inputs()).sample
    model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    assert torch.allclose(model(**inputs()).sample, expected, atol=1e-6)


def test_save_and_load_both_ways(tmp_path: Any) -> None:
    ours, theirs = pair(**SHAPES["3.5-medium"])
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    agree(ours, diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "ours"), **inputs())
    agree(SD3Transformer2DModel.from_pretrained(tmp_path / "theirs"), theirs, **inputs())


def test_layerwise_casting_leaves_positions_and_norms() -> None:
    model = tiny(**SHAPES["3.5-medium"])
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert model.pos_embed.proj.weight.dtype == torch.float32
    assert model.transformer_blocks[0].attn.norm_q.weight.dtype == torch.float32
    assert model.transformer_blocks[0].attn.to_q._parameters["weight"].dtype == torch.float8_e4m3fn
    assert torch.isfinite(model(**inputs()).sample).all()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_states": seeded(2, 5, 8, 8)}, "hidden_states"),
        ({"hidden_states": seeded(2, 4, 7, 8)}, "patches of 2"),
        ({"hidden_states": seeded(2, 4, 14, 8)}, "at most 12 x 12"),
        ({"encoder_hidden_states": seeded(3, 5, 12)}, "encoder_hidden_states"),
        ({"encoder_hidden_states": None, "timestep": None}, "encoder_hidden_states, timestep"),
        ({"pooled_projections": seeded(2, 9)}, "pooled_projections"),
        ({"timestep": torch.ones(3)}, "timestep"),
        ({"skip_layers": [1, 3]}, "skip_layers"),
        ({"joint_attention_kwargs": {"ip_adapter_image_embeds": 1}}, "ip_adapter_image_embeds"),
    ],
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        tiny()(**{**inputs(), **changes})


def test_configs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="caption_projection_dim=20"):
        tiny(caption_projection_dim=20)
    with pytest.raises(ValueError, match="norm"):
        tiny(qk_norm="other")
    with pytest.raises(ValueError, match="multiple of 4"):
        tiny(attention_head_dim=7, caption_projection_dim=14)
