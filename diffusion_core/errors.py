"""Every error that diffusion-core raises by itself, as a tree.

    DiffusionCoreError
    |-- CheckpointError (OSError)       a file or folder of weights that cannot be used
    |   |-- CorruptFileError            truncated, not safetensors, a pointer or a page in place of weights
    |   |-- MissingFileError            a file that the checkpoint promises or the caller asked for is absent
    |   `-- KeyMismatchError            missing, unexpected or wrongly shaped tensors, listed
    |-- ConfigError (ValueError)        a config or model_index that makes no sense
    |-- PlacementError (ValueError)     a memory mode or device map that cannot be applied
    |-- MissingPackageError (ImportError, RuntimeError)  what was asked for needs a package that is not here
    |-- NumericalError (ArithmeticError)  values that are not finite
    |-- UnsupportedError (ValueError)   what the reference has and this library has not
    `-- RaceError (RuntimeError)        unordered accesses to memory on a simulated device

Wrong arguments raise plain `ValueError` or `TypeError`, naming the argument and the remedy.
"""

from collections.abc import Sequence


class DiffusionCoreError(Exception):
    """The root of the tree; catch it to catch all that the library raises on purpose."""


class CheckpointError(DiffusionCoreError, OSError):
    """A file or folder of weights cannot be used."""


class CorruptFileError(CheckpointError):
    """A file is not what its name says: truncated, a git-lfs pointer, an HTML page, a broken header."""


class MissingFileError(CheckpointError):
    """A file that a checkpoint promises, or that was asked for, is not there."""


class KeyMismatchError(CheckpointError):
    """The tensors of a checkpoint and of the model differ; the message lists every one that does.

    Attributes:
        missing: names that the model has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model lacks.
        mismatched: names with the shape in the checkpoint and the shape in the model.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = ()


class ConfigError(DiffusionCoreError, ValueError):
    """A config file or model_index cannot be understood."""


class PlacementError(DiffusionCoreError, ValueError):
    """A device map or memory mode cannot be applied; nothing was changed."""


class MissingPackageError(DiffusionCoreError, ImportError, RuntimeError):
    """A package that was asked for is not installed, or too old; the message says how to get it.

    A `RuntimeError` too, since that is what the reference raises.
    """


class NumericalError(DiffusionCoreError, ArithmeticError):
    """A model or scheduler produced values that are not finite."""


class UnsupportedError(DiffusionCoreError, ValueError):
    """Something that code written for the reference may call and that is not here; the message says what to do."""


class RaceError(DiffusionCoreError, RuntimeError):
    """A simulated device found two accesses to the same memory without an order between them."""
