"""LTX-Video's pipelines: what the battery does not see, against the reference and on input that does not fit."""

from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from . import ltx, sd

TEXT = {"prompt": ["a red cat"], "negative_prompt": ["ugly"]}
TWO = {"prompt": ["a red cat", "a dog"], "negative_prompt": ["ugly", "blue"]}
CLASSES = {"text": "LTXPipeline", "image": "LTXImageToVideoPipeline"}
PICTURES = [sd.image(32, 32), sd.image(50, 40, seed=2)]


def make(library: ModuleType, parts: dict[str, Any], task: str = "text", scheduler: int = 0) -> Any:
    name, config = ltx.SCHEDULERS[scheduler]
    made = getattr(library, CLASSES[task])(**{**parts, "scheduler": getattr(library, name)(**config)})
    made.set_progress_bar_config(disable=True)
    return made


def pair(kind: Any = ltx.parts, task: str = "text", scheduler: int = 0) -> tuple[Any, Any]:
    """Our pipeline, and the reference's with the same weights."""
    ours, theirs = kind(diffusion_core), kind(diffusers)
    for name in ("vae", "transformer"):
        ours[name].load_state_dict(theirs[name].state_dict())
    return make(diffusion_core, ours, task, scheduler), make(diffusers, theirs, task, scheduler)


def call(made: Any, **changes: Any) -> Any:
    arguments = {
        **TEXT,
        "num_inference_steps": 3,
        "output_type": "pt",
        "max_sequence_length": ltx.LENGTH,
        "height": 32,
        "width": 32,
        "num_frames": 9,
        "generator": sd.seeded(),
        **changes,
    }
    return made(**arguments)


def difference(pipes: tuple[Any, Any], seeds: int = 0, **changes: Any) -> float:
    """The largest difference of the films; with as many generators as `seeds` if there are any."""

    def generator() -> Any:
        return [sd.seeded(index) for index in range(seeds)] if seeds else sd.seeded()

    ours, theirs = (call(made, **changes, generator=generator()).frames for made in pipes)
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


# ---- against the reference ----


@pytest.mark.parametrize("scheduler", [0, 1])
@pytest.mark.parametrize("kind", [ltx.parts, ltx.timed_parts])
def test_films_of_text_are_those_of_the_reference(kind: Any, scheduler: int) -> None:
    pipes = pair(kind, scheduler=scheduler)
    for changes in (
        {"num_frames": 17, "width": 64, "frame_rate": 10},
        {"guidance_rescale": 0.7},
        {"guidance_scale": 1.0, "num_frames": 1},
        {**TWO, "seeds": 2, "decode_timestep": [0.05, 0.4], "decode_noise_scale": [0.025, 0.3]},
        {**TWO, "decode_timestep": 0.2},
        {"latents": torch.randn(1, 48, 8, generator=sd.seeded(7)), "output_type": "latent"},
        {"num_videos_per_prompt": 2, "output_type": "latent"},
    ):
        assert difference(pipes, **changes) < 1e-4, changes


@pytest.mark.parametrize("scheduler", [0, 1])
def test_films_of_a_first_frame_are_those_of_the_reference(scheduler: int) -> None:
    pipes = pair(task="image", scheduler=scheduler)
    for changes in (
        {"image": PICTURES[0], "num_frames": 17, "width": 64},
        {"image": PICTURES[1], "guidance_scale": 1.0},
        {"image": PICTURES[0], "guidance_rescale": 0.5, "frame_rate": 30},
        {"image": PICTURES, **TWO, "seeds": 2},
        {"image": PICTURES, **TWO},
    ):
        changes = {**changes, **({"image": [p.resize((32, 32)) for p in PICTURES]} if "seeds" in changes else {})}
        assert difference(pipes, **changes) < 1e-4, changes


def test_films_of_a_first_frame_with_a_timed_decoder_are_those_of_the_reference() -> None:
    pipes = pair(ltx.timed_parts, "image")
    for changes in ({}, {"decode_timestep": 0.05, "decode_noise_scale": 0.025}):
        assert difference(pipes, image=PICTURES[0], **changes) < 1e-4


def test_latents_that_start_with_a_picture_are_those_of_the_reference() -> None:
    pipes = pair(task="image")
    latents = torch.randn(1, 48, 8, generator=sd.seeded(7))
    assert difference(pipes, image=PICTURES[0], latents=latents) < 1e-4
    ours = pipes[0]
    kept = call(ours, image=None, latents=latents, output_type="latent").frames
    assert torch.equal(kept[:, :16], latents[:, :16])
    assert not torch.allclose(kept[:, 16:], latents[:, 16:], atol=1e-2)


# ---- numbers of frames, sizes, rates ----


