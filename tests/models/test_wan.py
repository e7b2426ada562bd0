"""`WanTransformer3DModel` against the reference, on real configs, compiled, and on input that does not fit."""

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core.models.transformers.wan import WanTransformer3DModel
from tests.support import hub_config

TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 12,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 2,
}
# Text to video, image to video, a first and a last picture, the 5B's times for each token, and what no checkpoint has.
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "image": {"in_channels": 6, "image_dim": 10, "added_kv_proj_dim": 32},
    "two images": {"image_dim": 10, "added_kv_proj_dim": 32, "pos_embed_seq_len": 6},
    "unusual": {"cross_attn_norm": False, "eps": 1e-3, "patch_size": (1, 1, 2), "out_channels": 3},
    "patches in time": {"patch_size": (2, 2, 2)},
}
CONFIGS = [
    "Wan2.1-T2V-1.3B-Diffusers/transformer",
    "Wan2.1-T2V-14B-Diffusers/transformer",
    "Wan2.1-I2V-14B-480P-Diffusers/transformer",
    "Wan2.2-T2V-A14B-Diffusers/transformer",
    "Wan2.2-T2V-A14B-Diffusers/transformer_2",
]


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(config: dict[str, Any], frames: int = 2, height: int = 6, width: int = 4, words: int = 512) -> Any:
    """The reference knows the text among the pictures by its 512 tokens."""
    given = {
        "hidden_states": seeded(2, config["in_channels"], frames, height, width),
        "timestep": torch.tensor([700, 5]),
        "encoder_hidden_states": seeded(2, words, 12, seed=1),
    }
    if config.get("image_dim"):
        # Where there are two pictures a film, they lie along the batch.
        pictures, tokens = (4, 3) if config.get("pos_embed_seq_len") else (2, 5)
        given["encoder_hidden_states_image"] = seeded(pictures, tokens, 10, seed=2)
    return given


def pair(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    config = {**TINY, **KINDS[kind]}
    torch.manual_seed(0)
    theirs = diffusers.WanTransformer3DModel(**config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = WanTransformer3DModel(**config).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, config


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_reference(kind: str) -> None:
    ours, theirs, config = pair(kind)
    for size in ({}, {"frames": 4, "height": 2, "width": 8}):
        given = inputs(config, **size)
        expected = theirs(**given).sample
        assert torch.allclose(ours(**given).sample, expected, atol=1e-5)
        assert torch.equal(ours(**given, return_dict=False)[0], ours(**given).sample)


@torch.no_grad()
def test_agrees_with_a_time_for_each_token() -> None:
    ours, theirs, config = pair("text")
    given = inputs(config)
    given["timestep"] = torch.tensor([[0.0] * 6 + [400.0] * 6, [3.0] * 12])
    assert torch.allclose(ours(**given).sample, theirs(**given).sample, atol=1e-5)
    same = {**given, "timestep": torch.full((2, 12), 400.0)}
    once = {**given, "timestep": torch.tensor([400.0, 400.0])}
    assert torch.allclose(ours(**same).sample, ours(**once).sample, atol=1e-6)


@torch.no_grad()
def test_agrees_in_bfloat16_where_parts_stay_float32(tmp_path: Path) -> None:
    _, theirs, config = pair("image")
    theirs.save_pretrained(tmp_path)
    classes = (WanTransformer3DModel, diffusers.WanTransformer3DModel)
    ours, theirs = (each.from_pretrained(tmp_path, torch_dtype=torch.bfloat16) for each in classes)
    dtypes = {name: value.dtype for name, value in theirs.state_dict().items()}
    assert {name: value.dtype for name, value in ours.state_dict().items()} == dtypes
    given = {name: value.bfloat16() for name, value in inputs(config).items()}
    found = ours(**given).sample
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), theirs(**given).sample.float(), atol=0.05)


@torch.no_grad()
def test_pictures_are_told_from_text_of_any_length() -> None:
    ours, _, config = pair("image")
    given = inputs(config, words=7)
    changed = {**given, "encoder_hidden_states_image": seeded(2, 5, 10, seed=9)}
    assert not torch.allclose(ours(**given).sample, ours(**changed).sample, atol=1e-4)
    # Attention does not depend on the order of what it looks at, so text turned round is the same text here.
    for name in ("encoder_hidden_states", "encoder_hidden_states_image"):
        turned = {**given, name: given[name].flip(1)}
        assert torch.allclose(ours(**turned).sample, ours(**given).sample, atol=1e-5)


