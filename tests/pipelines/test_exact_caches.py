"""What pipelines compute once a call changes no bit of what they draw."""

import pytest
import torch

from diffusion_core.offload.runs import current_run
from diffusion_core.pipelines.base import Pipeline

from .families import CASES, FAMILIES, Family, pipe
from .sd import seeded


def draw(made: Pipeline, family: Family, task: str, **changes: object) -> torch.Tensor:
    drawn = made(**family.call(task, **{"num_inference_steps": 4, **changes}))
    return drawn[0] if isinstance(drawn[0], torch.Tensor) else torch.stack([*drawn[0]])


@pytest.mark.parametrize(("family", "task"), CASES, ids=[f"{family}-{task}" for family, task in CASES])
def test_pictures_are_the_same_bit_for_bit(family: Family, task: str) -> None:
    made = pipe(family, task)
    made.disable_exact_caches()
    without = draw(made, family, task)
    made.enable_exact_caches()
    for _ in range(2):
        assert torch.equal(draw(made, family, task), without)
    assert current_run() is None


@pytest.mark.parametrize("family", [each for each in FAMILIES if "prompt_embeds" in each.callback_tensors], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_a_callback_may_change_the_text_in_place(family: Family, inference: bool) -> None:
    def dim(_pipe: object, step: int, _timestep: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if step == 1:
            tensors["prompt_embeds"].mul_(0.5)
        return {}

    made, found = pipe(family), []
    for switch in (made.disable_exact_caches, made.enable_exact_caches):
        switch()
        with torch.inference_mode(inference):
            found.append(
                draw(
                    made,
                    family,
                    family.main,
                    callback_on_step_end=dim,
                    callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
                )
            )
    assert torch.equal(*found)


def test_keys_and_values_of_the_text_are_made_once() -> None:
    family = next(each for each in FAMILIES if each.denoiser == "unet")
    made, counts, handles = pipe(family), {}, []
    for name, layer in made.unet.named_modules():
        if name.endswith(("attn1.to_k", "attn2.to_k")):
            counts[name] = 0

            def count(*_: object, name: str = name) -> None:
                counts[name] += 1

            handles.append(layer.register_forward_hook(count))
    draw(made, family, family.main)
    for handle in handles:
        handle.remove()
    assert {each for name, each in counts.items() if "attn2" in name} == {1}
    assert {each for name, each in counts.items() if "attn1" in name} == {4}


def test_the_limit_is_a_size() -> None:
    made = pipe(FAMILIES[0])
    made.enable_exact_caches("1MB")
    assert made._exact_cache_bytes == 1_000_000
    with pytest.raises(ValueError, match="limit"):
        made.enable_exact_caches("much")
    made.enable_exact_caches()


def test_nothing_is_left_of_an_aborted_call() -> None:
    family = FAMILIES[0]
    made = pipe(family)
    wanted = draw(made, family, family.main, generator=[seeded(0)])

    def stop(*_: object) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        draw(made, family, family.main, callback_on_step_end=stop)
    assert current_run() is None
    assert torch.equal(draw(made, family, family.main, generator=[seeded(0)]), wanted)
