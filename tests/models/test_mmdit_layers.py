"""The layers that diffusion transformers share, against the reference with the same weights."""

from typing import Any

import pytest
import torch
from diffusers.models import attention_processor, embeddings, normalization

from diffusion_core.models.layers.activations import activation_function, get_activation
from diffusion_core.models.layers.embeddings import CombinedTimestepTextProjEmbeddings, TextProjection
from diffusion_core.models.layers.joint_attention import JointAttention
from diffusion_core.models.layers.modulation import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    AdaLayerNormZeroX,
    table_vectors,
)
from diffusion_core.models.layers.patches import PatchEmbed, from_patches, sincos_2d
from diffusion_core.models.layers.rotary import rotary_table


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def share(theirs: torch.nn.Module, ours: torch.nn.Module) -> None:
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def agree(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-5


def test_gelu_tanh_matches() -> None:
    values = seeded(50)
    expected = torch.nn.functional.gelu(values, approximate="tanh")
    assert torch.equal(get_activation("gelu_tanh")(values), expected)
    assert torch.equal(activation_function("gelu_tanh")(values), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AdaLayerNormZero", AdaLayerNormZero),
        ("AdaLayerNormZeroSingle", AdaLayerNormZeroSingle),
        ("SD35AdaLayerNormZeroX", AdaLayerNormZeroX),
    ],
)
def test_adaptive_norms_match(name: str, kind: Any, bias: bool) -> None:
    theirs, ours = getattr(normalization, name)(16, bias=bias), kind(16, bias=bias)
    share(theirs, ours)
    tokens, vector = seeded(2, 5, 16), seeded(2, 16, seed=1)
    agree(ours(tokens, vector), theirs(tokens, emb=vector))


@pytest.mark.parametrize("bias", [True, False])
def test_continuous_norm_matches(bias: bool) -> None:
    theirs = normalization.AdaLayerNormContinuous(16, 12, elementwise_affine=False, eps=1e-6, bias=bias)
    ours = AdaLayerNormContinuous(16, 12, bias=bias)
    share(theirs, ours)
    agree([ours(seeded(2, 5, 16), seeded(2, 12))], [theirs(seeded(2, 5, 16), seeded(2, 12))])


def test_table_adds_to_each_vector() -> None:
    table, emb = seeded(6, 4), seeded(2, 24, seed=1)
    vectors = table_vectors(table, emb)
    assert len(vectors) == 6
    for index, vector in enumerate(vectors):
        assert torch.equal(vector, table[index] + emb[:, 4 * index : 4 * index + 4])
    shared = table_vectors(table[:2], emb[:, :4])
    assert [tuple(vector.shape) for vector in shared] == [(2, 4), (2, 4)]
    assert torch.equal(shared[1], table[1] + emb[:, :4])


@pytest.mark.parametrize("guidance", [False, True])
def test_combined_embeddings_match(guidance: bool) -> None:
    name = "CombinedTimestepGuidanceTextProjEmbeddings" if guidance else "CombinedTimestepTextProjEmbeddings"
    theirs, ours = getattr(embeddings, name)(16, 10), CombinedTimestepTextProjEmbeddings(16, 10, guidance)
    share(theirs, ours)
    time, pooled, strength = torch.tensor([3.0, 997.5]), seeded(2, 10), torch.tensor([3500.0, 1000.0])
    if guidance:
        agree([ours(time, pooled, strength)], [theirs(time, strength, pooled)])
        with pytest.raises(ValueError, match="guidance"):
            ours(time, pooled)
    else:
        agree([ours(time, pooled)], [theirs(time, pooled)])
        with pytest.raises(ValueError, match="guidance_embeds"):
            ours(time, pooled, strength)


@pytest.mark.parametrize("act_fn", ["gelu_tanh", "silu"])
def test_text_projection_matches(act_fn: str) -> None:
    theirs, ours = embeddings.PixArtAlphaTextProjection(6, 8, 4, act_fn), TextProjection(6, 8, 4, act_fn)
    share(theirs, ours)
    agree([ours(seeded(2, 3, 6))], [theirs(seeded(2, 3, 6))])


@pytest.mark.parametrize("size", [(8, 8), (12, 4), (6, 10), (2, 2)])
@pytest.mark.parametrize(("max_size", "scale"), [(None, 1.0), (None, 2.0), (6, 1.0), (7, 1.5)])
def test_patches_match(size: tuple[int, int], max_size: int | None, scale: float) -> None:
    theirs = embeddings.PatchEmbed(8, 8, 2, 3, 16, interpolation_scale=scale, pos_embed_max_size=max_size)
    ours = PatchEmbed(8, 2, 3, 16, interpolation_scale=scale, pos_embed_max_size=max_size)
    if max_size is not None:
        agree([ours.pos_embed], [theirs.pos_embed])
    share(theirs, ours)
    latent = seeded(2, 3, *size)
    agree([ours(latent)], [theirs(latent)])


