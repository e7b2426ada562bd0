"""What only Stable Diffusion XL has: two encoders, conditions on sizes, the refiner, an autoencoder in float32."""

from types import ModuleType
from typing import Any

import pytest
import torch

import diffusion_core
from diffusion_core.callbacks import SDXLCFGCutoffCallback

from . import sd, tiny
from .families import SDXL, VP, pair, pipe, projecting_encoder, tokenizer, xl_unet

LONG = "a red cat and a dog " * 12


def difference(pipes: Any, task: str = "text", count: int = 1, **changes: Any) -> float:
    results = [made(**SDXL.call(task, count, generator=sd.seeded(), **changes)).images for made in pipes]
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


def refiners(task: str = "image", scheduler: int = 0) -> Any:
    """Refiners have the second encoder only, and a UNet that takes a score in place of the target size."""
    settings = {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    ours, theirs = pair(SDXL, task, scheduler, unet=lambda library: xl_unet(library, numbers=5, text=32))
    found = []
    for library, made in ((diffusion_core, ours), (__import__("diffusers"), theirs)):
        parts = {**made.components, "text_encoder": None, "tokenizer": None}
        found.append(getattr(library, SDXL.tasks[task])(**parts, **settings))
        found[-1].set_progress_bar_config(disable=True)
    return tuple(found)


# ---- parity ----

VARIATIONS: dict[str, dict[str, Any]] = {
    "a second prompt": {"prompt_2": "a blue dog", "negative_prompt_2": "red"},
    "no negative prompt": {"negative_prompt": None},
    "clip_skip": {"clip_skip": 1},
    "rescaled": {"guidance_rescale": 0.7},
    "sizes": {"original_size": (64, 48), "crops_coords_top_left": (3, 5), "target_size": (40, 48)},
    "negative sizes": {
        "negative_original_size": (16, 16),
        "negative_crops_coords_top_left": (2, 1),
        "negative_target_size": (20, 24),
    },
    "images": {"num_images_per_prompt": 2},
    "another size": {"height": 40, "width": 48},
    "timesteps": {"timesteps": [900, 500, 20], "num_inference_steps": 3},
    "an end": {"denoising_end": 0.6, "num_inference_steps": 6, "output_type": "latent"},
}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_arguments_work_as_in_the_reference(variation: str) -> None:
    assert difference(pair(SDXL), **VARIATIONS[variation]) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"original_size": (64, 48), "negative_original_size": (16, 20), "negative_target_size": (24, 20)},
        {"crops_coords_top_left": (3, 5)},
        {"num_images_per_prompt": 2, "image": sd.image(45, 37)},
        {"image": torch.randn(1, 4, 8, 8, generator=sd.seeded(3))},
        {"latents": torch.randn(1, 4, 8, 8, generator=sd.seeded(4))},
    ],
    ids=["sizes", "crops", "images", "latents as image", "latents"],
)
def test_image_to_image_takes_the_same_arguments(changes: dict[str, Any]) -> None:
    assert difference(pair(SDXL, "image"), "image", **changes) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"strength": 1.0},
        {"strength": 0.9999, "height": 40, "width": 48},
        {"padding_mask_crop": 4, "output_type": "pil"},
        {"denoising_start": 0.5, "num_inference_steps": 6},
    ],
    ids=["whole", "another size", "crop", "start"],
)
@pytest.mark.parametrize("channels", [4, 9])
def test_inpainting_equals_the_reference(channels: int, changes: dict[str, Any]) -> None:
    pipes = pair(SDXL, "inpaint", unet=lambda library: xl_unet(library, in_channels=channels))
    if "padding_mask_crop" not in changes:
        assert difference(pipes, "inpaint", **changes) < 1e-4
        return
    ours, theirs = (
        torch.frombuffer(
            bytearray(made(**SDXL.call("inpaint", generator=sd.seeded(), **changes)).images[0].tobytes()),
            dtype=torch.uint8,
        )
        for made in pipes
    )
    assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("task", ["image", "inpaint"])
def test_a_refiner_equals_the_reference(task: str) -> None:
    assert difference(refiners(task), task, aesthetic_score=7.0, negative_aesthetic_score=1.5) < 1e-4


