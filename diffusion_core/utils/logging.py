"""A familiar import path: the log and the switch for progress bars."""

from diffusion_core.logging import (
    CRITICAL,
    DEBUG,
    ERROR,
    INFO,
    WARNING,
    get_logger,
    get_verbosity,
    set_verbosity,
    set_verbosity_debug,
    set_verbosity_error,
    set_verbosity_info,
    set_verbosity_warning,
)
from diffusion_core.progress import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

__all__ = [
    "CRITICAL",
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "disable_progress_bar",
    "enable_progress_bar",
    "get_logger",
    "get_verbosity",
    "is_progress_bar_enabled",
    "set_verbosity",
    "set_verbosity_debug",
    "set_verbosity_error",
    "set_verbosity_info",
    "set_verbosity_warning",
]
