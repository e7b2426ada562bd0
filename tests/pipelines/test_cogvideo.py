"""CogVideoX's pipelines: what the battery does not see, against the reference and on input that does not fit."""

from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed

import diffusion_core
from diffusion_core.pipelines.cogvideo.base import dynamic_factor
from diffusion_core.pipelines.cogvideo.positions import fitted, rotary_positions

from . import cogvideo, sd

TEXT = {"prompt": ["a red cat"], "negative_prompt": ["ugly"]}
TWO = {"prompt": ["a red cat", "a dog"], "negative_prompt": ["ugly", "blue"]}
CLASSES = {
    "text": "CogVideoXPipeline",
    "image": "CogVideoXImageToVideoPipeline",
    "video": "CogVideoXVideoToVideoPipeline",
}


def film(frames: int = 9, seed: int = 0) -> list[Any]:
    return [sd.image(32, 32, seed=seed + index) for index in range(frames)]


def make(library: ModuleType, parts: dict[str, Any], task: str = "text", scheduler: int = 0) -> Any:
    name, config = cogvideo.SCHEDULERS[scheduler]
    made = getattr(library, CLASSES[task])(**{**parts, "scheduler": getattr(library, name)(**config)})
    made.set_progress_bar_config(disable=True)
    return made


def pair(kind: Any, task: str = "text", scheduler: int = 0) -> tuple[Any, Any]:
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
        "max_sequence_length": cogvideo.LENGTH,
        "height": 32,
        "width": 32,
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
@pytest.mark.parametrize("kind", [cogvideo.rotary_parts, cogvideo.text_15_parts])
def test_films_of_text_are_those_of_the_reference(kind: Any, scheduler: int) -> None:
    pipes = pair(kind, scheduler=scheduler)
    for changes in (
        {"num_frames": 9},
        {"num_frames": 8, "use_dynamic_cfg": True},
        {"num_frames": 16, "guidance_scale": 1.0},
        {"num_frames": 1},
        {**TWO, "seeds": 2},
    ):
        assert difference(pipes, **changes) < 1e-4, changes


def test_sizes_other_than_the_trained_one_are_fitted_into_its_positions() -> None:
    pipes = pair(cogvideo.rotary_parts)
    for height, width in ((48, 32), (32, 64), (40, 40)):
        assert difference(pipes, height=height, width=width) < 1e-4


@pytest.mark.parametrize("scheduler", [0, 1])
@pytest.mark.parametrize("kind", [cogvideo.image_parts, cogvideo.image_15_parts])
def test_films_of_a_first_frame_are_those_of_the_reference(kind: Any, scheduler: int) -> None:
    pipes = pair(kind, "image", scheduler)
    for changes in (
        {"image": sd.image(32, 32), "num_frames": 9},
        {"image": sd.image(50, 40), "num_frames": 9, "guidance_scale": 1.0},
        {"image": [sd.image(32, 32), sd.image(32, 32, seed=2)], "num_frames": 9, **TWO, "seeds": 2},
        {"image": [sd.image(32, 32), sd.image(32, 32, seed=2)], "num_frames": 8, **TWO},
    ):
        assert difference(pipes, **changes) < 1e-4


@pytest.mark.parametrize("scheduler", [0, 1])
def test_films_of_films_are_those_of_the_reference(scheduler: int) -> None:
    pipes = pair(cogvideo.parts, "video", scheduler)
    for changes in (
        {"video": film(), "num_inference_steps": 5},
        {"video": film(8), "num_inference_steps": 5, "strength": 0.5, "use_dynamic_cfg": True},
        {"video": film(), "strength": 1.0, "guidance_scale": 1.0},
        {"video": [film(), film(seed=20)], **TWO, "seeds": 2, "num_inference_steps": 4},
        {"latents": torch.randn(1, 3, 4, 8, 8, generator=sd.seeded(7)), "num_inference_steps": 5},
    ):
        assert difference(pipes, **changes) < 1e-4