@pytest.mark.parametrize(
    "scheduler", ["EulerDiscreteScheduler", "HeunDiscreteScheduler", "DPMSolverMultistepScheduler"]
)
@pytest.mark.parametrize(("start", "end"), [(0.6, None), (0.3, 0.7), (0.8, None)])
def test_a_part_of_the_way_equals_the_reference(scheduler: str, start: float, end: float | None) -> None:
    pipes = refiners()
    for library, made in zip((diffusion_core, __import__("diffusers")), pipes, strict=True):
        made.scheduler = getattr(library, scheduler)(**VP) if scheduler[0] != "D" else getattr(library, scheduler)()
    half = torch.randn(1, 4, 8, 8, generator=sd.seeded(6))
    changes = {"denoising_start": start, "denoising_end": end, "num_inference_steps": 10, "image": half}
    assert difference(pipes, "image", **changes) < 1e-4


@pytest.mark.parametrize("clip_skip", [None, 1])
def test_encode_prompt_equals_the_reference(clip_skip: int | None) -> None:
    arguments = {"prompt_2": ["a", "b c"], "num_images_per_prompt": 2, "negative_prompt": "no", "clip_skip": clip_skip}
    ours, theirs = (made.encode_prompt(["a red cat", "dog"], **arguments) for made in pair(SDXL))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)


def test_latents_with_a_mean_and_a_deviation_for_each_channel() -> None:
    def vae(library: ModuleType) -> Any:
        return tiny.vae(
            library, latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.1, 0.9, 1.3, 0.8], scaling_factor=0.5
        )

    assert difference(pair(SDXL, vae=vae)) < 1e-4
    assert difference(pair(SDXL, "image", vae=vae), "image") < 1e-4


def test_each_negative_condition_counts() -> None:
    """The reference passes over most of them unless others are given too."""
    for task in ("text", "image"):
        made = pipe(SDXL, task)
        plain = made(**SDXL.call(task)).images
        for name in ("negative_original_size", "negative_crops_coords_top_left", "negative_target_size"):
            assert not torch.equal(made(**SDXL.call(task, **{name: (20, 24)})).images, plain)


# ---- the two models together ----


def test_a_refiner_goes_on_where_the_base_stopped() -> None:
    """Split in two, with the same UNet on both sides, the way ends where it ends in one go."""
    made = pipe(SDXL)
    rest = diffusion_core.StableDiffusionXLImg2ImgPipeline.from_pipe(made)
    rest.set_progress_bar_config(disable=True)
    whole = made(**SDXL.call("text", num_inference_steps=10)).images
    arguments = SDXL.call("text", num_inference_steps=10)
    half = made(**{**arguments, "output_type": "latent", "denoising_end": 0.7}).images
    again = rest(**{**arguments, "image": half, "denoising_start": 0.7}).images
    torch.testing.assert_close(again, whole, atol=1e-5, rtol=0)


# ---- the autoencoder in float32 ----


def test_an_autoencoder_that_wants_float32_decodes_in_it_and_stays_as_it_is() -> None:
    half = tiny.vae(diffusion_core, force_upcast=True).half()
    seen: list[torch.dtype] = []
    hook = half.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    before = {name: value.clone() for name, value in half.state_dict().items()}
    made = pipe(SDXL, vae=half)
    images = made(**SDXL.call("text")).images
    hook.remove()
    assert seen == [torch.float32]
    assert half.dtype == torch.float16
    assert all(torch.equal(value, before[name]) for name, value in half.state_dict().items())
    wanted = pipe(SDXL, vae=tiny.vae(diffusion_core).half().float())(**SDXL.call("text")).images
    torch.testing.assert_close(images.float(), wanted, atol=1e-5, rtol=0)


# ---- prompts ----


def test_long_prompts_are_cut_visibly_or_encoded_in_parts() -> None:
    made = pipe(SDXL)
    cut = made(**SDXL.call("text", prompt=[LONG]))
    assert cut.truncated_prompts is not None
    assert LONG.strip().replace(" ", "").endswith(cut.truncated_prompts[0].replace(" ", ""))
    whole = made(**SDXL.call("text", prompt=[LONG], long_prompt="chunk"))
    assert whole.truncated_prompts is None
    assert not torch.equal(cut.images, whole.images)
    embeds, negative, pooled, _ = made.encode_prompt(LONG, negative_prompt="no", long_prompt="chunk")
    assert embeds.shape == negative.shape
    assert embeds.shape[1] > 77
    assert embeds.shape[1] % 77 == 0
    assert pooled.shape == (1, 32)


