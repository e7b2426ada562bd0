"""What every test leaves behind as it found it: how much the library says, and whether it shows bars."""

from collections.abc import Iterator

import pytest

from diffusion_core import progress
from diffusion_core.logging import get_verbosity, set_verbosity


@pytest.fixture(autouse=True)
def voice() -> Iterator[None]:
    """The command line and the switches change these for the whole process."""
    said, shown = get_verbosity(), progress.is_progress_bar_enabled()
    yield
    set_verbosity(said)
    (progress.enable_progress_bar if shown else progress.disable_progress_bar)()
