"""Stable Diffusion, text to image and image to image: equal to the reference, and better where that fails users."""

import inspect
import threading
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import diffusion_core
from diffusion_core.errors import NumericalError

from . import sd, tiny
from .sd import difference, fresh, pair, pipe, seeded

PROMPT = "a red cat"
NAMES = ["StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"]
# Arguments of the reference that need IP-Adapter or LoRA.
ABSENT = {"ip_adapter_image", "ip_adapter_image_embeds", "cross_attention_kwargs"}


def draw(made: Any, **arguments: Any) -> torch.Tensor:
    defaults = {"prompt": PROMPT, "num_inference_steps": 2, "generator": seeded(), "output_type": "pt"}
    given = {**defaults, **arguments}
    return made(**{key: value for key, value in given.items() if value is not ...}).images


@pytest.fixture(scope="module")
def watched() -> tuple[Any, list[str]]:
    """A pipeline whose models are its own, and a list of the calls to them."""
    made = pipe(text_encoder=tiny.text_encoder(), unet=tiny.unet(diffusion_core))
    seen: list[str] = []
    for name in ("text_encoder", "unet"):
        getattr(made, name).register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    return made, seen


# ---- signatures ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["__init__", "__call__", "encode_prompt"])
def test_arguments_and_defaults_are_those_of_the_reference(name: str, method: str) -> None:
    theirs = inspect.signature(getattr(getattr(diffusers, name), method)).parameters
    ours = inspect.signature(getattr(getattr(diffusion_core, name), method)).parameters
    wanted = [key for key in theirs if key not in ABSENT]
    assert [key for key in ours if key != "long_prompt"] == wanted
    for key in wanted:
        default = ours[key].default
        assert (list(default) if isinstance(default, tuple) else default) == theirs[key].default, key


@pytest.mark.parametrize("name", NAMES)
def test_declarations_are_those_of_the_reference(name: str) -> None:
    ours, theirs = getattr(diffusion_core, name), getattr(diffusers, name)
    for attribute in (
        "_optional_components",
        "_callback_tensor_inputs",
        "model_cpu_offload_seq",
        "_exclude_from_cpu_offload",
    ):
        assert getattr(ours, attribute) == getattr(theirs, attribute)


# ---- parity ----


@pytest.mark.parametrize("scheduler", sd.SCHEDULERS)
def test_text_to_image_equals_the_reference(scheduler: str) -> None:
    generator = fresh(lambda: seeded(3))
    assert difference(*pair(scheduler_name=scheduler), prompt=PROMPT, num_inference_steps=3, generator=generator) < 1e-4


