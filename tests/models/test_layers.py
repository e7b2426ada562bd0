"""The layers that models share, against the reference with the same weights."""

from typing import Any

import pytest
import torch
from diffusers.models import attention as reference_attention
from diffusers.models import attention_processor, embeddings
from diffusers.models.activations import get_activation as reference_activation
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from diffusion_core.models.layers.activations import activation_function, get_activation
from diffusion_core.models.layers.attention import Attention
from diffusion_core.models.layers.embeddings import (
    GaussianFourierProjection,
    TextTimeEmbedding,
    TimestepEmbedding,
    Timesteps,
    batched_timestep,
    get_timestep_embedding,
)
from diffusion_core.models.layers.norms import make_norm
from diffusion_core.models.layers.transformer import BasicTransformerBlock, FeedForward, SpatialTransformer


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def share(theirs: torch.nn.Module, ours: torch.nn.Module) -> None:
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("name", ["silu", "swish", "mish", "gelu", "relu", "SiLU"])
def test_activations_match(name: str) -> None:
    values = seeded(50)
    assert torch.equal(get_activation(name)(values), reference_activation(name)(values))
    assert torch.equal(activation_function(name)(values), reference_activation(name)(values))


@pytest.mark.parametrize("name", ["other", None])
def test_unknown_activations_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"silu"):
        get_activation(name)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dim", [32, 33])
def test_timestep_embeddings_match(dim: int, shift: int, flip: bool) -> None:
    timesteps = torch.tensor([0, 1.5, 999])
    expected = embeddings.get_timestep_embedding(timesteps, dim, flip, shift, 2.0)
    assert (get_timestep_embedding(timesteps, dim, flip, shift, 2.0) - expected).abs().max() <= 1e-6
    layer = Timesteps(dim, flip, shift)(timesteps.half())
    assert layer.dtype == torch.float32
    assert (layer - embeddings.Timesteps(dim, flip, shift)(timesteps)).abs().max() <= 1e-6


def test_timesteps_must_be_a_list() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        get_timestep_embedding(torch.ones(2, 2), 8)


