"""Progress bars: one switch for the whole process, and one function that makes a bar."""

import inspect
from collections.abc import Iterable
from typing import Any

_enabled = True


def enable_progress_bar() -> None:
    """Show progress bars; the default."""
    global _enabled
    _enabled = True


def disable_progress_bar() -> None:
    """Show no progress bar anywhere, whatever a pipeline's own settings say."""
    global _enabled
    _enabled = False


def is_progress_bar_enabled() -> bool:
    """Whether bars are shown unless a pipeline's own settings say otherwise."""
    return _enabled


def progress_bar(iterable: Iterable[Any] | None = None, total: float | None = None, **options: Any) -> Any:
    """A tqdm bar, over `iterable` or with `total` steps to be counted by `update()`.

    Args:
        iterable: what to walk through; the bar yields its items.
        total: the number of steps, when there is no `iterable` or it has no length.
        options: options of tqdm, such as `desc`, `leave` or `disable`.

    Raises:
        ValueError: if neither `iterable` nor `total` is given.
    """
    if iterable is None and total is None:
        raise ValueError("a progress bar needs an iterable or a total")
    from tqdm.auto import tqdm

    options["disable"] = not _enabled or options.get("disable", False)
    return tqdm(iterable, total=total, **options)


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that tqdm does not know, when they are set rather than when the first bar is drawn.

    Raises:
        TypeError: naming the unknown options and the known ones.
    """
    from tqdm.std import tqdm

    known = set(inspect.signature(tqdm.__init__).parameters) - {"self", "iterable", "total", "kwargs"} | {"display"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(f"progress bars have no option {', '.join(unknown)}; they have {', '.join(sorted(known))}")
