"""Every family draws what the reference draws, takes the same arguments, and reads and writes the same folders."""

import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

from . import sd
from .families import CASES, FAMILIES, Family, pair

every_pipeline = pytest.mark.parametrize(("family", "task"), CASES, ids=[f"{family}-{task}" for family, task in CASES])
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)
SCHEDULED = [(family, task, number) for family, task in CASES for number in range(len(family.scheduled(task)))]
# What we take and the reference does not.
OURS = {"long_prompt", "callback_on_step_end", "callback_on_step_end_tensor_inputs"}


def difference(family: Family, task: str, pipes: Any, count: int = 2, **changes: Any) -> float:
    """The largest difference of the pictures or films, from 0 to 1."""
    results = [made(**family.call(task, count, generator=sd.seeded(), **changes))[0] for made in pipes]
    assert results[0].shape == results[1].shape
    return float((results[0] - results[1]).abs().max())


@pytest.mark.parametrize("guided", [True, False], ids=["guided", "unguided"])
@pytest.mark.parametrize(
    ("family", "task", "scheduler"),
    SCHEDULED,
    ids=[f"{family}-{task}-{family.scheduled(task)[number][0]}-{number}" for family, task, number in SCHEDULED],
)
def test_pictures_are_those_of_the_reference(family: Family, task: str, scheduler: int, guided: bool) -> None:
    name, on, off = family.guidance
    assert difference(family, task, pair(family, task, scheduler), **{name: on if guided else off}) < 1e-4


@pytest.mark.parametrize("method", ["__init__", "__call__", "encode_prompt"])
@every_pipeline
def test_arguments_and_defaults_are_those_of_the_reference(family: Family, task: str, method: str) -> None:
    name = family.tasks[task]
    ours, theirs = (
        inspect.signature(getattr(getattr(library, name), method)).parameters for library in (diffusion_core, diffusers)
    )
    wanted = [key for key in theirs if key not in family.absent]
    assert [key for key in ours if key in theirs or key not in OURS] == wanted
    for key in wanted:
        default = ours[key].default
        assert (list(default) if default == ("latents",) else default) == theirs[key].default, key


@every_pipeline
def test_declarations_are_those_of_the_reference(family: Family, task: str) -> None:
    ours, theirs = (getattr(library, family.tasks[task]) for library in (diffusion_core, diffusers))
    names = (
        "_optional_components",
        "_callback_tensor_inputs",
        "model_cpu_offload_seq",
        "_exclude_from_cpu_offload",
    )
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name, getattr(ours, name)), name


@every_family
def test_the_denoiser_declares_its_layers(family: Family) -> None:
    ours, theirs = (getattr(made, family.denoiser) for made in pair(family))
    kinds = {type(module).__name__ for module in ours.modules()}
    assert ours._repeated_blocks
    assert set(ours._repeated_blocks) <= kinds & set(ours._no_split_modules)
    assert set(theirs._repeated_blocks) <= set(ours._repeated_blocks)
    assert ours._keep_in_fp32_modules == theirs._keep_in_fp32_modules


@every_family
def test_layerwise_casting_stores_the_same_layers(family: Family) -> None:
    stored = []
    for made in pair(family):
        part = deepcopy(getattr(made, family.denoiser))
        part.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        tensors = {name: each.dtype for name, each in part.named_parameters()}
        stored.append({name for name, dtype in tensors.items() if dtype == torch.float8_e4m3fn})
    assert stored[0] == stored[1]
    assert stored[0]


@every_family
def test_folders_go_both_ways(family: Family, tmp_path: Path) -> None:
    ours, theirs = pair(family)
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    ours_there = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "ours")
    theirs_here = diffusion_core.Pipeline.from_pretrained(tmp_path / "theirs")
    assert type(ours_there) is type(theirs)
    assert type(theirs_here) is type(ours)
    for made in (ours_there, theirs_here):
        made.set_progress_bar_config(disable=True)
    assert difference(family, family.main, (ours_there, theirs_here), 1) < 1e-4
