# pyright: reportMissingImports=false
from .config import ConfigMixin as ConfigMixin
from .config import FrozenDict as FrozenDict
from .errors import DiffusionCoreError as DiffusionCoreError
from .outputs import BaseOutput as BaseOutput

__version__: str
