"""Rotary position embeddings."""

import pytest
import torch

from diffusion_core.models.layers.rotary import apply_rotary, rotary_angles, rotary_table, table_of

AXES = (4, 6, 6)


def positions(tokens: int = 7) -> torch.Tensor:
    return torch.randint(-9, 200, (tokens, 3), generator=torch.Generator().manual_seed(1)).float()


def heads(tokens: int = 7, dim: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, tokens, 3, dim, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_agrees_with_the_reference() -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    transformer = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    theirs = transformer.FluxPosEmbed(theta=10000, axes_dim=list(AXES))(positions())
    ours = rotary_table(positions(), AXES)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.squeeze(1).repeat_interleave(2, dim=-1), other)
    turned = embeddings.apply_rotary_emb(heads(), theirs, sequence_dim=1)
    assert (apply_rotary(heads(), ours) - turned).abs().max() < 1e-6


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = heads()[:, :1], heads(dim=16)[:, 1:2]

    def score(at: float) -> torch.Tensor:
        where = torch.tensor([[at, 2 * at, -at]])
        offset = torch.tensor([[3.0, 1.0, 4.0]])
        turned = apply_rotary(query, rotary_table(where, AXES))
        return (turned * apply_rotary(key, rotary_table(where + offset, AXES))).sum(-1)

    assert torch.allclose(score(0.0), score(17.5), atol=1e-5)


def test_position_zero_changes_nothing_and_lengths_stay() -> None:
    x = heads(dtype=torch.bfloat16)
    assert torch.equal(apply_rotary(x, rotary_table(torch.zeros(7, 3), AXES)), x)
    turned = apply_rotary(heads(), rotary_table(positions(), AXES))
    assert torch.allclose(turned.norm(dim=-1), heads().norm(dim=-1), atol=1e-5)
    assert apply_rotary(x, rotary_table(positions(), AXES)).dtype == torch.bfloat16


def test_far_positions_keep_their_digits() -> None:
    table = rotary_table(torch.tensor([[1_000_000.0]]), (2,), theta=10000.0)
    assert abs(table.cos.item() - 0.9367521275331447) < 1e-7


def test_tables_may_differ_by_sample_and_head() -> None:
    angles = torch.rand(2, 7, 3, 8, generator=torch.Generator().manual_seed(2))
    whole = apply_rotary(heads(), type(rotary_table(positions(), AXES))(angles.cos(), angles.sin()))
    alone = apply_rotary(heads()[1:, :, 2:], table_of(angles[1, :, 2]))
    assert torch.allclose(whole[1:, :, 2:], alone, atol=1e-6)


@pytest.mark.parametrize(("axes", "word"), [((4, 6), "2"), ((4, 5, 7), "even")])
def test_axes_that_do_not_fit_are_refused(axes: tuple[int, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        rotary_angles(positions(), axes)
