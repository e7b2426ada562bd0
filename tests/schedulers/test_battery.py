"""What every public scheduler keeps, whatever it computes: one battery over the whole table of classes."""

import copy
import itertools
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.schedulers.support import CLASSES, accepts, fake_model, generators, initial, sample, start

TRAIN = 24  # so that as many steps as training had are cheap; betas to match
MODES = ["", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_flow_sigmas"]
SPACINGS = ["linspace", "leading", "trailing"]
# these walk a fixed table of few steps that distillation was made for
DISTILLED = {"LCMScheduler", "TCDScheduler"}


def make(name: str, **config: Any) -> Any:
    """A scheduler with a short training schedule whose end is nearly pure noise; unknown keys are left out."""
    cls = CLASSES[name]
    known = cls.config_arguments()
    base = {"num_train_timesteps": TRAIN, "beta_start": 0.004, "beta_end": 0.45, "original_inference_steps": TRAIN}
    base["set_alpha_to_one"] = True  # otherwise a run that reaches timestep 0 ends at that level, and stands still
    if config.get("use_flow_sigmas"):
        config["prediction_type"] = "flow_prediction"
    return cls(**{key: value for key, value in {**base, **config}.items() if key in known})


def configs(name: str) -> list[dict[str, Any]]:
    known = CLASSES[name].config_arguments()
    modes = [mode for mode in MODES if not mode or mode in known]
    spacings = [spacing for spacing in SPACINGS if "timestep_spacing" in known] or [None]
    offsets = [0, 1] if "steps_offset" in known else [0]
    every = [
        {
            **({mode: True} if mode else {}),
            **({"timestep_spacing": spacing} if spacing else {}),
            **({"steps_offset": offset} if offset else {}),
        }
        for mode, spacing, offset in itertools.product(modes, spacings, offsets)
        if not offset or spacing == "leading"
    ]
    if "beta_schedule" in known:
        every += [{**config, "beta_schedule": "squaredcos_cap_v2"} for config in every if len(config) > 1]
    return every


def options(scheduler: Any, batch: int) -> dict[str, Any]:
    return {"generator": generators(batch)} if accepts(scheduler, "step", "generator") else {}


def calls_of(steps: int, order: int) -> int:
    return 2 * steps - 1 if order == 2 else steps


every_class = pytest.mark.parametrize("name", sorted(CLASSES))


@every_class
@pytest.mark.parametrize("steps", [1, 2, 3, 9, TRAIN - 1, TRAIN])
def test_finite_and_every_step_counts(name, steps):
    failed = []
    # a Brownian tree is slow to walk
    for config in configs(name)[: 2 if name == "DPMSolverSDEScheduler" and steps > 9 else None]:
        scheduler = make(name, **config)
        scheduler.set_timesteps(steps)
        trace = sample(scheduler, initial(scheduler), **options(scheduler, 2))
        finite = all(bool(torch.isfinite(after).all()) for _, after, _ in trace)
        moved = all(not torch.equal(before, after) for before, after, _ in trace)
        rounds = steps if name == "PNDMScheduler" and len(trace) >= steps else len(trace)
        counted = rounds >= steps if name in DISTILLED else rounds == calls_of(steps, scheduler.order)
        # half of PNDM's stride of 1 is 0; consistency models leave what is at timestep 0 as it is
        still = (name == "PNDMScheduler" and steps > TRAIN // 2) or (name in DISTILLED and steps == TRAIN)
        if not finite or not counted or not (moved or still):
            failed.append((config, finite, moved, len(trace)))
    assert not failed


@every_class
def test_timesteps_fall_and_stay_in_training(name):
    for config in configs(name):
        scheduler = make(name, **config)
        for steps in (1, 7, TRAIN):
            scheduler.set_timesteps(steps)
            times = scheduler.timesteps
            assert float(times.max()) <= TRAIN and float(times.min()) >= 0, (config, steps)
            assert bool((times.diff() <= 1e-4).all()) or scheduler.order == 2 or name == "PNDMScheduler", (
                config,
                steps,
            )
            whole = any(key.startswith("use_") for key in config)  # levels closer than timesteps share one
            if scheduler.order == 1 and not whole and name not in ("PNDMScheduler", *DISTILLED):
                assert len(set(times.tolist())) == steps, (config, steps)


@every_class
def test_runs_do_not_disturb_each_other(name):
    scheduler = make(name)
    scheduler.set_timesteps(5)
    noise = initial(scheduler)
    expected = sample(scheduler.copy_for_run(), noise, **options(scheduler, 2))[-1][1]
    one, other = scheduler.copy_for_run(), scheduler.copy_for_run()
    assert one.step_index is None
    values, choices = [noise, noise], [options(one, 2), options(other, 2)]
    for time in one.timesteps:
        for at, run in enumerate((one, other)):
            output = fake_model(
                run.scale_model_input(values[at], time) if hasattr(run, "scale_model_input") else values[at], time
            )
            values[at] = run.step(output, time, values[at], **choices[at]).prev_sample
    assert torch.equal(values[0], expected) and torch.equal(values[1], expected)
    # a second run of the same object, after set_timesteps, too
    scheduler.set_timesteps(5)
    assert torch.equal(sample(scheduler, noise, **options(scheduler, 2))[-1][1], expected)


@every_class
def test_two_threads_share_a_scheduler(name):
    shared = make(name)
    results: dict[int, torch.Tensor] = {}

    def run(steps: int) -> None:
        mine = shared.copy_for_run()
        mine.set_timesteps(steps)
        results[steps] = sample(mine, initial(mine), **options(mine, 2))[-1][1]

    threads = [threading.Thread(target=run, args=(steps,)) for steps in (4, 6, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for steps in (4, 6, 9):
        alone = make(name)
        alone.set_timesteps(steps)
        assert torch.equal(results[steps], sample(alone, initial(alone), **options(alone, 2))[-1][1])


@every_class
def test_an_image_does_not_depend_on_its_batch(name):
    scheduler = make(name)
    results = []
    for batch in (3, 1):
        scheduler.set_timesteps(6)
        results.append(sample(scheduler, initial(scheduler, batch), **options(scheduler, batch))[-1][1])
    torch.testing.assert_close(results[0][:1], results[1], rtol=0, atol=0)


@every_class
def test_any_run_may_start_in_the_middle(name):
    """By hand: noise added at a timestep, then the rest of the schedule, with and without `set_begin_index`."""
    for steps, skipped in ((6, 2), (20, 17), (TRAIN, TRAIN - 3)):
        ends = []
        for told in (True, False):
            scheduler = make(name)
            scheduler.set_timesteps(steps)
            first = skipped * scheduler.order
            if told and hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(first)
            time = scheduler.timesteps[first : first + 1]
            add = scheduler.add_noise if hasattr(scheduler, "add_noise") else None
            noisy = (
                add(start(2, 1), start(2, 2), time.repeat(2))
                if add
                else scheduler.scale_noise(start(2, 1), time, start(2, 2))
            )
            trace = sample(scheduler, noisy, first=first, **options(scheduler, 2))
            assert all(bool(torch.isfinite(after).all()) for _, after, _ in trace)
            ends.append(trace[-1][1])
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


@every_class
def test_custom_timesteps_and_sigmas(name):
    if name in DISTILLED:
        pytest.skip("takes timesteps of its distillation's table; tested in its own file")
    times = [22, 17, 10, 4, 1]
    scheduler = make(name)
    scheduler.set_timesteps(timesteps=times)
    told = [round(time) for time in scheduler.timesteps.tolist() if any(abs(time - mine) < 0.5 for mine in times)]
    assert len(set(told)) == len(times)
    trace = sample(scheduler, initial(scheduler), **options(scheduler, 2))
    assert bool(torch.isfinite(trace[-1][1]).all())
    flow = name.startswith("Flow")
    levels = [0.95, 0.7, 0.4, 0.1] if flow else [9.0, 3.0, 1.0, 0.3, 0.0]
    scheduler.set_timesteps(sigmas=levels)
    trace = sample(scheduler, initial(scheduler), **options(scheduler, 2))
    assert bool(torch.isfinite(trace[-1][1]).all())
    assert scheduler.num_inference_steps == 4


@every_class
@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"timesteps": [10, 20]}, "fall"),
        ({"timesteps": []}, "timesteps"),
        ({"timesteps": [TRAIN + 5, 3]}, "timesteps"),
        ({"timesteps": [15, -3]}, "timesteps"),
        ({"sigmas": [0.1, 0.9, 0.0]}, "fall"),
        ({"sigmas": [float("nan"), 0.1]}, "sigmas"),
        ({"sigmas": [0.9, -0.1]}, "sigmas"),
        ({"timesteps": [15, 3], "sigmas": [0.9, 0.0]}, "timesteps"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": -2}, "num_inference_steps"),
        ({}, "num_inference_steps"),
    ],
)
def test_bad_schedules_are_refused_and_change_nothing(name, given, word):
    scheduler = make(name)
    if name in DISTILLED and "sigmas" in given:
        pytest.skip("takes no sigmas")
    scheduler.set_timesteps(4)
    before = copy.copy(scheduler.timesteps)
    with pytest.raises(ValueError, match=word):
        scheduler.set_timesteps(**given)
    assert torch.equal(scheduler.timesteps, before)


@every_class
def test_half_precision_and_devices_are_kept(name):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        scheduler = make(name)
        scheduler.set_timesteps(4, device="cpu")
        trace = sample(scheduler, initial(scheduler).to(dtype), **options(scheduler, 2))
        assert {after.dtype for _, after, _ in trace} == {dtype}
        assert bool(torch.isfinite(trace[-1][1]).all())


class _Reads(TorchDispatchMode):
    """Counts what would make a device wait: a tensor's value taken to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.reads.append(str(function))
        return function(*args, **(kwargs or {}))


@every_class
def test_no_step_reads_a_tensor(name):
    scheduler = make(name)
    scheduler.set_timesteps(8)
    value, choice = initial(scheduler), options(scheduler, 2)
    for time in scheduler.timesteps:
        output = fake_model(value, 1.0)
        with _Reads() as watch:
            if hasattr(scheduler, "scale_model_input"):
                scheduler.scale_model_input(value, time)
            value = scheduler.step(output, time, value, **choice).prev_sample
        if name != "DPMSolverSDEScheduler":  # its Brownian tree is a library's, which works on the CPU
            assert watch.reads == []
            assert watch.count <= 60


@every_class
def test_a_finished_run_says_so(name):
    scheduler = make(name)
    scheduler.set_timesteps(3)
    sample(scheduler, initial(scheduler), **options(scheduler, 2))
    with pytest.raises(ValueError, match=r"schedule|set_timesteps"):
        scheduler.step(start(2), TRAIN * 7.0, start(2))
        scheduler.step(start(2), TRAIN * 7.0, start(2))


@every_class
def test_save_load_and_tuples(name, tmp_path):
    scheduler = make(name)
    scheduler.save_pretrained(tmp_path)
    again = type(scheduler).from_pretrained(tmp_path)
    public = [{k: v for k, v in each.config.items() if k[0] != "_"} for each in (scheduler, again)]
    assert public[0] == public[1]
    results = []
    for one, as_dict in ((scheduler, True), (again, False)):
        one.set_timesteps(4)
        time, value = one.timesteps[0], initial(one)
        scaled = one.scale_model_input(value, time) if hasattr(one, "scale_model_input") else value
        output = one.step(fake_model(scaled, time), time, value, return_dict=as_dict, **options(one, 2))
        results.append(output.prev_sample if as_dict else output[0])
    assert torch.equal(*results)
    assert len(scheduler) == TRAIN


@every_class
@pytest.mark.parametrize("count", [0, -1, 2**63, 10**30, 1.5, True, "1000", None, float("inf")])
def test_absurd_numbers_of_training_steps_are_refused_by_name(name, count):
    with pytest.raises(ValueError, match="num_train_timesteps"):
        CLASSES[name](num_train_timesteps=count)
