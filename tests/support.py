"""What tests share: where the reference material lies, and comparisons."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"
HUB = SHARED / "hub"

needs_shared = pytest.mark.skipif(not HUB.is_dir(), reason="the folder ../shared is not here")


def hub_config(name: str) -> Path:
    """The path of a real config below `shared/hub`; the test is skipped where the folder is absent."""
    path = HUB / name
    if not path.exists():
        pytest.skip(f"{name} is not in ../shared/hub")
    return path
