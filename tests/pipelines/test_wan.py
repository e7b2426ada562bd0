"""Wan's pipelines: what the battery does not see, against the reference and on input that does not fit."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import diffusion_core
from diffusion_core.pipelines.wan.prompts import clean

from . import sd, wan

ONE = {"prompt": ["a red cat"], "negative_prompt": ["ugly"]}
TWO = {"prompt": ["a red cat", "a dog"], "negative_prompt": ["ugly", "blue"]}
TEXT, IMAGE, VIDEO = "WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"
FIRST, LAST = sd.image(40, 32), sd.image(32, 32, seed=3)
# Pictures seen through CLIP are told from 512 tokens of text by the reference.
LONG = {"max_sequence_length": 512}


def film(frames: int = 9, seed: int = 0) -> list[Any]:
    return [sd.image(32, 32, seed=seed + index) for index in range(frames)]


def make(library: ModuleType, name: str, parts: dict[str, Any], scheduler: int = 0, **settings: Any) -> Any:
    kind, config = wan.SCHEDULERS[scheduler]
    made = getattr(library, name)(**{**parts, "scheduler": getattr(library, kind)(**config)}, **settings)
    made.set_progress_bar_config(disable=True)
    return made


def ours(name: str = TEXT, kind: Any = wan.parts, **settings: Any) -> Any:
    return make(diffusion_core, name, kind(diffusion_core), **settings)


def pair(name: str, kind: Any = wan.parts, scheduler: int = 0, **settings: Any) -> tuple[Any, Any]:
    """Our pipeline, and the reference's with the same weights."""
    found, right = kind(diffusion_core), kind(diffusers)
    for key, part in found.items():
        if isinstance(part, torch.nn.Module):
            part.load_state_dict(right[key].state_dict())
    libraries = ((diffusion_core, found), (diffusers, right))
    made = [make(library, name, parts, scheduler, **settings) for library, parts in libraries]
    return made[0], made[1]


def call(made: Any, **changes: Any) -> Any:
    arguments = {
        **ONE,
        "num_inference_steps": 4,
        "output_type": "pt",
        "max_sequence_length": wan.LENGTH,
        "height": 32,
        "width": 32,
        "generator": sd.seeded(),
        **({} if "VideoToVideo" in type(made).__name__ else {"num_frames": 9}),
        **changes,
    }
    return made(**arguments)


def difference(pipes: tuple[Any, Any], seeds: int = 0, **changes: Any) -> float:
    """The largest difference of the films; with as many generators as `seeds` if there are any."""

    def generator() -> Any:
        return [sd.seeded(index) for index in range(seeds)] if seeds else sd.seeded()

    found, right = (torch.as_tensor(call(made, **changes, generator=generator()).frames) for made in pipes)
    assert found.shape == right.shape
    return float((found - right).abs().max())


# ---- against the reference ----


@pytest.mark.parametrize("scheduler", [0, 1])
def test_films_of_text_are_those_of_the_reference(scheduler: int) -> None:
    pipes = pair(TEXT, scheduler=scheduler)
    for changes in (
        {"num_frames": 1},
        {"num_frames": 12, "guidance_scale": 1.0},
        {"height": 48, "width": 16, "num_videos_per_prompt": 2},
        {"prompt": "a  red &amp;amp; blue cat "},
        {**TWO, "seeds": 2},
        {"latents": torch.randn(1, 4, 3, 8, 8, generator=sd.seeded(7))},
    ):
        assert difference(pipes, **changes) < 1e-4, changes


@pytest.mark.parametrize("scheduler", [0, 1])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9, 1.0])
def test_two_transformers_share_the_steps_as_in_the_reference(ratio: float, scheduler: int) -> None:
    pipes = pair(TEXT, wan.two_parts, scheduler, boundary_ratio=ratio)
    for changes in ({}, {"guidance_scale_2": 3.0}, {"guidance_scale": 1.0}):
        assert difference(pipes, **changes) < 1e-4, changes


