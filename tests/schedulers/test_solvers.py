"""The exponential-integrator solvers, LCM, TCD and DPM-Solver-SDE: against diffusers, and where diffusers fails."""

import inspect
import json
import logging
import sys
import threading

import diffusers
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diffusion_core.schedulers as ours
from tests.schedulers.support import accepts, fake_model, generators, initial, sample, start, worst_difference
from tests.support import HUB, needs_shared

logging.getLogger("diffusers").setLevel(logging.ERROR)

SOLVERS = ["DPMSolverMultistep", "DPMSolverSinglestep", "DEISMultistep", "UniPCMultistep"]
FEW_STEPS = ["LCM", "TCD"]
ALL = [*SOLVERS, *FEW_STEPS, "DPMSolverSDE"]
LATENT = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
MODES = {
    "plain": {},
    "linear": {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
    "karras": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True},
    "beta": {"use_beta_sigmas": True},
    "lu": {"use_lu_lambdas": True},
    "flow": {**FLOW, "flow_shift": 3.0},
    "dynamic": {**FLOW, "use_dynamic_shifting": True},
    "terminal": {**FLOW, "shift_terminal": 0.1},
    "leading": {"timestep_spacing": "leading", "steps_offset": 1},
    "trailing": {"timestep_spacing": "trailing"},
    "zero_snr": {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
    "v": {"prediction_type": "v_prediction"},
    "sample": {"prediction_type": "sample"},
    "thresholding": {"thresholding": True, "sample_max_value": 1.5},
    "cosine_clipped": {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1},
    "sigma_min": {"final_sigmas_type": "sigma_min"},
    "ends": {"use_karras_sigmas": True, "sigma_min": 0.05, "sigma_max": 9.0},
}
VARIANTS = {
    "DPMSolverMultistep": [
        {"algorithm_type": name, "solver_type": rule, "solver_order": order}
        for name in ("dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++")
        for rule, order in (("midpoint", 1), ("midpoint", 2), ("heun", 2), ("midpoint", 3))
        if not (name.startswith("sde") and order == 3)
    ]
    + [{"euler_at_final": True}, {"lower_order_final": False, "solver_order": 3}],
    "DPMSolverSinglestep": [
        {"algorithm_type": name, "solver_type": rule, "solver_order": order, "lower_order_final": last}
        for name in ("dpmsolver", "dpmsolver++", "sde-dpmsolver++")
        for rule, order, last in (("midpoint", 1, True), ("midpoint", 2, False), ("heun", 2, True), ("heun", 3, True))
        if not (name.startswith("sde") and order == 3)
    ]
    + [{"solver_order": 3, "algorithm_type": "sde-dpmsolver++"}],
    "DEISMultistep": [{"solver_order": order} for order in (1, 2, 3)] + [{"lower_order_final": False}],
    "UniPCMultistep": [
        {"predict_x0": data, "solver_type": kind, "solver_order": order}
        for data in (True, False)
        for kind, order in (("bh2", 1), ("bh1", 2), ("bh2", 2), ("bh2", 3), ("bh1", 4))
    ]
    + [{"disable_corrector": [0, 2]}, {"lower_order_final": False, "final_sigmas_type": "sigma_min"}],
}


def pair_of(name, **config):
    cls = f"{name}Scheduler"
    return getattr(diffusers, cls)(**config), getattr(ours, cls)(**config)


def knows(name, config):
    return set(config) <= set(inspect.signature(getattr(diffusers, f"{name}Scheduler").__init__).parameters)


def compare(pair, steps, *, batch=2, seed=0, given=None, options=None, skip_last=False):
    """The worst difference of both trajectories, relative to the largest value."""
    traces = []
    for scheduler in pair:
        scheduler.set_timesteps(steps, **(given or {}))
        noise = initial(scheduler, batch, seed)
        extra = dict(options or {})
        if accepts(pair[0], "step", "generator"):
            extra["generator"] = torch.Generator().manual_seed(seed) if seed % 2 else generators(batch)
        traces.append(sample(scheduler, noise, **extra))
    torch.testing.assert_close(pair[1].timesteps.double(), pair[0].timesteps.double(), rtol=0, atol=1e-3)
    return worst_difference(*(trace[: -1 if skip_last else None] for trace in traces))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SOLVERS)
