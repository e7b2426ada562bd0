"""Z-Image's transformer, against the reference."""

from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from ..pipelines.zimage import transformer

LATENTS, TEXT = 4, 16


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    theirs, ours = transformer(diffusers), transformer(diffusion_core)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(sizes: list[tuple[int, int]], words: list[int]) -> tuple[Any, ...]:
    source = torch.Generator().manual_seed(0)
    latents = [torch.randn(LATENTS, 1, *size, generator=source) for size in sizes]
    text = [torch.randn(count, TEXT, generator=source) for count in words]
    return latents, torch.linspace(0.1, 0.9, len(sizes)), text


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([(8, 8)], [5]),
        ([(8, 6)] * 2, [5, 7]),
        ([(8, 6)] * 2, [32, 33]),
        ([(16, 16), (4, 8)], [5, 40]),
    ],
)
@torch.no_grad()
def test_agrees_with_the_reference(models: tuple[Any, Any], sizes: list[tuple[int, int]], words: list[int]) -> None:
    """What fills up takes part, so a sample draws the same alone and beside longer ones."""
    ours, theirs = models
    given = inputs(sizes, words)
    found, expected = ours(*given, return_dict=False)[0], theirs(*given, return_dict=False)[0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    alone = ours(*([each[:1] for each in given]), return_dict=False)[0]
    torch.testing.assert_close(alone[0], found[0], atol=1e-5, rtol=0)
    assert torch.equal(ours(*given).sample[0], found[0])


def test_names_shapes_and_declarations_are_those_of_the_reference() -> None:
    name = "ZImageTransformer2DModel"
    with torch.device("meta"):
        ours, theirs = (getattr(library, name)() for library in (diffusion_core, diffusers))
    shapes = [{name: tuple(each.shape) for name, each in made.state_dict().items()} for made in (ours, theirs)]
    assert shapes[0] == shapes[1]
    skipped = ("_use_default_values",)
    assert {key: value for key, value in ours.config.items() if key not in skipped} == {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in theirs.config.items()
        if key not in skipped
    }
    for name in ("_repeated_blocks", "_no_split_modules", "_keep_in_fp32_modules", "_skip_layerwise_casting_patterns"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_without_norms_of_queries(models: tuple[Any, Any]) -> None:
    theirs, ours = transformer(diffusers, qk_norm=False), transformer(diffusion_core, qk_norm=False)
    ours.load_state_dict(theirs.state_dict())
    given = inputs([(8, 8)], [5])
    with torch.no_grad():
        found, expected = ours(*given, return_dict=False)[0][0], theirs(*given, return_dict=False)[0][0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 1}, "n_kv_heads must be n_heads"),
        ({"siglip_feat_dim": 8}, "siglip_feat_dim None"),
        ({"axes_dims": [4, 4, 4]}, "must be even numbers that add up to dim / n_heads = 16"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transformer(diffusion_core, **change)


@pytest.mark.parametrize(
    ("sizes", "words", "change", "message"),
    [
        ([(8, 8)], [5, 5], {}, "x has 1 samples and cap_feats 2"),
        ([(8, 7)], [5], {}, "which patches of .* do not divide"),
        ([(8, 8)], [5], {"patch_size": 4}, "not among those of the config"),
        ([(8, 80)], [5], {}, "more than axes_lens"),
        ([(8, 8)], [600], {}, "more than axes_lens"),
        ([(8, 8)], [5], {"siglip_feats": [1]}, "must be None"),
        ([(8, 8)], [5], {"joint_attention_kwargs": {"odd": 1}}, "odd"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    models: tuple[Any, Any], sizes: Any, words: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        models[0](*inputs(sizes, words), **change)


def test_wrong_channels_are_refused(models: tuple[Any, Any]) -> None:
    latents, times, text = inputs([(8, 8)], [5])
    with pytest.raises(ValueError, match="x has the shape"):
        models[0]([latents[0][:2]], times, text)
    with pytest.raises(ValueError, match="cap_feats has the shape"):
        models[0](latents, times, [text[0][:, :3]])