@pytest.mark.parametrize("scheduler", [0, 1])
def test_the_5b_makes_films_as_in_the_reference(scheduler: int) -> None:
    assert difference(pair(TEXT, wan.timed_parts, scheduler, expand_timesteps=True)) < 1e-4
    pipes = pair(IMAGE, wan.timed_parts, scheduler, expand_timesteps=True)
    for changes in ({}, {"guidance_scale": 1.0, "width": 48}, {**TWO, "seeds": 2}):
        assert difference(pipes, image=FIRST, **changes) < 1e-4, changes


@pytest.mark.parametrize("scheduler", [0, 1])
def test_films_between_pictures_are_those_of_the_reference(scheduler: int) -> None:
    pipes = pair(IMAGE, wan.image_parts, scheduler)
    for changes in ({}, {"guidance_scale": 1.0}, {**TWO, "seeds": 2}):
        assert difference(pipes, image=FIRST, **LONG, **changes) < 1e-4, changes
    pipes = pair(IMAGE, wan.ends_parts, scheduler)
    for changes in ({}, TWO):
        assert difference(pipes, image=FIRST, last_image=LAST, **LONG, **changes) < 1e-4, changes
    pipes = pair(IMAGE, wan.two_image_parts, scheduler, boundary_ratio=0.9)
    for changes in ({}, {"last_image": LAST, "guidance_scale_2": 2.0}, {**TWO, "num_frames": 5}):
        assert difference(pipes, image=FIRST, **changes) < 1e-4, changes


@pytest.mark.parametrize("scheduler", [0, 1])
def test_films_of_films_are_those_of_the_reference(scheduler: int) -> None:
    pipes = pair(VIDEO, scheduler=scheduler)
    for changes in (
        {"video": film(), "strength": 0.5, "guidance_scale": 1.0},
        {"video": film(8), "strength": 1.0},
        # The reference hands UniPC's timesteps on; here they stay integers, and are checked.
        *([{"video": film(), "timesteps": [900, 700, 300]}] if scheduler else []),
        {"latents": torch.randn(1, 4, 3, 8, 8, generator=sd.seeded(7))},
    ):
        assert difference(pipes, **changes) < 1e-4, changes


def test_vision_embeddings_are_those_of_the_reference() -> None:
    made, right = pair(IMAGE, wan.image_parts)
    assert torch.allclose(made.encode_image(FIRST), right.encode_image(FIRST), atol=1e-5)
    seen = made.encode_image(FIRST)
    film_of_embeds = call(made, image=FIRST, image_embeds=seen).frames
    assert torch.allclose(film_of_embeds, call(made, image=FIRST).frames, atol=1e-5)


# ---- numbers of frames, rates ----


@pytest.mark.parametrize(("asked", "made"), [(1, 1), (2, 1), (4, 5), (5, 5), (7, 5), (8, 9), (9, 9), (12, 13)])
def test_frames_that_do_not_fit_are_rounded_and_the_result_says_so(asked: int, made: int) -> None:
    pipe = ours()
    result = call(pipe, num_frames=asked, num_inference_steps=1)
    assert result.frames.shape[1] == made
    assert result.rounded_from == (None if asked == made else asked)


def test_a_film_that_does_not_fit_is_cut_and_the_result_says_so() -> None:
    result = call(ours(VIDEO), video=film(12), num_inference_steps=2)
    assert (result.frames.shape[1], result.rounded_from) == (9, 12)


def test_the_rate_is_that_of_the_version() -> None:
    assert ours().fps == 16
    assert ours(kind=wan.timed_parts, expand_timesteps=True).fps == 24


# ---- two transformers ----


