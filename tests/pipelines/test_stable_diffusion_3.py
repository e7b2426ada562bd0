"""Stable Diffusion 3: what it does besides what every family does, against the reference with the same weights."""

from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core
from diffusion_core import AutoPipelineForImage2Image, StableDiffusion3InpaintPipeline, StableDiffusion3Pipeline

from . import sd, sd3, tiny
from .families import SD3, pair, pipe

LONG = "a red cat a dog " * 30


def difference(pipes: Any, task: str = "text", count: int = 2, **changes: Any) -> float:
    """The largest difference of the latents, from a number of steps in which each argument counts."""
    settings = {"output_type": "latent", "num_inference_steps": 4, **changes}
    results = [made(**SD3.call(task, count, generator=sd.seeded(), **settings)).images for made in pipes]
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


@pytest.fixture(scope="module")
def pipes() -> Any:
    return pair(SD3)


def without_t5(made: Any) -> Any:
    return type(made)(**{**made.components, "text_encoder_3": None, "tokenizer_3": None})


# ---- prompts ----


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_2": ["a dog", "a cat"], "prompt_3": ["blue", "red cat"]},
        {"negative_prompt_2": ["a dog", ""], "negative_prompt_3": ["red", "cat"]},
        {"prompt_2": "", "negative_prompt": None},
        {"clip_skip": 1},
        {"max_sequence_length": 3},
        {"prompt": [LONG, "a dog"]},
        {"num_images_per_prompt": 2},
    ],
    ids=str,
)
def test_prompts_agree(pipes: Any, changes: dict[str, Any]) -> None:
    assert difference(pipes, **changes) < 1e-4


@torch.no_grad()
def test_embeddings_are_those_of_the_reference(pipes: Any) -> None:
    settings = {"negative_prompt": "ugly", "num_images_per_prompt": 2, "max_sequence_length": 9}
    ours, theirs = (made.encode_prompt(["a cat", "a dog"], None, ["red", "blue"], **settings) for made in pipes)
    assert [tuple(each.shape) for each in ours] == [(4, 86, 64), (4, 86, 64), (4, 56), (4, 56)]
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) < 1e-5
    positive, negative, pooled, none = pipes[0].encode_prompt("a cat", None, None, do_classifier_free_guidance=False)
    assert (negative, none) == (None, None)
    assert positive.shape == (1, 77 + 256, 64)
    assert pooled.shape == (1, 56)


def test_without_t5_zeros_stand_for_it(pipes: Any) -> None:
    fewer = [without_t5(made) for made in pipes]
    for made in fewer:
        made.set_progress_bar_config(disable=True)
    assert difference(fewer) < 1e-4
    embeds = fewer[0].encode_prompt("a cat", None, None, max_sequence_length=5)[0]
    assert embeds.shape == (1, 82, 64)
    assert embeds[:, 77:].abs().max() == 0
    assert not torch.equal(*(made(**SD3.call("text")).images for made in (pipes[0], fewer[0])))


def test_a_folder_without_t5_loads_both_ways(pipes: Any, tmp_path: Path) -> None:
    ours, theirs = (without_t5(made) for made in pipes)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    nothing = {"text_encoder_3": None, "tokenizer_3": None}
    there = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "ours", **nothing)
    here = StableDiffusion3Pipeline.from_pretrained(tmp_path / "theirs")  # which needs no more than the folder says
    assert here.text_encoder_3 is None
    assert difference((here, there)) < 1e-4
    pipes[0].save_pretrained(tmp_path / "whole")
    fewer = StableDiffusion3Pipeline.from_pretrained(tmp_path / "whole", **nothing)
    assert fewer.text_encoder_3 is None


def test_a_pipeline_that_only_encodes(pipes: Any) -> None:
    parts = {**pipes[0].components, "transformer": None, "vae": None}
    embeds = StableDiffusion3Pipeline(**parts).encode_prompt("a cat", None, None, max_sequence_length=9)
    for one, other in zip(embeds, pipes[0].encode_prompt("a cat", None, None, max_sequence_length=9), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="text_encoder_3"):
        StableDiffusion3Pipeline(**{**parts, "text_encoder_3": None}).encode_prompt("a cat", None, None)


def test_what_t5_did_not_see_is_told(pipes: Any) -> None:
    ours = pipes[0]
    result = ours(**SD3.call("text", 2, prompt=["a red cat a dog", "a dog"], max_sequence_length=4))
    assert result.truncated_prompts == ["a dog", ""]
    assert ours(**SD3.call("text", prompt="a cat")).truncated_prompts is None
    assert without_t5(ours)(**SD3.call("text", prompt=LONG)).truncated_prompts[0].endswith("a dog")


