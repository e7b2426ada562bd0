"""PixArt beyond the battery: alpha's sizes, bins, captions, masks, old callbacks, old checkpoints."""

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import PixArtImageProcessor
from diffusers.pipelines.pixart_alpha import pipeline_pixart_sigma

import diffusion_core
from diffusion_core.pipelines.captions import clean_caption
from diffusion_core.pipelines.pixart.bins import FromNoiseInBins, bins, nearest_bin

from . import masked, sd, t5, tiny

SCHEDULERS: dict[str, dict[str, Any]] = {
    "DPMSolverMultistepScheduler": {},
    "EulerDiscreteScheduler": {},
    "HeunDiscreteScheduler": {},
    "DDIMScheduler": {"clip_sample": False},
}


def made(library: Any, name: str, scheduler: str = "DPMSolverMultistepScheduler", **changes: Any) -> Any:
    """A pipeline; changes are of the transformer, or replace components."""
    inner = {key: changes.pop(key) for key in list(changes) if key in ("sample_size", "out_channels")}
    parts = masked.pixart_parts(library, **inner)
    parts["scheduler"] = getattr(library, scheduler)(**masked.BETAS, **SCHEDULERS[scheduler])
    pipe = getattr(library, name)(**{**parts, **changes})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pair(name: str, scheduler: str = "DPMSolverMultistepScheduler", **changes: Any) -> Any:
    ours, theirs = (made(library, name, scheduler, **changes) for library in (diffusion_core, diffusers))
    for part in ("transformer", "vae"):
        getattr(ours, part).load_state_dict(getattr(theirs, part).state_dict())
    return ours, theirs


def call(**changes: Any) -> dict[str, Any]:
    small = {"num_inference_steps": 2, "output_type": "pt", "max_sequence_length": 12, "use_resolution_binning": False}
    return {"prompt": "a red cat", "height": 32, "width": 32, "generator": sd.seeded(), **small, **changes}


def difference(ours: Any, theirs: Any, **changes: Any) -> float:
    results = [each(**call(**changes, generator=sd.seeded())).images for each in (ours, theirs)]
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


# ---- against the reference ----


@pytest.mark.parametrize("scale", [4.5, 1.0])
@pytest.mark.parametrize("scheduler", ["DPMSolverMultistepScheduler", "EulerDiscreteScheduler"])
def test_alpha_draws_what_the_reference_draws(scheduler: str, scale: float) -> None:
    ours, theirs = pair("PixArtAlphaPipeline", scheduler, sample_size=128)
    changes = {"prompt": ["a red cat", "dog"], "negative_prompt": "ugly", "width": 48, "num_images_per_prompt": 2}
    assert difference(ours, theirs, guidance_scale=scale, **changes) < 1e-4


def test_a_variance_that_was_not_learned_is_not_dropped() -> None:
    ours, theirs = pair("PixArtSigmaPipeline", "DDIMScheduler", out_channels=4)
    assert difference(ours, theirs, eta=0.5) < 1e-4


@pytest.mark.parametrize(("height", "width"), [(None, None), (300, 200), (256, 500)])
def test_bins_draw_what_the_reference_draws(height: int | None, width: int | None) -> None:
    # The reference counts 8 pixels a latent when it chooses the bins, so the autoencoder has four levels.
    config = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    ours, theirs = (
        made(library, "PixArtSigmaPipeline", sample_size=32, vae=tiny.vae(library, **config, **blocks))
        for library in (diffusion_core, diffusers)
    )
    for part in ("transformer", "vae"):
        getattr(ours, part).load_state_dict(getattr(theirs, part).state_dict())
    changes = {"height": height, "width": width, "use_resolution_binning": True, "num_inference_steps": 1}
    assert difference(ours, theirs, **changes) < 1e-4
    assert ours(**call(**changes)).images.shape == (1, 3, height or 256, width or 256)


