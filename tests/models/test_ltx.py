"""`LTXVideoTransformer3DModel` against the reference: times for all and for each token, positions, bad input."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from diffusion_core.models import LTXVideoTransformer3DModel
from diffusion_core.models.transformers.ltx import film_positions, film_rotary

from ..support import hub_config

Config = dict[str, Any]

TINY: Config = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 12,
}
SCALE = (8 / 25, 32.0, 32.0)


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(**changes: Any) -> Config:
    given = {
        "hidden_states": seeded(2, 30, 4),
        "encoder_hidden_states": seeded(2, 7, 12, seed=1),
        "timestep": torch.tensor([3.0, 500.0]),
        "encoder_attention_mask": (torch.arange(7) < torch.tensor([[7], [3]])).float(),
        "num_frames": 2,
        "height": 3,
        "width": 5,
        "rope_interpolation_scale": SCALE,
    }
    return {**given, **changes}


def pair(**config: Any) -> tuple[Any, LTXVideoTransformer3DModel]:
    torch.manual_seed(0)
    theirs = diffusers.LTXVideoTransformer3DModel(**{**TINY, **config}).eval()
    ours = LTXVideoTransformer3DModel(**{**TINY, **config}).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"norm_elementwise_affine": True, "attention_bias": False, "attention_out_bias": False, "patch_size": 2},
        {"out_channels": None, "num_attention_heads": 3, "cross_attention_dim": 48, "patch_size_t": 2},
    ],
    ids=str,
)
def test_agrees_with_the_reference(config: Config) -> None:
    theirs, ours = pair(**config)
    coords = torch.rand(2, 3, 30, generator=torch.Generator().manual_seed(3)) * torch.tensor([[[20.0], [2048], [2048]]])
    for changes in (
        {},
        {"rope_interpolation_scale": None},
        {"rope_interpolation_scale": torch.tensor(SCALE)},
        {"video_coords": coords},
        {"timestep": seeded(2, 30).abs() * 300},
        {"timestep": torch.tensor([[9.0], [700.0]])},
    ):
        given = inputs(**changes)
        close(ours(**given).sample, theirs(**given).sample)
    close(ours(**inputs(), return_dict=False)[0], theirs(**inputs(), return_dict=False)[0])


@pytest.mark.parametrize(("heads", "dim_head"), [(2, 16), (3, 10), (32, 64), (1, 6)])
def test_positions_are_those_of_the_reference(heads: int, dim_head: int) -> None:
    size = heads * dim_head
    theirs = diffusers.LTXVideoTransformer3DModel(
        **{**TINY, "num_attention_heads": heads, "attention_head_dim": dim_head, "cross_attention_dim": size}
    ).rope
    like = torch.zeros(1, 24, size)
    for scale in (None, SCALE):
        table = film_rotary(film_positions(4, 2, 3, scale, (1, 1, 1)), heads, dim_head)
        for part, wanted in zip(table, theirs(like, 4, 2, 3, scale), strict=True):
            close(part.flatten(2).repeat_interleave(2, dim=-1), wanted, 1e-6)


@torch.no_grad()
def test_one_time_for_all() -> None:
    _, ours = pair()
    wanted = ours(**inputs(timestep=torch.tensor([7.0, 7.0]))).sample
    for time in (torch.tensor(7.0), torch.tensor([7.0]), torch.full((2, 30), 7.0)):
        close(ours(**inputs(timestep=time)).sample, wanted, 1e-6)


@torch.no_grad()
def test_what_the_mask_hides_changes_nothing() -> None:
    _, ours = pair()
    other = inputs()["encoder_hidden_states"].clone()
    other[1, 3:] = 9.0
    for kind in (torch.float32, torch.bool):
        mask = inputs()["encoder_attention_mask"].to(kind)
        plain = ours(**inputs(encoder_attention_mask=mask)).sample
        close(ours(**inputs(encoder_attention_mask=mask, encoder_hidden_states=other)).sample, plain, 1e-6)


def test_a_real_config_has_the_reference_s_names_and_count() -> None:
    path = hub_config("Lightricks/LTX-Video/transformer")
    with torch.device("meta"):
        ours = LTXVideoTransformer3DModel.from_config(LTXVideoTransformer3DModel.load_config(path))
        theirs = diffusers.LTXVideoTransformer3DModel.from_config(
            diffusers.LTXVideoTransformer3DModel.load_config(path)
        )
    shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert round(sum(each.numel() for each in ours.parameters()) / 1e6, 2) == 1923.39


@torch.no_grad()
def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    theirs, ours = pair()
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    wanted = theirs(**inputs()).sample
    close(LTXVideoTransformer3DModel.from_pretrained(tmp_path / "theirs")(**inputs()).sample, wanted)
    close(diffusers.LTXVideoTransformer3DModel.from_pretrained(tmp_path / "ours")(**inputs()).sample, wanted)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm' is not supported"),
        ({"cross_attention_dim": 20}, "cross_attention_dim=20 must equal the 32 channels"),
        ({"attention_head_dim": 7, "cross_attention_dim": 14}, "attention_head_dim=7 must be even"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LTXVideoTransformer3DModel(**{**TINY, **config})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": seeded(2, 30, 5)}, r"hidden_states has the shape \(2, 30, 5\), expected \(2, tokens, 4\)"),
        ({"encoder_hidden_states": seeded(2, 7, 13)}, r"expected \(2, tokens, 12\)"),
        ({"num_frames": 3}, "num_frames=3, height=3 and width=5 must multiply to the 30 tokens"),
        ({"height": None}, "height=None"),
        ({"video_coords": torch.zeros(2, 3, 29)}, r"video_coords has the shape \(2, 3, 29\), expected \(2, 3, 30\)"),
        ({"timestep": torch.zeros(2, 29)}, r"timestep has the shape \(2, 29\)"),
        ({"timestep": torch.zeros(3)}, "timestep holds 3 values"),
        ({"encoder_attention_mask": torch.ones(2, 6)}, "6 tokens, but there are 7"),
        ({"attention_kwargs": {"gamma": 1.0}}, r"attention_kwargs has \['gamma'\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LTXVideoTransformer3DModel(**TINY).eval()(**inputs(**changes))


@torch.no_grad()
def test_projections_fuse_without_a_trace() -> None:
    theirs, ours = pair()
    ours.fuse_qkv_projections()
    assert set(ours.state_dict()) == set(theirs.state_dict())
    close(ours(**inputs()).sample, theirs(**inputs()).sample)


@torch.no_grad()
def test_compiles_into_one_graph_for_all_steps() -> None:
    _, ours = pair()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for step in (1000.0, 500.0, 3.0):
        given = inputs(timestep=torch.tensor(step))
        close(compiled(**given).sample, ours(**given).sample, 1e-5)
    assert counter.frame_count == 1


@torch.no_grad()
def test_repeated_blocks_compile_alone() -> None:
    _, ours = pair()
    plain = ours(**inputs()).sample
    ours.compile_repeated_blocks(fullgraph=True, backend="eager")
    close(ours(**inputs()).sample, plain)