@pytest.mark.parametrize(("asked", "made"), [(1, 1), (4, 1), (5, 5), (8, 5), (9, 9)])
def test_frames_that_do_not_fit_are_rounded_and_the_result_says_so(asked: int, made: int) -> None:
    pipe = make(diffusion_core, ltx.parts(diffusion_core))
    result = call(pipe, num_frames=asked, num_inference_steps=1)
    assert result.frames.shape[1] == made
    assert result.rounded_from == (None if asked == made else asked)


def test_a_pipeline_without_its_autoencoder_knows_the_scales() -> None:
    parts = {**ltx.parts(diffusion_core), "vae": None}
    pipe = make(diffusion_core, parts)
    assert (pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal) == (32, 8)
    latents = call(pipe, height=64, width=96, num_frames=17, output_type="latent").frames
    assert latents.shape == (1, 3 * 2 * 3, 8)


def test_tokens_of_several_latents_are_packed_and_unpacked() -> None:
    parts = ltx.parts(diffusion_core)
    parts["transformer"] = ltx.transformer(diffusion_core, in_channels=32, out_channels=32, patch_size=2)
    pipe = make(diffusion_core, parts)
    assert pipe.size_multiple == 16
    latents = torch.randn(2, 8, 3, 4, 6)
    packed = pipe._pack(latents)
    assert packed.shape == pipe._packed_shape(tuple(latents.shape)) == (2, 18, 32)
    assert torch.equal(pipe._unpack(packed, 32, 48, 9), latents)
    assert call(pipe).frames.shape == (1, 9, 3, 32, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"height": 36}, "height=36 must be a positive multiple of 8"),
        ({"frame_rate": 0}, "frame_rate=0 must be"),
        ({"frame_rate": "25"}, "frame_rate='25' must be"),
        ({"decode_timestep": 2.0}, "decode_timestep=2.0 must be"),
        ({"decode_noise_scale": [0.1, 0.2, 0.3]}, "decode_noise_scale has 3 entries for 1 prompts"),
        ({"guidance_rescale": 3}, "guidance_rescale=3"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 4, 32)}, "prompt_attention_mask come together"),
        (
            {
                "prompt": None,
                "prompt_embeds": torch.zeros(1, 4, 16),
                "prompt_attention_mask": torch.ones(1, 4),
            },
            "vectors of size 16, the transformer takes size 32",
        ),
        ({"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    pipe = make(diffusion_core, ltx.parts(diffusion_core))
    with pytest.raises((TypeError, ValueError), match=words):
        call(pipe, **changes)


# ---- what the reference does not do ----


def test_one_time_of_the_decoder_serves_several_films_of_a_prompt() -> None:
    pipe = make(diffusion_core, ltx.timed_parts(diffusion_core))
    arguments = {**TWO, "num_videos_per_prompt": 2, "generator": [sd.seeded(index) for index in range(4)]}
    films = call(pipe, **arguments, decode_timestep=[0.05, 0.3]).frames
    second = {name: texts[1:] for name, texts in TWO.items()}
    alone = call(pipe, **second, generator=sd.seeded(3), decode_timestep=0.3).frames
    assert torch.allclose(films[3:], alone, atol=2e-5)


def test_a_timed_decoder_takes_a_list_of_generators_after_a_first_frame() -> None:
    pipe = make(diffusion_core, ltx.timed_parts(diffusion_core), "image")
    films = call(pipe, image=PICTURES[0], **TWO, generator=[sd.seeded(0), sd.seeded(1)], decode_timestep=0.1).frames
    second = {name: texts[1:] for name, texts in TWO.items()}
    alone = call(pipe, image=PICTURES[0], **second, generator=sd.seeded(1), decode_timestep=0.1).frames
    assert torch.allclose(films[1:], alone, atol=2e-5)


def test_timesteps_of_ones_own() -> None:
    pipe = make(diffusion_core, ltx.parts(diffusion_core), scheduler=1)
    first = call(pipe, timesteps=[1000, 500], output_type="latent").frames
    assert first.isfinite().all()
    assert not torch.equal(first, call(pipe, timesteps=[1000, 900], output_type="latent").frames)


def test_the_first_frame_stays() -> None:
    pipe = make(diffusion_core, ltx.parts(diffusion_core), "image")
    first = [
        call(pipe, image=PICTURES[0], num_inference_steps=steps, output_type="latent").frames[:, :16]
        for steps in (1, 4)
    ]
    assert torch.equal(first[0], first[1])


def test_steps_keep_their_digits_in_half_precision() -> None:
    pipe = make(diffusion_core, ltx.parts(diffusion_core)).to(torch.bfloat16)
    latents = call(pipe, output_type="latent").frames
    assert latents.dtype == torch.float32
    frames = call(pipe).frames
    assert frames.shape == (1, 9, 3, 32, 32) and frames.isfinite().all()
    whole = make(diffusion_core, ltx.parts(diffusion_core))
    assert (call(whole, output_type="latent").frames - latents).abs().mean() < 0.05