def test_trajectories_equal_the_references(name, mode):
    worse, tried = {}, 0
    for number, variant in enumerate(VARIANTS[name]):
        config = {**LATENT, **variant, **MODES[mode]}
        noise_wanted = str(variant.get("algorithm_type")) in ("dpmsolver", "sde-dpmsolver") or not variant.get(
            "predict_x0", True
        )
        if noise_wanted and "final_sigmas_type" not in config:
            config["final_sigmas_type"] = "sigma_min"
        if noise_wanted and config.get("prediction_type") == "flow_prediction":
            continue  # the reference refuses it
        if noise_wanted and mode == "thresholding" and name != "DPMSolverMultistep":
            continue  # the reference ignores it, or fails
        if noise_wanted and mode == "zero_snr":
            continue  # pure noise says nothing of the data: a division by 4096 of what float32 has lost
        if not knows(name, config):
            continue
        for steps, seed in ((1, 0), (6, number), (17, number + 1))[: 2 + number % 2]:
            theirs, mine = pair_of(name, **config)
            given = {"mu": 0.8} if mode == "dynamic" else {}
            theirs.set_timesteps(steps, **given)
            idle = float(theirs.sigmas[-1]) >= float(theirs.sigmas[-2]) * (1 - 1e-6)  # their last step does nothing
            # with "bh1" their last step to no noise is 0 times infinity
            idle = idle or (variant.get("solver_type") == "bh1" and float(theirs.sigmas[-1]) == 0)
            if steps == 1 and (idle or mode == "terminal"):
                continue  # nothing is left to compare, and NaN
            tried += 1
            difference = compare((theirs, mine), steps, seed=seed, batch=1 + number % 3, given=given, skip_last=idle)
            if not difference <= 1e-5:
                worse[(*variant.items(), steps)] = difference
    assert not worse
    if knows(name, MODES[mode]):
        assert tried


