"""The FLUX.1 pipelines against the reference, and on input that does not fit."""

import inspect
import logging
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import diffusion_core
from diffusion_core import AutoPipelineForImage2Image, AutoPipelineForInpainting, AutoPipelineForText2Image

from . import flux
from .flux import SIDE, pair, pipe
from .sd import difference, fresh, image, mask, seeded

NAMES = [
    "FluxPipeline",
    "FluxImg2ImgPipeline",
    "FluxInpaintPipeline",
    "FluxFillPipeline",
    "FluxKontextPipeline",
    "FluxControlPipeline",
]
SIZE = {"height": SIDE, "width": 2 * SIDE}


def arguments(name: str = "FluxPipeline", **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "prompt": "a red cat",
        **SIZE,
        "num_inference_steps": 3,
        "max_sequence_length": 12,
        "generator": fresh(seeded),
    }
    if name == "FluxControlPipeline":
        given["control_image"] = image()
    elif name != "FluxPipeline":
        given["image"] = image()
    if name in ("FluxInpaintPipeline", "FluxFillPipeline"):
        given["mask_image"] = mask()
    if name == "FluxKontextPipeline":
        given |= {"max_area": 40 * 48, "_auto_resize": False}
    return {**given, **changes}


def draw(made: Any, name: str = "FluxPipeline", **changes: Any) -> Any:
    given = arguments(name, **{"output_type": "pt", **changes})
    return made(**{key: value() if getattr(value, "fresh", False) else value for key, value in given.items()}).images


# ---- like the reference ----


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("scheduler", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_reference(name: str, scheduler: str, guided: bool) -> None:
    """Every task, with and without the guidance that a model was distilled with, and true guidance where there is."""
    ours, theirs = pair(name, scheduler, guidance_embeds=guided)
    given = arguments(name)
    if guided and "negative_prompt" in inspect.signature(type(ours).__call__).parameters:
        given |= {"negative_prompt": "ugly", "true_cfg_scale": 3.0}
    assert difference(ours, theirs, **given) < 1e-4


def test_agrees_with_another_solver() -> None:
    assert difference(*pair(scheduler_name="unipc"), **arguments(num_inference_steps=5)) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ["a cat", "a dog"], "num_images_per_prompt": 2},
        {"prompt_2": "a blue dog", "negative_prompt": "x", "negative_prompt_2": "y", "true_cfg_scale": 2.0},
        {"generator": fresh(lambda: [seeded(1), seeded(2)]), "num_images_per_prompt": 2},
        {"sigmas": [1.0, 0.6, 0.3]},
        {"guidance_scale": 1.0},
        {"output_type": "latent"},
        {"true_cfg_scale": 4.0},
        {"latents": torch.randn(1, 128, 16, generator=seeded(5))},
        {"prompt": "many words " * 60},
    ],
)
def test_variations_agree(changes: dict[str, Any]) -> None:
    assert difference(*pair(), **arguments(**changes)) < 1e-4


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ["a cat", "a dog"], "num_images_per_prompt": 2},
        {"strength": 0.5, "num_inference_steps": 5},
        {"strength": 1.0},
    ],
)
def test_variations_of_other_tasks_agree(name: str, changes: dict[str, Any]) -> None:
    ours, theirs = pair(name)
    if "strength" in changes and "strength" not in inspect.signature(type(ours).__call__).parameters:
        pytest.skip("takes no strength")
    assert difference(ours, theirs, **arguments(name, **changes)) < 1e-4


def test_editing_agrees_at_the_trained_sizes() -> None:
    pipes = pair("FluxKontextPipeline")
    # A latent as wide as the real one, so that there are no more tokens than in use.
    for made, vae in zip(pipes, flux.vaes(levels=4), strict=True):
        made.register_modules(vae=vae)
    ours, theirs = (type(made)(**made.components) for made in pipes)
    for made in (ours, theirs):
        made.set_progress_bar_config(disable=True)
    given = arguments("FluxKontextPipeline", num_inference_steps=1, output_type="latent", max_area=64 * 48)
    assert difference(ours, theirs, **{**given, "image": image(20, 44), "_auto_resize": True}) < 1e-4
    assert difference(ours, theirs, **{**given, "image": None}) < 1e-4


