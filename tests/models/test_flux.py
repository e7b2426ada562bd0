"""`FluxTransformer2DModel` against the reference, on real configs, compiled, and on input that does not fit."""

import inspect
import json
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core import FluxTransformer2DModel
from tests.support import hub_config

TINY = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(rows: int, columns: int) -> torch.Tensor:
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    return torch.cat([torch.zeros(rows * columns, 1), grid], dim=1)


def inputs(batch: int = 2, words: int = 5, guidance: bool = False) -> dict[str, Any]:
    given = {
        "hidden_states": seeded(batch, 6, 8),
        "encoder_hidden_states": seeded(batch, words, 12, seed=1),
        "pooled_projections": seeded(batch, 10, seed=2),
        "timestep": torch.linspace(0.3, 0.9, batch),
        "img_ids": ids(2, 3),
        "txt_ids": torch.zeros(words, 3),
    }
    return {**given, "guidance": torch.full((batch,), 3.5)} if guidance else given


def pair(**changes: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = diffusers.FluxTransformer2DModel(**{**TINY, **changes}).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = FluxTransformer2DModel(**{**TINY, **changes}).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tiny(**changes: Any) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(**{**TINY, **changes}).eval()


@torch.no_grad()
def agree(ours: Any, theirs: Any, **given: Any) -> None:
    expected, found = theirs(**given, return_dict=False)[0], ours(**given, return_dict=False)[0]
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"guidance_embeds": True}, {"out_channels": 4}, {"num_layers": 0}])
def test_agrees_with_the_reference(changes: dict[str, Any]) -> None:
    agree(*pair(**changes), **inputs(guidance=changes.get("guidance_embeds", False)))


@pytest.mark.parametrize("repeat", [False, True])
def test_controlnet_residuals_agree(repeat: bool) -> None:
    ours, theirs = pair(num_layers=3)
    more = [seeded(2, 6, 32, seed=seed) for seed in range(5, 9)]
    control = {"controlnet_block_samples": more[:2], "controlnet_single_block_samples": more[2:]}
    agree(ours, theirs, **inputs(), **control, controlnet_blocks_repeat=repeat)


@torch.no_grad()
def test_half_precision_stays_near() -> None:
    ours, _ = pair()
    exact = ours(**inputs()).sample
    given = {name: value.bfloat16() if "ids" not in name else value for name, value in inputs().items()}
    near = ours.to(torch.bfloat16)(**given).sample
    assert near.dtype == torch.bfloat16
    assert float((near - exact).abs().max() / exact.abs().max()) < 0.05


@torch.no_grad()
def test_a_batch_is_its_singles_and_ids_may_differ_by_sample() -> None:
    model, given = tiny(), inputs()
    whole = model(**given).sample
    each = {name: value.expand(2, -1, -1) for name, value in given.items() if "ids" in name}
    assert torch.equal(model(**{**given, **each}).sample, whole)
    for index in range(2):
        one = {name: value if "ids" in name else value[index : index + 1] for name, value in given.items()}
        assert torch.allclose(model(**one).sample, whole[index : index + 1], atol=1e-6)


def test_signatures_are_the_reference_s() -> None:
    for ours, theirs in (
        (FluxTransformer2DModel.__init__, diffusers.FluxTransformer2DModel.__init__),
        (FluxTransformer2DModel.forward, diffusers.FluxTransformer2DModel.forward),
    ):
        found, expected = (inspect.signature(each).parameters.values() for each in (ours, theirs))
        assert [(each.name, each.default) for each in found] == [(each.name, each.default) for each in expected]
    for name in ("_repeated_blocks", "_no_split_modules", "_keep_in_fp32_modules"):
        assert getattr(FluxTransformer2DModel, name) == getattr(diffusers.FluxTransformer2DModel, name)


@pytest.mark.parametrize("name", ["FLUX.1-dev", "FLUX.1-schnell"])
def test_real_checkpoints_fit_name_by_name(name: str) -> None:
    folder = hub_config(f"black-forest-labs/{name}/transformer")
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    with torch.device("meta"):
        ours, theirs = (each.from_config(config) for each in (FluxTransformer2DModel, diffusers.FluxTransformer2DModel))
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    assert shapes.keys() == index["weight_map"].keys()
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    # The files hold bfloat16.
    assert 2 * ours.num_parameters() == index["metadata"]["total_size"]


@torch.no_grad()
def test_compiles_whole_with_one_graph_for_all_steps() -> None:
    model, graphs = tiny(guidance_embeds=True), []

    def count(graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    for time in (0.9, 0.5, 0.1):
        given = {**inputs(guidance=True), "timestep": torch.full((2,), time)}
        assert torch.allclose(compiled(**given).sample, model(**given).sample, atol=1e-6)
    assert len(graphs) == 1


@torch.no_grad()
def test_fused_projections_and_compiled_blocks_give_the_same() -> None:
    model, names = tiny(), set(tiny().state_dict())
    expected = model(**inputs()).sample
    model.fuse_qkv_projections()
    assert hasattr(model.single_transformer_blocks[0].attn, "to_qkv") and set(model.state_dict()) == names
    assert torch.allclose(model(**inputs()).sample, expected, atol=1e-6)
    model.unfuse_qkv_projections()
    torch._dynamo.reset()
    model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    assert torch.allclose(model(**inputs()).sample, expected, atol=1e-6)


def test_save_and_load_both_ways(tmp_path: Any) -> None:
    ours, theirs = pair()
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    agree(ours, diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "ours"), **inputs())
    agree(FluxTransformer2DModel.from_pretrained(tmp_path / "theirs"), theirs, **inputs())


def test_layerwise_casting_leaves_what_norms_hold() -> None:
    model = tiny()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    norm = model.transformer_blocks[0].attn.norm_q.weight
    assert norm.dtype == torch.float32
    assert model.x_embedder._parameters["weight"].dtype == torch.float8_e4m3fn
    assert torch.isfinite(model(**inputs()).sample).all()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_states": seeded(2, 6, 7)}, "hidden_states"),
        ({"hidden_states": seeded(2, 5, 8)}, "img_ids"),
        ({"encoder_hidden_states": seeded(3, 5, 12)}, "encoder_hidden_states"),
        ({"pooled_projections": seeded(2, 9)}, "pooled_projections"),
        ({"pooled_projections": None, "timestep": None}, "pooled_projections, timestep"),
        ({"txt_ids": torch.zeros(4, 3)}, "txt_ids"),
        ({"txt_ids": torch.zeros(1, 5, 3)}, "img_ids"),
        ({"timestep": torch.ones(3)}, "timestep"),
        ({"guidance": torch.ones(2)}, "guidance"),
        ({"joint_attention_kwargs": {"ip_adapter": 1}}, "ip_adapter"),
    ],
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        tiny()(**{**inputs(), **changes})


def test_missing_guidance_and_odd_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="guidance"):
        tiny(guidance_embeds=True)(**inputs())
    with pytest.raises(ValueError, match="axes_dims_rope"):
        FluxTransformer2DModel(**{**TINY, "axes_dims_rope": (4, 4, 6)})
