"""`QwenImageTransformer2DModel` against the reference, on its real size, compiled, and on input that does not fit."""

import inspect
import json
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core import QwenImageTransformer2DModel
from diffusion_core.models.transformers.qwenimage import joint_positions
from tests.support import hub_config

TINY: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 2,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}
MASK = torch.tensor([[1, 1, 1, 0, 0], [1] * 5])


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(**changes: Any) -> dict[str, Any]:
    given = {
        "hidden_states": seeded(2, 12, 8),
        "encoder_hidden_states": seeded(2, 5, 12, seed=1),
        "timestep": torch.tensor([0.5, 0.9]),
        "img_shapes": [[(1, 3, 4)]] * 2,
    }
    return {**given, **changes}


def tiny(**changes: Any) -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(**{**TINY, **changes}).eval()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.QwenImageTransformer2DModel(**TINY).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = tiny()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@torch.no_grad()
def agree(ours: Any, theirs: Any, **given: Any) -> None:
    expected, found = theirs(**given, return_dict=False)[0], ours(**given, return_dict=False)[0]
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"encoder_hidden_states_mask": MASK},
        {"encoder_hidden_states_mask": MASK.bool()},
        {"img_shapes": [[(1, 1, 2), (1, 5, 2)]] * 2},
        {"img_shapes": [[(2, 3, 2)]] * 2},
        {"img_shapes": [(1, 3, 4)]},
        *({"controlnet_block_samples": [seeded(2, 12, 32, seed=n) for n in range(count)]} for count in (1, 2, 3)),
    ],
)
def test_agrees_with_the_reference(pair: Any, changes: dict[str, Any]) -> None:
    agree(*pair, **inputs(**changes))


@torch.no_grad()
def test_masked_text_does_not_count() -> None:
    model, given = tiny(), inputs(encoder_hidden_states_mask=MASK)
    changed = given["encoder_hidden_states"].clone()
    changed[0, 3:] += 9
    assert torch.equal(model(**{**given, "encoder_hidden_states": changed}).sample, model(**given).sample)
    shorter = {name: value[:1, :3] if "encoder" in name else value[:1] for name, value in given.items()}
    assert torch.allclose(model(**shorter).sample, model(**given).sample[:1], atol=1e-6)


def test_positions_have_their_origin_in_the_middle() -> None:
    positions = joint_positions([(1, 4, 3)], 2)
    assert positions[:2].tolist() == [[2, 2, 2], [3, 3, 3]]
    assert positions[2].tolist() == [0, -2, -2]
    assert positions[-1].tolist() == [0, 1, 0]


def test_signatures_are_the_reference_s() -> None:
    for method in ("__init__", "forward"):
        found, expected = (
            inspect.signature(getattr(each, method)).parameters.values()
            for each in (QwenImageTransformer2DModel, diffusers.QwenImageTransformer2DModel)
        )
        assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]
    for name in ("_repeated_blocks", "_no_split_modules", "_keep_in_fp32_modules", "_skip_layerwise_casting_patterns"):
        assert getattr(QwenImageTransformer2DModel, name) == getattr(diffusers.QwenImageTransformer2DModel, name)


def test_the_real_size_has_the_same_tensors() -> None:
    config = json.loads(hub_config("Qwen/Qwen-Image/transformer/config.json").read_text())
    kinds = (QwenImageTransformer2DModel, diffusers.QwenImageTransformer2DModel)
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in kinds)
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    assert round(ours.num_parameters() / 1e6, 2) == 20430.40


@torch.no_grad()
def test_compiles_whole_with_one_graph_for_all_steps() -> None:
    from torch._dynamo.backends.debugging import aot_eager

    model, graphs = tiny(), []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for time in (0.9, 0.5):
        given = inputs(encoder_hidden_states_mask=MASK, timestep=torch.full((2,), time))
        assert torch.allclose(compiled(**given).sample, model(**given).sample, atol=1e-6)
    assert len(graphs) == 1


def test_save_and_load_both_ways(pair: Any, tmp_path: Any) -> None:
    ours, theirs = pair
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    agree(ours, diffusers.QwenImageTransformer2DModel.from_pretrained(tmp_path / "ours"), **inputs())
    agree(QwenImageTransformer2DModel.from_pretrained(tmp_path / "theirs"), theirs, **inputs())


@torch.no_grad()
def test_half_precision_stays_near() -> None:
    model = tiny()
    exact = model(**inputs()).sample
    halves = {key: value.bfloat16() for key, value in inputs().items() if isinstance(value, torch.Tensor)}
    near = model.to(torch.bfloat16)(**inputs(**halves)).sample
    assert near.dtype == torch.bfloat16
    assert float((near - exact).abs().max() / exact.abs().max()) < 0.05


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_states": seeded(2, 12, 7)}, "hidden_states"),
        ({"img_shapes": [[(1, 3, 3)]] * 2}, "12 tokens"),
        ({"img_shapes": [[(1, 3, 4)], [(1, 4, 3)]]}, "differ between samples"),
        ({"img_shapes": None, "timestep": None}, "timestep, img_shapes"),
        ({"encoder_hidden_states_mask": MASK[:, :4]}, "encoder_hidden_states_mask"),
        ({"guidance": torch.ones(2)}, "guidance"),
        ({"attention_kwargs": {"other": 1}}, "other"),
    ],
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        tiny()(**inputs(**changes))


def test_configs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="axes_dims_rope"):
        tiny(axes_dims_rope=(4, 4, 6))
    with pytest.raises(ValueError, match="zero_cond_t=True"):
        tiny(zero_cond_t=True)