def test_a_cropped_part_is_painted_as_by_the_reference() -> None:
    ours, theirs = pair("FluxInpaintPipeline")
    given = arguments("FluxInpaintPipeline", padding_mask_crop=4, output_type="pil")
    results = []
    for each in (ours, theirs):
        made = {key: value() if getattr(value, "fresh", False) else value for key, value in given.items()}
        results.append(np.asarray(each(**made).images[0], dtype=int))
    assert np.abs(results[0] - results[1]).max() <= 1


def test_callbacks_see_the_same() -> None:
    seen: list[list[Any]] = [[], []]
    for each, notes in zip(pair(), seen, strict=True):

        def note(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any], notes: Any = notes) -> dict[str, Any]:
            notes.append((step, float(timestep), tensors["latents"].clone(), tensors["prompt_embeds"].shape))
            return {"latents": tensors["latents"] * 0.9}

        names = ["latents", "prompt_embeds"]
        draw(each, callback_on_step_end=note, callback_on_step_end_tensor_inputs=names)
    for ours, theirs in zip(*seen, strict=True):
        assert ours[:2] == pytest.approx(theirs[:2]) and ours[3] == theirs[3]
        assert torch.allclose(ours[2], theirs[2], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_the_reference_s(name: str) -> None:
    """By name, order and default."""
    for method in ("__init__", "__call__", "encode_prompt"):
        found, expected = (
            [
                (each.name, tuple(each.default) if isinstance(each.default, list | tuple) else each.default)
                for each in inspect.signature(getattr(getattr(library, name), method)).parameters.values()
            ]
            for library in (diffusion_core, diffusers)
        )
        assert [one for one, _ in found] == [one for one, _ in expected]
        if method == "__call__":
            assert found == expected
    ours, theirs = (getattr(library, name) for library in (diffusion_core, diffusers))
    for attribute in ("_callback_tensor_inputs", "model_cpu_offload_seq", "_optional_components"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)


def test_encode_prompt_agrees() -> None:
    ours, theirs = pair()
    given = {"prompt": ["a cat", "a red dog"], "prompt_2": ["x", "a dog"], "max_sequence_length": 9}
    given["num_images_per_prompt"] = 2
    with torch.no_grad():
        for one, other in zip(ours.encode_prompt(**given), theirs.encode_prompt(**given), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


# ---- by itself ----


def test_embeddings_stand_for_prompts() -> None:
    made = pipe()
    expected = draw(made, negative_prompt="ugly", true_cfg_scale=2.0)
    with torch.no_grad():
        embeds, pooled, _ = made.encode_prompt("a red cat", max_sequence_length=12)
        negative, negative_pooled, _ = made.encode_prompt("ugly", max_sequence_length=12)
    given = {
        "prompt": None,
        "prompt_embeds": embeds,
        "pooled_prompt_embeds": pooled,
        "true_cfg_scale": 2.0,
        "max_sequence_length": 512,
    }
    negatives = {"negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled}
    assert torch.equal(draw(made, **given, **negatives), expected)
    # Text beside embeddings gets as many tokens as these have.
    assert torch.allclose(draw(made, **given, negative_prompt="ugly"), expected, atol=1e-5)
    textless = pipe(text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
    assert torch.equal(draw(textless, **given, **negatives), expected)


def test_one_negative_prompt_serves_all() -> None:
    made = pipe()
    given = {"prompt": ["a cat", "a dog"], "true_cfg_scale": 2.0}
    expected = draw(made, **given, negative_prompt=["ugly", "ugly"])
    assert torch.equal(draw(made, **given, negative_prompt="ugly"), expected)
    assert torch.equal(draw(made, **given, negative_prompt=["ugly"]), expected)


def test_image_k_of_a_batch_can_be_drawn_alone() -> None:
    made = pipe()
    batch = draw(made, num_images_per_prompt=3, generator=[seeded(seed) for seed in range(3)])
    alone = draw(made, generator=[seeded(2)])
    assert torch.allclose(batch[2:], alone, atol=1e-5)


def test_any_scheduler_of_flows_draws() -> None:
    images = draw(pipe(scheduler_name="heun"))
    assert images.shape == (1, 3, SIDE, 2 * SIDE) and torch.isfinite(images).all()


def test_latents_go_round() -> None:
    """What is packed can be decoded by hand, and unpacked latents serve as pictures."""
    made = pipe()
    expected, packed = draw(made), draw(made, output_type="latent")
    assert packed.shape == (1, SIDE * 2 * SIDE // 16, 16)
    latents = made._unpack(packed, SIDE, 2 * SIDE)
    with torch.no_grad():
        pixels = made.vae.decode(latents / 0.3611 + 0.1159).sample
    assert torch.allclose(pixels / 2 + 0.5, expected, atol=0.5) and latents.shape == (1, 4, SIDE // 2, SIDE)
    assert torch.equal(made._pack(latents), packed)
    other = pipe("FluxImg2ImgPipeline", vae=None)
    given = {"image": latents, "height": None, "width": None, "output_type": "latent"}
    assert other.vae_scale_factor == 8
    assert draw(other, "FluxImg2ImgPipeline", **given).shape == packed.shape


def test_given_latents_go_before_the_picture() -> None:
    made = pipe("FluxImg2ImgPipeline")
    latents = torch.randn(1, 128, 16, generator=seeded(5))
    one, other = (draw(made, "FluxImg2ImgPipeline", image=image(seed=seed), latents=latents) for seed in (0, 1))
    assert torch.equal(one, other)


def test_masked_latents_stand_for_picture_and_mask() -> None:
    made = pipe("FluxFillPipeline")
    seen: list[torch.Tensor] = []
    made.transformer.register_forward_pre_hook(
        lambda module, given, named: seen.append(named["hidden_states"]), with_kwargs=True
    )
    latents = torch.randn(1, 128, 16, generator=seeded(5))
    expected = draw(made, "FluxFillPipeline", latents=latents)
    given = {"image": None, "mask_image": None, "masked_image_latents": seen[0][:, :, 16:], "latents": latents}
    made.transformer._forward_pre_hooks.clear()
    made.transformer._forward_pre_hooks_with_kwargs.clear()
    assert torch.allclose(draw(made, "FluxFillPipeline", **given), expected, atol=1e-5)
    with pytest.raises(ValueError, match="strength"):
        draw(made, "FluxFillPipeline", **given, strength=0.5)
    with pytest.raises(ValueError, match="either"):
        draw(made, "FluxFillPipeline", **{**given, "image": image()})
    with pytest.raises(ValueError, match="masked_image_latents"):
        draw(made, "FluxFillPipeline", **{**given, "masked_image_latents": torch.zeros(1, 128, 80)})


def test_what_lies_outside_of_a_mask_stays() -> None:
    made = pipe("FluxInpaintPipeline")
    box = mask(64, 32, (40, 0, 64, 32))
    given = {"image": image(64, 32), "mask_image": box, "output_type": "latent", "strength": 1.0}
    one, other = (
        made._unpack(draw(made, "FluxInpaintPipeline", **given, prompt=prompt), SIDE, 2 * SIDE)
        for prompt in ("a cat", "a dog")
    )
    assert torch.equal(one[..., :20], other[..., :20])
    assert not torch.equal(one[..., 20:], other[..., 20:])


def test_a_long_prompt_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="diffusion_core"):
        result = pipe()(**{**arguments(prompt=["a red cat", "a dog"], max_sequence_length=3), "generator": seeded()})
    assert result.truncated_prompts == ["cat", ""]
    assert "3 tokens" in caplog.text


def test_guidance_can_be_left_off_by_a_callback() -> None:
    made, calls = pipe(), []
    made.transformer.register_forward_pre_hook(
        lambda module, given, named: calls.append(len(named["hidden_states"])), with_kwargs=True
    )

    def stop(pipe: Any, step: int, timestep: Any, tensors: Any) -> None:
        pipe._true_cfg_scale = 1.0

    draw(made, negative_prompt="ugly", true_cfg_scale=2.0, callback_on_step_end=stop)
    made.transformer._forward_pre_hooks.clear()
    made.transformer._forward_pre_hooks_with_kwargs.clear()
    assert calls == [2, 1, 1]


def test_interrupting_stops() -> None:
    steps: list[int] = []

    def stop(pipe: Any, step: int, timestep: Any, tensors: Any) -> None:
        steps.append(step)
        pipe._interrupt = True

    draw(pipe(), callback_on_step_end=stop)
    assert steps == [0]


@pytest.mark.parametrize(
    ("auto", "name", "expected"),
    [
        (AutoPipelineForText2Image, "FluxInpaintPipeline", "FluxPipeline"),
        (AutoPipelineForImage2Image, "FluxPipeline", "FluxImg2ImgPipeline"),
        (AutoPipelineForInpainting, "FluxPipeline", "FluxInpaintPipeline"),
        (AutoPipelineForInpainting, "FluxFillPipeline", "FluxFillPipeline"),
        (AutoPipelineForImage2Image, "FluxKontextPipeline", "FluxKontextPipeline"),
    ],
)
def test_auto_pipelines_know_the_family(auto: Any, name: str, expected: str) -> None:
    made = pipe(name)
    other = auto.from_pipe(made)
    assert type(other).__name__ == expected and other.transformer is made.transformer


def test_saves_and_loads_both_ways(tmp_path: Any) -> None:
    ours, theirs = pair()
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    expected = draw(ours)
    loaded = diffusion_core.DiffusionPipeline.from_pretrained(tmp_path / "theirs")
    assert type(loaded) is diffusion_core.FluxPipeline
    assert torch.equal(draw(loaded), expected)
    back = diffusers.FluxPipeline.from_pretrained(tmp_path / "ours")
    assert torch.allclose(draw(back), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt_embeds": torch.zeros(1, 12, 32)}, "exclude"),
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 12, 32)}, "come together"),
        ({"prompt": None, "pooled_prompt_embeds": torch.zeros(1, 32)}, "prompt"),
        ({"negative_pooled_prompt_embeds": torch.zeros(1, 32)}, "come together"),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(1, 12, 31), "pooled_prompt_embeds": torch.zeros(1, 32)},
            "size 31",
        ),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(1, 12, 32), "pooled_prompt_embeds": torch.zeros(2, 32)},
            "pooled_prompt_embeds",
        ),
        ({"prompt_2": ["a", "b"]}, "prompt_2"),
        ({"negative_prompt": ["a", "b"], "true_cfg_scale": 2.0}, "negative_prompt"),
        ({"max_sequence_length": 513}, "max_sequence_length"),
        ({"max_sequence_length": 0}, "max_sequence_length"),
        ({"height": 0}, "height"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"true_cfg_scale": float("inf"), "negative_prompt": "x"}, "true_cfg_scale"),
        ({"height": 33}, "height=33 must be a positive multiple of 4, such as 32"),
        ({"latents": torch.zeros(1, 4, 16, 32)}, r"latents.*\(1, 128, 16\).*tokens"),
        (
            {
                "prompt": None,
                "prompt_embeds": torch.zeros(2, 12, 32),
                "pooled_prompt_embeds": torch.zeros(2, 32),
                "negative_prompt_embeds": torch.zeros(3, 12, 32),
                "negative_pooled_prompt_embeds": torch.zeros(3, 32),
            },
            "negative_prompt_embeds has 3",
        ),
        ({"output_type": "jpeg"}, "output_type"),
        ({"generator": [seeded()] * 2}, "generator"),
        ({"ip_adapter_image": image()}, "ip_adapter_image"),
        ({"joint_attention_kwargs": {"ip_adapter_masks": 1}}, "ip_adapter_masks"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, "noise"),
    ],
)
def test_wrong_arguments_are_refused_before_any_model_is_called(
    changes: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipe()

    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was called")

    for name in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        monkeypatch.setattr(getattr(made, name), "forward", called)
    with pytest.raises(ValueError, match=word):
        draw(made, **changes)


@pytest.mark.parametrize("name", NAMES[1:])
def test_missing_pictures_are_refused(name: str) -> None:
    if name == "FluxKontextPipeline":
        pytest.skip("draws from a prompt alone too")
    word = "control_image" if name == "FluxControlPipeline" else "image"
    with pytest.raises(ValueError, match=word):
        draw(pipe(name), name, **{word: None})


def test_a_model_for_another_task_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        draw(pipe(transformer=flux.transformers(32)[0]))
    with pytest.raises(ValueError, match="48"):
        draw(pipe("FluxFillPipeline", transformer=flux.transformers(16)[0]), "FluxFillPipeline")


def test_non_finite_output_is_an_error() -> None:
    made = pipe()
    with pytest.raises(ArithmeticError, match="latents"):
        draw(made, callback_on_step_end=lambda *given: {"latents": given[3]["latents"] * float("nan")})


def test_sliced_decoding_is_the_same_in_all_tasks() -> None:
    for name in ("FluxPipeline", "FluxImg2ImgPipeline"):
        made = pipe(name)
        expected = draw(made, name, num_images_per_prompt=2)
        made.vae.enable_slicing()
        try:
            assert torch.allclose(draw(made, name, num_images_per_prompt=2), expected, atol=1e-6)
        finally:
            made.vae.disable_slicing()
