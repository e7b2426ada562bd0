"""Every model class compiles to one graph for all steps, prompts and sizes, whole and by block."""

import pytest
import torch

import diffusion_core
from benchmarks.graph_models import SUBJECTS, Subject
from benchmarks.graphs import by_block, whole, with_sizes_apart

# Those whose blocks no other entry has.
IN_BLOCKS = [
    each
    for each in SUBJECTS
    if each.kind._repeated_blocks and each.method == "forward" and each.make is None
    if each.variant not in {"SDXL", "dev", "image"}
]
every_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=str)
every_subject_in_blocks = pytest.mark.parametrize("subject", IN_BLOCKS, ids=str)
# What a class is but for another name, or a base of others.
NO_MODELS = {"Model", "ModelMixin", "Transformer2DModel"}


@pytest.fixture(autouse=True)
def forget_graphs():
    yield
    torch._dynamo.reset()


def test_no_model_class_is_left_out() -> None:
    public = {name: getattr(diffusion_core, name) for name in diffusion_core.__all__}
    models = {
        name for name, kind in public.items() if isinstance(kind, type) and issubclass(kind, diffusion_core.Model)
    }
    assert models - NO_MODELS - {subject.name for subject in SUBJECTS} == set()


@every_subject
def test_one_graph_for_all_steps_prompts_and_sizes(subject: Subject) -> None:
    with with_sizes_apart():
        graphs, difference = whole(subject, subject.calls(), "eager", dynamic=True)
    assert graphs == 1
    assert difference <= 1e-6


@every_subject_in_blocks
def test_blocks_are_compiled_at_the_first_step_and_never_again(subject: Subject) -> None:
    with with_sizes_apart():
        first, later, difference = by_block(subject, subject.calls(), "eager", dynamic=True)
    # One for each way that a block is built, and one where what comes into the first block is a view.
    assert 1 <= first <= 6 and later == 0
    assert difference <= 1e-6


@pytest.mark.slow
@every_subject
def test_one_graph_down_to_operators(subject: Subject) -> None:
    """With the tracing that inductor needs, at one size and at many."""
    assert whole(subject, subject.calls_of_one_size(), "aot_eager")[0] == 1
    with with_sizes_apart():
        graphs, difference = whole(subject, subject.calls(), "aot_eager", dynamic=True)
    assert graphs == 1
    assert difference <= 1e-6
