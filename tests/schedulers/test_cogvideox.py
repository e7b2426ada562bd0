"""CogVideoX's schedulers against diffusers."""

import inspect
import logging

import diffusers
import pytest
import torch

import diffusion_core.schedulers as ours
from tests.schedulers.support import fake_model, generators, start, worst_difference
from tests.schedulers.test_solvers import Count
from tests.support import hub_config

logging.getLogger("diffusers").setLevel(logging.ERROR)

NAMES = ["CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"]
CONFIGS = [
    {"timestep_spacing": "trailing"},
    {"timestep_spacing": "trailing", "prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    {"timestep_spacing": "linspace", "prediction_type": "sample", "snr_shift_scale": 1.0},
    {"beta_schedule": "linear", "set_alpha_to_one": False, "prediction_type": "v_prediction"},
]


def run(scheduler, value, generator=None, first=0):
    """A run as pipelines do it: the DPM scheduler gets the step before from the caller."""
    trace, old, back = [], None, None
    for time in scheduler.timesteps[first:]:
        output = fake_model(value, time)
        if "DPM" in type(scheduler).__name__:
            moved, old = scheduler.step(output, old, time, back, value, generator=generator, return_dict=False)
        else:
            moved = scheduler.step(output, time, value, generator=generator).prev_sample
        trace.append((value, moved, old))
        value, back = moved, time
    return trace


def pair_of(name, **config):
    return getattr(diffusers, name)(**config), getattr(ours, name)(**config)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", CONFIGS)
def test_trajectories_equal_the_references(name, config):
    for seed, steps in enumerate((1, 2, 7, 50)):
        traces = []
        for scheduler in pair_of(name, **config):
            scheduler.set_timesteps(steps)
            noise = generators(2) if seed % 2 else torch.Generator().manual_seed(seed)
            traces.append(run(scheduler, start(2, seed), noise))
        assert worst_difference(*traces) <= 1e-5, steps


@pytest.mark.parametrize(("name", "repo"), zip(NAMES, ("CogVideoX-2b", "CogVideoX-5b"), strict=True))
def test_released_configs_run_as_the_reference(name, repo, tmp_path):
    file = hub_config(f"THUDM/{repo}/scheduler/scheduler_config.json")
    theirs = getattr(diffusers, name).from_pretrained(file.parent)
    mine = getattr(ours, name).from_pretrained(file.parents[1], subfolder="scheduler")
    torch.testing.assert_close(mine.alphas_cumprod, theirs.alphas_cumprod)
    mine.save_pretrained(tmp_path)
    back = getattr(diffusers, name).from_pretrained(tmp_path)
    assert {k: v for k, v in back.config.items() if k[0] != "_"} == {
        k: v for k, v in theirs.config.items() if k[0] != "_"
    }
    traces = []
    for scheduler in (theirs, mine):
        scheduler.set_timesteps(20)
        traces.append(run(scheduler, start(1), torch.Generator().manual_seed(0)))
    assert worst_difference(*traces) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_signatures_equal_the_references(name):
    theirs, mine = getattr(diffusers, name), getattr(ours, name)
    for method in ("__init__", "step", "set_timesteps", "add_noise", "get_velocity"):
        expected = inspect.signature(getattr(theirs, method)).parameters
        found = inspect.signature(getattr(mine, method)).parameters
        assert list(found)[: len(expected)] == list(expected), method
        if method in ("__init__", "step"):
            assert [one.default for one in found.values()] == [one.default for one in expected.values()]
    theirs, mine = pair_of(name)
    times = torch.tensor([3, 998])
    for method in ("add_noise", "get_velocity"):
        results = [getattr(one, method)(start(2), start(2, 1), times) for one in (theirs, mine)]
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_start_and_count_is_finite_and_nothing_is_read(name):
    scheduler = getattr(ours, name)(**CONFIGS[1])
    for steps in (1, 2, 3, 9, 999, 1000):
        scheduler.set_timesteps(steps)
        for first in {0, steps // 2, steps - 1}:
            trace = run(scheduler.copy_for_run(), start(1), torch.Generator().manual_seed(0), first)
            assert len(trace) == steps - first
            assert all(torch.isfinite(after).all() and not torch.equal(given, after) for given, after, _ in trace)
    for given in ({"timesteps": [900, 400, 20]}, {"sigmas": [9.0, 2.0, 0.5, 0.0]}):
        scheduler.set_timesteps(**given)
        assert torch.isfinite(run(scheduler, start(1))[-1][1]).all() and len(scheduler.timesteps) == 3
    scheduler.set_timesteps(5)
    value, old, back = start(1).bfloat16(), None, None
    for time in scheduler.timesteps:
        output = fake_model(value, float(time))
        with Count() as count:
            if "DPM" in name:
                value, old = scheduler.step(output, old, time, back, value)
            else:
                value = scheduler.step(output, time, value).prev_sample
        back = time
        assert count.reads == 0 and count.all <= 16 and value.dtype == torch.bfloat16


def test_bad_arguments_fail_at_once():
    with pytest.raises(ValueError, match="snr_shift_scale"):
        ours.CogVideoXDDIMScheduler(snr_shift_scale=0)
    with pytest.raises(ValueError, match="prediction_type"):
        ours.CogVideoXDPMScheduler(prediction_type="flow_prediction")
    with pytest.raises(ValueError, match="set_timesteps"):
        ours.CogVideoXDDIMScheduler().step(start(1), 999, start(1))
    scheduler = ours.CogVideoXDPMScheduler()
    scheduler.set_timesteps(4)
    with pytest.raises(ValueError, match="timestep_back"):
        scheduler.step(start(1), start(1), scheduler.timesteps[0], None, start(1))


UNUSUAL = [
    {"beta_schedule": kind, "rescale_betas_zero_snr": rescaled, "set_alpha_to_one": clean, "prediction_type": predicts}
    | spacing
    for kind in ("linear", "squaredcos_cap_v2", "scaled_linear")
    for rescaled in (True, False)
    for clean in (True, False)
    for predicts, spacing in (
        ("sample", {"timestep_spacing": "trailing"}),
        ("v_prediction", {"timestep_spacing": "linspace"}),
        ("v_prediction", {"timestep_spacing": "leading", "steps_offset": 1, "snr_shift_scale": 1.0}),
    )
]


@pytest.mark.parametrize("name", NAMES)
def test_unusual_settings_differ_by_the_digits_of_float32_alone(name):
    # Where little noise is left, 1 - alphas_cumprod in float32 has few digits. With ours, the reference agrees.
    for config in UNUSUAL:
        theirs, mine = pair_of(name, **config)
        torch.testing.assert_close(theirs.alphas_cumprod.double(), mine.alphas_cumprod, rtol=1e-4, atol=1e-6)
        theirs.alphas_cumprod = mine.alphas_cumprod
        if not config["set_alpha_to_one"]:
            theirs.final_alpha_cumprod = mine.alphas_cumprod[0]
        for steps in (1, 2, 6, 50):
            traces = []
            for scheduler in (theirs, mine):
                scheduler.set_timesteps(steps)
                traces.append(run(scheduler, start(1), torch.Generator().manual_seed(0)))
            assert worst_difference(*traces) <= 2e-5, (config, steps)