def test_embeddings_and_masks_are_those_of_the_reference() -> None:
    ours, theirs = pair("PixArtAlphaPipeline")
    for arguments in (
        {"prompt": ["a RED cat ", "dog"], "negative_prompt": ["", "ugly"], "num_images_per_prompt": 2},
        {"prompt": "a (cat)", "do_classifier_free_guidance": False, "max_sequence_length": 9},
        {"prompt": ["a", "b"], "negative_prompt": "blue"},
    ):
        for first, second in zip(ours.encode_prompt(**arguments), theirs.encode_prompt(**arguments), strict=True):
            if second is None:
                assert first is None
            else:
                torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_embeddings_stand_for_prompts_in_both() -> None:
    ours, theirs = pair("PixArtSigmaPipeline")
    embeds = dict(zip(masked.EMBEDS, ours.encode_prompt("a dog", max_sequence_length=10), strict=True))
    assert difference(ours, theirs, prompt=None, negative_prompt=None, **embeds) < 1e-4


# ---- bins ----


@pytest.mark.parametrize("side", [256, 512, 1024, 2048])
def test_bins_are_those_of_the_reference(side: int) -> None:
    table = getattr(pipeline_pixart_sigma, f"ASPECT_RATIO_{side}_BIN")
    assert bins(side) == [tuple(map(int, size)) for size in table.values()]
    sizes = np.random.default_rng(side).integers(100, 3000, (500, 2)).tolist()
    for height, width in [*sizes, (1024, 1024), (1000, 1), (1, 1000)]:
        wanted = PixArtImageProcessor.classify_height_width_bin(height, width, ratios=table)
        assert nearest_bin(height, width, side) == tuple(wanted)


def test_pictures_are_scaled_and_cropped_as_by_the_reference() -> None:
    sizes = np.random.default_rng(0).integers(5, 60, (50, 4)).tolist()
    for *drawn, height, width in sizes:
        pixels, task = torch.rand(1, 3, *drawn), FromNoiseInBins(height, width)
        task.wanted = (height, width)
        ours = task.crop(None, pixels)  # type: ignore[arg-type]
        assert ours.shape == (1, 3, height, width)
        theirs = PixArtImageProcessor.resize_and_crop_tensor(pixels, width, height)
        if theirs.shape == ours.shape:  # products that fall short of a whole number lose it a row
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_bins_give_the_size_that_was_asked_for_and_latents_of_the_bin() -> None:
    pipe = made(diffusion_core, "PixArtSigmaPipeline", sample_size=32)
    arguments = call(height=101, width=77, use_resolution_binning=True, num_inference_steps=1)
    assert pipe(**arguments).images.shape == (1, 3, 101, 77)
    latents = pipe(**{**arguments, "output_type": "latent"}).images
    assert nearest_bin(101, 77, 128) == (144, 112)
    assert latents.shape == (1, 4, 36, 28)
    again = {**arguments, "latents": torch.randn(latents.shape, generator=sd.seeded())}
    assert torch.equal(pipe(**again).images, pipe(**{**arguments, "generator": sd.seeded()}).images)
    with pytest.raises(ValueError, match=r"latents has shape \(1, 4, 8, 8\), expected \(1, 4, 36, 28\)"):
        pipe(**{**arguments, "latents": torch.zeros(1, 4, 8, 8)})


def test_models_without_bins_say_so() -> None:
    pipe = made(diffusion_core, "PixArtSigmaPipeline")
    with pytest.raises(ValueError, match="multiple of 128 pixels, but this one is made for 32 x 32"):
        pipe("a cat")
    with pytest.raises(ValueError, match=r"height=10\.5 must be a whole number"):
        made(diffusion_core, "PixArtSigmaPipeline", sample_size=32)("a cat", height=10.5)