def test_signatures_and_declarations_are_the_reference_s() -> None:
    theirs = diffusers.WanTransformer3DModel
    for name in ("__init__", "forward"):
        pairs = (getattr(WanTransformer3DModel, name), getattr(theirs, name))
        found, expected = ([*inspect.signature(each).parameters.values()] for each in pairs)
        assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]
    for name in (
        "_repeated_blocks",
        "_no_split_modules",
        "_keep_in_fp32_modules",
        "_keys_to_ignore_on_load_unexpected",
        "_skip_layerwise_casting_patterns",
    ):
        assert getattr(WanTransformer3DModel, name) == getattr(theirs, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configs_match_name_by_name(name: str) -> None:
    config = json.loads((hub_config(f"Wan-AI/{name}") / "config.json").read_text())
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in (WanTransformer3DModel, diffusers.WanTransformer3DModel))
    shapes, expected = ({key: value.shape for key, value in each.state_dict().items()} for each in (ours, theirs))
    assert shapes == expected
    assert ours.num_parameters() == theirs.num_parameters()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["text", "image", "tokens"])
def test_compiles_whole_with_one_graph_for_all_steps(kind: str) -> None:
    ours, _, config = pair("text" if kind == "tokens" else kind)
    graphs: list[Any] = []

    def count(graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=count, fullgraph=True)
    for time in (900, 500, 1):
        shape = (2, 12) if kind == "tokens" else (2,)
        given = {**inputs(config, words=7), "timestep": torch.full(shape, time)}
        assert torch.allclose(compiled(**given).sample, ours(**given).sample, atol=1e-6)
    assert len(graphs) == 1


def test_save_and_load_both_ways(tmp_path: Path) -> None:
    ours, theirs, config = pair("image")
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    given = inputs(config)
    with torch.no_grad():
        expected = ours(**given).sample
        there = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "ours")
        back = WanTransformer3DModel.from_pretrained(tmp_path / "theirs")
        assert torch.equal(back(**given).sample, expected)
        assert torch.allclose(there(**given).sample, expected, atol=1e-5)


@torch.no_grad()
def test_fused_projections_change_nothing() -> None:
    ours, _, config = pair("image")
    given = inputs(config)
    expected = ours(**given).sample
    ours.fuse_qkv_projections()
    assert torch.allclose(ours(**given).sample, expected, atol=1e-5)
    ours.unfuse_qkv_projections()
    assert torch.equal(ours(**given).sample, expected)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("image", {"encoder_hidden_states_image": None}, "needs encoder_hidden_states_image"),
        ("text", {"encoder_hidden_states_image": seeded(2, 5, 10)}, "does not take encoder_hidden_states_image"),
        ("image", {"encoder_hidden_states_image": seeded(2, 5, 9)}, "encoder_hidden_states_image"),
        ("two images", {"encoder_hidden_states_image": seeded(2, 5, 10)}, "several pictures"),
        ("text", {"hidden_states": seeded(2, 5, 2, 6, 4)}, "hidden_states"),
        ("text", {"hidden_states": seeded(2, 4, 6, 4)}, "hidden_states"),
        ("text", {"hidden_states": seeded(2, 4, 2, 5, 4)}, "part into patches"),
        ("text", {"encoder_hidden_states": seeded(2, 6, 11)}, "encoder_hidden_states"),
        ("text", {"timestep": torch.tensor([1, 2, 3])}, "timestep"),
        ("text", {"timestep": torch.zeros(2, 5)}, "one a token"),
        ("text", {"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
    ],
)
def test_bad_input_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    ours, _, config = pair(kind)
    with pytest.raises(ValueError, match=words):
        ours(**{**inputs(config, words=4), **changes})


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": None}, {"attention_head_dim": 15}, {"image_dim": 10}, {"added_kv_proj_dim": 32, "image_dim": None}],
)
def test_bad_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        WanTransformer3DModel(**{**TINY, **changes})
