"""Whole pipelines at full size, in dry runs: every mode is quick to predict, and takes what it should."""

import resource

import pytest

from benchmarks.memory_modes import FAMILIES, HUB, MODES, measure, rows
from diffusion_core.offload.simulator import unavailable
from tests.support import needs_shared

pytestmark = [pytest.mark.simulator, pytest.mark.slow, needs_shared]


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_every_mode_is_predicted_in_a_minute_and_two_gigabytes(family):
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    peaks, steps = {}, {}
    # Each in a process of its own, whose memory counts.
    for name, result in rows([(family, mode.name, HUB, "rtx-4090") for mode in MODES]):
        assert result.took < 60, name
        peaks[name], steps[name] = max(result.peaks), result.step
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2_000_000  # in KiB
    offloaded = [name for name in peaks if "offload" in name]
    assert all(peaks[name] < peaks["all on the device"] for name in offloaded)
    assert steps["group offload, blocks, stream"] < steps["group offload, blocks"]
    assert peaks["fp8, leaves, stream, VAE tiling"] == min(peaks.values())


@pytest.mark.parametrize("mode", ["group offload, blocks, stream", "model offload, denoiser by blocks, stream"])
def test_the_two_transformers_of_wan_fit_a_card_of_24_gigabytes(mode):
    """57 GB of weights besides the encoder's 11, and films of 81 frames; the card refuses what does not fit."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    found = measure(FAMILIES["wan-a14b"], next(each for each in MODES if each.name == mode), cap="24GB")
    assert found.weights > 30e9
    assert max(found.peaks) < 24e9
