"""`CogVideoXTransformer3DModel` against the reference, on real configs, compiled, and on input that does not fit."""

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core.models.transformers.cogvideox import CogVideoXTransformer3DModel
from tests.support import hub_config

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 12,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
    "max_text_seq_length": 6,
}
# CogVideoX-2b, 5b, 5b-I2V and 1.5-5B-I2V, in small.
KINDS: dict[str, dict[str, Any]] = {
    "sinusoids": {},
    "sinusoids slower": {"temporal_interpolation_scale": 2.0},
    "rotary": {"use_rotary_positional_embeddings": True},
    "learned": {
        "use_rotary_positional_embeddings": True,
        "use_learned_positional_embeddings": True,
        "in_channels": 8,
    },
    "patches in time": {
        "use_rotary_positional_embeddings": True,
        "patch_size_t": 2,
        "patch_bias": False,
        "ofs_embed_dim": 8,
    },
    "unusual": {"attention_bias": False, "norm_elementwise_affine": False, "flip_sin_to_cos": False, "freq_shift": 1},
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(config: Any, batch: int = 2, frames: int = 3, height: int = 8, width: int = 8, words: int = 6) -> Any:
    p_t = config.get("patch_size_t") or 1
    frames += frames % p_t
    given: dict[str, Any] = {
        "hidden_states": seeded(batch, frames, config["in_channels"], height, width),
        "encoder_hidden_states": seeded(batch, words, 12, seed=1),
        "timestep": torch.tensor([700, 5])[:batch],
    }
    if config.get("use_rotary_positional_embeddings"):
        angles = seeded(frames // p_t * (height // 2) * (width // 2), 8, seed=2)
        given["image_rotary_emb"] = tuple(part.repeat_interleave(2, 1) for part in (angles.cos(), angles.sin()))
    if config.get("ofs_embed_dim"):
        given["ofs"] = torch.full((batch,), 2.0)
    return given


def pair(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    config = {**TINY, **KINDS[kind]}
    torch.manual_seed(0)
    theirs = diffusers.CogVideoXTransformer3DModel(**config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = CogVideoXTransformer3DModel(**config).eval()
    if KINDS[kind].get("use_learned_positional_embeddings"):
        theirs.patch_embed.pos_embedding.normal_()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, config


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(3, 8, 8), (2, 8, 8), (4, 12, 8)])
def test_agrees_with_the_reference(kind: str, sizes: tuple[int, int, int]) -> None:
    ours, theirs, config = pair(kind)
    if kind == "learned" and sizes[1] != 8:
        pytest.skip("learned positions are for one size")
    given = inputs(config, 2, *sizes)
    expected, found = theirs(**given).sample, ours(**given).sample
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sinusoids", "rotary", "learned"])
def test_shorter_text_is_taken(kind: str) -> None:
    """The reference fails on it unless positions are rotary alone."""
    ours, theirs, config = pair(kind)
    given = inputs(config, words=4)
    found = ours(**given).sample
    if kind == "rotary":
        assert float((found - theirs(**given).sample).abs().max()) < 1e-5
    assert torch.isfinite(found).all()


@torch.no_grad()
def test_a_batch_is_its_singles() -> None:
    ours, _, config = pair("patches in time")
    given = inputs(config)
    whole = ours(**given).sample
    for index in range(2):
        one = {name: value if name == "image_rotary_emb" else value[index : index + 1] for name, value in given.items()}
        assert torch.allclose(ours(**one).sample, whole[index : index + 1], atol=1e-6)


def test_signatures_are_the_reference_s() -> None:
    theirs = diffusers.CogVideoXTransformer3DModel
    for name in ("__init__", "forward"):
        pairs = (getattr(CogVideoXTransformer3DModel, name), getattr(theirs, name))
        found, expected = (inspect.signature(each).parameters.values() for each in pairs)
        assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]
    assert CogVideoXTransformer3DModel._no_split_modules == theirs._no_split_modules
    assert CogVideoXTransformer3DModel._repeated_blocks == ["CogVideoXBlock"]


@pytest.mark.parametrize("name", ["CogVideoX-2b", "CogVideoX-5b"])
def test_real_configs_match_name_by_name(name: str) -> None:
    config = json.loads((hub_config(f"THUDM/{name}/transformer") / "config.json").read_text())
    classes = (CogVideoXTransformer3DModel, diffusers.CogVideoXTransformer3DModel)
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in classes)
    shapes, expected = ({key: value.shape for key, value in each.state_dict().items()} for each in (ours, theirs))
    assert shapes == expected


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sinusoids", "rotary"])
def test_compiles_whole_with_one_graph_for_all_steps(kind: str) -> None:
    ours, _, config = pair(kind)
    graphs: list[Any] = []

    def count(graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=count, fullgraph=True)
    for time in (900, 500, 1):
        given = {**inputs(config), "timestep": torch.full((2,), time)}
        assert torch.allclose(compiled(**given).sample, ours(**given).sample, atol=1e-6)
    assert len(graphs) == 1


def test_save_and_load_both_ways(tmp_path: Path) -> None:
    ours, theirs, config = pair("rotary")
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    given = inputs(config)
    with torch.no_grad():
        expected = ours(**given).sample
        there = diffusers.CogVideoXTransformer3DModel.from_pretrained(tmp_path / "ours")
        back = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "theirs")
        assert torch.equal(back(**given).sample, expected)
        assert torch.allclose(there(**given).sample, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("rotary", {"image_rotary_emb": None}, "needs image_rotary_emb"),
        ("sinusoids", {"image_rotary_emb": (torch.zeros(48, 16),) * 2}, "does not take image_rotary_emb"),
        ("rotary", {"image_rotary_emb": (torch.zeros(5, 16),) * 2}, "5 patches"),
        ("sinusoids", {"hidden_states": seeded(2, 3, 5, 8, 8)}, "hidden_states"),
        ("sinusoids", {"hidden_states": seeded(2, 3, 4, 7, 8)}, "part into patches"),
        ("sinusoids", {"encoder_hidden_states": seeded(2, 6, 11)}, "encoder_hidden_states"),
        ("sinusoids", {"timestep": torch.tensor([1, 2, 3])}, "timestep"),
        ("sinusoids", {"timestep_cond": torch.zeros(2, 8)}, "timestep_cond"),
        ("patches in time", {"ofs": None}, "ofs"),
        ("learned", {"encoder_hidden_states": seeded(2, 9, 12)}, "max_text_seq_length"),
        ("sinusoids", {"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
    ],
)
def test_bad_input_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    ours, _, config = pair(kind)
    with pytest.raises(ValueError, match=words):
        ours(**{**inputs(config), **changes})


def test_bad_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="use_rotary_positional_embeddings"):
        CogVideoXTransformer3DModel(**{**TINY, "use_learned_positional_embeddings": True})
    with pytest.raises(ValueError, match="ofs_embed_dim"):
        CogVideoXTransformer3DModel(**{**TINY, "ofs_embed_dim": 4})