@pytest.mark.parametrize("timestep", [5, 5.0, torch.tensor(5), torch.tensor([5])])
def test_a_timestep_becomes_one_a_sample(timestep: Any) -> None:
    assert batched_timestep(timestep, seeded(3, 1)).tolist() == [5, 5, 5]
    assert batched_timestep(torch.tensor([1, 2, 3]), seeded(3, 1)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("flip", [True, False])
def test_fourier_projection_matches(log: bool, flip: bool) -> None:
    theirs = embeddings.GaussianFourierProjection(8, scale=16.0, log=log, flip_sin_to_cos=flip)
    ours = GaussianFourierProjection(8, scale=16.0, log=log, flip_sin_to_cos=flip)
    share(theirs, ours)
    levels = torch.tensor([0.1, 3.0])
    assert torch.equal(ours(levels), theirs(levels))
    assert not ours.weight.requires_grad


def test_timestep_embedding_matches() -> None:
    theirs = embeddings.TimestepEmbedding(6, 12, "gelu", out_dim=10, post_act_fn="relu", cond_proj_dim=4)
    ours = TimestepEmbedding(6, 12, "gelu", out_dim=10, post_act_fn="relu", cond_proj_dim=4)
    share(theirs, ours)
    values, condition = seeded(2, 6), seeded(2, 4)
    assert torch.equal(ours(values, condition), theirs(values, condition))
    assert torch.equal(ours(values), theirs(values))


def test_text_time_embedding_matches() -> None:
    theirs, ours = embeddings.TextTimeEmbedding(16, 32, 4), TextTimeEmbedding(16, 32, 4)
    share(theirs, ours)
    assert (ours(seeded(2, 5, 16)) - theirs(seeded(2, 5, 16))).abs().max() <= 1e-5


ATTENTIONS: dict[str, dict[str, Any]] = {
    "self": {},
    "cross": {"cross_attention_dim": 7, "upcast_attention": True},
    "autoencoder": {"norm_num_groups": 4, "bias": True, "residual_connection": True, "rescale_output_factor": 2.0},
    "layer norm": {"qk_norm": "layer_norm", "eps": 1e-6},
    "rms norm": {"qk_norm": "rms_norm", "out_bias": False},
}


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_matches(case: str, maps: bool) -> None:
    settings = {"heads": 2, "dim_head": 4, **ATTENTIONS[case]}
    theirs, ours = attention_processor.Attention(16, **settings), Attention(16, **settings)
    share(theirs, ours)
    values = seeded(2, 16, 3, 5) if maps else seeded(2, 15, 16)
    context = seeded(2, 4, 7) if case == "cross" else None
    assert (ours(values, context) - theirs(values, context)).abs().max() <= 1e-5


def test_attention_takes_masks_of_every_shape() -> None:
    layer, values = Attention(8, heads=2, dim_head=4), seeded(2, 3, 8)
    keep = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    bias = torch.zeros(2, 3).masked_fill(~keep, -torch.inf)
    expected = layer(values[:1], values[:1, :2])
    for mask in (keep, bias, keep[:, None], bias[:, None].expand(2, 3, 3)):
        assert (layer(values, attention_mask=mask)[:1] - expected).abs().max() <= 1e-6
    with pytest.raises(ValueError, match=r"4 tokens, but there are 3"):
        layer(values, attention_mask=torch.ones(2, 4))


def test_norms_by_name() -> None:
    assert make_norm(None, 4, 1e-5) is None
    assert isinstance(make_norm("layer_norm", 4, 1e-5), torch.nn.LayerNorm)
    assert isinstance(make_norm("rms_norm", 4, 1e-5), torch.nn.RMSNorm)
    with pytest.raises(ValueError, match=r"rms_norm"):
        make_norm("other", 4, 1e-5)


@pytest.mark.parametrize("name", ["geglu", "gelu", "gelu-approximate", "linear-silu", "swiglu"])
def test_feed_forward_matches(name: str) -> None:
    theirs, ours = reference_attention.FeedForward(8, activation_fn=name), FeedForward(8, activation_fn=name)
    share(theirs, ours)
    assert (ours(seeded(2, 3, 8)) - theirs(seeded(2, 3, 8))).abs().max() <= 1e-6


def test_unknown_feed_forwards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"geglu"):
        FeedForward(8, activation_fn="other")


@pytest.mark.parametrize("context", [None, 6])
@pytest.mark.parametrize("only", [True, False])
def test_transformer_block_matches(context: int | None, only: bool) -> None:
    settings = {"cross_attention_dim": context, "only_cross_attention": only and context is not None}
    theirs, ours = (
        reference_attention.BasicTransformerBlock(8, 2, 4, **settings),
        BasicTransformerBlock(8, 2, 4, **settings),
    )
    share(theirs, ours)
    tokens, text = seeded(2, 5, 8), None if context is None else seeded(2, 3, context)
    got = ours(tokens, encoder_hidden_states=text)
    assert (got - theirs(tokens, encoder_hidden_states=text)).abs().max() <= 1e-5


@pytest.mark.parametrize("linear", [True, False])
def test_spatial_transformer_matches(linear: bool) -> None:
    theirs = Transformer2DModel(
        2, 4, in_channels=8, num_layers=2, norm_num_groups=4, cross_attention_dim=6, use_linear_projection=linear
    )
    ours = SpatialTransformer(8, 2, num_layers=2, groups=4, cross_attention_dim=6, linear_projection=linear)
    share(theirs, ours)
    maps, text = seeded(2, 8, 3, 5), seeded(2, 4, 6)
    assert (ours(maps, text) - theirs(maps, text).sample).abs().max() <= 1e-5


def test_dropout_acts_in_training_only() -> None:
    layer, values = Attention(8, heads=2, dim_head=4, dropout=0.5), seeded(2, 3, 8)
    assert not torch.equal(layer(values), layer(values))
    layer.eval()
    assert torch.equal(layer(values), layer(values))
