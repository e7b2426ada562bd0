"""What every pipeline must do, whatever it draws with. A new family joins by its entry in `families.py`."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from . import sd
from .families import CASES, FAMILIES, PROMPTS, Family, loaded, pipe

every_pipeline = pytest.mark.parametrize(("family", "task"), CASES, ids=[f"{family}-{task}" for family, task in CASES])
# With guidance; where that takes two calls of the denoiser, also without.
COMPILED = [(family, guided) for family in FAMILIES for guided in ([True] if family.graphs == 1 else [True, False])]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    """Equal up to what another batch size does to sums in float32."""
    torch.testing.assert_close(first, second, atol=2e-5, rtol=0)


def single(arguments: dict[str, Any], index: int, prompt: int | None = None) -> dict[str, Any]:
    """The arguments that draw picture `index` of a batch alone."""
    found = {**arguments, "generator": sd.seeded(index)}
    for name in ("prompt", "negative_prompt", "image"):
        if isinstance(found.get(name), list):
            found[name] = found[name][index if prompt is None else prompt]
    return found


# ---- batches ----


@every_pipeline
def test_a_batch_equals_its_pictures_drawn_alone(family: Family, task: str) -> None:
    made, arguments = pipe(family, task), family.call(task, 2)
    batch = made(**arguments)[0]
    assert batch.shape == family.shape(2)
    for index in range(2):
        close(batch[index : index + 1], made(**single(arguments, index))[0])


@every_pipeline
def test_prompts_times_images(family: Family, task: str) -> None:
    made = pipe(family, task)
    arguments = family.call(task, 2, generator=[sd.seeded(index) for index in range(4)], **{family.repeats: 2})
    batch = made(**arguments)[0]
    assert batch.shape == family.shape(4)
    for index in (1, 2):
        alone = single({**arguments, family.repeats: 1}, index, prompt=index // 2)
        close(batch[index : index + 1], made(**alone)[0])


@every_pipeline
def test_a_list_of_generators_has_one_for_each_picture(family: Family, task: str) -> None:
    with pytest.raises(ValueError, match="generator is a list of 3, but 2 samples"):
        pipe(family, task)(**family.call(task, 2, generator=[sd.seeded()] * 3))


@every_pipeline
def test_embeddings_stand_for_prompts(family: Family, task: str) -> None:
    made, arguments = pipe(family, task), family.call(task, 2)
    wanted = made(**arguments)[0]
    embeds = family.embed(made, arguments["prompt"], arguments.get("negative_prompt", ["", ""]))
    given = {name: value for name, value in embeds.items() if family.negative or not name.startswith("negative_")}
    given["generator"] = [sd.seeded(index) for index in range(2)]
    texts = {"prompt": None, "negative_prompt": None} if family.negative else {"prompt": None}
    close(made(**{**arguments, **texts, **given})[0], wanted)


@every_pipeline
def test_wrong_calls_are_refused_before_any_model_is_called(family: Family, task: str) -> None:
    made = pipe(family, task)
    called: list[str] = []
    hooks = [
        part.register_forward_pre_hook(lambda module, _: called.append(type(module).__name__))
        for part in made.components.values()
        if isinstance(part, torch.nn.Module)
    ]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": None}, "pass prompt"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({family.repeats: 0}, f"{family.repeats}=0"),
        ({"output_type": "jpg"}, "output_type='jpg'"),
        ({family.guidance[0]: float("nan")}, family.guidance[0]),
        ({"callback_on_step_end_tensor_inputs": ["nothing"]}, "callback_on_step_end_tensor_inputs has"),
    ]
    if task != "text":
        start = family.starts_from[task]
        wrong.append(({start: None}, f"{start} is missing"))
    if family.takes_strength(task):
        wrong.append(({"strength": 2.0}, "strength=2.0"))
    if family.frames is not None and task != "video":
        wrong += [({"num_frames": 0}, "num_frames=0"), ({"num_frames": 2.5}, "num_frames must be a whole number")]
    try:
        for change, message in wrong:
            with pytest.raises((TypeError, ValueError), match=message):
                made(**family.call(task, 1, **change))
    finally:
        for hook in hooks:
            hook.remove()
    assert called == []


# ---- callbacks ----


@every_pipeline
def test_callbacks_see_and_change_tensors(family: Family, task: str) -> None:
    made, seen = pipe(family, task), []

    def look(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        seen.append((step, {name: None if value is None else tuple(value.shape) for name, value in tensors.items()}))

    names = list(family.callback_tensors)
    assert set(names) <= set(made._callback_tensor_inputs)
    watched = {"callback_on_step_end": look, "callback_on_step_end_tensor_inputs": names}
    plain = made(**family.call(task, output_type="latent"))[0]
    assert torch.equal(made(**family.call(task, output_type="latent", **watched))[0], plain)
    assert [step for step, _ in seen] == list(range(len(seen)))
    assert len(seen) == 2
    assert list(seen[0][1]) == names
    assert seen[0][1]["latents"] == (1, *family.latents)

    def clear(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": torch.zeros_like(tensors["latents"])}

    assert made(**family.call(task, output_type="latent", callback_on_step_end=clear))[0].abs().max() == 0

    def lose(*_: Any) -> dict[str, Any]:
        return {"nothing": 1}

    with pytest.raises(ValueError, match="callback_on_step_end returned"):
        made(**family.call(task, callback_on_step_end=lose))
    assert torch.equal(made(**family.call(task, output_type="latent"))[0], plain)


@every_pipeline
def test_an_interruption_ends_the_steps_and_decodes(family: Family, task: str) -> None:
    made, steps = pipe(family, task), []

    def stop(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        steps.append(tensors["latents"])
        pipeline._interrupt = True

    ended = made(**family.call(task, callback_on_step_end=stop, output_type="latent"))[0]
    assert len(steps) == 1
    assert torch.equal(steps[0], ended)
    assert made(**family.call(task, callback_on_step_end=stop))[0].shape == family.shape()


# ---- sizes and forms ----


@every_pipeline
def test_sizes_off_the_grid(family: Family, task: str) -> None:
    made, wide = pipe(family, task), 32 + family.multiple
    if task == "image" and family.frames is None:
        arguments = family.call(task, image=sd.image(wide + 1, 33))
        if "height" not in arguments and "control_image" not in arguments:
            assert made(**arguments)[0].shape == family.shape(width=wide)
        return
    assert made(**family.call(task, height=32, width=wide))[0].shape == family.shape(width=wide)
    with pytest.raises(ValueError, match=r"height=33 must be a positive multiple of \d+, such as 32"):
        made(**family.call(task, height=33, width=32))


@every_family
def test_latents_go_in_and_out(family: Family) -> None:
    made = pipe(family)
    noise = torch.randn(1, *family.latents, generator=sd.seeded(5))

    def drawn(latents: torch.Tensor, **sizes: int) -> torch.Tensor:
        return made(**family.call(family.main, latents=latents, output_type="latent", **sizes))[0]

    first = drawn(noise)
    assert first.shape == noise.shape
    assert torch.equal(drawn(noise), first)
    assert not torch.equal(drawn(noise + 1), first)
    with pytest.raises(ValueError, match="latents has shape"):
        drawn(noise[:, :-1], height=32, width=32)
    with pytest.raises(ValueError, match="latents must hold finite"):
        drawn(noise * float("inf"))


@every_family
def test_forms_of_the_result(family: Family) -> None:
    made = pipe(family)
    pt = made(**family.call(family.main))[0]
    array = made(**family.call(family.main, output_type="np"))[0]
    assert array.shape == (*family.shape()[:-3], 32, 32, 3)
    close(torch.from_numpy(array).movedim(-1, -3), pt)
    first = made(**family.call(family.main, output_type="pil"))[0][0]
    if family.frames is not None:
        assert len(first) == family.frames
        first = first[0]
    assert first.size == (32, 32)
    parts = made(**family.call(family.main, return_dict=False))
    assert isinstance(parts, tuple)
    assert torch.equal(parts[0], pt)


# ---- saving, and what saves memory and time ----


@every_pipeline
def test_saved_and_loaded_it_draws_the_same(family: Family, task: str) -> None:
    again = loaded(family, task)
    assert type(again) is type(pipe(family, task))
    # Mapped weights are aligned otherwise, which sums of text encoders on the CPU notice in the last bit.
    close(again(**family.call(task))[0], pipe(family, task)(**family.call(task))[0])


@every_family
def test_layerwise_casting_and_back(family: Family) -> None:
    made = loaded(family)
    plain = made(**family.call(family.main))[0]
    made.denoiser.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    cast = made(**family.call(family.main))[0]
    assert cast.isfinite().all()
    assert not torch.equal(cast, plain)
    assert float((cast - plain).abs().mean()) < 0.2
    made.denoiser.disable_layerwise_casting()
    assert torch.equal(made(**family.call(family.main))[0], plain)


@every_family
def test_tiling_and_slicing_keep_the_picture(family: Family) -> None:
    made = loaded(family)
    sizes = {"height": 32, "width": 64}
    plain = made(**family.call(family.main, 2, **sizes))[0]
    made.enable_vae_slicing()
    close(made(**family.call(family.main, 2, **sizes))[0], plain)
    made.enable_vae_tiling()
    tiled = made(**family.call(family.main, 2, **sizes))[0]
    assert tiled.shape == plain.shape
    assert tiled.isfinite().all()
    made.disable_vae_slicing()
    made.disable_vae_tiling()
    close(made(**family.call(family.main, 2, **sizes))[0], plain)


@pytest.mark.parametrize(("family", "guided"), COMPILED, ids=[f"{family}-{guided}" for family, guided in COMPILED])
def test_what_is_called_in_each_step_compiles_to_one_graph(family: Family, guided: bool) -> None:
    name, on, off = family.guidance
    arguments = {name: on if guided else off, "num_inference_steps": 5}
    plain = pipe(family)(**family.call(family.main, **arguments))[0]
    parts = {name: deepcopy(getattr(pipe(family), name)) for name in (family.denoiser, *family.beside)}
    counters = {name: CompileCounterWithBackend("aot_eager") for name in parts}
    for name, part in parts.items():
        part.compile(fullgraph=True, backend=counters[name])
    after: list[list[int]] = []

    def count(*_: Any) -> None:
        after.append([counter.frame_count for counter in counters.values()])

    arguments["callback_on_step_end"] = count
    close(pipe(family, **parts)(**family.call(family.main, **arguments))[0], plain)
    assert len(after) >= 3
    # All is compiled in the first step.
    assert after == [[family.graphs if guided else 1] * len(parts)] * len(after)
    torch.compiler.reset()


@every_family
def test_repeated_blocks_compile_alone(family: Family) -> None:
    plain = pipe(family)(**family.call(family.main))[0]
    parts = {name: deepcopy(getattr(pipe(family), name)) for name in (family.denoiser, *family.beside)}
    for part in parts.values():
        part.compile_repeated_blocks(fullgraph=True, backend="eager")
    close(pipe(family, **parts)(**family.call(family.main))[0], plain)
    torch.compiler.reset()


@every_family
def test_the_prompt_matters(family: Family) -> None:
    made = pipe(family)
    first, second = (made(**family.call(family.main, prompt=prompt))[0] for prompt in PROMPTS)
    assert not torch.equal(first, second)
