"""The face that people import: every public name, resolved only when it is first used.

The names stand in one sorted table, `__init__.pyi`, which type checkers read as it is.
"""

import lazy_loader

from .familiar import install as _install

_install()
__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
