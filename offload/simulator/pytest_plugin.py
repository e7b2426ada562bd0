"""A pytest plug-in for tests on simulated devices.

Name it in a test module or in the root `conftest.py`:

    pytest_plugins = ["diffusion_core.offload.simulator.pytest_plugin"]

    @pytest.mark.simulated_devices(devices=2, capacity="8GB")
    def test_runs_on_two_devices(simulated_devices):
        ...

The fixture is the running `Simulator`; the marker takes the arguments of `simulator()`. A race fails the test. Where
the device type cannot be registered, the test is skipped. Run such tests in a pytest process of their own.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from . import Simulator, simulator, unavailable


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    line = "simulated_devices(devices=1, capacity=None, ...): arguments of the fixture `simulated_devices`"
    config.addinivalue_line("markers", line)


@pytest.fixture
def simulated_devices(request: pytest.FixtureRequest) -> Generator[Simulator]:
    """A running simulator, one device unless the marker says otherwise."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    marker = request.node.get_closest_marker("simulated_devices")
    opened = simulator() if marker is None else simulator(*marker.args, **marker.kwargs)
    with opened as running:
        yield running
