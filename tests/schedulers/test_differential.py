"""Random configs, step counts, seeds and lists: whole trajectories against diffusers, to 1e-5."""

import inspect
import logging
import random

import diffusers
import pytest
import torch

import diffusion_core.schedulers as ours
from tests.schedulers.support import accepts, generators, initial, sample, worst_difference

logging.getLogger("diffusers").setLevel(logging.CRITICAL)

KARRAS = ["EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete", "LMSDiscrete"]
NAMES = [*KARRAS, "DDPM", "FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete"]
BETAS = [
    {},
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    {"beta_start": 0.0001, "beta_end": 0.02},
    {"beta_schedule": "squaredcos_cap_v2"},
]
MODES = [None, "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"]
CHOICES = {
    "prediction_type": ["epsilon", "v_prediction"],
    "timestep_spacing": ["linspace", "leading", "trailing"],
    "steps_offset": [0, 1],
    "clip_sample": [False, True],
    "clip_sample_range": [1.0, 2.0],
    "interpolation_type": ["linear", "linear", "log_linear"],
    "rescale_betas_zero_snr": [False, False, True],
    "shift": [1.0, 1.7, 3.0],
    "invert_sigmas": [False, False, True],
}


def drawn(name, luck):
    """A config, and what `set_timesteps` is given."""
    known = inspect.signature(getattr(diffusers, f"{name}Scheduler").__init__).parameters
    config = dict(luck.choice(BETAS)) if "beta_schedule" in known else {}
    config |= {key: luck.choice(values) for key, values in CHOICES.items() if key in known}
    mode = luck.choice(MODES)
    if mode in known:
        config[mode] = True
    if name == "DDPM" and config["prediction_type"] == "epsilon":
        config["rescale_betas_zero_snr"] = False  # nothing can be predicted from pure noise
    given = {"num_inference_steps": luck.choice([1, 2, 3, 5, 8, 13, 20, 34, 50])}
    takes = inspect.signature(getattr(diffusers, f"{name}Scheduler").set_timesteps).parameters
    if "timesteps" in takes and mode not in config and not name.startswith("Flow") and luck.random() < 0.2:
        given = {"timesteps": sorted(luck.sample(range(1, 1000), luck.randint(2, 8)), reverse=True)}
    return config, given


def trajectory(scheduler, given, seed, batch):
    scheduler.set_timesteps(**given)
    options = {}
    if accepts(scheduler, "step", "generator"):
        options["generator"] = generators(batch) if seed % 2 else generators(1)[0]
    return sample(scheduler, initial(scheduler, batch, seed), **options)


def failures(name, seeds):
    found = []
    for seed in seeds:
        config, given = drawn(name, random.Random(f"{name}-{seed}"))
        theirs, mine = (getattr(library, f"{name}Scheduler")(**config) for library in (diffusers, ours))
        expected, got = (trajectory(one, given, seed, 1 + seed % 3) for one in (theirs, mine))
        assert all(bool(torch.isfinite(after).all()) for _, after, _ in got), (seed, config, given)
        if not all(bool(torch.isfinite(after).all()) for _, after, _ in expected):
            continue
        apart = (theirs.timesteps.double() - mine.timesteps.double()).abs().max()
        difference = worst_difference(expected, got)
        if not (difference <= 1e-5 and apart <= 1e-3):
            found.append((seed, difference, float(apart), config, given))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_random_configs_give_the_references_trajectories(name):
    assert not failures(name, range(12))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_random_configs_give_the_references_trajectories(name):
    assert not failures(name, range(1000, 1500))