def test_a_negative_prompt_for_the_second_encoder_alone_counts() -> None:
    made = pipe(SDXL)
    without = made.encode_prompt("a cat")[1]
    assert without.abs().max() == 0
    assert made.encode_prompt("a cat", negative_prompt_2="blue")[1].abs().max() > 0


def test_guidance_can_be_switched_off_on_the_way() -> None:
    made = pipe(SDXL)
    sizes: list[int] = []
    hook = made.unet.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    names = list(SDXLCFGCutoffCallback.tensor_inputs)
    cutoff = SDXLCFGCutoffCallback(cutoff_step_index=1)
    made(
        **SDXL.call("text", 2, num_inference_steps=4),
        callback_on_step_end=cutoff,
        callback_on_step_end_tensor_inputs=names,
    )
    hook.remove()
    assert sizes == [4, 4, 2, 2]


EMBEDS = {"prompt": None, "negative_prompt": None, "prompt_embeds": torch.zeros(1, 77, 64)}
WRONG: list[tuple[dict[str, Any], str]] = [
    (EMBEDS, "prompt_embeds and pooled_prompt_embeds come together"),
    ({**EMBEDS, "pooled_prompt_embeds": torch.zeros(2, 32)}, "pooled_prompt_embeds has the shape"),
    (
        {**EMBEDS, "prompt_embeds": torch.zeros(1, 77, 63), "pooled_prompt_embeds": torch.zeros(1, 32)},
        "vectors of size 63, the unet takes size 64",
    ),
    ({**EMBEDS, "pooled_prompt_embeds": torch.zeros(1, 31)}, "the UNet takes 80 values"),
    ({**EMBEDS, "pooled_prompt_embeds": torch.zeros(1, 32), "prompt_2": "a"}, "prompt_2 and prompt_embeds exclude"),
    (
        {"negative_pooled_prompt_embeds": torch.zeros(1, 32)},
        "negative_prompt_embeds and negative_pooled_prompt_embeds come together",
    ),
    ({"prompt_2": ["a", "b"]}, "prompt_2 has 2 texts for 1 prompts"),
    ({"original_size": 64}, "original_size=64 must be a pair"),
    ({"crops_coords_top_left": None}, "crops_coords_top_left=None"),
    ({"denoising_end": 1.5}, "denoising_end=1.5 must be a number from 0 to 1"),
    ({"clip_skip": 5}, "clip_skip=5"),
    ({"long_prompt": "cut"}, "long_prompt='cut'"),
    ({"guidance_rescale": 2.0}, "guidance_rescale=2.0"),
    ({"ip_adapter_image": 1}, "ip_adapter_image"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pipe(SDXL)(**SDXL.call("text", **changes))


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="needs text_encoder_2 and tokenizer_2"):
        pipe(SDXL, text_encoder_2=None, tokenizer_2=None)(**SDXL.call("text"))
    with pytest.raises(ValueError, match="addition_embed_type is None"):
        pipe(SDXL, unet=tiny.unet(diffusion_core, cross_attention_dim=64))(**SDXL.call("text"))
    with pytest.raises(ValueError, match="the UNet takes 80 values"):
        pipe(SDXL, text_encoder_2=projecting_encoder(36), tokenizer_2=tokenizer())(**SDXL.call("text"))
    with pytest.raises(ValueError, match=r"denoising_start=0\.5 must be less than denoising_end=0\.5"):
        pipe(SDXL, "image")(**SDXL.call("image", denoising_start=0.5, denoising_end=0.5))
    with pytest.raises(ValueError, match="no step lies between"):
        pipe(SDXL)(**SDXL.call("text", denoising_end=0.0004))
    with pytest.raises(ValueError, match="add_watermarker"):
        diffusion_core.StableDiffusionXLPipeline(**pipe(SDXL).components, add_watermarker=True)
    with pytest.raises(ValueError, match="lora_scale"):
        pipe(SDXL).encode_prompt("a", lora_scale=0.5)
