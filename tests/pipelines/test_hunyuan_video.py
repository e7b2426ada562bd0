"""HunyuanVideo's pipeline: what the battery does not see, against the reference and on input that does not fit."""

from typing import Any

import diffusers
import pytest
import torch

import diffusion_core
from diffusion_core.pipelines.hunyuan_video.prompts import DEFAULT_PROMPT_TEMPLATE, encode_llama

from . import hunyuan, sd

TWO = {"prompt": ["a red cat", "a dog"], "negative_prompt": ["ugly", "blue"]}


def make(library: Any, parts: dict[str, Any]) -> Any:
    made = library.HunyuanVideoPipeline(**parts)
    made.set_progress_bar_config(disable=True)
    return made


def pair(**changes: Any) -> tuple[Any, Any]:
    """Our pipeline, and the reference's with the same weights."""
    ours, theirs = (hunyuan.parts(library, **changes) for library in (diffusion_core, diffusers))
    for name in ("vae", "transformer"):
        ours[name].load_state_dict(theirs[name].state_dict())
    return make(diffusion_core, ours), make(diffusers, theirs)


def call(made: Any, **changes: Any) -> Any:
    arguments = {
        "prompt": ["a red cat"],
        "num_inference_steps": 3,
        "output_type": "pt",
        "max_sequence_length": hunyuan.LENGTH,
        "prompt_template": hunyuan.TEMPLATE,
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


def test_films_are_those_of_the_reference() -> None:
    pipes = pair()
    for changes in (
        {"num_frames": 21, "width": 64, "guidance_scale": 2.0},
        {"num_frames": 1},
        {"negative_prompt": "ugly", "true_cfg_scale": 4.0},
        {"true_cfg_scale": 4.0},
        {**TWO, "true_cfg_scale": 2.0, "seeds": 2},
        {"sigmas": [1.0, 0.7, 0.1]},
        {"latents": torch.randn(1, 4, 3, 8, 8, generator=sd.seeded(7)), "output_type": "latent"},
        {"num_videos_per_prompt": 2},
        {"prompt": ["a very long prompt that is cut somewhere"]},
    ):
        assert difference(pipes, **changes) < 1e-4, changes


def test_a_transformer_that_is_not_told_the_scale() -> None:
    """The reference hands the scale over in any case, where its transformer then ignores it."""
    pipes = pair(guidance_embeds=False)
    assert difference(pipes) < 1e-4


def test_the_published_template_is_the_reference_s() -> None:
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

    assert DEFAULT_PROMPT_TEMPLATE == pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE


# ---- prompts ----


def test_a_second_prompt_is_read_by_clip() -> None:
    """The reference takes the first one in any case."""
    pipe = make(diffusion_core, hunyuan.parts(diffusion_core))
    options = {"prompt_template": hunyuan.TEMPLATE, "max_sequence_length": hunyuan.LENGTH}
    first, second = (pipe.encode_prompt(text, **options) for text in ("a red cat", "a dog"))
    both = pipe.encode_prompt("a red cat", "a dog", **options)
    assert torch.equal(both[0], first[0])
    assert torch.equal(both[1], second[1])
    assert not torch.equal(first[1], second[1])


def test_what_comes_before_the_prompt_is_counted_if_the_template_does_not_say() -> None:
    parts = hunyuan.parts(diffusion_core)
    encoders = (parts["tokenizer"], parts["text_encoder"])
    said, counted = (
        encode_llama(["a cat"], *encoders, template, hunyuan.LENGTH)
        for template in (hunyuan.TEMPLATE, {"template": hunyuan.TEMPLATE["template"]})
    )
    assert torch.equal(said.embeds, counted.embeds)
    assert said.mask.sum() == len("a cat") + 1


def test_a_long_prompt_is_cut_and_the_result_says_so() -> None:
    pipe = make(diffusion_core, hunyuan.parts(diffusion_core))
    result = call(pipe, prompt=["a cat", "a dog" * 6], max_sequence_length=10, num_inference_steps=1)
    assert result.truncated_prompts == ["", ("a dog" * 6)[10:]]
    assert call(pipe, num_inference_steps=1).truncated_prompts is None


# ---- what does not fit ----


@pytest.mark.parametrize(("asked", "made"), [(1, 1), (4, 1), (5, 5), (8, 5), (9, 9)])
def test_frames_that_do_not_fit_are_rounded_and_the_result_says_so(asked: int, made: int) -> None:
    result = call(make(diffusion_core, hunyuan.parts(diffusion_core)), num_frames=asked, num_inference_steps=1)
    assert result.frames.shape[1] == made
    assert result.rounded_from == (None if asked == made else asked)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"height": 36}, "height=36 must be a positive multiple of 8"),
        ({"prompt_template": {"template": "no place"}}, "prompt_template must be a dict"),
        ({"prompt_template": {"template": "{}", "crop_start": -1}}, '"crop_start" of prompt_template'),
        ({"max_sequence_length": 0}, "max_sequence_length=0"),
        ({"guidance_scale": float("inf")}, "guidance_scale"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 4, 16)}, "pooled_prompt_embeds come together"),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(1, 4, 16), "pooled_prompt_embeds": torch.zeros(1, 32)},
            "prompt_attention_mask come together",
        ),
        (
            {
                "prompt": None,
                "prompt_embeds": torch.zeros(1, 4, 15),
                "pooled_prompt_embeds": torch.zeros(1, 32),
                "prompt_attention_mask": torch.ones(1, 4),
            },
            "vectors of size 15, the transformer takes size 16",
        ),
        ({"attention_kwargs": {"mask": 1}}, "attention_kwargs"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    pipe = make(diffusion_core, hunyuan.parts(diffusion_core))
    with pytest.raises((TypeError, ValueError), match=words):
        call(pipe, **changes)


def test_a_pipeline_without_its_autoencoder_and_encoders_works_on_latents() -> None:
    whole = make(diffusion_core, hunyuan.parts(diffusion_core))
    embeds = hunyuan.embed(whole, ["a red cat"], ["ugly"])
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    lean = make(diffusion_core, {**hunyuan.parts(diffusion_core), **absent})
    assert (lean.vae_scale_factor_spatial, lean.vae_scale_factor_temporal) == (8, 4)
    latents = torch.randn(1, 4, 3, 8, 8, generator=sd.seeded(7))
    given = {"prompt": None, **embeds, "true_cfg_scale": 3.0, "output_type": "latent", "latents": latents}
    found = call(lean, **given, height=64, width=64).frames
    wanted = call(whole, **given).frames
    assert torch.allclose(found, wanted, atol=1e-5)
    with pytest.raises(ValueError, match="needs text_encoder"):
        call(lean, output_type="latent")


def test_steps_keep_their_digits_in_half_precision() -> None:
    pipe = make(diffusion_core, hunyuan.parts(diffusion_core)).to(torch.bfloat16)
    latents = call(pipe, output_type="latent").frames
    assert latents.dtype == torch.float32
    whole = make(diffusion_core, hunyuan.parts(diffusion_core))
    assert (call(whole, output_type="latent").frames - latents).abs().mean() < 0.05
    assert call(pipe).frames.isfinite().all()
