"""The library's log: plain `logging` under one name, with the level in one place."""

import logging
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING

_ROOT = logging.getLogger("diffusion_core")

__all__ = [
    "CRITICAL",
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "get_logger",
    "get_verbosity",
    "set_verbosity",
    "set_verbosity_debug",
    "set_verbosity_error",
    "set_verbosity_info",
    "set_verbosity_warning",
]


def get_logger(name: str | None = None) -> logging.Logger:
    """The library's logger, or the one of a module below it."""
    return _ROOT if name is None or name == _ROOT.name else _ROOT.getChild(name.removeprefix("diffusion_core."))


def set_verbosity(level: int) -> None:
    """Show messages of `level` (`logging.INFO` and so on) and above."""
    _ROOT.setLevel(level)


def get_verbosity() -> int:
    """The level in force."""
    return _ROOT.getEffectiveLevel()


def set_verbosity_debug() -> None:
    """Show everything."""
    set_verbosity(DEBUG)


def set_verbosity_info() -> None:
    """Show what the library does and why."""
    set_verbosity(INFO)


def set_verbosity_warning() -> None:
    """Show only what may surprise; the default."""
    set_verbosity(WARNING)


def set_verbosity_error() -> None:
    """Show errors alone."""
    set_verbosity(ERROR)
