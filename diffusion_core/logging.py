"""The library's log: plain `logging` under one name, with the level in one place."""

import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING
from typing import Any

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
    "transformers_quiet",
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


# transformers imports torchao where it is installed, which tells of each of its kernels that this system lacks.
_TOLD_AT_IMPORT = ("torchao", "torch.utils._pytree")


class _Hush:
    """What transformers said before the first of the contexts that are open, and how many are."""

    lock = threading.Lock()
    depth = 0
    before: tuple[int, bool, bool] = (WARNING, True, False)


@contextmanager
def transformers_quiet() -> Iterator[None]:
    """A context for calls of transformers: no bars of its own, and a log one level quieter than this library's.

    What it warns of by default, such as which of its image processors it takes, is no news to users of a pipeline.
    """
    with _without_warnings(_TOLD_AT_IMPORT):
        if "transformers" in sys.modules:
            with _hushed():
                yield
        else:
            yield


@contextmanager
def _without_warnings(names: Sequence[str]) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(max(each.level, ERROR))
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


@contextmanager
def _hushed() -> Iterator[None]:
    import transformers.utils.logging as theirs
    from huggingface_hub.utils import are_progress_bars_disabled

    with _Hush.lock:
        if not _Hush.depth:
            _Hush.before = (theirs.get_verbosity(), theirs.is_progress_bar_enabled(), are_progress_bars_disabled())
            theirs.set_verbosity(max(_Hush.before[0], min(get_verbosity() + 10, CRITICAL)))
            theirs.disable_progress_bar()
        _Hush.depth += 1
    try:
        yield
    finally:
        with _Hush.lock:
            _Hush.depth -= 1
            if not _Hush.depth:
                _restore(theirs)


def _restore(theirs: Any) -> None:
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    level, bars, hub_bars_off = _Hush.before
    theirs.set_verbosity(level)
    if bars:
        theirs.enable_progress_bar()
    # transformers switches the bars of downloads with its own.
    (disable_progress_bars if hub_bars_off else enable_progress_bars)()
