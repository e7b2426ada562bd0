"""`AuraFlowTransformer2DModel` against the reference, and where it refuses what the reference gets wrong."""

from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from diffusion_core.models import AuraFlowTransformer2DModel

from ..support import hub_config

Config = dict[str, Any]

TINY: Config = {
    "sample_size": 8,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pos_embed_max_size": 64,
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(channels: int = 4, height: int = 8, width: int = 12) -> Config:
    return {
        "hidden_states": seeded(2, channels, height, width),
        "encoder_hidden_states": seeded(2, 7, 12, seed=1),
        "timestep": torch.tensor([0.3, 0.9]),
    }


def pair(**config: Any) -> tuple[Any, AuraFlowTransformer2DModel]:
    torch.manual_seed(0)
    theirs = diffusers.AuraFlowTransformer2DModel(**{**TINY, **config}).eval()
    ours = AuraFlowTransformer2DModel(**{**TINY, **config}).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"in_channels": 3, "out_channels": 5},
        {"num_mmdit_layers": 0},
        {"num_single_dit_layers": 0, "patch_size": 4},
        {"pos_embed_max_size": 49},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(8, 12), (8, 8), (12, 4)], ids=str)
def test_agrees_with_the_reference(config: Config, size: tuple[int, int]) -> None:
    theirs, ours = pair(**config)
    given = inputs(config.get("in_channels", 4), *size)
    close(ours(**given).sample, theirs(**given).sample)
    close(ours(**given, return_dict=False)[0], theirs(**given, return_dict=False)[0])


@torch.no_grad()
@pytest.mark.parametrize("size", [(6, 10), (2, 2), (16, 16), (14, 6)], ids=str)
def test_positions_come_from_the_middle_of_the_table(size: tuple[int, int]) -> None:
    theirs, ours = pair()
    latent = inputs(4, *size)["hidden_states"]
    close(ours.pos_embed(latent), theirs.pos_embed(latent), 1e-6)


@torch.no_grad()
def test_one_time_for_all() -> None:
    _, ours = pair()
    given = {**inputs(), "timestep": torch.tensor([0.25, 0.25])}
    for time in (0.25, torch.tensor(0.25), torch.tensor([0.25])):
        close(ours(**{**given, "timestep": time}).sample, ours(**given).sample, 0)


@torch.no_grad()
def test_channels_out_follow_channels_in() -> None:
    model = AuraFlowTransformer2DModel(**{**TINY, "in_channels": 3, "out_channels": None}).eval()
    assert model(**inputs(3)).sample.shape == (2, 3, 8, 12)


@torch.no_grad()
def test_half_precision_stays_near_the_reference() -> None:
    theirs, ours = (model.to(torch.bfloat16) for model in pair())
    given = {name: value.bfloat16() for name, value in inputs().items()}
    result = ours(**given).sample
    assert result.dtype == torch.bfloat16
    close(result, theirs(**given).sample, 0.1)


def test_a_real_config_has_the_reference_s_names_and_count() -> None:
    path = hub_config("fal/AuraFlow/transformer")
    with torch.device("meta"):
        ours = AuraFlowTransformer2DModel.from_config(AuraFlowTransformer2DModel.load_config(path))
        theirs = diffusers.AuraFlowTransformer2DModel.from_config(
            diffusers.AuraFlowTransformer2DModel.load_config(path)
        )
    shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert round(sum(each.numel() for each in ours.parameters()) / 1e6, 2) == 6833.44


def test_checkpoints_go_both_ways(tmp_path: Any) -> None:
    theirs, ours = pair()
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        expected = theirs(**inputs()).sample
        close(AuraFlowTransformer2DModel.from_pretrained(tmp_path / "theirs")(**inputs()).sample, expected)
        close(diffusers.AuraFlowTransformer2DModel.from_pretrained(tmp_path / "ours")(**inputs()).sample, expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"caption_projection_dim": 17}, "caption_projection_dim=17 must equal the 16 channels"),
        ({"pos_embed_max_size": 60}, "pos_embed_max_size=60 must be a square"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuraFlowTransformer2DModel(**{**TINY, **config})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # The reference takes positions of the next row for what does not fit in one.
        ({"hidden_states": seeded(2, 4, 4, 18)}, "4 x 18 .* exceed the positions .* at most 16 x 16"),
        ({"hidden_states": seeded(2, 4, 18, 4)}, "18 x 4 .* exceed"),
        ({"hidden_states": seeded(2, 4, 7, 8)}, "7 x 8"),
        ({"hidden_states": seeded(2, 3, 8, 8)}, r"expected \(batch, 4, height, width\)"),
        ({"encoder_hidden_states": seeded(2, 7, 13)}, r"expected \(2, tokens, 12\)"),
        ({"encoder_hidden_states": None}, "needs encoder_hidden_states"),
        ({"timestep": None}, "needs timestep"),
        ({"timestep": torch.rand(3)}, "timestep holds 3 values"),
        ({"attention_kwargs": {"gamma": 0.5}}, r"attention_kwargs has \['gamma'\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuraFlowTransformer2DModel(**TINY).eval()(**{**inputs(), **changes})


@torch.no_grad()
def test_compiles_into_one_graph_for_all_steps() -> None:
    _, ours = pair()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for step in (1.0, 0.5, 0.01):
        given = {**inputs(), "timestep": torch.tensor(step)}
        close(compiled(**given).sample, ours(**given).sample, 1e-6)
    assert counter.frame_count == 1


def test_repeated_blocks_compile_alone() -> None:
    _, ours = pair()
    with torch.no_grad():
        plain = ours(**inputs()).sample
        ours.compile_repeated_blocks(fullgraph=True, backend="eager")
        close(ours(**inputs()).sample, plain)
