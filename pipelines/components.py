"""Components by name: which (library, class) a `model_index.json` entry means, and which entry a component gets.

Nothing is imported because a file names it: only this library, transformers, and what the program has imported itself.
"""

import importlib
import importlib.util
import sys
from typing import Any

from torch import nn

from diffusion_core.errors import ConfigError
from diffusion_core.logging import transformers_quiet

Entry = tuple[str | None, str | None]
ABSENT: Entry = (None, None)

OURS = "diffusers"  # the name that the reference writes and reads for its own classes, so ours carry it too
_OUR_NAMES = frozenset({OURS, "diffusion_core"})
_PIPELINES = "diffusion_core.pipelines"


def unwrap(component: Any) -> Any:
    """The module inside one that `torch.compile` made; anything else as it is."""
    return getattr(component, "_orig_mod", component) if isinstance(component, nn.Module) else component


def entry_of(component: Any) -> Entry:
    """The library and class under which `model_index.json` records a component; `(None, None)` for None."""
    if component is None:
        return ABSENT
    made_by = type(unwrap(component))
    module, name = made_by.__module__, made_by.__name__
    if module.startswith(f"{_PIPELINES}."):
        from .base import Pipeline

        part = module.removeprefix(f"{_PIPELINES}.").split(".")[0]
        return (OURS, name) if issubclass(made_by, Pipeline) else (part, name)
    root = module.split(".")[0]
    if root in _OUR_NAMES:
        return OURS, name
    if root == "transformers":
        return root, _portable(name)
    return module, name


def class_of(entry: Entry) -> type:
    """The class that an entry names.

    Raises:
        ConfigError: if it is unknown here. The message says which libraries are.
    """
    library, name = entry
    if not isinstance(library, str) or not isinstance(name, str):
        raise ConfigError(f"{list(entry)} is not a pair of a library and a class")
    found = _find(library, name)
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        known = "diffusers (read as this library), transformers, and modules that your program has already imported"
        raise ConfigError(f"no class {name} of {library} is known here; the libraries read are {known}")
    return found


def _find(library: str, name: str) -> Any:
    if library in _OUR_NAMES:
        return public(name)
    if library == "transformers":
        import transformers

        # Image processors were called feature extractors, and are still named so in older checkpoints.
        names = [name, name.replace("FeatureExtractor", "ImageProcessor")]
        with transformers_quiet():
            return next((getattr(transformers, each) for each in names if hasattr(transformers, each)), None)
    if library.isidentifier() and importlib.util.find_spec(f"{_PIPELINES}.{library}"):
        found = getattr(importlib.import_module(f"{_PIPELINES}.{library}"), name, None)
        return found or public(name)
    return getattr(sys.modules.get(library), name, None)


def public_names() -> list[str]:
    """The names in the public table of this library."""
    return list(importlib.import_module("diffusion_core").__all__)


def public(name: str) -> Any:
    """One of our classes by its public name, or None. The name comes from a file, so only the table is searched."""
    return getattr(importlib.import_module("diffusion_core"), name) if name in public_names() else None


def _portable(name: str) -> str:
    """transformers names an image processor after its backend, which other versions do not have."""
    import transformers

    for suffix in ("Pil", "Fast"):
        plain = name.removesuffix(suffix)
        if plain != name and "ImageProcessor" in name:
            with transformers_quiet():
                if hasattr(transformers, plain):
                    return plain
    return name
