"""The fixture `simulated_devices` and its marker, for all tests of the offload package."""

from diffusion_core.offload.simulator.pytest_plugin import pytest_configure, simulated_devices

__all__ = ["pytest_configure", "simulated_devices"]