def test_negative_texts_go_with_embeddings(pipes: Any) -> None:
    ours = pipes[0]
    positive, _, pooled, _ = ours.encode_prompt("a cat", None, None, max_sequence_length=9)
    given = {"prompt": None, "prompt_embeds": positive, "pooled_prompt_embeds": pooled}
    mixed = ours(**SD3.call("text", **given, negative_prompt="ugly")).images
    texts = ours(**SD3.call("text", prompt="a cat", negative_prompt="ugly", max_sequence_length=9)).images
    assert torch.allclose(mixed, texts, atol=1e-5)
    given["prompt_embeds"] = positive[:, :77]
    with pytest.raises(ValueError, match="77 tokens"):
        ours(**SD3.call("text", **given, negative_prompt="ugly"))


# ---- schedule ----


@pytest.mark.parametrize(
    ("scheduler", "config", "changes"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, {"sigmas": [1.0, 0.6, 0.3]}),
        ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}, {"height": 32, "width": 48}),
        ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}, {"mu": 0.9}),
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, {"mu": 0.9}),
        ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}, {}),
        (
            "UniPCMultistepScheduler",
            {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0},
            {},
        ),
    ],
)
@pytest.mark.parametrize("task", ["text", "image"])
def test_schedules_agree(task: str, scheduler: str, config: dict[str, Any], changes: dict[str, Any]) -> None:
    made = pair(SD3, task)
    for each, library in zip(made, (diffusion_core, diffusers), strict=True):
        each.scheduler = getattr(library, scheduler)(**config)
    if task == "image" and "UniPC" in scheduler:
        # The reference fails there: it noises pictures with `scale_noise`, which this scheduler does not have.
        made = (made[0], made[0])
    assert difference(made, task, **changes) < 1e-4


def test_mu_needs_a_scheduler_that_shifts() -> None:
    made = pipe(SD3, scheduler=diffusion_core.FlowMatchHeunDiscreteScheduler())
    with pytest.raises(ValueError, match=r"mu=0\.5 .*FlowMatchHeunDiscreteScheduler"):
        made(**SD3.call("text", mu=0.5))


# ---- latents ----


@pytest.mark.parametrize("task", ["text", "image"])
def test_shifted_latents_agree(task: str) -> None:
    def vae(library: ModuleType) -> Any:
        return tiny.vae(library, latent_channels=16, shift_factor=0.3, scaling_factor=1.5)

    assert difference(pair(SD3, task, vae=vae), task, output_type="pt") < 1e-4


def test_inpainting_shifts_back() -> None:
    vae = tiny.vae(diffusion_core, latent_channels=16, shift_factor=0.3, scaling_factor=1.5)
    made = pipe(SD3, "inpaint", vae=vae)
    latents = made(**SD3.call("inpaint", output_type="latent")).images
    picture = (vae.decode(latents / 1.5 + 0.3).sample / 2 + 0.5).clamp(0, 1)
    assert torch.allclose(made(**SD3.call("inpaint")).images, picture, atol=1e-5)


def test_image_to_image_from_latents_agrees() -> None:
    noisy = torch.randn(2, 16, 8, 8, generator=sd.seeded(8))
    assert difference(pair(SD3, "image"), "image", latents=noisy) < 1e-4


@pytest.mark.parametrize("changes", [{"strength": 0.3}, {"strength": 1.0}, {"height": 48, "width": 40}])
@pytest.mark.parametrize("task", ["image", "inpaint"])
def test_redrawing_agrees(task: str, changes: dict[str, Any]) -> None:
    assert difference(pair(SD3, task), task, **changes) < 1e-4


def test_inpainting_with_a_transformer_that_sees_the_mask_agrees() -> None:
    made = pair(SD3, "inpaint", transformer=lambda library: sd3.transformer(library, in_channels=33))
    assert difference(made, "inpaint") < 1e-4


def test_latents_without_an_autoencoder_go_on_in_another_task(pipes: Any) -> None:
    parts = {**pipes[0].components, "vae": None}
    made = StableDiffusion3Pipeline(**parts)
    made.set_progress_bar_config(disable=True)
    with pytest.raises(ValueError, match="output_type='latent'"):
        made(**SD3.call("text"))
    latents = pipes[0](**SD3.call("text", 2, output_type="latent")).images
    assert latents.shape == (2, 16, 8, 8)
    redrawn = pipe(SD3, "image")(**SD3.call("image", 2, image=latents)).images
    assert redrawn.shape == (2, 3, 32, 32)