FEW = [
    ({}, {"num_inference_steps": 1}),
    ({}, {"num_inference_steps": 4}),
    ({"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}, {"num_inference_steps": 8}),
    ({"prediction_type": "sample", "set_alpha_to_one": False}, {"num_inference_steps": 50}),
    ({"clip_sample": True, "clip_sample_range": 0.7}, {"num_inference_steps": 3}),
    ({"thresholding": True, "timestep_scaling": 5.0}, {"num_inference_steps": 3}),
    ({"original_inference_steps": 30}, {"num_inference_steps": 7, "strength": 0.6}),
    ({}, {"num_inference_steps": 7, "original_inference_steps": 100}),
    ({}, {"num_inference_steps": None, "timesteps": [999, 700, 333, 20]}),
]


@pytest.mark.parametrize("name", FEW_STEPS)
def test_few_step_trajectories_equal_the_references(name):
    for seed, (config, given) in enumerate(FEW):
        for options in [{}] if name == "LCM" else [{}, {"eta": 0.0}, {"eta": 1.0}]:
            rest = {key: value for key, value in given.items() if key != "num_inference_steps"}
            steps = given["num_inference_steps"]
            difference = compare(pair_of(name, **config), steps, seed=seed, given=rest, options=options)
            assert difference <= 1e-5, (config, given, options)


@pytest.mark.parametrize("mode", ["plain", "karras", "exponential", "beta", "leading", "trailing", "v"])
def test_brownian_trajectories_equal_the_references(mode):
    pytest.importorskip("torchsde")
    for steps, seeds in ((1, 5), (2, 5), (9, [1, 2])):
        pair = pair_of("DPMSolverSDE", noise_sampler_seed=seeds, **{**LATENT, **MODES[mode]})
        assert compare(pair, steps) <= 1e-5
        assert float(pair[1].init_noise_sigma) == pytest.approx(float(pair[0].init_noise_sigma), rel=1e-6)


def test_without_torchsde_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchsde", None)
    with pytest.raises(ImportError, match="pip install torchsde"):
        ours.DPMSolverSDEScheduler().set_timesteps(3)


# --- every step count ----------------------------------------------------------------------------------------------

SCHEDULES = ["plain", "karras", "exponential", "beta", "lu", "flow", "leading", "trailing", "zero_snr", "sigma_min"]


def runs(scheduler, count, **given):
    """A run's timesteps and its last sample, after checks that every step was taken and changed something."""
    scheduler.set_timesteps(count, **given)
    noise = initial(scheduler, 1)
    extra = {"generator": torch.Generator().manual_seed(0)} if accepts(scheduler, "step", "generator") else {}
    trace = sample(scheduler, noise, **extra)
    assert all(torch.isfinite(after).all() for _, after, _ in trace)
    assert all(not torch.equal(before, after) for before, after, _ in trace)
    return scheduler.timesteps.tolist(), trace[-1][1]


@pytest.mark.parametrize("mode", SCHEDULES)
@pytest.mark.parametrize("name", [*SOLVERS, "DPMSolverSDE"])
def test_every_count_of_steps_is_finite_and_each_step_counts(name, mode):
    for variant in [{}, *VARIANTS.get(name, [])[-3:]]:
        config = {**LATENT, **variant, **MODES[mode]}
        if not set(config) <= set(getattr(ours, f"{name}Scheduler").config_arguments()):
            continue
        for count in (1, 2, 3, 9):
            times, _ = runs(getattr(ours, f"{name}Scheduler")(**config), count)
            assert len(times) == (2 * count - 1 if name == "DPMSolverSDE" else count)


@pytest.mark.parametrize("name", SOLVERS)
def test_as_many_steps_as_training_had(name):
    """In the reference the result is NaN: a timestep comes twice (linspace), or always (leading)."""
    for mode in ("plain", "leading", "trailing", "sigma_min"):
        config = {**LATENT, "num_train_timesteps": 100, **MODES[mode]}
        if not set(config) <= set(getattr(ours, f"{name}Scheduler").config_arguments()):
            continue
        for count in (99, 100):
            times, _ = runs(getattr(ours, f"{name}Scheduler")(**config), count)
            assert len(set(times)) == count
    with pytest.raises(ValueError, match="num_inference_steps=101"):
        getattr(ours, f"{name}Scheduler")(num_train_timesteps=100).set_timesteps(101)
    times, last = runs(getattr(ours, f"{name}Scheduler")(**LATENT), 1000)
    assert times == list(range(999, -1, -1)) and torch.isfinite(last).all()


@pytest.mark.parametrize("mode", ["use_karras_sigmas", "use_exponential_sigmas", "use_lu_lambdas", "use_beta_sigmas"])
def test_cosine_schedules_work_with_every_spacing(mode):
    """Case 119: rounded timesteps come twice, and the reference runs out of its table."""
    for name in SOLVERS:
        if not knows(name, {mode: True}):
            continue
        for count in (5, 25, 60):
            scheduler = getattr(ours, f"{name}Scheduler")(beta_schedule="squaredcos_cap_v2", **{mode: True})
            times, _ = runs(scheduler, count)
            assert max(times) <= 999 and min(times) >= 0
            # by hand, with numbers in place of elements of `timesteps`
            value = initial(scheduler, 1)
            scheduler.set_timesteps(count)
            for time in times:
                value = scheduler.step(fake_model(value, time), int(time), value).prev_sample
            assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", [*SOLVERS, "LCM", "TCD"])
def test_a_run_starts_from_any_step_by_hand(name):
    """Case 121: the reference runs out of its table (DPM, DEIS) or fails an assertion (UniPC)."""
    for config in ({}, {"use_karras_sigmas": True}):
        if not knows(name, config):
            continue
        count = 100 if name in SOLVERS else 8
        scheduler = getattr(ours, f"{name}Scheduler")(**LATENT, **config)
        for first in (0, 1, count // 2, count - 10 if count > 10 else 5, count - 1):
            scheduler.set_timesteps(count)
            times = scheduler.timesteps[first:]
            noisy = scheduler.add_noise(start(1), start(1, 5), times[:1])
            for as_number in (False, True):
                scheduler.set_timesteps(count)
                value = noisy
                for time in times.tolist() if as_number else scheduler.timesteps[first:]:
                    value = scheduler.step(fake_model(value, time), time, value).prev_sample
                assert torch.isfinite(value).all()


def test_a_run_from_the_middle_equals_the_references():
    for name in SOLVERS:
        traces = []
        for scheduler in pair_of(name, **LATENT, use_karras_sigmas=True):
            scheduler.set_timesteps(20)
            scheduler.set_begin_index(12)
            noisy = scheduler.add_noise(start(2), start(2, 5), scheduler.timesteps[12:13].repeat(2))
            extra = {"generator": generators(2)} if accepts(scheduler, "step", "generator") else {}
            traces.append([(noisy, noisy, None), *sample(scheduler, noisy, first=12, **extra)])
        skip = -1 if name == "DEISMultistep" else None
        assert worst_difference(*(trace[:skip] for trace in traces)) <= 1e-5, name


# --- custom schedules ----------------------------------------------------------------------------------------------


def test_custom_timesteps_equal_the_references():
    for name in ("DPMSolverMultistep", "DPMSolverSinglestep"):
        pair = pair_of(name, **LATENT)
        assert compare(pair, None, given={"timesteps": [981, 720, 500, 333, 80, 7]}) <= 1e-5
    pair = pair_of("UniPCMultistep", **FLOW, flow_shift=3.0)
    assert compare(pair, None, given={"sigmas": np.array([0.97, 0.7, 0.4, 0.1])}) <= 1e-5


@pytest.mark.parametrize("name", ALL)
def test_every_class_takes_timesteps_and_sigmas(name):
    """Case 134: in the reference UniPC and DEIS take no timesteps, and the others no sigmas."""
    scheduler = getattr(ours, f"{name}Scheduler")(**LATENT)
    for given in (
        {"timesteps": [900, 500, 100]},
        {"timesteps": torch.tensor([900, 500, 100])},
        {"sigmas": [10.0, 2.0, 0.3]},
        {"sigmas": [10.0, 2.0, 0.3, 0.0]},
        {"sigmas": np.array([10.0, 2.0, 0.3, 0.0])},
    ):
        if name == "DPMSolverSDE" and len(given.get("sigmas", [0] * 4)) == 3:
            continue  # there, as in all VE schedulers, sigmas hold the end
        times, _ = runs(scheduler, None, **given)
        assert len(times) == (5 if name == "DPMSolverSDE" else 3)
    wrong = [
        {"timesteps": [100, 500]},
        {"timesteps": [1000, 500]},
        {"timesteps": [500, -1]},
        {"timesteps": []},
        {"timesteps": [500, 500]},
        {"timesteps": [900], "sigmas": [1.0, 0.0]},
        {"sigmas": [1.0, 2.0, 0.0]},
        {"sigmas": [1.0, 0.0, 0.0]},
        {"sigmas": [float("nan"), 0.0]},
        {"sigmas": [2.0, -1.0]},
        {"timesteps": [900, 500], "num_inference_steps": 3},
        {"num_inference_steps": None},
        {"num_inference_steps": 0},
        {"num_inference_steps": -3},
    ]
    for given in wrong:
        before = scheduler.timesteps.tolist()
        with pytest.raises(ValueError, match=r"timesteps|sigmas|num_inference_steps"):
            scheduler.set_timesteps(**given)
        assert scheduler.timesteps.tolist() == before
    with pytest.raises(TypeError, match="num_inference_steps"):
        scheduler.set_timesteps(2.5)


@pytest.mark.parametrize("name", SOLVERS)
def test_flow_schedules_take_timesteps_and_sigmas(name):
    scheduler = getattr(ours, f"{name}Scheduler")(**FLOW, flow_shift=3.0)
    assert runs(scheduler, None, timesteps=[900, 500, 100])[0] == [900, 500, 100]
    torch.testing.assert_close(scheduler.sigmas[:3], torch.tensor([0.9, 0.5, 0.1]))
    runs(scheduler, None, sigmas=[1.0, 0.5, 0.25])  # lists too: the reference needs an array
    torch.testing.assert_close(scheduler.sigmas, torch.tensor([1 - 1e-6, 0.75, 0.5, 0.0]))
    with pytest.raises(ValueError, match="sigmas"):
        scheduler.set_timesteps(sigmas=[1.5, 0.5])


def test_flow_and_spaced_sigmas_stay_on_the_path():
    """In the reference only UniPC with Karras maps them to [0, 1]; elsewhere alpha = 1 - sigma is far below 0."""
    for name in SOLVERS:
        for mode in ("karras", "exponential", "beta"):
            scheduler = getattr(ours, f"{name}Scheduler")(**FLOW, **{f"use_{mode}_sigmas": True})
            runs(scheduler, 6)
            assert float(scheduler.sigmas[:-1].min()) > 0 and float(scheduler.sigmas.max()) < 1
    pair = pair_of("UniPCMultistep", **FLOW, use_karras_sigmas=True)
    assert compare(pair, 7) <= 1e-5


# --- numbers that the reference gets wrong -------------------------------------------------------------------------


def test_the_stochastic_third_order_converges():
    """The reference adds a constant share of the second difference, which does not vanish with the step."""
    ends = {}
    for order in (2, 3):
        for which, scheduler in zip(
            ("theirs", "mine"),
            pair_of("DPMSolverMultistep", **LATENT, algorithm_type="sde-dpmsolver++", solver_order=order),
            strict=True,
        ):
            scheduler.set_timesteps(200)
            value = start(1)
            for time in scheduler.timesteps:
                still = torch.zeros_like(value)
                value = scheduler.step(fake_model(value, time), time, value, variance_noise=still).prev_sample
            ends[which, order] = value
    gap = {which: float((ends[which, 3] - ends[which, 2]).abs().max()) for which in ("theirs", "mine")}
    assert gap["mine"] < 0.2 * gap["theirs"]


@pytest.mark.parametrize("name", ["DPMSolverMultistep", "DPMSolverSinglestep", "UniPCMultistep"])
def test_the_last_step_to_no_noise_is_the_predicted_data(name):
    """Noise prediction too, which the reference refuses to end at zero; and no fresh noise is left in the picture."""
    kinds = {"DPMSolverMultistep": ["dpmsolver", "sde-dpmsolver"], "DPMSolverSinglestep": ["dpmsolver"]}
    for kind in kinds.get(name, [None]):
        config = {"predict_x0": False} if kind is None else {"algorithm_type": kind}
        scheduler = getattr(ours, f"{name}Scheduler")(**LATENT, **config)
        scheduler.set_timesteps(5)
        scheduler.set_begin_index(4)
        value, output = start(1), start(1, 3)
        sigma = float(scheduler.sigmas[4])
        data = value * (1 + sigma**2) ** 0.5 - sigma * output
        got = scheduler.step(output, scheduler.timesteps[4], value).prev_sample
        torch.testing.assert_close(got, data, rtol=1e-5, atol=1e-5)


def test_noise_before_a_schedule_is_that_of_training():
    """Case 136, and the reference takes the wrong end of its table: at timestep 999 it adds next to no noise."""
    for name in SOLVERS:
        scheduler = getattr(ours, f"{name}Scheduler")(**LATENT)
        kept = scheduler.alphas_cumprod[[3, 999]].reshape(2, 1, 1, 1)
        clean, noise = start(2), start(2, 4)
        noisy = scheduler.add_noise(clean, noise, torch.tensor([3, 999]))
        torch.testing.assert_close(noisy, kept.sqrt() * clean + (1 - kept).sqrt() * noise)


def test_deis_with_flow_ends_without_noise():
    scheduler = ours.DEISMultistepScheduler(**FLOW, flow_shift=3.0)
    scheduler.set_timesteps(5)
    assert float(scheduler.sigmas[-1]) == 0  # 0.43 in the reference, which leaves the picture noisy


# --- invariants ----------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts operations, and those that read a value on the host."""

    def __init__(self):
        super().__init__()
        self.all, self.reads = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.all += 1
        self.reads += func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


MOST_OPERATIONS = {"DPMSolverMultistep": 10, "DPMSolverSinglestep": 10, "DEISMultistep": 12, "UniPCMultistep": 24}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_step_is_a_few_operations_and_reads_nothing(name):
    """Case 127. The reference takes 61 operations (DPM-Solver++) to 158 (UniPC), some of which wait for the device."""
    scheduler = getattr(ours, f"{name}Scheduler")(**LATENT)
    scheduler.set_timesteps(10)
    value = start(1)
    for index, time in enumerate(scheduler.timesteps):
        output = fake_model(value, float(time))
        with Count() as count:
            value = scheduler.step(output, time, value).prev_sample
        assert count.reads == 0
        assert count.all <= MOST_OPERATIONS[name] + (2 if index == 0 else 0)


@pytest.mark.parametrize("name", [*SOLVERS, *FEW_STEPS])
def test_a_step_stays_where_the_sample_is(name):
    """Cases 127 and 133: on the meta device a look at a value, or a copy from elsewhere, is an error."""
    scheduler = getattr(ours, f"{name}Scheduler")(**LATENT)
    scheduler.set_timesteps(4, device="meta")
    assert (
        scheduler.timesteps.device.type == "meta" and scheduler.sigmas is None
    ) or scheduler.sigmas.device.type == "cpu"
    scheduler.set_begin_index(0)
    value = torch.empty(2, 3, 4, 4, device="meta")
    for time in scheduler.timesteps:
        value = scheduler.step(value, time, value).prev_sample
    assert value.device.type == "meta"


@pytest.mark.parametrize("name", ALL)
def test_two_threads_share_one_scheduler(name):
    """Case 128."""
    config = {"noise_sampler_seed": 3} if name == "DPMSolverSDE" else {}
    shared = getattr(ours, f"{name}Scheduler")(**LATENT, **config)
    shared.set_timesteps(8)
    found: dict[int, torch.Tensor] = {}

    def work(seed):
        scheduler = shared.copy_for_run()
        extra = {"generator": torch.Generator().manual_seed(seed)} if accepts(scheduler, "step", "generator") else {}
        found[seed] = sample(scheduler, initial(scheduler, 1, seed), **extra)[-1][1]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(found)
    for seed in range(4):
        work(seed)
        assert torch.equal(found[seed], together[seed])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver++"}),
        ("DPMSolverSinglestep", {"algorithm_type": "sde-dpmsolver++"}),
        ("LCM", {}),
        ("TCD", {}),
        ("DPMSolverSDE", {}),
    ],
)
def test_an_image_does_not_depend_on_its_batch(name, config):
    """Case 131."""
    whole = []
    for batch in (1, 3):
        scheduler = getattr(ours, f"{name}Scheduler")(**LATENT, **config)
        scheduler.set_timesteps(4)
        whole.append(sample(scheduler, initial(scheduler, batch), generator=generators(batch))[-1][1])
    torch.testing.assert_close(whole[1][:1], whole[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_comes_back_as_it_went_in(name):
    scheduler = getattr(ours, f"{name}Scheduler")(**LATENT)
    for dtype in (torch.float16, torch.bfloat16):
        scheduler.set_timesteps(3)
        value = initial(scheduler, 1).to(dtype)
        for time in scheduler.timesteps:
            value = scheduler.step(fake_model(value, time), time, value).prev_sample
        assert value.dtype == dtype and torch.isfinite(value).all()


def test_schedulers_leave_their_input_alone():
    for name in ALL:
        scheduler = getattr(ours, f"{name}Scheduler")(**LATENT)
        scheduler.set_timesteps(4)
        value = initial(scheduler, 1)
        for time in scheduler.timesteps:
            output = fake_model(value, time)
            kept, kept_output = value.clone(), output.clone()
            following = scheduler.step(output, time, value).prev_sample
            assert torch.equal(kept, value) and torch.equal(kept_output, output)
            value = following


# --- options -------------------------------------------------------------------------------------------------------


def test_learned_variances_are_left_aside():
    for name in ("DPMSolverMultistep", "DPMSolverSinglestep"):
        results = []
        for scheduler in pair_of(name, **LATENT, variance_type="learned_range"):
            scheduler.set_timesteps(5)
            value, output = start(2), torch.cat([start(2, 3), start(2, 4)], dim=1)
            results.append(scheduler.step(output, scheduler.timesteps[0], value).prev_sample)
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_unipc_predicts_with_another_solver():
    scheduler = ours.UniPCMultistepScheduler(**LATENT, solver_p=ours.DDIMScheduler(**LATENT, clip_sample=False))
    alone = ours.UniPCMultistepScheduler(**LATENT, solver_order=1)
    scheduler.set_timesteps(5)
    alone.set_timesteps(5)
    one = scheduler.copy_for_run().step(start(1, 2), scheduler.timesteps[0], start(1)).prev_sample
    torch.testing.assert_close(one, alone.step(start(1, 2), alone.timesteps[0], start(1)).prev_sample)
    with pytest.raises(TypeError, match="solver_p"):
        ours.UniPCMultistepScheduler(solver_p="DDIM")


def test_names_of_other_solvers_mean_the_default():
    given = [
        ("DPMSolverMultistep", {"solver_type": "logrho", "algorithm_type": "deis"}),
        ("DPMSolverSinglestep", {"solver_type": "bh1", "algorithm_type": "deis"}),
        ("DEISMultistep", {"solver_type": "heun", "algorithm_type": "dpmsolver++"}),
        ("UniPCMultistep", {"solver_type": "midpoint"}),
    ]
    for name, config in given:
        if name.startswith("DPM"):
            config["final_sigmas_type"] = "sigma_min"  # the reference wants it for "deis"
        theirs, mine = pair_of(name, **config)
        assert plain(mine) == plain(theirs)


def test_bad_arguments_fail_at_once():
    wrong = [
        ("DPMSolverMultistep", "algorithm_type", "euler"),
        ("DPMSolverMultistep", "solver_type", "rk4"),
        ("DPMSolverMultistep", "solver_order", 4),
        ("DPMSolverMultistep", "solver_order", True),
        ("DPMSolverMultistep", "prediction_type", "noise"),
        ("DPMSolverMultistep", "final_sigmas_type", "one"),
        ("DPMSolverMultistep", "timestep_spacing", "even"),
        ("DPMSolverMultistep", "beta_schedule", "cubic"),
        ("DPMSolverMultistep", "time_shift_type", "cubic"),
        ("DPMSolverSinglestep", "algorithm_type", "sde-dpmsolver"),
        ("DEISMultistep", "solver_type", "rk4"),
        ("UniPCMultistep", "solver_type", "rk4"),
        ("UniPCMultistep", "solver_order", 0),
        ("DPMSolverSDE", "prediction_type", "flow"),
        ("LCM", "prediction_type", "flow_prediction"),
    ]
    for name, argument, value in wrong:
        with pytest.raises(ValueError, match=argument):
            getattr(ours, f"{name}Scheduler")(**{argument: value})
    with pytest.raises(ValueError, match=r"karras.*beta"):
        ours.DPMSolverMultistepScheduler(use_karras_sigmas=True, use_beta_sigmas=True)
    with pytest.raises(ValueError, match="mu"):
        ours.UniPCMultistepScheduler(**FLOW, use_dynamic_shifting=True).set_timesteps(4)
    for name in ALL:
        with pytest.raises(ValueError, match="set_timesteps"):
            getattr(ours, f"{name}Scheduler")().step(start(1), 999, start(1))


def test_more_steps_than_a_student_knows():
    """Case 137; and image-to-image starts at strength times the schedule (case 125)."""
    for cls in (ours.LCMScheduler, ours.TCDScheduler):
        scheduler = cls()
        with pytest.raises(ValueError, match="num_inference_steps=51 is more than the 50"):
            scheduler.set_timesteps(51)
        with pytest.raises(ValueError, match="num_inference_steps=40 is more than the 25"):
            scheduler.set_timesteps(40, strength=0.5)
        with pytest.raises(ValueError, match="at most num_train_timesteps=1000"):
            scheduler.set_timesteps(1001)
        with pytest.raises(ValueError, match="strength"):
            scheduler.set_timesteps(4, strength=0.0)
        scheduler.set_timesteps(4, strength=0.5)
        assert scheduler.timesteps.tolist() == [499, 379, 259, 139]
    with pytest.raises(ValueError, match="original_inference_steps"):
        ours.LCMScheduler().set_timesteps(4, original_inference_steps=2000)
    with pytest.raises(ValueError, match="eta"):
        ours.TCDScheduler().step(start(1), 999, start(1), eta=2.0)


def test_a_shortened_custom_schedule_ends_without_noise():
    """In the reference the last of the timesteps that `strength` leaves is noised once more."""
    for cls in (ours.LCMScheduler, ours.TCDScheduler):
        scheduler = cls()
        scheduler.set_timesteps(timesteps=[999, 700, 100], strength=0.7)
        assert scheduler.timesteps.tolist() == [700, 100]
        scheduler.set_begin_index(1)
        draws = [
            scheduler.copy_for_run().step(start(1, 2), 100, start(1), generator=torch.Generator().manual_seed(seed))
            for seed in (0, 1)
        ]
        assert torch.equal(draws[0].prev_sample, draws[1].prev_sample)


# --- signatures and files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_signatures_equal_the_references(name):
    theirs, mine = getattr(diffusers, f"{name}Scheduler"), getattr(ours, f"{name}Scheduler")
    for method in ("__init__", "step", "set_timesteps"):
        expected = inspect.signature(getattr(theirs, method)).parameters
        found = inspect.signature(getattr(mine, method)).parameters
        assert list(found)[: len(expected)] == list(expected), method
        if method == "set_timesteps":
            continue  # ours need no number of steps next to a list
        assert [found[key].default for key in expected] == [value.default for value in expected.values()], method
        if method == "__init__":
            assert list(found) == list(expected)
    assert mine.order == theirs.order
    assert float(mine().init_noise_sigma) == pytest.approx(float(theirs().init_noise_sigma))
    assert {cls.__name__ for cls in mine().compatibles} <= {cls.__name__ for cls in theirs().compatibles}


def plain(scheduler):
    return {key: value for key, value in scheduler.config.items() if not key.startswith("_")}


@pytest.mark.parametrize("name", ALL)
def test_configs_go_both_ways(name, tmp_path):
    theirs, mine = pair_of(name, **LATENT, prediction_type="v_prediction")
    mine.save_pretrained(tmp_path / "mine")
    theirs.save_pretrained(tmp_path / "theirs")
    back = getattr(diffusers, f"{name}Scheduler").from_pretrained(tmp_path / "mine")
    here = getattr(ours, f"{name}Scheduler").from_pretrained(tmp_path / "theirs")
    assert plain(back) == plain(here) == plain(theirs)


@pytest.mark.parametrize("name", SOLVERS)
def test_switching_classes_keeps_what_both_know(name):
    config = {**LATENT, "steps_offset": 1, "timestep_spacing": "leading"}
    theirs, mine = pair_of("EulerDiscrete", **config)
    theirs = getattr(diffusers, f"{name}Scheduler").from_config(theirs.config)
    mine = getattr(ours, f"{name}Scheduler").from_config(mine.config)
    assert compare((theirs, mine), 7) <= 1e-5
    # what only the other class knows comes along, without effect
    carried = getattr(ours, f"{name}Scheduler").from_config(ours.DDPMScheduler(**LATENT, clip_sample=True).config)
    plain_one = getattr(ours, f"{name}Scheduler")(**LATENT)
    assert worst_difference(*(_after(one) for one in (carried, plain_one))) == 0


def _after(scheduler):
    scheduler.set_timesteps(4)
    return sample(scheduler, 5 * start(1))


@needs_shared
def test_every_hub_config_of_these_classes_runs_as_the_reference():
    tried = 0
    for file in sorted(HUB.rglob("scheduler_config.json")):
        name = json.loads(file.read_text())["_class_name"]
        if name.removesuffix("Scheduler") not in ALL:
            continue
        tried += 1
        theirs = getattr(diffusers, name).from_pretrained(file.parent)
        mine = getattr(ours, name).from_pretrained(file.parents[1], subfolder="scheduler")
        assert plain(mine) == plain(theirs)
        for steps, seed in ((1, 0), (12, 1), (50, 2)):
            assert compare((theirs, mine), steps, seed=seed) <= 1e-5, file
    assert tried >= 5
