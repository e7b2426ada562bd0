"""The face that people import: every public name, resolved only when it is first used.

The names stand in one sorted table, `__init__.pyi`, which type checkers read as it is.
"""

import importlib
from typing import Any

import lazy_loader

from .familiar import install as _install

_install()
__version__ = "0.1.0"
_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
# Packages that code written for the reference reaches by `diffusers.utils.load_image` and the like.
_PACKAGES = frozenset({"callbacks", "hooks", "image_processor", "models", "pipelines", "schedulers", "utils"})


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}") if name in _PACKAGES else _public(name)
