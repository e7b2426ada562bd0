"""`FluxControlNetModel` against the reference, and on input that does not fit."""

import inspect
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core import FluxControlNetModel
from tests.models.test_flux import TINY, inputs, seeded


def pair(**changes: Any) -> tuple[Any, Any]:
    """Ours and the reference's, with joints that are not zero."""
    torch.manual_seed(0)
    theirs = diffusers.FluxControlNetModel(**{**TINY, **changes}).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = FluxControlNetModel(**{**TINY, **changes}).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({}, {}),
        ({"guidance_embeds": True}, {"guidance": torch.full((2,), 3.5)}),
        ({"num_mode": 3}, {"controlnet_mode": torch.tensor([[1], [2]])}),
        ({"num_single_layers": 0}, {}),
        ({"conditioning_embedding_channels": 2, "patch_size": 2}, {"controlnet_cond": seeded(2, 3, 32, 48)}),
    ],
)
def test_agrees_with_the_reference(changes: dict[str, Any], given: dict[str, Any]) -> None:
    arguments = {**inputs(), "controlnet_cond": seeded(2, 6, 8, seed=4), "conditioning_scale": 0.7, **given}
    ours, theirs = pair(**changes)
    for found, expected in zip(ours(**arguments).to_tuple(), theirs(**arguments).to_tuple(), strict=True):
        assert (found is None) == (expected is None)
        for one, other in zip(found or (), expected or (), strict=True):
            assert float((one - other).abs().max()) < 1e-5


def test_signatures_are_the_reference_s() -> None:
    for method in ("__init__", "forward"):
        found, expected = (
            [
                (each.name, tuple(each.default) if isinstance(each.default, list) else each.default)
                for each in inspect.signature(getattr(library, method)).parameters.values()
            ]
            for library in (FluxControlNetModel, diffusers.FluxControlNetModel)
        )
        assert found == expected


@torch.no_grad()
def test_a_new_one_adds_nothing_and_saves(tmp_path: Any) -> None:
    torch.manual_seed(0)
    made = FluxControlNetModel(**TINY).eval()
    given = {**inputs(), "controlnet_cond": seeded(2, 6, 8, seed=4)}
    found = made(**given)
    assert all(not sample.any() for samples in found.to_tuple() for sample in samples)
    made.save_pretrained(tmp_path)
    again = diffusers.FluxControlNetModel.from_pretrained(tmp_path)
    assert again.state_dict().keys() == made.state_dict().keys()


def test_compiles_whole() -> None:
    ours, _ = pair()
    given = {**inputs(), "controlnet_cond": seeded(2, 6, 8, seed=4)}
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(ours, backend="aot_eager", fullgraph=True)(**given, return_dict=False)
        for one, other in zip(found[0], ours(**given, return_dict=False)[0], strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "given", "word"),
    [
        ({}, {"controlnet_cond": seeded(2, 6, 7)}, "controlnet_cond"),
        ({}, {"controlnet_mode": torch.zeros(2, 1, dtype=torch.long)}, "controlnet_mode"),
        ({"num_mode": 3}, {}, "controlnet_mode must be from 0 to 2"),
        ({}, {"timestep": None}, "timestep"),
    ],
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], given: dict[str, Any], word: str) -> None:
    ours, _ = pair(**changes)
    with pytest.raises(ValueError, match=word):
        ours(**{**inputs(), "controlnet_cond": seeded(2, 6, 8, seed=4), **given})