def test_each_step_calls_one_transformer_and_guides_by_its_scale() -> None:
    pipe = ours(kind=wan.two_parts, boundary_ratio=0.9)
    seen: list[tuple[str, float]] = []
    for name in ("transformer", "transformer_2"):

        def note(_module: Any, _args: Any, given: dict[str, Any], name: str = name) -> None:
            seen.append((name, float(given["timestep"][0])))

        getattr(pipe, name).register_forward_pre_hook(note, with_kwargs=True)
    call(pipe, guidance_scale=4.0, guidance_scale_2=1.0)
    # At a scale of 1 there is nothing to guide: a single call for each of these steps.
    first, second = ([time for each, time in seen if each == name] for name in ("transformer", "transformer_2"))
    assert min(first) >= 900 > max(second)
    assert len(first) == 2 * len(set(first)) and len(second) == len(set(second)) > 0


def test_a_scale_for_the_second_counts_without_one_for_the_first() -> None:
    pipe = ours(kind=wan.two_parts, boundary_ratio=0.9)
    guided, plain = (call(pipe, guidance_scale=1.0, guidance_scale_2=scale).frames for scale in (4.0, 1.0))
    assert not torch.allclose(guided, plain, atol=1e-3)


def test_one_of_two_transformers_is_enough_where_no_step_needs_the_other() -> None:
    parts = wan.two_parts(diffusion_core)
    whole = make(diffusion_core, TEXT, parts, boundary_ratio=1.0)
    alone = make(diffusion_core, TEXT, {**parts, "transformer": None}, boundary_ratio=1.0)
    # The first timestep of training counts as below the whole.
    assert torch.equal(call(alone).frames, call(whole).frames)
    first = make(diffusion_core, TEXT, {**parts, "transformer_2": None}, boundary_ratio=0.5)
    called: list[Any] = []
    first.text_encoder.register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match="some steps need transformer_2"):
        call(first, num_inference_steps=8)
    with pytest.raises(ValueError, match="needs transformer, which"):
        call(make(diffusion_core, TEXT, {**parts, "transformer": None, "transformer_2": None}))
    assert called == []


def test_both_transformers_compile_to_one_graph() -> None:
    pipe = ours(kind=wan.two_parts, boundary_ratio=0.9)
    plain = call(pipe, num_inference_steps=6).frames
    counters = [CompileCounterWithBackend("eager") for _ in range(2)]
    for part, counter in zip((pipe.transformer, pipe.transformer_2), counters, strict=True):
        part.compile(fullgraph=True, backend=counter)
    assert torch.allclose(call(pipe, num_inference_steps=6).frames, plain, atol=1e-5)
    assert [counter.frame_count for counter in counters] == [1, 1]
    torch.compiler.reset()


def test_settings_survive_saving(tmp_path: Any) -> None:
    pipe = ours(kind=wan.two_parts, boundary_ratio=0.9)
    pipe.save_pretrained(tmp_path)
    again = diffusion_core.Pipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.config["boundary_ratio"] == 0.9
    assert torch.equal(call(again).frames, call(pipe).frames)


# ---- what the reference does not do ----


def test_the_first_frame_of_the_5b_stays_as_it_is() -> None:
    pipe = ours(IMAGE, wan.timed_parts, expand_timesteps=True)
    latents = []
    for steps in (1, 5):
        latents.append(call(pipe, image=FIRST, num_inference_steps=steps, output_type="latent").frames)
    assert torch.equal(latents[0][:, :, 0], latents[1][:, :, 0])
    assert not torch.allclose(latents[0][:, :, 1:], latents[1][:, :, 1:], atol=1e-3)


@pytest.mark.parametrize(("kind", "settings"), [(wan.image_parts, {}), (wan.timed_parts, {"expand_timesteps": True})])
def test_a_picture_for_each_prompt(kind: Any, settings: dict[str, Any]) -> None:
    pipe = ours(IMAGE, kind, **settings)
    generators = [sd.seeded(1), sd.seeded(2)]
    films = call(pipe, image=[FIRST, LAST], **TWO, generator=generators).frames
    second = {"prompt": TWO["prompt"][1:], "negative_prompt": TWO["negative_prompt"][1:]}
    alone = call(pipe, image=LAST, **second, generator=sd.seeded(2)).frames
    assert torch.allclose(films[1:], alone, atol=2e-5)