VARIATIONS: dict[str, dict[str, Any]] = {
    "without guidance": {"guidance_scale": 1.0},
    "another seed": {"generator": fresh(lambda: seeded(11))},
    "another size": {"height": 24, "width": 40},
    "batch": {"prompt": ["red", "cat"], "num_images_per_prompt": 2, "negative_prompt": ["dog", ""]},
    "generators": {"num_images_per_prompt": 2, "generator": fresh(lambda: [seeded(1), seeded(2)])},
    "rescale": {"guidance_rescale": 0.7},
    "eta": {"eta": 0.6},
    "long prompt": {"prompt": "red cat " * 60},
    "latents": {"latents": torch.randn(1, 4, 8, 8, generator=seeded(5))},
    "embeds": {"prompt": None, "prompt_embeds": torch.randn(1, 77, 32, generator=seeded(6))},
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_arguments_work_as_in_the_reference(variation: str) -> None:
    arguments = {"prompt": PROMPT, "num_inference_steps": 2, "generator": fresh(seeded_zero), **VARIATIONS[variation]}
    assert difference(*pair(), **arguments) < 1e-4


def seeded_zero() -> torch.Generator:
    return seeded(0)


@pytest.mark.parametrize(
    ("scheduler", "schedule"),
    [
        ("EulerDiscreteScheduler", {"timesteps": [901, 501, 101]}),
        ("EulerDiscreteScheduler", {"sigmas": [10.0, 3.0, 0.5, 0.0]}),
        ("DPMSolverMultistepScheduler", {"timesteps": [901, 501, 101]}),
    ],
)
def test_own_schedules_equal_the_reference(scheduler: str, schedule: dict[str, Any]) -> None:
    arguments = {"prompt": PROMPT, "generator": fresh(seeded_zero), **schedule}
    assert difference(*pair(scheduler_name=scheduler), **arguments) < 1e-4


@pytest.mark.parametrize("scheduler", sd.SCHEDULERS)
def test_image_to_image_equals_the_reference(scheduler: str) -> None:
    pipes = pair("StableDiffusionImg2ImgPipeline", scheduler)
    arguments = {"prompt": ["red", "cat"], "image": sd.image(), "num_inference_steps": 5, "strength": 0.6}
    assert difference(*pipes, **arguments, generator=fresh(seeded_zero)) < 1e-4


@pytest.mark.parametrize(
    "arguments",
    [
        {"strength": 1.0},
        {"image": sd.image(33, 21), "guidance_scale": 1.0},
        {"image": torch.randn(1, 4, 6, 8, generator=seeded(1))},
        {"image": [sd.image(seed=1), sd.image(seed=2)]},
        {"num_images_per_prompt": 2, "generator": fresh(lambda: [seeded(seed) for seed in range(4)])},
    ],
)
def test_image_to_image_takes_the_same_pictures(arguments: dict[str, Any]) -> None:
    base = {"prompt": ["red", "cat"], "image": sd.image(), "num_inference_steps": 3, "strength": 0.7}
    pipes = pair("StableDiffusionImg2ImgPipeline")
    assert difference(*pipes, **{**base, "generator": fresh(seeded_zero), **arguments}) < 1e-4


def test_encode_prompt_equals_the_reference() -> None:
    ours, theirs = pair()
    for arguments in (("a cat", "cpu", 2, True, "dog"), (["red", "cat"], "cpu", 1, True), ("cat", "cpu", 1, False)):
        for one, other in zip(ours.encode_prompt(*arguments), theirs.encode_prompt(*arguments), strict=True):
            assert (one is None and other is None) or torch.allclose(one, other, atol=1e-6)


def test_clip_skip_takes_an_earlier_layer() -> None:
    """With current versions of transformers the reference stops with an AttributeError."""
    made = pipe()
    positive, negative = made.encode_prompt(PROMPT, None, 1, True, "dog", clip_skip=1)
    ids = made.tokenizer([PROMPT], padding="max_length", return_tensors="pt").input_ids
    with torch.no_grad():
        states = made.text_encoder(ids, output_hidden_states=True).hidden_states
        norm = next(part for name, part in made.text_encoder.named_modules() if name.endswith("final_layer_norm"))
        assert torch.allclose(positive, norm(states[-2]), atol=1e-6)
    # As in the reference, all layers count for the negative prompt.
    assert torch.allclose(negative, made.encode_prompt("dog", None, 1, False)[0], atol=1e-6)


# ---- batches, latents, output ----


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "EulerAncestralDiscreteScheduler"])
def test_each_picture_of_a_batch_equals_the_one_drawn_alone(scheduler: str) -> None:
    made = pipe(scheduler_name=scheduler)
    prompts = ["red", "cat"]
    generators = [seeded(seed) for seed in range(4)]
    together = draw(made, prompt=prompts, num_images_per_prompt=2, generator=generators, num_inference_steps=3)
    for index in range(4):
        alone = draw(made, prompt=prompts[index // 2], generator=seeded(index), num_inference_steps=3)
        assert torch.allclose(together[index], alone[0], atol=1e-5)


def test_each_picture_goes_with_its_prompt() -> None:
    """Here the reference pairs pictures and prompts wrongly."""
    made = pipe("StableDiffusionImg2ImgPipeline")
    images, prompts = [sd.image(seed=1), sd.image(seed=2)], ["red", "cat"]
    generators = [seeded(seed) for seed in range(4)]
    shared = {"strength": 0.7, "num_inference_steps": 3}
    together = draw(made, prompt=prompts, image=images, num_images_per_prompt=2, generator=generators, **shared)
    for index in range(4):
        prompt, image = prompts[index // 2], images[index // 2]
        alone = draw(made, prompt=prompt, image=image, generator=seeded(index), **shared)
        assert torch.allclose(together[index], alone[0], atol=1e-5)


def test_latents_go_in_and_out() -> None:
    made = pipe()
    latents = draw(made, output_type="latent", height=24)
    assert latents.shape == (1, 4, 6, 8)
    # The size follows the latents that are given.
    assert draw(made, latents=latents).shape == (1, 3, 24, 32)
    again = draw(pipe("StableDiffusionImg2ImgPipeline"), image=latents, strength=0.5)
    assert again.shape == (1, 3, 24, 32)


def test_output_types() -> None:
    made = pipe()
    pictures = draw(made)
    assert np.allclose(draw(made, output_type="np"), pictures.permute(0, 2, 3, 1).numpy())
    assert draw(made, output_type="pil")[0].size == (32, 32)
    images, flagged = made(PROMPT, num_inference_steps=1, output_type="np", return_dict=False)
    assert images.shape == (1, 32, 32, 3) and flagged is None


def test_without_an_autoencoder_the_scale_comes_from_the_config(tmp_path: Any) -> None:
    whole = pipe()
    whole.save_pretrained(tmp_path)
    loaded = diffusion_core.StableDiffusionPipeline.from_pretrained(tmp_path, vae=None)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.vae_scale_factor == whole.vae_scale_factor == 4
    assert torch.allclose(draw(loaded, output_type="latent"), draw(whole, output_type="latent"), atol=1e-6)
    with pytest.raises(ValueError, match=r"needs vae.*output_type='latent'"):
        draw(loaded)


def test_a_tiny_autoencoder_of_any_scale() -> None:
    """The reference takes this one's scale for 8."""
    torch.manual_seed(0)
    config = {"encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32)}
    blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    vae = diffusion_core.AutoencoderTiny(**config, **blocks).eval()
    made = pipe(vae=vae)
    assert made.vae_scale_factor == 2
    assert draw(made).shape == (1, 3, 16, 16)
    image_to_image = pipe("StableDiffusionImg2ImgPipeline", vae=vae)
    assert draw(image_to_image, image=sd.image(18, 20), strength=0.7).shape == (1, 3, 20, 18)


def test_other_numbers_of_channels_and_tokens() -> None:
    """As of the embedded model: 8 channels of latents, prompts of 32 tokens."""
    short = tiny.tokenizer(Path(mkdtemp(prefix="tokenizer-")))
    short.model_max_length = 32
    made = pipe(
        tokenizer=short,
        unet=tiny.unet(diffusion_core, in_channels=8, out_channels=8),
        vae=tiny.vae(diffusion_core, latent_channels=8),
    )
    assert made.encode_prompt(PROMPT, None, 1, True)[1].shape == (1, 32, 32)
    assert draw(made).shape == (1, 3, 32, 32)
    latents = draw(made, output_type="latent")
    image_to_image = diffusion_core.StableDiffusionImg2ImgPipeline.from_pipe(made)
    image_to_image.set_progress_bar_config(disable=True)
    assert draw(image_to_image, image=latents, strength=0.7).shape == (1, 3, 32, 32)
    assert draw(image_to_image, image=sd.image(32, 32), strength=0.7).shape == (1, 3, 32, 32)


# ---- prompts ----


def test_one_negative_prompt_serves_all() -> None:
    made = pipe()
    expected = draw(made, prompt=["red", "cat"], negative_prompt=["dog", "dog"])
    for negative in ("dog", ["dog"]):
        assert torch.equal(draw(made, prompt=["red", "cat"], negative_prompt=negative), expected)
    assert draw(made, prompt="red", negative_prompt=["dog"]).shape[0] == 1


def test_embeddings_stand_for_prompts() -> None:
    made = pipe()
    positive, negative = made.encode_prompt(PROMPT, None, 1, True, negative_prompt="dog")
    expected = draw(made, negative_prompt="dog", num_images_per_prompt=2)
    given = {"prompt": None, "prompt_embeds": positive, "num_images_per_prompt": 2}
    assert torch.allclose(draw(made, negative_prompt_embeds=negative, **given), expected, atol=1e-5)
    assert torch.allclose(draw(made, negative_prompt="dog", **given), expected, atol=1e-5)
    bare = pipe(text_encoder=None, tokenizer=None)
    assert torch.allclose(draw(bare, negative_prompt_embeds=negative, **given), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"needs text_encoder and tokenizer.*negative_prompt_embeds"):
        draw(bare, **given)


def test_a_long_prompt_is_cut_visibly_or_encoded_in_parts() -> None:
    made = pipe()
    words = " ".join(["red", "cat"] * 40)  # 80 tokens, of which 75 fit
    cut = made(words, num_inference_steps=1, output_type="pt", generator=seeded())
    assert cut.truncated_prompts == ["cat red cat red cat"]
    whole = made(words, num_inference_steps=1, output_type="pt", generator=seeded(), long_prompt="chunk")
    assert whole.truncated_prompts is None and not torch.allclose(cut.images, whole.images)
    positive, negative = made.encode_prompt(words, None, 1, True, "dog", long_prompt="chunk")
    assert positive.shape == negative.shape == (1, 154, 32)
    first = made.encode_prompt(words, None, 1, False)[0]
    assert torch.allclose(positive[:, :77], first, atol=1e-5)
    second = made.encode_prompt("cat red cat red cat", None, 1, False)[0]
    assert torch.allclose(positive[:, 77:], second, atol=1e-5)
    # Embeddings in parts go with a negative prompt in as many parts.
    given = draw(made, prompt=None, prompt_embeds=positive, negative_prompt="dog", num_inference_steps=1)
    expected = draw(made, prompt=words, negative_prompt="dog", long_prompt="chunk", num_inference_steps=1)
    assert torch.allclose(given, expected, atol=1e-5)


# ---- what is refused ----

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "pass prompt or prompt_embeds"),
    ({"prompt": []}, "prompt is an empty list"),
    ({"prompt": 3}, "prompt must be a string"),
    ({"prompt": ["a", 3]}, "prompt must be a string"),
    ({"prompt_embeds": torch.zeros(1, 77, 32)}, "prompt and prompt_embeds exclude each other"),
    ({"prompt": None, "prompt_embeds": torch.zeros(77, 32)}, r"prompt_embeds must be .*\(prompts, tokens, size\)"),
    ({"prompt": None, "prompt_embeds": torch.zeros(1, 77, 31)}, "vectors of size 31, the unet takes size 32"),
    ({"prompt": ["a", "b"], "negative_prompt": ["c"] * 3}, "negative_prompt has 3 texts for 2 prompts"),
    ({"negative_prompt": "a", "negative_prompt_embeds": torch.zeros(1, 77, 32)}, "negative_prompt and"),
    ({"negative_prompt_embeds": torch.zeros(2, 77, 32)}, "negative_prompt_embeds has 2 entries for 1"),
    (
        {"prompt": None, "prompt_embeds": torch.zeros(1, 77, 32), "negative_prompt_embeds": torch.zeros(1, 76, 32)},
        "differ in tokens or size",
    ),
    ({"num_inference_steps": 0}, "num_inference_steps=0"),
    ({"num_inference_steps": 2.5}, "num_inference_steps must be a whole number"),
    ({"num_images_per_prompt": 0}, "num_images_per_prompt=0"),
    ({"height": 30}, "height=30 must be a positive multiple of 4, such as"),
    ({"width": -8}, "width=-8"),
    ({"height": 0}, "height=0"),
    ({"output_type": "jpeg"}, "output_type='jpeg'"),
    ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
    ({"clip_skip": 7}, "clip_skip=7 must be a whole number from 0 to 1"),
    ({"long_prompt": "split"}, "long_prompt='split'"),
    ({"generator": [seeded(), seeded()]}, "generator is a list of 2, but 1"),
    ({"generator": 5}, r"generator must be a torch\.Generator"),
    ({"latents": torch.zeros(1, 4, 10, 16), "height": 64, "width": 64}, r"expected \(1, 4, 16, 16\)"),
    ({"latents": torch.zeros(4, 8, 8)}, r"shape \(4, 8, 8\), expected \(1, 4, 8, 8\)"),
    ({"latents": torch.zeros(2, 4, 8, 8)}, r"expected \(1, 4, 8, 8\)"),
    ({"timesteps": [5], "sigmas": [1.0]}, "timesteps and sigmas exclude"),
    ({"timesteps": []}, "timesteps is empty"),
    ({"callback_on_step_end_tensor_inputs": ["noise"]}, "noise"),
    ({"callback_on_step_end": 3}, "callback_on_step_end=3"),
    ({"callback_on_step_end_tensor_inputs": 3}, "callback_on_step_end_tensor_inputs=3"),
    ({"timesteps": "x"}, "timesteps must be a list of numbers"),
    ({"timesteps": 5}, "timesteps must be a list of numbers"),
    ({"sigmas": [1.5, "a"]}, "sigmas must be a list of numbers"),
    ({"eta": None}, "eta=None must be a number from 0 to 1"),
    ({"eta": -1}, "eta=-1 must be a number from 0 to 1"),
    ({"guidance_rescale": "x"}, "guidance_rescale='x' must be a number from 0 to 1"),
    ({"guidance_rescale": float("nan")}, "guidance_rescale=nan"),
    ({"latents": torch.full((1, 4, 8, 8), float("nan"))}, "latents must hold finite"),
    ({"latents": torch.ones(1, 4, 8, 8, dtype=torch.int64)}, "latents must hold finite"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_refused_before_any_model_is_called(
    watched: Any, arguments: dict[str, Any], message: str
) -> None:
    made, seen = watched
    with pytest.raises((ValueError, TypeError), match=message):
        draw(made, **arguments)
    assert seen == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strength": 1.5}, "strength=1.5 must be a number from 0"),
        ({"strength": -0.1}, "strength=-0.1"),
        ({"strength": 0.1}, "leaves no step"),
        ({"strength": None}, "strength=None"),
        ({"image": torch.full((1, 3, 32, 32), float("nan"))}, "image holds values that are not finite"),
        ({"image": None}, "image is missing"),
        ({"image": "cat.png"}, "image must be PIL images"),
        ({"image": [sd.image()] * 3}, "image has 3 entries for 1 prompts"),
    ],
)
def test_image_to_image_refuses_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    made = pipe("StableDiffusionImg2ImgPipeline")
    with pytest.raises((ValueError, TypeError), match=message):
        draw(made, **{"image": sd.image(), **arguments})


def test_what_only_adapters_need_is_refused() -> None:
    with pytest.raises(ValueError, match="ip_adapter_image"):
        pipe()(PROMPT, ip_adapter_image=sd.image())
    with pytest.raises(ValueError, match="lora_scale"):
        pipe().encode_prompt(PROMPT, None, 1, True, lora_scale=0.5)


# ---- the loop ----


def test_callbacks_see_and_change_tensors() -> None:
    made = pipe()
    seen: list[Any] = []

    def watch(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        assert pipeline is made and pipeline.num_timesteps == 3 and pipeline.do_classifier_free_guidance
        seen.append((step, int(timestep), {name: tuple(value.shape) for name, value in tensors.items()}))

    names = ["latents", "prompt_embeds", "negative_prompt_embeds"]
    with_callback = draw(
        made, num_inference_steps=3, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names
    )
    assert torch.equal(with_callback, draw(made, num_inference_steps=3))
    shapes = {"latents": (1, 4, 8, 8), "prompt_embeds": (2, 77, 32), "negative_prompt_embeds": (1, 77, 32)}
    assert [step for step, _, _ in seen] == [0, 1, 2] and all(each == shapes for _, _, each in seen)


def test_guidance_can_be_switched_off_on_the_way() -> None:
    ours, theirs = pair()

    def cut(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
            pipeline._guidance_scale = 0.0
        return tensors

    arguments = {"callback_on_step_end": cut, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    assert (
        difference(ours, theirs, prompt=PROMPT, num_inference_steps=4, generator=fresh(seeded_zero), **arguments) < 1e-4
    )


def test_interruption_stops_after_the_step_and_still_decodes() -> None:
    made = pipe()
    steps: list[int] = []

    def stop(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        steps.append(step)
        pipeline._interrupt = step == 1

    assert draw(made, num_inference_steps=5, callback_on_step_end=stop).shape == (1, 3, 32, 32)
    assert steps == [0, 1]
    assert torch.equal(draw(made), draw(pipe()))


def test_an_exception_leaves_the_pipeline_usable() -> None:
    made = pipe(scheduler_name="PNDMScheduler")
    expected = draw(made, num_inference_steps=4)

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        draw(made, num_inference_steps=4, callback_on_step_end=fail)
    assert torch.equal(draw(made, num_inference_steps=4), expected)


def test_two_threads_share_a_pipeline() -> None:
    made = pipe(scheduler_name="DPMSolverMultistepScheduler")
    work = [(PROMPT, 3, 5.0), ("cat", 5, 1.0), ("red " * 90, 4, 7.5)]
    alone = [draw(made, prompt=p, num_inference_steps=n, guidance_scale=g) for p, n, g in work]
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        prompt, count, scale = work[index]
        try:
            results[index] = draw(made, prompt=prompt, num_inference_steps=count, guidance_scale=scale)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, expected in enumerate(alone):
        assert isinstance(results[index], torch.Tensor), results[index]
        assert torch.allclose(results[index], expected, atol=1e-5)


def test_the_loop_waits_for_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one number of a tensor would wait for the device; between the first and the last step none is read."""
    made = pipe(scheduler_name="EulerDiscreteScheduler")
    reads: list[str] = []
    watching = [False]
    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "nonzero"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            if watching[0]:
                reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    def watch(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        watching[0] = step < 3

    draw(made, num_inference_steps=5, callback_on_step_end=watch)
    assert reads == []


# ---- numbers that overflow ----


def test_latents_that_are_not_finite_are_an_error() -> None:
    made = pipe()

    def spoil(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * float("nan")}

    with pytest.raises(NumericalError, match=r"latents are not finite.*bfloat16"):
        draw(made, callback_on_step_end=spoil)


def test_an_autoencoder_that_overflows_in_float16_decodes_in_float32() -> None:
    vae = tiny.vae(diffusion_core).half()
    made = pipe(vae=vae)
    with torch.no_grad():
        # The largest float16 is 65504.
        vae.decoder.conv_in.bias.fill_(60000.0)
        vae.decoder.conv_in.weight.mul_(1e4)
    pictures = draw(made)
    assert torch.isfinite(pictures).all() and vae.dtype == torch.float16


def test_schedulers_get_the_settings_that_latents_need() -> None:
    given = diffusion_core.DDIMScheduler()
    made = pipe(scheduler=given)
    assert made.scheduler.config.steps_offset == 1 and made.scheduler.config.clip_sample is False
    assert given.config.steps_offset == 0 and given.config.clip_sample is True
    fitting = sd.scheduler(diffusion_core)
    assert pipe(scheduler=fitting).scheduler is fitting
