"""The host's memory: what is left of it, also in a container, and what pinned memory really takes."""

from __future__ import annotations

import os
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2^63


def pinned_size(nbytes: int) -> int:
    """What a pinned allocation takes: torch's host allocator rounds up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def available_memory(root: str | os.PathLike[str] = "/") -> int:
    """Bytes that this process may still take: of the machine, or of the container if that allows less.

    Args:
        root: where `proc` and `sys` lie, for tests.
    """
    base = Path(root)
    bounds = [_free_by_system(base)]
    for folder in _cgroups(base):
        version2 = (folder / "memory.max").exists()
        limit = _number(folder / ("memory.max" if version2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if version2 else "memory.usage_in_bytes"))
        if limit is not None and limit < _UNLIMITED:
            # Cached pages of files count as used, but make room when it is needed.
            bounds.append(max(0, limit - max(0, (used or 0) - _reclaimable(folder / "memory.stat"))))
    return min(bounds)


def default_pinned_budget() -> int:
    """A quarter of what is available: pinned memory cannot be swapped out, and others need some too."""
    return available_memory() // 4


def _free_by_system(base: Path) -> int:
    try:
        for line in (base / "proc" / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def _cgroups(base: Path) -> list[Path]:
    """The folders of this process's memory groups and of all around them, of version 2 and version 1."""
    mounts = base / "sys" / "fs" / "cgroup"
    found = [mounts, mounts / "memory"]
    try:
        lines = (base / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "" or "memory" in controllers.split(","):
            top = mounts if controllers == "" else mounts / "memory"
            parts = [part for part in path.split("/") if part]
            found += [top.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return [folder for folder in found if any((folder / n).exists() for n in ("memory.max", "memory.limit_in_bytes"))]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _reclaimable(path: Path) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return 0
