"""`PixArtTransformer2DModel` against the reference: alpha with sizes, Sigma without, old configs, bad input."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from diffusion_core.errors import ConfigError
from diffusion_core.models import AutoModel, PixArtTransformer2DModel, Transformer2DModel

from ..support import hub_config

Config = dict[str, Any]

TINY: Config = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "cross_attention_dim": 24,
    "caption_channels": 20,
    "sample_size": 16,
}
VARIANTS: dict[str, Config] = {
    "sigma": {},
    "alpha": {"sample_size": 128},
    "sizes asked for": {"use_additional_conditions": True},
    "sizes refused": {"sample_size": 128, "use_additional_conditions": False},
    "other layers": {
        "out_channels": None,
        "norm_elementwise_affine": True,
        "interpolation_scale": 2,
        "attention_bias": False,
        "activation_fn": "geglu",
        "patch_size": 4,
    },
    "no text": {"cross_attention_dim": None},
    "text as it is": {"caption_channels": None},
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(text_channels: int = 20) -> Config:
    sizes = {"resolution": torch.tensor([[64.0, 128.0], [100.0, 90.0]]), "aspect_ratio": torch.tensor([[0.5], [0.8]])}
    return {
        "hidden_states": seeded(2, 4, 8, 16),
        "encoder_hidden_states": seeded(2, 7, text_channels, seed=1),
        "timestep": torch.tensor([3, 500]),
        "added_cond_kwargs": sizes,
    }


def pair(**config: Any) -> tuple[Any, PixArtTransformer2DModel]:
    torch.manual_seed(0)
    theirs = diffusers.PixArtTransformer2DModel(**{**TINY, **config}).eval()
    ours = PixArtTransformer2DModel(**{**TINY, **config}).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_agrees_with_the_reference(name: str) -> None:
    theirs, ours = pair(**VARIANTS[name])
    given = inputs(ours.config["caption_channels"] or 24)
    mask = torch.ones(2, 7)
    mask[1, 3:] = 0
    for masks in ({}, {"encoder_attention_mask": mask}, {"encoder_attention_mask": (1 - mask[:, None]) * -3.0}):
        close(ours(**given, **masks).sample, theirs(**given, **masks).sample)


@torch.no_grad()
def test_masks_of_patches_and_one_time_for_all() -> None:
    theirs, ours = pair()
    given = {**inputs(), "attention_mask": (seeded(2, 32) > -1).float()}
    close(ours(**given, return_dict=False)[0], theirs(**given, return_dict=False)[0])
    time = torch.tensor(7)
    close(ours(**{**given, "timestep": time}).sample, theirs(**{**given, "timestep": time.expand(2)}).sample)
    close(ours(**{**given, "timestep": 7}).sample, ours(**{**given, "timestep": time}).sample, 0)


@torch.no_grad()
def test_what_a_mask_hides_changes_nothing_whatever_its_dtype() -> None:
    _, ours = pair()
    given, mask = inputs(), torch.ones(2, 7)
    mask[:, 5:] = 0
    other = given["encoder_hidden_states"].clone()
    other[:, 5:] = 9.0
    for kind in (torch.float32, torch.bool, torch.int64):
        masked = {**given, "encoder_attention_mask": mask.to(kind)}
        close(ours(**masked).sample, ours(**{**masked, "encoder_hidden_states": other}).sample, 1e-6)


@torch.no_grad()
def test_half_precision_stays_near_the_reference() -> None:
    theirs, ours = (model.to(torch.bfloat16) for model in pair(sample_size=128))
    given = inputs()
    given = {**given, **{name: given[name].bfloat16() for name in ("hidden_states", "encoder_hidden_states")}}
    result = ours(**given).sample
    assert result.dtype == torch.bfloat16
    close(result, theirs(**given).sample, 0.1)


def test_a_real_config_has_the_reference_s_names_and_count() -> None:
    path = hub_config("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS/transformer")
    with torch.device("meta"):
        ours = PixArtTransformer2DModel.from_config(PixArtTransformer2DModel.load_config(path))
        theirs = diffusers.PixArtTransformer2DModel.from_config(diffusers.PixArtTransformer2DModel.load_config(path))
        alpha, their_alpha = PixArtTransformer2DModel(), diffusers.PixArtTransformer2DModel()
    for model, other in ((ours, theirs), (alpha, their_alpha)):
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        assert shapes == {name: tensor.shape for name, tensor in other.state_dict().items()}
    assert round(sum(each.numel() for each in ours.parameters()) / 1e6, 2) == 610.86
    assert not ours.takes_sizes and alpha.takes_sizes


def old_checkpoint(folder: Path, **entries: Any) -> Any:
    """A checkpoint as PixArt-alpha was published: its config names a class that had many kinds."""
    theirs, _ = pair(sample_size=128)
    theirs.save_pretrained(folder)
    file = folder / "config.json"
    old = {"double_self_attention": False, "num_vector_embeds": None, "only_cross_attention": False}
    config = {**json.loads(file.read_text()), **old, "use_linear_projection": False, **entries}
    file.write_text(json.dumps({**config, "_class_name": "Transformer2DModel"}))
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("loader", [Transformer2DModel, PixArtTransformer2DModel, AutoModel])
def test_checkpoints_under_the_old_name_load(loader: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = old_checkpoint(tmp_path)
    ours = loader.from_pretrained(tmp_path)
    assert type(ours) is PixArtTransformer2DModel and not caplog.records
    close(ours(**inputs()).sample, theirs(**inputs()).sample)
    ours.save_pretrained(tmp_path / "again")
    again = diffusers.PixArtTransformer2DModel.from_pretrained(tmp_path / "again")
    close(again(**inputs()).sample, theirs(**inputs()).sample, 0)


def test_other_kinds_of_the_old_class_are_refused(tmp_path: Path) -> None:
    old_checkpoint(tmp_path, norm_type="ada_norm_zero")
    for make in (Transformer2DModel.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ConfigError, match="norm_type='ada_norm_zero' is not supported"):
            make(tmp_path)
    with pytest.raises(ConfigError, match="norm_type=None"):
        Transformer2DModel.from_config({})
    with pytest.raises(TypeError, match="PixArtTransformer2DModel"):
        Transformer2DModel()
    assert type(Transformer2DModel.from_config({**TINY, "norm_type": "ada_norm_single"})) is PixArtTransformer2DModel


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_type": "layer_norm"}, "norm_type='layer_norm' is not supported"),
        ({"patch_size": None}, "patch_size=None"),
        ({"cross_attention_dim": 20}, "cross_attention_dim=20 differs from the 24 channels"),
        ({"activation_fn": "tanh"}, "activation_fn='tanh' is unknown"),
        (
            {"attention_head_dim": 14, "cross_attention_dim": 28, "use_additional_conditions": True},
            "28 channels are not a multiple of 3",
        ),
        ({"attention_head_dim": 9, "cross_attention_dim": 18}, "multiple of 4"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(config: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PixArtTransformer2DModel(**{**TINY, **config})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": seeded(2, 3, 8, 16)}, r"hidden_states has the shape \(2, 3, 8, 16\), expected \(batch, 4"),
        ({"hidden_states": seeded(4, 8, 16)}, "hidden_states has the shape"),
        ({"hidden_states": seeded(2, 4, 7, 16)}, "7 x 16"),
        ({"encoder_hidden_states": seeded(2, 7, 24)}, r"expected \(2, tokens, 20\)"),
        ({"encoder_hidden_states": None}, "needs encoder_hidden_states"),
        ({"timestep": None}, "needs timestep"),
        ({"timestep": torch.tensor([1, 2, 3])}, "timestep holds 3 values"),
        ({"added_cond_kwargs": None}, "added_cond_kwargs must hold"),
        ({"cross_attention_kwargs": {"gamma": 1.0}}, r"cross_attention_kwargs has \['gamma'\]"),
        ({"encoder_attention_mask": torch.ones(2, 6)}, "6 tokens, but there are 7"),
        ({"encoder_attention_mask": torch.ones(3, 7)}, "3 rows for 2 samples"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: Config, message: str) -> None:
    model = PixArtTransformer2DModel(**{**TINY, "sample_size": 128}).eval()
    with pytest.raises(ValueError, match=message):
        model(**{**inputs(), **changes})


@torch.no_grad()
@pytest.mark.parametrize("name", ["sigma", "alpha"])
def test_compiles_into_one_graph_for_all_steps(name: str) -> None:
    _, ours = pair(**VARIANTS[name])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    mask = torch.ones(2, 7)
    for step in (999, 500, 3):
        given = {**inputs(), "timestep": torch.tensor(step), "encoder_attention_mask": mask}
        close(compiled(**given).sample, ours(**given).sample, 1e-6)
    assert counter.frame_count == 1


def test_repeated_blocks_compile_alone() -> None:
    _, ours = pair()
    with torch.no_grad():
        plain = ours(**inputs()).sample
        ours.compile_repeated_blocks(fullgraph=True, backend="eager")
        close(ours(**inputs()).sample, plain)
