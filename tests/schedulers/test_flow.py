"""The flow-matching schedulers: against diffusers, and where diffusers fails."""

import inspect
import json
import logging

import diffusers
import numpy as np
import pytest
import torch

import diffusion_core.schedulers as ours
from tests.schedulers.support import fake_model, generators, initial, sample, start, worst_difference
from tests.schedulers.test_solvers import Count
from tests.support import HUB, needs_shared

logging.getLogger("diffusers").setLevel(logging.ERROR)

EULER, HEUN = "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"
BOTH = [EULER, HEUN]
CONFIGS = {
    "plain": {},
    "sd3": {"shift": 3.0},
    "karras": {"shift": 3.0, "use_karras_sigmas": True},
    "exponential": {"shift": 2.0, "use_exponential_sigmas": True},
    "beta": {"use_beta_sigmas": True},
    "flux": {"use_dynamic_shifting": True, "shift": 3.0},
    "linear": {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    "ltx": {"use_dynamic_shifting": True, "shift_terminal": 0.1},
    "terminal": {"shift": 3.0, "shift_terminal": 0.02},
    "inverted": {"shift": 3.0, "invert_sigmas": True},
    "stochastic": {"stochastic_sampling": True},
    "short": {"num_train_timesteps": 200, "shift": 1.7},
}
GIVEN = [
    {"num_inference_steps": 1},
    {"num_inference_steps": 2},
    {"num_inference_steps": 9},
    {"num_inference_steps": 50},
    {"sigmas": [1.0, 0.6, 0.2]},
    {"sigmas": np.linspace(1.0, 0.25, 4)},
    {"timesteps": [190.0, 100.0, 20.0]},
    {"timesteps": [190.0, 100.0, 20.0], "sigmas": [0.9, 0.5, 0.3], "num_inference_steps": 3},
]


def pair_of(name, **config):
    return getattr(diffusers, name)(**config), getattr(ours, name)(**config)


def compare(pair, given, *, batch=2, seed=0, several=False, **options):
    traces = []
    for scheduler in pair:
        scheduler.set_timesteps(**given)
        torch.manual_seed(seed)  # the reference draws the noise of stochastic sampling from the global generator
        extra = (
            {} if scheduler.config.get("stochastic_sampling") else {"generator": torch.Generator().manual_seed(seed)}
        )
        if several:
            extra = {"generator": generators(batch)}
        traces.append(sample(scheduler, initial(scheduler, batch, seed), **extra, **options))
    assert pair[1].timesteps.dtype == pair[0].timesteps.dtype == torch.float32
    torch.testing.assert_close(pair[1].timesteps, pair[0].timesteps, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(pair[1].sigmas, pair[0].sigmas, rtol=1e-6, atol=1e-6)
    assert pair[1].num_inference_steps == pair[0].num_inference_steps
    return worst_difference(*traces)


@pytest.mark.parametrize("mode", CONFIGS)
def test_euler_trajectories_equal_the_references(mode):
    for seed, given in enumerate(GIVEN):
        if given == {"num_inference_steps": 1} and "shift_terminal" in CONFIGS[mode]:
            continue  # 0 / 0 in the reference
        given = {**given, "mu": 0.83} if CONFIGS[mode].get("use_dynamic_shifting") else given
        difference = compare(pair_of(EULER, **CONFIGS[mode]), given, seed=seed, batch=1 + seed % 3)
        assert difference <= 1e-5, given


CHURN = [{}, {"s_churn": 2.0, "s_tmin": 0.1, "s_tmax": 0.9, "s_noise": 1.1}, {"s_churn": 40.0}]


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_heun_trajectories_equal_the_references(shift):
    for seed, options in enumerate(CHURN):
        for steps in (1, 3, 9, 30):
            pair = pair_of(HEUN, shift=shift)
            given = {"num_inference_steps": steps}
            # the reference divides a rounded difference by sigma: 1e-7 / 0.001 in its last steps
            assert compare(pair, given, seed=seed, several=seed == 1, **options) <= 5e-5
            assert worst_in_front(pair, given, options) <= 1e-5


def worst_in_front(pair, given, options):
    """The difference before the last step, where the levels are far above 0."""
    traces = []
    for scheduler in pair:
        scheduler.set_timesteps(**given)
        noise = torch.Generator().manual_seed(1)
        traces.append(sample(scheduler, initial(scheduler), generator=noise, **options)[:-2])
    return worst_difference(*traces) if traces[0] else 0.0


def test_the_shift_acts_once_or_as_released_checkpoints_are_used():
    """Case 116."""
    theirs, mine = pair_of(EULER, shift=3.0)
    once = ours.FlowMatchEulerDiscreteScheduler(shift=3.0, shift_once=True)
    for scheduler in (theirs, mine, once):
        scheduler.set_timesteps(1000)
    torch.testing.assert_close(mine.sigmas, theirs.sigmas, rtol=1e-6, atol=1e-6)
    assert float(mine.sigmas[-2]) == pytest.approx(0.0089, abs=5e-5)
    assert float(once.sigmas[-2]) == pytest.approx(0.0030, abs=5e-5)
    whole = torch.linspace(1, 0.001, 1000)
    torch.testing.assert_close(once.sigmas[:-1], 3 * whole / (1 + 2 * whole), rtol=1e-5, atol=1e-6)
    # where the shift does nothing, or is dynamic, the option changes nothing
    for config, given in (({}, {}), ({"use_dynamic_shifting": True}, {"mu": 0.7})):
        first, second = (ours.FlowMatchEulerDiscreteScheduler(**config, shift_once=flag) for flag in (True, False))
        first.set_timesteps(7, **given)
        second.set_timesteps(7, **given)
        torch.testing.assert_close(first.sigmas, second.sigmas)


def test_the_option_stays_in_files_only_where_it_is_used(tmp_path):
    assert "shift_once" not in ours.FlowMatchEulerDiscreteScheduler(shift=3.0).config
    once = ours.FlowMatchEulerDiscreteScheduler(shift=3.0, shift_once=True)
    once.save_pretrained(tmp_path)
    again = ours.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path)
    again.set_timesteps(1000)
    assert float(again.sigmas[-2]) == pytest.approx(0.0030, abs=5e-5)
    assert diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path).config["shift"] == 3.0


