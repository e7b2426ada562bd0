"""Sizes of memory: "8GB" to bytes and back to words."""

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes of a size: an int, or a number with a unit.

    Args:
        size: bytes, or text such as "8GB" (10^9 bytes each) or "7.5 GiB" (2^30 bytes each).
        name: how the error calls the argument.

    Raises:
        ValueError: the text is not a number with a known unit, or the size is negative.
        TypeError: neither int nor text.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f'`{name}` must be bytes as an int or text such as "8GB", but is {size!r}.')
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                f'`{name}` is {size!r}; write a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB ("8GB").'
            )
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 0:
        raise ValueError(f"`{name}` must not be negative, but is {size}.")
    return size


def format_bytes(size: int) -> str:
    """A size in words, with binary units: 1536 is "1.50 KiB"."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{size} bytes" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the loop ends at GiB")