# ---- captions ----


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("A small cactus with a happy face in the Sahara desert.", None),
        ("  An astronaut riding a green horse, 4k, photo-realistic!  ", None),
        ("<person> walking <b>fast</b> at night", "person walking fast at night"),
        ("by @john_doe, see www.foo.org or foo.com/bar", "by , see or"),
        ("It’s “quoted” «text» `x`", 'it\'s "quoted" "text" "x"'),
        ("dash — en – hyphen‐x", "dash - en - hyphen-x"),
        ("a &quot;quoted&quot; caf%C3%A9+plus", 'a "quoted" café plus'),
        ("file_name.jpg and 192.168.0.1 1920x1080 #123 wallpaper", "and wallpaper"),
        ("hello ...... world", "hello world"),
        ("well-lit, semi-matte, low-key, high-res, ultra-wide", "well lit, semi matte, low key, high res, ultra wide"),
        ("semi-matte, low-key, high-res", "semi-matte, low-key, high-res"),
        ("(red hair:1.3) [x] {y} a*b/c", "red hair:1.3 x y a b c"),
        ("1,000 birds,cats : dogs", "1,000 birds, cats: dogs"),
        ("'a sign that says hello'", "a sign that says hello"),
        ("black & white photo", "black white photo"),
        ("naïve ﬁ ligature, ＡＢＣ", "naïve fi ligature, abc"),
        ("50% off, 16:9, f/1.8", "50% off, 16:9, f 1.8"),
        ("", ""),
    ],
)
def test_captions_are_cleaned(text: str, cleaned: str | None) -> None:
    """What is expected is what the reference makes of it with bs4 and ftfy installed."""
    assert clean_caption(text) == (text.lower().strip() if cleaned is None else cleaned)


@pytest.mark.parametrize(
    "text", ["中文 城市", "r2d2 on a nikon d850", "a 4x4 truck", "page 5 of a book", "free shipping"]
)
def test_what_may_say_what_to_draw_stays_in_captions(text: str) -> None:
    assert clean_caption(text) == text


def test_captions_are_cleaned_or_lowered_before_they_are_encoded() -> None:
    pipe = made(diffusion_core, "PixArtSigmaPipeline")
    plain = pipe(**call(prompt="a red cat")).images
    assert torch.equal(pipe(**call(prompt="A <b>RED</b> (cat)")).images, plain)
    assert torch.equal(pipe(**call(prompt=" A RED cat", clean_caption=False)).images, plain)
    assert not torch.equal(pipe(**call(prompt="A (RED) cat", clean_caption=False)).images, plain)


# ---- prompts ----


def test_padding_changes_nothing() -> None:
    pipe = made(diffusion_core, "PixArtSigmaPipeline")
    short, long = (pipe(**call(max_sequence_length=length)).images for length in (8, 40))
    torch.testing.assert_close(short, long, atol=1e-5, rtol=0)


def test_what_is_cut_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pipe = made(diffusion_core, "PixArtSigmaPipeline")
    cut = pipe(**call(prompt=["a cat", "a red cat dog"], max_sequence_length=4, generator=None))
    assert cut.truncated_prompts == ["", "dog"]
    assert "was cut" in caplog.text
    assert pipe(**call()).truncated_prompts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None, "prompt_embeds": torch.zeros(1, 5, 32)}, "prompt_embeds and prompt_attention_mask come"),
        ({"prompt_attention_mask": torch.ones(1, 5)}, "prompt_embeds and prompt_attention_mask come together"),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(1, 5, 32), "prompt_attention_mask": torch.ones(1, 4)},
            r"prompt_attention_mask has the shape \(1, 4\), expected \(1, 5\)",
        ),
        (
            {"prompt": None, "prompt_embeds": torch.zeros(1, 5, 30), "prompt_attention_mask": torch.ones(1, 5)},
            "vectors of size 30, the transformer takes size 32",
        ),
        ({"negative_prompt_embeds": torch.zeros(1, 5, 32)}, "negative_prompt_attention_mask come together"),
        ({"negative_prompt": ["a", "b", "c"]}, "negative_prompt has 3 texts for 1 prompts"),
        ({"max_sequence_length": 0}, "max_sequence_length=0"),
        ({"callback": 3}, "callback=3 is not callable"),
        ({"callback_steps": 0}, "callback_steps=0"),
        ({"height": 36}, "height=36 must be a positive multiple of 8"),
    ],
)
def test_wrong_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made(diffusion_core, "PixArtSigmaPipeline")(**call(**changes))


