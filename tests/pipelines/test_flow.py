"""Schedules of flow models."""

import pytest
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from diffusion_core import (
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusion_core.pipelines.flow import flow_schedule, image_shift


@pytest.mark.parametrize("tokens", [1, 256, 1000, 4096, 16384])
@pytest.mark.parametrize("config", [{}, {"base_shift": 0.2, "max_shift": 0.9, "max_image_seq_len": 8192}])
def test_the_shift_is_the_reference_s(tokens: int, config: dict[str, float]) -> None:
    defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    expected = calculate_shift(tokens, *({**defaults, **config}[key] for key in defaults))
    assert image_shift(config, tokens) == pytest.approx(expected, abs=1e-12)


def test_levels_are_even_and_each_scheduler_gets_what_it_takes() -> None:
    schedule = flow_schedule(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 4, 256)
    assert schedule == {"sigmas": [1.0, 0.75, 0.5, 0.25], "mu": pytest.approx(0.5)}
    assert flow_schedule(FlowMatchHeunDiscreteScheduler(), 2, 256) == {"sigmas": [1.0, 0.5]}
    assert flow_schedule(FlowMatchEulerDiscreteScheduler(), 4, 256, sigmas=[0.9, 0.1])["sigmas"] == [0.9, 0.1]
    own = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    assert flow_schedule(own, 4, 256)["sigmas"] is None
    assert flow_schedule(own, 4, 256, always=True)["sigmas"] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("count", [0, None, 1.5])
def test_a_number_of_steps_that_is_none_is_refused(count: object) -> None:
    with pytest.raises((TypeError, ValueError), match="num_inference_steps"):
        flow_schedule(FlowMatchEulerDiscreteScheduler(), count, 256)
