"""The cache of prompts: encoders are asked once, and asked again once they have changed."""

import copy

import pytest
import torch

from diffusion_core.offload.gates import watchers_of
from diffusion_core.pipelines.base import Pipeline

from .families import FAMILIES, Family, loaded

WITH_TEXT = [family for family in FAMILIES if family.denoiser in ("unet", "transformer")]
QUICK = [next(each for each in WITH_TEXT if str(each) == name) for name in ("stable-diffusion-3", "flux", "pixart")]


def draw(made: Pipeline, family: Family, **changes: object) -> torch.Tensor:
    drawn = made(**family.call(family.main, **{"num_inference_steps": 1, **changes}))
    return drawn[0] if isinstance(drawn[0], torch.Tensor) else torch.stack([*drawn[0]])


def encoders(made: Pipeline) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in made.components.items() if name.startswith("text_encoder")}


@pytest.mark.parametrize("family", QUICK, ids=str)
def test_the_same_prompt_is_encoded_once(family: Family) -> None:
    made = loaded(family)
    wanted = draw(made, family)
    assert made.prompt_cache is None
    made.enable_prompt_cache()
    calls = []
    for part in encoders(made).values():
        part.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(draw(made, family), wanted)
    first = len(calls)
    assert torch.equal(draw(made, family), wanted)
    assert len(calls) == first == made.prompt_cache.misses == made.prompt_cache.hits > 0
    other = draw(made, family, prompt=["another text"])
    assert len(calls) > first
    assert not torch.equal(other, wanted)
    cache = made.prompt_cache
    made.disable_prompt_cache()
    made.disable_prompt_cache()
    assert made.prompt_cache is None and len(cache) == cache.size == 0
    assert not any(watchers_of(part) for part in encoders(made).values())
    assert torch.equal(draw(made, family), wanted)


@pytest.mark.parametrize("family", QUICK[:1], ids=str)
def test_changed_and_replaced_encoders_are_asked_again(family: Family) -> None:
    made, plain = loaded(family), loaded(family)
    made.enable_prompt_cache()
    draw(made, family)
    with torch.no_grad():
        for each in (made, plain):
            next(each.text_encoder.parameters()).mul_(1.5)
    assert torch.equal(draw(made, family), draw(plain, family))
    replacement = loaded(family).text_encoder
    made.text_encoder = plain.text_encoder = replacement
    assert torch.equal(draw(made, family), draw(plain, family))
    made.to(torch.float64)
    hits = made.prompt_cache.hits
    with torch.no_grad():
        made.encode_prompt(*[["a red cat"]] * 3)
    assert made.prompt_cache.hits == hits


@pytest.mark.parametrize("family", QUICK[1:2], ids=str)
def test_moved_encoders_are_the_same(family: Family) -> None:
    made = loaded(family)
    wanted = draw(made, family)
    made.enable_prompt_cache()
    draw(made, family)
    made.enable_model_cpu_offload(device="cpu")
    assert torch.equal(draw(made, family), wanted)
    made.disable_model_cpu_offload()
    made.enable_sequential_cpu_offload(device="cpu")
    assert torch.equal(draw(made, family), wanted)
    assert made.prompt_cache.misses == made.prompt_cache.hits / 2


@torch.no_grad()
def test_no_more_bytes_than_the_limit_and_edits_stay_outside() -> None:
    family = QUICK[1]
    made = loaded(family)
    made.enable_prompt_cache("20kB")
    for index in range(8):
        made.encode_prompt(f"picture {index}", max_sequence_length=8)
        assert made.prompt_cache.size <= 20_000
    assert 0 < len(made.prompt_cache) < 16
    first, _, _ = made.encode_prompt("picture 7", max_sequence_length=8)
    kept = first.clone()
    first.zero_()
    assert torch.equal(made.encode_prompt("picture 7", max_sequence_length=8)[0], kept)
    made.prompt_cache.clear()
    assert made.prompt_cache.size == len(made.prompt_cache) == 0
    with pytest.raises(ValueError, match="limit"):
        made.enable_prompt_cache("much")
    assert made.prompt_cache is not None
    made.enable_prompt_cache(0)
    made.encode_prompt("picture 1", max_sequence_length=8)
    assert len(made.prompt_cache) == 0


def test_copies_of_a_pipeline_have_no_cache() -> None:
    made = loaded(QUICK[1])
    made.enable_prompt_cache()
    assert copy.deepcopy(made).prompt_cache is None