@pytest.mark.parametrize("grid", [(30, 45), (48, 85), (20, 60), (45, 30), (1, 1), (60, 100)])
def test_rotary_positions_are_those_of_the_reference(grid: tuple[int, int]) -> None:
    (top, bottom), (left, right) = fitted(grid, (30, 45))
    corners = ((int(top), int(left)), (int(bottom), int(right)))
    right_cos, right_sin = get_3d_rotary_pos_embed(64, corners, grid, 13)
    cos, sin = rotary_positions((13, *grid), (30, 45), 64)
    assert torch.allclose(cos, right_cos, atol=2e-5) and torch.allclose(sin, right_sin, atol=2e-5)
    right_cos, right_sin = get_3d_rotary_pos_embed(64, None, grid, 11, grid_type="slice", max_size=(300, 300))
    cos, sin = rotary_positions((11, *grid), None, 64)
    assert torch.allclose(cos, right_cos, atol=2e-5) and torch.allclose(sin, right_sin, atol=2e-5)


def test_the_trained_grid_counts_from_0_and_others_keep_their_shape() -> None:
    assert fitted((30, 45), (30, 45)) == [(0, 30), (0, 45)]
    assert fitted((30, 30), (30, 45)) == [(0, 30), (8, 38)]
    (top, bottom), (left, right) = fitted((20, 60), (30, 45))
    assert (bottom - top) / (right - left) == pytest.approx(20 / 60)
    assert (left, right) == (0, 45)


def test_the_dynamic_scale_stays_between_1_and_its_end() -> None:
    factors = [dynamic_factor(timestep, 50) for timestep in range(0, 1000, 7)]
    assert min(factors) >= 0 and max(factors) <= 1
    assert dynamic_factor(0, 50) == 1.0


# ---- numbers of frames ----


@pytest.mark.parametrize(
    ("asked", "made"), [(1, 1), (4, 1), (5, 8), (8, 8), (9, 9), (12, 9), (13, 16), (16, 16), (17, 17)]
)
def test_frames_that_do_not_fit_are_rounded_and_the_result_says_so(asked: int, made: int) -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core))
    result = call(pipe, num_frames=asked, num_inference_steps=1)
    assert result.frames.shape[1] == made
    assert result.rounded_from == (None if asked == made else asked)
    assert call(pipe, num_frames=asked, num_inference_steps=1, return_dict=False)[0].shape == result.frames.shape


def test_a_film_that_does_not_fit_is_cut_and_the_result_says_so() -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core), "video")
    result = call(pipe, video=film(12), num_inference_steps=2)
    assert (result.frames.shape[1], result.rounded_from) == (9, 12)
    whole = call(pipe, video=film(9), num_inference_steps=2)
    assert torch.equal(result.frames, whole.frames) and whole.rounded_from is None


def test_version_1_5_puts_latents_before_the_film_which_are_not_decoded() -> None:
    pipe = make(diffusion_core, cogvideo.text_15_parts(diffusion_core))
    latents = call(pipe, num_frames=9, output_type="latent").frames
    assert latents.shape == (1, 4, 4, 8, 8)
    decoded = pipe.vae.decode(latents[:, 1:].transpose(1, 2) / pipe.vae.config.scaling_factor).sample
    frames = call(pipe, num_frames=9).frames
    assert torch.allclose(frames, (decoded / 2 + 0.5).clamp(0, 1).transpose(1, 2), atol=1e-5)


def test_version_1_5_redraws_films_of_any_number_of_latents() -> None:
    pipe = make(diffusion_core, cogvideo.text_15_parts(diffusion_core), "video")
    for frames in (8, 9):
        assert call(pipe, video=film(frames)).frames.shape[1] == frames


# ---- what the reference does not do ----


def test_several_films_of_a_prompt() -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core))
    films = call(pipe, num_videos_per_prompt=2, generator=[sd.seeded(1), sd.seeded(2)]).frames
    assert films.shape == (2, 9, 3, 32, 32)
    assert torch.allclose(films[1:], call(pipe, generator=sd.seeded(2)).frames, atol=2e-5)
    assert not torch.allclose(films[0], films[1], atol=1e-2)


def test_one_picture_serves_all_prompts() -> None:
    pipe = make(diffusion_core, cogvideo.image_parts(diffusion_core), "image")
    generators = [sd.seeded(1), sd.seeded(2)]
    films = call(pipe, image=sd.image(32, 32), num_frames=9, **TWO, generator=generators).frames
    second = {"prompt": TWO["prompt"][1:], "negative_prompt": TWO["negative_prompt"][1:]}
    alone = call(pipe, image=sd.image(32, 32), num_frames=9, **second, generator=sd.seeded(2)).frames
    assert torch.allclose(films[1:], alone, atol=2e-5)