@pytest.mark.parametrize("mode", CONFIGS)
def test_every_count_of_steps_is_finite_and_each_step_counts(mode):
    for count in (1, 2, 3, 9, 199, 200, 1000):
        scheduler = ours.FlowMatchEulerDiscreteScheduler(**CONFIGS[mode])
        scheduler.set_timesteps(count, mu=0.5)
        assert len(scheduler.timesteps) == count == len(set(scheduler.timesteps.tolist()))
        trace = sample(scheduler, initial(scheduler, 1))
        assert all(torch.isfinite(after).all() and not torch.equal(before, after) for before, after, _ in trace)
    if "short" in mode:
        for count in (1, 2, 3, 9, 199, 200):
            scheduler = ours.FlowMatchHeunDiscreteScheduler(num_train_timesteps=200)
            scheduler.set_timesteps(count)
            assert len(scheduler.timesteps) == 2 * count - 1
            assert all(torch.isfinite(after).all() for _, after, _ in sample(scheduler, initial(scheduler, 1)))


@pytest.mark.parametrize("name", BOTH)
def test_a_run_starts_from_any_step_by_hand(name):
    """Case 121, with elements of `timesteps` and with plain numbers."""
    scheduler = getattr(ours, name)(shift=3.0)
    for first in range(11 if name == HEUN else 6):
        for as_number in (False, True):
            scheduler.set_timesteps(6)
            times = scheduler.timesteps[first:]
            value = scheduler.scale_noise(start(1), times[:1], start(1, 5))
            sigma = times[0] / 1000
            torch.testing.assert_close(value, (1 - sigma) * start(1) + sigma * start(1, 5), rtol=1e-5, atol=1e-5)
            if as_number and name == HEUN and first % 2:
                times = times[1:]  # a number stands for the beginning of a step
            for time in times.tolist() if as_number else times:
                value = scheduler.step(start(1, 5) - start(1), time, value).prev_sample
            # on a straight path every start ends at the data
            torch.testing.assert_close(value, start(1), rtol=1e-4, atol=1e-4)


