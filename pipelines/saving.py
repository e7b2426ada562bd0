"""From a pipeline to a checkpoint: a folder for each component, and `model_index.json` when all of them are there."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion_core.logging import transformers_quiet

from .components import unwrap


def save(components: Mapping[str, Any], folder: Path, **options: Any) -> None:
    """Save each component to a folder of its name.

    Args:
        components: by name; None is passed over.
        folder: made if need be.
        options: `safe_serialization`, `variant`, `max_shard_size`: handed to those that take them, unless None.

    Raises:
        NotADirectoryError: if `folder` is a file.
        TypeError: if a component cannot be saved; nothing is written then.
    """
    if folder.is_file():
        raise NotADirectoryError(f"save_directory={str(folder)!r} is a file; name a folder")
    present = {name: unwrap(component) for name, component in components.items() if component is not None}
    unsavable = [f"{name} ({type(each).__name__})" for name, each in present.items() if not _can_save(each)]
    if unsavable:
        raise TypeError(f"{', '.join(unsavable)} cannot be saved: no save_pretrained. Replace it, or set it to None")
    folder.mkdir(parents=True, exist_ok=True)
    for name, component in present.items():
        taken = inspect.signature(component.save_pretrained).parameters
        chosen = {key: value for key, value in options.items() if key in taken and value is not None}
        with transformers_quiet():
            component.save_pretrained(str(folder / name), **chosen)


def _can_save(component: Any) -> bool:
    return callable(getattr(component, "save_pretrained", None))