def test_two_threads_share_a_pipeline(pipes: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def draw(steps: int) -> torch.Tensor:
        return pipes[0](**SD3.call("text", num_inference_steps=steps, output_type="latent")).images

    counts = [2, 5, 3, 4]
    alone = [draw(steps) for steps in counts]
    with ThreadPoolExecutor(2) as pool:
        for together, expected in zip(pool.map(draw, counts), alone, strict=True):
            assert torch.equal(together, expected)


def test_guidance_can_end_early(pipes: Any) -> None:
    from diffusers.callbacks import SD3CFGCutoffCallback as Theirs

    from diffusion_core.callbacks import SD3CFGCutoffCallback

    results = [
        made(
            **SD3.call(
                "text",
                generator=sd.seeded(),
                num_inference_steps=4,
                output_type="latent",
                callback_on_step_end=kind(cutoff_step_ratio=None, cutoff_step_index=1),
            )
        ).images
        for made, kind in zip(pipes, (SD3CFGCutoffCallback, Theirs), strict=True)
    ]
    assert float((results[0] - results[1]).abs().max()) < 1e-4


# ---- skip-layer guidance ----


@pytest.mark.parametrize(
    "changes",
    [
        {"skip_guidance_layers": [1]},
        {"skip_guidance_layers": [0, 2], "skip_layer_guidance_scale": 1.5, "skip_layer_guidance_stop": 0.7},
        {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.5, "skip_layer_guidance_stop": 1.0},
        {"skip_guidance_layers": [1], "skip_layer_guidance_stop": 1.0, "guidance_scale": 1.0},
        {"skip_guidance_layers": [], "skip_layer_guidance_stop": 1.0},
    ],
    ids=str,
)
def test_skip_layer_guidance_agrees(pipes: Any, changes: dict[str, Any]) -> None:
    assert difference(pipes, **{"num_inference_steps": 6, **changes}) < 1e-4


def test_skip_layer_guidance_acts_in_its_steps(pipes: Any) -> None:
    made, seen = pipes[0], []
    hook = made.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["skip_layers"]), with_kwargs=True
    )
    try:
        made(
            **SD3.call(
                "text",
                num_inference_steps=5,
                skip_guidance_layers=[1],
                skip_layer_guidance_start=0.1,
                skip_layer_guidance_stop=0.6,
            )
        )
    finally:
        hook.remove()
    assert seen == [None, None, [1], None, [1], None, None]


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sequence_length": 513}, "max_sequence_length=513"),
        ({"prompt_3": ["a"] * 3}, "prompt_3 has 3 texts"),
        ({"prompt_2": 5}, "prompt_2"),
        ({"clip_skip": 3}, "clip_skip=3"),
        ({"skip_guidance_layers": [3]}, "skip_guidance_layers"),
        ({"skip_layer_guidance_stop": 2.0}, "skip_layer_guidance_stop=2.0"),
        ({"mu": float("nan")}, "mu=nan"),
        ({"ip_adapter_image": 1}, "ip_adapter_image"),
        ({"joint_attention_kwargs": {"mask": 1}}, "mask"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 90, 64)}, "pooled_prompt_embeds"),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(1, 90, 63), "pooled_prompt_embeds": torch.zeros(1, 56)},
            r"prompt_embeds has .*size 63",
        ),
        ({"prompt_3": "x", "prompt": None, "prompt_embeds": torch.zeros(1, 90, 64)}, "exclude each other|pooled"),
    ],
)
def test_what_makes_no_sense_is_refused(pipes: Any, changes: dict[str, Any], message: str) -> None:
    called: list[Any] = []
    hook = pipes[0].text_encoder.register_forward_pre_hook(lambda *_: called.append(1))
    try:
        with pytest.raises((TypeError, ValueError), match=message):
            pipes[0](**SD3.call("text", **changes))
    finally:
        hook.remove()
    assert called == []


def test_sizes_are_multiples_of_patches(pipes: Any) -> None:
    with pytest.raises(ValueError, match="height=36 must be a positive multiple of 8"):
        pipes[0](**SD3.call("text", height=36, width=32))
    with pytest.raises(ValueError, match="at most 24 x 24"):
        pipes[0](**SD3.call("text", height=104, width=32))


def test_components_that_go_together(pipes: Any) -> None:
    lone = StableDiffusion3Pipeline(**{**pipes[0].components, "tokenizer_3": None})
    with pytest.raises(ValueError, match="tokenizer_3"):
        lone(**SD3.call("text"))
    mute = StableDiffusion3Pipeline(**{**pipes[0].components, "text_encoder_2": None})
    with pytest.raises(ValueError, match="text_encoder_2"):
        mute(**SD3.call("text"))


def test_the_family_is_known_to_automatic_pipelines(pipes: Any) -> None:
    made = AutoPipelineForImage2Image.from_pipe(pipes[0])
    assert type(made).__name__ == "StableDiffusion3Img2ImgPipeline"
    assert made.transformer is pipes[0].transformer
    assert type(diffusion_core.AutoPipelineForInpainting.from_pipe(made)) is StableDiffusion3InpaintPipeline