def test_a_run_from_the_middle_equals_the_references():
    for name in BOTH:
        traces = []
        for scheduler in pair_of(name, shift=3.0):
            scheduler.set_timesteps(10)
            scheduler.set_begin_index(6)
            noisy = scheduler.scale_noise(start(2), scheduler.timesteps[6:7].repeat(2), start(2, 5))
            traces.append([(noisy, noisy, None), *sample(scheduler, noisy, first=6)[:-1]])
        assert worst_difference(*traces) <= 1e-5


def test_noise_is_scaled_at_any_timestep():
    """Case 136; in the reference a timestep outside the schedule is an IndexError."""
    for name in BOTH:
        scheduler = getattr(ours, name)()
        for _ in range(2):
            got = scheduler.scale_noise(torch.ones(2, 1), torch.tensor([250.0, 500.0]), torch.zeros(2, 1))
            torch.testing.assert_close(got, torch.tensor([[0.75], [0.5]]))
            scheduler.set_timesteps(4)
        scheduler.set_timesteps(4)
        assert scheduler.scale_noise(torch.ones(2, 3), 334.0).shape == (2, 3)


def test_tokens_have_timesteps_of_their_own():
    for config in ({}, {"shift": 3.0}, {"stochastic_sampling": True}):
        found = []
        for scheduler in pair_of(EULER, **config):
            scheduler.set_timesteps(6)
            tokens, flow = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1)), torch.ones(2, 4, 5)
            times = torch.tensor([[1000.0, 500.0, 0.0, 30.0], [250.0, 1000.0, 100.0, 1.0]])
            torch.manual_seed(3)
            step = scheduler.step(flow, scheduler.timesteps[0], tokens, per_token_timesteps=times, return_dict=False)
            found.append(step[0])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_stochastic_sampling_takes_generators():
    """Case 131: the reference draws from the global generator, whatever it is given."""
    found = []
    for batch in (1, 3):
        scheduler = ours.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
        scheduler.set_timesteps(4)
        found.append(sample(scheduler, initial(scheduler, batch), generator=generators(batch))[-1][1])
    torch.testing.assert_close(found[1][:1], found[0], rtol=0, atol=1e-6)


def test_a_step_is_an_operation_or_two_and_reads_nothing():
    for name, most in ((EULER, 1), (HEUN, 4)):
        scheduler = getattr(ours, name)(shift=3.0)
        scheduler.set_timesteps(8)
        value = start(1)
        for index, time in enumerate(scheduler.timesteps):
            output = fake_model(value, float(time))
            with Count() as count:
                value = scheduler.step(output, time, value).prev_sample
            assert count.reads == 0 and count.all <= most + (2 if index == 0 else 0)
        scheduler.set_timesteps(4, device="meta")
        value = torch.empty(1, 3, 4, 4, device="meta")
        for time in scheduler.timesteps:
            value = scheduler.step(value, time, value).prev_sample
        assert value.device.type == "meta"


@pytest.mark.parametrize("name", BOTH)
def test_runs_are_independent_and_half_precision_stays(name):
    shared = getattr(ours, name)(shift=3.0)
    shared.set_timesteps(5)
    first, second = shared.copy_for_run(), shared.copy_for_run()
    one, two = start(1), start(1, 3)
    for time in shared.timesteps:
        one = first.step(fake_model(one, time), time, one).prev_sample
        two = second.step(fake_model(two, time), time, two).prev_sample
    assert torch.equal(one, sample(shared.copy_for_run(), start(1))[-1][1])
    assert torch.equal(two, sample(shared.copy_for_run(), start(1, 3))[-1][1])
    assert shared.step_index is None
    half = shared.step(start(1).bfloat16(), shared.timesteps[0], start(1).bfloat16()).prev_sample
    assert half.dtype == torch.bfloat16