def test_without_text_encoder_embeddings_do(tmp_path: Path) -> None:
    whole = made(diffusion_core, "PixArtSigmaPipeline")
    embeds = dict(zip(masked.EMBEDS, whole.encode_prompt("a cat", clean_caption=True), strict=True))
    wanted = whole(**call(prompt="a cat", max_sequence_length=300)).images
    whole.save_pretrained(tmp_path)
    pipe = diffusion_core.PixArtSigmaPipeline.from_pretrained(tmp_path, text_encoder=None, tokenizer=None)
    pipe.set_progress_bar_config(disable=True)
    torch.testing.assert_close(pipe(**call(prompt=None, **embeds)).images, wanted, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="needs text_encoder and tokenizer"):
        pipe(**call())


# ---- callbacks ----


@pytest.mark.parametrize("scheduler", ["DPMSolverMultistepScheduler", "HeunDiscreteScheduler"])
def test_callbacks_of_old_are_called_as_by_the_reference(scheduler: str) -> None:
    seen: dict[str, list[Any]] = {"ours": [], "theirs": []}
    for name, pipe in zip(seen, pair("PixArtSigmaPipeline", scheduler), strict=True):
        watched = {"callback": lambda *given, name=name: seen[name].append(given), "num_inference_steps": 3}
        pipe(**call(**watched))
    assert [step for step, *_ in seen["ours"]] == [step for step, *_ in seen["theirs"]]
    assert len(seen["ours"]) == 3
    for (_, time, latents), (_, other, wanted) in zip(seen["ours"], seen["theirs"], strict=True):
        assert float(time) == pytest.approx(float(other), abs=1e-3)
        torch.testing.assert_close(latents, wanted, atol=1e-4, rtol=0)


def test_both_forms_of_callbacks_work_together() -> None:
    pipe = made(diffusion_core, "PixArtSigmaPipeline")
    seen: list[Any] = []

    def clear(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        assert list(tensors) == ["latents"]
        return {"latents": torch.zeros_like(tensors["latents"])}

    def look(step: int, timestep: Any, latents: torch.Tensor) -> None:
        seen.append((step, float(latents.abs().max())))

    pipe(**call(callback=look, callback_steps=2, callback_on_step_end=clear, num_inference_steps=3))
    assert seen == [(0, 0.0), (2, 0.0)]


# ---- checkpoints ----


def test_a_checkpoint_with_the_old_name_of_the_transformer_loads(tmp_path: Path) -> None:
    """PixArt-alpha was published with `Transformer2DModel` in its index and its config."""
    theirs = made(diffusers, "PixArtAlphaPipeline", sample_size=128)
    theirs.save_pretrained(tmp_path)
    for file, change in (
        (tmp_path / "model_index.json", {"transformer": ["diffusers", "Transformer2DModel"]}),
        (tmp_path / "transformer" / "config.json", {"_class_name": "Transformer2DModel", "num_vector_embeds": None}),
    ):
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    ours = diffusion_core.AutoPipelineForText2Image.from_pretrained(tmp_path)
    ours.set_progress_bar_config(disable=True)
    assert type(ours) is diffusion_core.PixArtAlphaPipeline
    assert type(ours.transformer) is diffusion_core.PixArtTransformer2DModel
    assert difference(ours, theirs) < 1e-4
    balanced = diffusion_core.Pipeline.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert type(balanced.transformer) is diffusion_core.PixArtTransformer2DModel


def test_alpha_and_sigma_differ_in_the_length_of_prompts() -> None:
    for name, length in (("PixArtAlphaPipeline", 120), ("PixArtSigmaPipeline", 300)):
        assert made(diffusion_core, name).encode_prompt("a cat")[0].shape == (1, length, 32)
    assert t5.tokenizer().model_max_length == 512