def test_patches_refuse_sizes_that_do_not_fit() -> None:
    layer = PatchEmbed(8, 2, 3, 16, pos_embed_max_size=4)
    with pytest.raises(ValueError, match=r"10 x 8.*at most 8 x 8"):
        layer(seeded(1, 3, 10, 8))
    with pytest.raises(ValueError, match=r"7 x 8.*patches of 2"):
        layer(seeded(1, 3, 7, 8))
    with pytest.raises(ValueError, match="multiple of 4"):
        PatchEmbed(8, 2, 3, 18)


def test_positions_tell_columns_and_rows_apart() -> None:
    grid = sincos_2d(3, 5, 8).reshape(3, 5, 8)
    assert grid.dtype == torch.float32
    assert torch.equal(grid[0, :, :4], grid[2, :, :4])
    assert torch.equal(grid[:, 0, 4:], grid[:, 4, 4:])
    assert torch.equal(grid[0, 2, :4], grid[2, 0, 4:])


def test_patches_come_back() -> None:
    maps = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    tokens = torch.nn.functional.unfold(maps, 2, stride=2).mT.reshape(2, 6, 3, 4).mT.reshape(2, 6, 12)
    assert torch.equal(from_patches(tokens, 2, 3, 2), maps)


@pytest.mark.parametrize("qk_norm", [None, "rms_norm", "layer_norm"])
@pytest.mark.parametrize("pre_only", [False, True])
def test_joint_attention_matches(pre_only: bool, qk_norm: str | None) -> None:
    theirs = attention_processor.Attention(
        query_dim=16,
        added_kv_proj_dim=16,
        dim_head=8,
        heads=2,
        out_dim=16,
        context_pre_only=pre_only,
        bias=True,
        qk_norm=qk_norm,
        eps=1e-6,
        processor=attention_processor.JointAttnProcessor2_0(),
    )
    ours = JointAttention(16, heads=2, dim_head=8, context_dim=16, qk_norm=qk_norm, context_pre_only=pre_only)
    share(theirs, ours)
    image, text = seeded(2, 6, 16), seeded(2, 3, 16, seed=1)
    expected_image, expected_text = theirs(image, encoder_hidden_states=text)
    found_image, found_text = ours(image, text)
    agree([found_image], [expected_image])
    if pre_only:
        assert found_text is None
    else:
        agree([found_text], [expected_text])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masked_text_does_not_count(kind: torch.dtype) -> None:
    layer = JointAttention(16, heads=2, dim_head=8, context_dim=12, qk_norm="layer_norm", qk_norm_affine=False)
    image, text = seeded(1, 6, 16), seeded(1, 4, 12, seed=1)
    mask = torch.tensor([[True, True, False, False] + [True] * 6])
    given = mask if kind == torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    found, found_text = layer(image, text, attention_mask=given)
    expected, expected_text = layer(image, text[:, :2])
    agree([found, found_text[:, :2]], [expected, expected_text])


def test_one_stream_attends_to_itself() -> None:
    layer = JointAttention(16, heads=2, dim_head=8, pre_only=True)
    assert layer.to_out is None
    out, text = layer(seeded(2, 6, 16))
    assert out.shape == (2, 6, 16)
    assert text is None
    with pytest.raises(ValueError, match="not taken"):
        layer(seeded(2, 6, 16), seeded(2, 3, 16))
    with pytest.raises(ValueError, match="missing"):
        JointAttention(16, heads=2, dim_head=8, context_dim=16)(seeded(2, 6, 16))


def test_text_that_is_only_read_gets_no_queries() -> None:
    torch.manual_seed(0)
    layer = JointAttention(16, heads=2, dim_head=8, context_dim=16, context_pre_only=True)
    full = JointAttention(16, heads=2, dim_head=8, context_dim=16)
    full.load_state_dict(layer.state_dict(), strict=False)
    rotary = rotary_table(torch.arange(9.0)[:, None], [8])
    image, text = seeded(2, 6, 16), seeded(2, 3, 16, seed=1)
    agree([layer(image, text, rotary=rotary)[0]], [full(image, text, rotary=rotary)[0]])