def test_pictures_as_tensors_are_seen_as_pictures_are() -> None:
    pipe = ours(IMAGE, wan.image_parts)
    picture = sd.image(32, 32)
    tensor = diffusion_core.VaeImageProcessor(vae_scale_factor=4).preprocess(picture) / 2 + 0.5
    seen, right, black = (pipe.encode_image(each) for each in (tensor[0], picture, torch.zeros(3, 32, 32)))
    assert (seen - right).norm() < 0.1 * (black - right).norm()
    assert call(pipe, image=tensor).frames.shape == (1, 9, 3, 32, 32)


def test_prompts_are_mended_where_the_package_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clean(" a  &lt;red&gt;\n cat ") == "a <red> cat"
    stand_in = SimpleNamespace(fix_text=lambda text: text.replace("“", '"'), __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ftfy", stand_in)
    assert clean("“cat&amp;amp; dog") == '"cat& dog'


def test_tasks_share_components() -> None:
    pipe = ours()
    other = diffusion_core.AutoPipelineForVideo2Video.from_pipe(pipe)
    assert type(other) is diffusion_core.WanVideoToVideoPipeline
    assert other.transformer is pipe.transformer
    assert type(diffusion_core.AutoPipelineForText2Video.from_pipe(other)) is diffusion_core.WanPipeline


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 36}, "height=36 must be a positive multiple of 8, such as 32"),
        ({"num_frames": 0}, "num_frames=0 must be 1 at least"),
        ({"guidance_scale_2": 3.0}, "guidance_scale_2 is for a pipeline with boundary_ratio"),
        ({"latents": torch.zeros(1, 4, 2, 8, 8)}, r"latents has shape \(1, 4, 2, 8, 8\), expected \(1, 4, 3, 8, 8\)"),
        ({"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 16, 5)}, "vectors of size 5, the transformer takes size 32"),
    ],
)
def test_wrong_calls_name_the_argument(changes: dict[str, Any], message: str) -> None:
    pipe = ours()
    called: list[Any] = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises((TypeError, ValueError), match=message):
        call(pipe, **changes)
    assert called == []


@pytest.mark.parametrize(
    ("kind", "settings", "changes", "message"),
    [
        (wan.image_parts, {}, {"image": None}, "image is missing"),
        (wan.parts, {}, {}, "has 4 input channels; image to video needs 12"),
        (wan.image_parts, {}, {"last_image": LAST}, "trained for a first frame alone"),
        (wan.ends_parts, {}, {}, "a first and a last frame: pass last_image"),
        (wan.timed_parts, {"expand_timesteps": True}, {"last_image": LAST}, "last_image is given, which"),
        (wan.two_image_parts, {"boundary_ratio": 0.9}, {"image_embeds": torch.zeros(1, 5, 16)}, "takes none"),
        (wan.image_parts, {}, {"image_embeds": torch.zeros(1, 5, 7)}, r"expected \(pictures, tokens, 16\)"),
        (
            wan.two_image_parts,
            {"boundary_ratio": 0.9},
            {"last_image": LAST, "num_frames": 1},
            "for a film of num_frames=1",
        ),
        (wan.image_parts, {}, {"image": [FIRST] * 3}, "image has 3 entries for 1 prompts"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(
    kind: Any, settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    pipe = ours(IMAGE, kind, **settings)
    called: list[Any] = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match=message):
        call(pipe, **{"image": FIRST, **changes})
    assert called == []


def test_pictures_need_the_encoder_that_sees_them() -> None:
    pipe = make(diffusion_core, IMAGE, {**wan.image_parts(diffusion_core), "image_encoder": None})
    with pytest.raises(ValueError, match="needs image_encoder"):
        call(pipe, image=FIRST)
    with pytest.raises(ValueError, match="needs image_encoder"):
        pipe.encode_image(FIRST)
