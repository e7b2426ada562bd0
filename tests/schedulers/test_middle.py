"""A run that starts in the middle arrives where a model that knows the picture leads it."""

import pytest
import torch

import diffusion_core.schedulers as package
from tests.schedulers.support import start


@pytest.mark.parametrize("skipped", [1, 4, 7])
@pytest.mark.parametrize("name", ["PNDM", "LMSDiscrete", "DDIM", "EulerDiscrete", "HeunDiscrete", "KDPM2Discrete"])
def test_a_perfect_model_leads_to_its_picture(name, skipped):
    known = {"skip_prk_steps": True, "set_alpha_to_one": True, "clip_sample": False, "timestep_spacing": "leading"}
    known["start_exactly"] = True  # PNDM's option
    cls = getattr(package, f"{name}Scheduler")
    scheduler = cls(**{key: value for key, value in known.items() if key in cls.config_arguments()})
    scheduler.set_timesteps(10)
    first = skipped * scheduler.order
    clean, noise = start(2, 1), start(2, 2)
    value = scheduler.add_noise(clean, noise, scheduler.timesteps[first : first + 1])
    for time in scheduler.timesteps[first:]:
        scheduler.scale_model_input(value, time)
        value = scheduler.step(noise, time, value).prev_sample
    torch.testing.assert_close(value, clean, rtol=0, atol=2e-5)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("skipped", [1, 2, 5])
def test_pndm_starts_in_the_middle_as_the_reference_unless_told_otherwise(skipped, offset):
    diffusers = pytest.importorskip("diffusers")
    config = {"skip_prk_steps": True, "steps_offset": offset, "beta_schedule": "scaled_linear"}
    ended = []
    for library in (package, diffusers):
        scheduler = library.PNDMScheduler(**config)
        scheduler.set_timesteps(10)
        value = start(2, 1)
        for time in scheduler.timesteps[skipped:]:
            value = scheduler.step(torch.sin(3 * value + 0.001 * time), time, value).prev_sample
        ended.append(value)
    torch.testing.assert_close(ended[0], ended[1], rtol=1e-5, atol=1e-5)
    assert "start_exactly" not in package.PNDMScheduler().config
    assert package.PNDMScheduler(start_exactly=True).config["start_exactly"] is True
