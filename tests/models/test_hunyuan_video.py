"""`HunyuanVideoTransformer3DModel` against the reference: masks, guidance, patches, a real config, bad input."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from diffusion_core.models import HunyuanVideoTransformer3DModel

from ..support import hub_config

Config = dict[str, Any]

TINY: Config = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 2,
    "patch_size": 2,
    "text_embed_dim": 12,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (4, 6, 6),
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(**changes: Any) -> Config:
    given = {
        "hidden_states": seeded(2, 4, 2, 4, 6),
        "timestep": torch.tensor([3.0, 500.0]),
        "encoder_hidden_states": seeded(2, 7, 12, seed=1),
        "encoder_attention_mask": (torch.arange(7) < torch.tensor([[7], [3]])).long(),
        "pooled_projections": seeded(2, 8, seed=2),
        "guidance": torch.tensor([6000.0, 1000.0]),
    }
    return {**given, **changes}


def pair(**config: Any) -> tuple[Any, HunyuanVideoTransformer3DModel]:
    torch.manual_seed(0)
    theirs = diffusers.HunyuanVideoTransformer3DModel(**{**TINY, **config}).eval()
    ours = HunyuanVideoTransformer3DModel(**{**TINY, **config}).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"guidance_embeds": False, "patch_size_t": 2, "mlp_ratio": 2.0},
        {"in_channels": 9, "out_channels": 3, "image_condition_type": "latent_concat", "rope_theta": 10.0},
        {"num_refiner_layers": 1, "num_layers": 1, "num_single_layers": 1},
    ],
    ids=str,
)
def test_agrees_with_the_reference(config: Config) -> None:
    theirs, ours = pair(**config)
    base = {} if config.get("guidance_embeds", True) else {"guidance": None}
    if "in_channels" in config:
        base["hidden_states"] = seeded(2, 9, 2, 4, 6)
    for changes in (
        {},
        {"timestep": torch.tensor([10, 999])},
        {"encoder_attention_mask": torch.ones(2, 7, dtype=torch.long)},
    ):
        given = inputs(**base, **changes)
        close(ours(**given).sample, theirs(**given).sample)
    close(ours(**inputs(**base), return_dict=False)[0], theirs(**inputs(**base), return_dict=False)[0])


@torch.no_grad()
def test_forms_of_mask_and_time() -> None:
    _, ours = pair()
    whole = ours(**inputs(encoder_attention_mask=torch.ones(2, 7))).sample
    close(ours(**inputs(encoder_attention_mask=None)).sample, whole)
    wanted = ours(**inputs(timestep=torch.tensor([7.0, 7.0]))).sample
    for time in (torch.tensor(7.0), torch.tensor([7.0]), 7.0):
        close(ours(**inputs(timestep=time)).sample, wanted, 1e-6)


@torch.no_grad()
def test_what_the_mask_hides_changes_nothing() -> None:
    _, ours = pair()
    other = inputs()["encoder_hidden_states"].clone()
    other[1, 3:] = 9.0
    mask = inputs()["encoder_attention_mask"]
    for kind in (torch.long, torch.bool, torch.float32):
        plain = ours(**inputs(encoder_attention_mask=mask.to(kind))).sample
        hidden = ours(**inputs(encoder_attention_mask=mask.to(kind), encoder_hidden_states=other)).sample
        close(hidden, plain, 1e-6)


def test_a_real_config_has_the_reference_s_names_and_count() -> None:
    path = hub_config("hunyuanvideo-community/HunyuanVideo/transformer")
    config = HunyuanVideoTransformer3DModel.load_config(path)
    with torch.device("meta"):
        ours = HunyuanVideoTransformer3DModel.from_config(config)
        theirs = diffusers.HunyuanVideoTransformer3DModel.from_config(config)
    shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert round(sum(each.numel() for each in ours.parameters()) / 1e6, 2) == 12821.01


@torch.no_grad()
def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    theirs, ours = pair()
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    wanted = theirs(**inputs()).sample
    close(HunyuanVideoTransformer3DModel.from_pretrained(tmp_path / "theirs")(**inputs()).sample, wanted)
    close(diffusers.HunyuanVideoTransformer3DModel.from_pretrained(tmp_path / "ours")(**inputs()).sample, wanted)


@torch.no_grad()
def test_one_graph_for_all_times() -> None:
    _, ours = pair()
    counter = CompileCounterWithBackend("aot_eager")
    wanted = [ours(**inputs(timestep=torch.tensor(time))).sample for time in (1000.0, 500.0, 3.0)]
    ours.compile(fullgraph=True, backend=counter)
    for time, plain in zip((1000.0, 500.0, 3.0), wanted, strict=True):
        close(ours(**inputs(timestep=torch.tensor(time))).sample, plain)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_axes_dim": (4, 4, 4)}, "attention_head_dim=16"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm' is not supported"),
        ({"image_condition_type": "token_replace"}, "image_condition_type='token_replace' is not supported"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HunyuanVideoTransformer3DModel(**{**TINY, **config})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": torch.zeros(2, 4, 4, 6)}, "hidden_states has the shape"),
        ({"hidden_states": torch.zeros(2, 4, 2, 5, 6)}, "must be multiples of"),
        ({"encoder_hidden_states": torch.zeros(2, 7, 11)}, "encoder_hidden_states has the shape"),
        ({"encoder_attention_mask": torch.ones(2, 6)}, "encoder_attention_mask has the shape"),
        ({"pooled_projections": torch.zeros(2, 7)}, "pooled_projections has the shape"),
        ({"guidance": None}, "pass `guidance`"),
        ({"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HunyuanVideoTransformer3DModel(**TINY)(**inputs(**changes))
