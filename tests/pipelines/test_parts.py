"""The parts that pipelines share: guidance, the plan of steps, latents, CLIP text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from transformers import AutoTokenizer

import diffusion_core
from diffusion_core.pipelines.guidance import guidance_embedding, guide
from diffusion_core.pipelines.latents import (
    check_size,
    decode_latents,
    encode_image,
    spread,
    to_model_scale,
    to_vae_scale,
)
from diffusion_core.pipelines.loop import plan_steps, step_options
from diffusion_core.pipelines.text import as_prompts, chunks_needed, encode_clip
from tests.support import hub_config

from . import sd
from .sd import seeded


def test_guidance_follows_the_papers() -> None:
    without, with_prompt = torch.randn(2, 3, 4, 4, 4, generator=seeded())
    both = torch.cat([without, with_prompt])
    guided = guide(both, 5.0)
    assert torch.allclose(guided, without + 5 * (with_prompt - without))
    assert torch.allclose(guide(both, 1.0), with_prompt, atol=1e-6)
    rescaled = guide(both, 5.0, rescale=1.0)
    for one, expected in zip(rescaled, with_prompt, strict=True):
        assert torch.isclose(one.std(), expected.std(), rtol=1e-4)
    assert torch.allclose(guide(both, 5.0, rescale=0.3), 0.3 * rescaled + 0.7 * guided, atol=1e-5)


@pytest.mark.parametrize("size", [6, 7, 256])
def test_guidance_embedding_equals_the_reference(size: int) -> None:
    scales = torch.tensor([0.5, 6.5])
    reference = diffusers.StableDiffusionPipeline.get_guidance_scale_embedding
    assert torch.allclose(guidance_embedding(scales, size), reference(None, scales, size), atol=1e-4)


@pytest.mark.parametrize("strength", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", ["DDIMScheduler", "HeunDiscreteScheduler"])
def test_strength_takes_the_last_steps(name: str, strength: float) -> None:
    scheduler = sd.scheduler(diffusion_core, name)
    whole = plan_steps(scheduler, 8, "cpu")
    part = plan_steps(scheduler, 8, "cpu", strength=strength)
    assert part.count == 8 * strength
    assert torch.equal(part.timesteps, whole.timesteps[(8 - part.count) * scheduler.order :])
    # The pipeline's own scheduler stays as it was made.
    assert torch.equal(scheduler.timesteps, sd.scheduler(diffusion_core, name).timesteps)


def test_step_options_are_what_the_scheduler_takes(caplog: pytest.LogCaptureFixture) -> None:
    generator = seeded()
    ddim, dpm = sd.scheduler(diffusion_core), sd.scheduler(diffusion_core, "PNDMScheduler")
    assert step_options(ddim, eta=0.5, generator=generator) == {"eta": 0.5, "generator": generator}
    assert step_options(dpm, generator=generator) == {}
    step_options(dpm, eta=0.5)
    assert "eta=0.5 has no effect with PNDMScheduler" in caplog.text


def test_latents_are_scaled_both_ways() -> None:
    latents = torch.randn(2, 3, 4, 4, generator=seeded())
    plain = SimpleNamespace(config={"scaling_factor": 0.5, "shift_factor": 0.1})
    assert torch.allclose(to_model_scale(plain, latents), (latents - 0.1) * 0.5)
    by_channel = SimpleNamespace(
        config={"scaling_factor": 0.5, "latents_mean": [0.1, 0.2, 0.3], "latents_std": [1.0, 2.0, 4.0]}
    )
    for vae in (plain, by_channel):
        assert torch.allclose(to_vae_scale(vae, to_model_scale(vae, latents)), latents, atol=1e-6)
    assert torch.allclose(to_model_scale(by_channel, latents)[:, 2], (latents[:, 2] - 0.3) * 0.5 / 4)


def test_an_encoder_that_overflows_draws_the_same_numbers_in_float32() -> None:
    vae = sd.tiny.vae(diffusion_core)
    pixels = torch.rand(1, 3, 16, 16, generator=seeded()) * 2 - 1
    with torch.no_grad():
        vae.encoder.conv_in.weight.mul_(3e5)  # the norms behind it make up for it in float32
        expected = encode_image(vae.half().float(), pixels, generator=seeded(1))
        vae.half()
        assert torch.allclose(encode_image(vae, pixels, generator=seeded(1)).float(), expected, atol=1e-4)
        assert vae.dtype == torch.float16
        for upcast in (True, False):
            assert decode_latents(vae, torch.zeros(1, 4, 4, 4), upcast=upcast).dtype == (
                torch.float32 if upcast else torch.float16
            )


def test_entries_are_spread_over_pictures() -> None:
    values = torch.tensor([[1], [2]])
    assert spread(values, 2, 4, "image").flatten().tolist() == [1, 1, 2, 2]
    assert spread(values[:1], 2, 4, "image").flatten().tolist() == [1] * 4
    with pytest.raises(ValueError, match="image has 3 entries for 2 prompts"):
        spread(torch.zeros(3, 1), 2, 4, "image")


def test_sizes_and_prompts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="height=100 must be a positive multiple of 16, such as 96"):
        check_size(100, 96, 16)
    assert as_prompts(None, 2) == ["", ""] and as_prompts("a", 2) == ["a", "a"]
    with pytest.raises(TypeError, match="negative_prompt must be a string"):
        as_prompts(3, 1, "negative_prompt")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "folder",
    [
        "runwayml/stable-diffusion-v1-5/tokenizer",
        "stabilityai/stable-diffusion-2-1/tokenizer",
        "stabilityai/stable-diffusion-xl-base-1.0/tokenizer_2",
    ],
)
def test_real_tokenizers_give_the_tokens_of_their_own_padding(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hub_config(folder))
    prompts = ["", "a photo of an astronaut riding a horse, 4k", "très jolie 🐈 " * 40]
    seen: list[Any] = []

    class Encoder(torch.nn.Module):
        config = SimpleNamespace(max_position_embeddings=77)
        device = torch.device("cpu")

        def forward(self, ids: torch.Tensor, **_: Any) -> Any:
            seen.append(ids)
            tokens = torch.zeros(*ids.shape, 4)
            return _Out((tokens, tokens[:, 0]))

    class _Out(tuple):
        last_hidden_state = property(lambda self: self[0])
        pooler_output = property(lambda self: self[1])

    text = encode_clip(prompts, tokenizer, Encoder())
    expected = tokenizer(prompts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    assert torch.equal(seen[0], expected)
    assert text.truncated[:2] == ["", ""] and text.truncated[2].endswith("🐈")
    parts = chunks_needed(prompts, tokenizer, Encoder())
    assert parts > 1 and encode_clip(prompts, tokenizer, Encoder(), chunks=parts).truncated == ["", "", ""]


def test_masks_go_to_encoders_that_use_them(tmp_path: Path) -> None:
    encoder = sd.tiny.text_encoder()
    plain = encode_clip(["cat"], sd.tokenizer(), encoder).embeds
    encoder.config.use_attention_mask = True
    masked = encode_clip(["cat"], sd.tokenizer(), encoder).embeds
    # Padding comes last and attention is causal, so what counts is the same and only padding differs.
    assert torch.allclose(plain[:, :3], masked[:, :3], atol=1e-5)


@pytest.mark.parametrize("given", [{"timesteps": [901, 601, 301, 1]}, {"sigmas": [9.0, 4.0, 1.5, 0.4, 0.0]}])
def test_a_share_of_own_steps_counts_steps_and_not_entries(given: dict[str, Any]) -> None:
    """Five noise levels are four steps, of which a share of one half is two."""
    steps = plan_steps(diffusion_core.HeunDiscreteScheduler(), None, "cpu", strength=0.5, **given)
    assert (steps.count, len(steps)) == (2, 3)