def test_timesteps_of_ones_own() -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core))
    usual = call(pipe, num_inference_steps=4).frames
    own = call(pipe, timesteps=[999, 749, 499, 249], num_inference_steps=50).frames
    assert torch.allclose(own, usual, atol=1e-6)
    assert not torch.equal(call(pipe, timesteps=[999, 500, 20]).frames, usual)


def test_a_long_prompt_is_cut_and_said() -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core))
    result = call(pipe, prompt="a red cat " * 20, negative_prompt=None, num_inference_steps=1)
    assert result.truncated_prompts is not None and "cat" in result.truncated_prompts[0]


# ---- loading, and tasks ----


def test_tasks_share_components() -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core))
    other = diffusion_core.AutoPipelineForVideo2Video.from_pipe(pipe)
    assert type(other) is diffusion_core.CogVideoXVideoToVideoPipeline
    assert other.transformer is pipe.transformer
    assert type(diffusion_core.AutoPipelineForText2Video.from_pipe(other)) is diffusion_core.CogVideoXPipeline
    with pytest.raises(ValueError, match="cogvideox has no pipeline for text to image"):
        diffusion_core.AutoPipelineForText2Image.from_pipe(pipe)


def test_a_pipeline_without_autoencoder_keeps_its_scales(tmp_path: Any) -> None:
    whole = make(diffusion_core, cogvideo.parts(diffusion_core))
    whole.save_pretrained(tmp_path)
    pipe = diffusion_core.Pipeline.from_pretrained(tmp_path, vae=None)
    assert (pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal) == (4, 4)
    pipe.set_progress_bar_config(disable=True)
    latents = call(pipe, output_type="latent").frames
    assert torch.allclose(latents, call(whole, output_type="latent").frames, atol=1e-5)
    with pytest.raises(ValueError, match="needs vae, which the pipeline does not have"):
        call(pipe)


def test_the_rate_is_that_of_the_version() -> None:
    assert make(diffusion_core, cogvideo.parts(diffusion_core)).fps == 8
    assert make(diffusion_core, cogvideo.text_15_parts(diffusion_core)).fps == 16


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 36}, "height=36 must be a positive multiple of 8, such as 32"),
        ({"num_frames": 0}, "num_frames=0 must be 1 at least"),
        ({"max_sequence_length": 0}, "max_sequence_length=0"),
        ({"latents": torch.zeros(1, 4, 3, 8, 8)}, r"latents has shape \(1, 4, 3, 8, 8\), expected \(1, 3, 4, 8, 8\)"),
        ({"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 16, 5)}, "vectors of size 5, the transformer takes size 32"),
        ({"generator": [sd.seeded()] * 2}, "generator is a list of 2, but 1 samples"),
    ],
)
def test_wrong_calls_name_the_argument(changes: dict[str, Any], message: str) -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core))
    called: list[Any] = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises((TypeError, ValueError), match=message):
        call(pipe, **changes)
    assert called == []


def test_learned_positions_are_for_one_size_and_length_which_is_said_before_a_model_is_called() -> None:
    pipe = make(diffusion_core, cogvideo.image_parts(diffusion_core), "image")
    called: list[Any] = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match="height=32 and width=40 must be 32 and 32"):
        call(pipe, image=sd.image(32, 32), width=40, num_frames=9)
    with pytest.raises(ValueError, match="max_sequence_length=17 exceeds the 16 tokens"):
        call(pipe, image=sd.image(32, 32), max_sequence_length=17, num_frames=9)
    assert called == []
    # Films of other lengths have sinusoids in place of what was learned.
    assert call(pipe, image=sd.image(32, 32), num_frames=8).frames.shape[1] == 8


def test_video_and_latents_exclude_each_other() -> None:
    pipe = make(diffusion_core, cogvideo.parts(diffusion_core), "video")
    with pytest.raises(ValueError, match="video and latents exclude each other"):
        call(pipe, video=film(), latents=torch.zeros(1, 3, 4, 8, 8))
    with pytest.raises(ValueError, match="video holds films of different shapes"):
        call(pipe, video=[film(9), film(8)], **TWO)
    with pytest.raises(ValueError, match="video has 3 entries for 2 prompts"):
        call(pipe, video=[film()] * 3, **TWO)