def test_bad_arguments_fail_at_once():
    with pytest.raises(ValueError, match="time_shift_type"):
        ours.FlowMatchEulerDiscreteScheduler(time_shift_type="cubic")
    with pytest.raises(ValueError, match="shift_terminal"):
        ours.FlowMatchEulerDiscreteScheduler(shift_terminal=1.5)
    with pytest.raises(ValueError, match=r"karras.*beta"):
        ours.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True, use_beta_sigmas=True)
    with pytest.raises(ValueError, match="mu"):
        ours.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).set_timesteps(4)
    with pytest.raises(ValueError, match="shift"):
        ours.FlowMatchEulerDiscreteScheduler().set_shift(0)
    wrong = [
        {"sigmas": [0.5, 1.0]},
        {"sigmas": [1.5, 0.5]},
        {"sigmas": [0.5, 0.0, 0.0]},
        {"sigmas": []},
        {"timesteps": [1001.0, 5.0]},
        {"timesteps": [500.0, 0.0]},
        {"timesteps": [5.0, 500.0]},
        {"sigmas": [1.0, 0.5], "timesteps": [900.0]},
        {"sigmas": [1.0, 0.5], "num_inference_steps": 5},
        {"num_inference_steps": 0},
        {},
    ]
    for name in BOTH:
        scheduler = getattr(ours, name)()
        for given in wrong:
            before = scheduler.timesteps.tolist()
            with pytest.raises(ValueError, match=r"sigmas|timesteps|num_inference_steps"):
                scheduler.set_timesteps(**given)
            assert scheduler.timesteps.tolist() == before
        with pytest.raises(ValueError, match="set_timesteps"):
            scheduler.step(start(1), 1000.0, start(1))
        scheduler.set_timesteps(4)
        with pytest.raises(ValueError, match="timestep=3 is not in the schedule"):
            scheduler.step(start(1), 3, start(1))


def test_a_zero_at_the_end_of_sigmas_is_the_end():
    """In the reference it becomes a step that does nothing (case 130)."""
    for name in BOTH:
        scheduler = getattr(ours, name)()
        scheduler.set_timesteps(sigmas=[1.0, 0.5, 0.25, 0.0])
        assert scheduler.num_inference_steps == 3 and scheduler.sigmas[-2:].tolist() == [0.25, 0.0]


@pytest.mark.parametrize("name", BOTH)
def test_signatures_and_attributes_equal_the_references(name):
    theirs, mine = getattr(diffusers, name), getattr(ours, name)
    for method in ("__init__", "step", "set_timesteps", "scale_noise", "set_shift", "set_begin_index"):
        if not hasattr(theirs, method):
            continue
        expected = inspect.signature(getattr(theirs, method)).parameters
        found = inspect.signature(getattr(mine, method)).parameters
        assert list(found)[: len(expected)] == list(expected), method
        if method in ("__init__", "step"):
            assert [found[key].default for key in expected] == [value.default for value in expected.values()]
    assert mine.order == theirs.order
    for config in ({}, {"shift": 3.0}):
        reference, here = theirs(**config), mine(**config)
        assert here.sigma_max == reference.sigma_max
        assert here.sigma_min == pytest.approx(reference.sigma_min, rel=1e-6)
        torch.testing.assert_close(here.timesteps, reference.timesteps, rtol=1e-6, atol=1e-4)
    shifted = mine()
    shifted.set_shift(5.0)
    assert shifted.config["shift"] == 1.0
    if name == EULER:
        reference = theirs(shift=1.0)
        reference.set_shift(5.0)
        assert compare((reference, shifted), {"num_inference_steps": 6}) <= 1e-5


@needs_shared
def test_every_hub_config_of_these_classes_runs_as_the_reference(tmp_path):
    tried = 0
    for file in sorted(HUB.rglob("scheduler_config.json")):
        name = json.loads(file.read_text())["_class_name"]
        if name not in BOTH:
            continue
        tried += 1
        theirs = getattr(diffusers, name).from_pretrained(file.parent)
        mine = getattr(ours, name).from_pretrained(file.parents[1], subfolder="scheduler")
        mine.save_pretrained(tmp_path)
        back = getattr(diffusers, name).from_pretrained(tmp_path)
        for one in (mine, back):
            assert {key: value for key, value in one.config.items() if key[0] != "_"} == {
                key: value for key, value in theirs.config.items() if key[0] != "_"
            }
        for seed, steps in enumerate((4, 28)):
            mu = {"mu": 0.9} if theirs.config["use_dynamic_shifting"] else {}
            assert compare((theirs, mine), {"num_inference_steps": steps, **mu}, seed=seed) <= 1e-5, file
            sigmas = np.linspace(1.0, 1 / steps, steps)
            assert compare((theirs, mine), {"sigmas": sigmas, **mu}, seed=seed) <= 1e-5, file
    assert tried >= 5
