"""A run that starts in the middle arrives where a model that knows the picture leads it."""

import pytest
import torch

import diffusion_core.schedulers as package
from tests.schedulers.support import start


@pytest.mark.parametrize("skipped", [1, 4, 7])
@pytest.mark.parametrize("name", ["PNDM", "LMSDiscrete", "DDIM", "EulerDiscrete", "HeunDiscrete", "KDPM2Discrete"])
def test_a_perfect_model_leads_to_its_picture(name, skipped):
    known = {"skip_prk_steps": True, "set_alpha_to_one": True, "clip_sample": False, "timestep_spacing": "leading"}
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
