"""The config round trip: the arguments of `__init__` are the config, and the config is a JSON file.

A class that derives from `ConfigMixin` needs no decorator: its constructor is watched, and what it was called with,
defaults filled in, becomes `self.config`.
"""

import functools
import inspect
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from diffusion_core.errors import ConfigError, MissingFileError
from diffusion_core.hub import find_file, is_local, source_name
from diffusion_core.logging import get_logger

logger = get_logger(__name__)

# Written by the reference under this name; kept so that checkpoints go both ways.
VERSION_KEY = "_diffusers_version"
REFERENCE_VERSION = "0.42.1"
# Keys that describe a file rather than an object: never handed to a constructor, never written back.
_FILE_KEYS = frozenset({"_ignore_files", "_use_default_values", "_pre_quantization_dtype", "_name_or_path"})

_Init = TypeVar("_Init", bound=Callable[..., None])


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed, and whose keys read as attributes too.

    Two configs are equal if they build the same object: JSON has no tuples, so a list equals a tuple, and entries
    whose names start with an underscore describe a file and do not count.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}; it has {sorted(self)}") from None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a config cannot be changed in place: make a new object with `from_config(config, key=value)`")

    __setitem__ = __delitem__ = __setattr__ = __delattr__ = __ior__ = _refuse  # type: ignore[assignment]
    pop = popitem = update = setdefault = clear = _refuse  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and _comparable(self) == _comparable(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return FrozenDict, (dict(self),)


class ConfigMixin:
    """Base of everything that is built from a config file: models, schedulers, pipelines.

    Subclasses name their file in `config_name`. Arguments in `ignore_for_config` are not recorded.
    Entries in `derived_config` are added by the constructor, and are no surprise in a file.
    """

    config_name: ClassVar[str] = "config.json"
    ignore_for_config: ClassVar[tuple[str, ...] | list[str]] = ()
    derived_config: ClassVar[tuple[str, ...]] = ()
    _internal_dict: FrozenDict

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]

    @property
    def config(self) -> FrozenDict:
        """What the object was made with, defaults filled in, plus keys that `from_config` carried along."""
        return self._internal_dict

    def __getattr__(self, name: str) -> Any:
        """Entries of the config read as attributes, as code for older versions of the reference does."""
        config = self.__dict__.get("_internal_dict")
        if config is not None and name in config and not name.startswith("_"):
            return config[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def register_to_config(self, **values: Any) -> None:
        """Add or replace entries of the config, as for a setting that changed after construction."""
        current = self.__dict__.get("_internal_dict", FrozenDict())
        self.__dict__["_internal_dict"] = FrozenDict({**current, **{key: _own(value) for key, value in values.items()}})

    @classmethod
    def config_arguments(cls) -> dict[str, Any]:
        """Every argument that a config may hold, with its default (`inspect.Parameter.empty` where it has none)."""
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {
            parameter.name: parameter.default
            for parameter in parameters
            if parameter.kind not in kinds and parameter.name not in cls.ignore_for_config
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Build an object from a config, overridden by `kwargs`.

        Keys that this class does not know stay in the new object's config, so that switching to another class and
        back keeps them. A key that was only a default of the class that wrote it gives way to this class's default.

        Args:
            config: the mapping, such as another object's `config` or a loaded file.
            return_unused_kwargs: also return what `kwargs` holds beyond the arguments, instead of a warning.

        Raises:
            ConfigError: if `config` is not a mapping, an argument without default is missing, or values are of kinds
                that the class cannot use.
        """
        if not isinstance(config, Mapping):
            remedy = " Load a file first with `load_config`." if isinstance(config, str | os.PathLike) else ""
            raise ConfigError(f"{cls.__name__}.from_config needs a mapping, not {type(config).__name__}.{remedy}")
        known = cls.config_arguments()
        defaulted = set(config.get("_use_default_values", ())) if config.get("_class_name") != cls.__name__ else set()
        values = {
            key: value
            for key, value in config.items()
            if not key.startswith("_") and key not in defaulted and key not in kwargs
        }
        unused = {key: kwargs[key] for key in kwargs if key not in known}
        arguments = {key: value for key, value in {**values, **kwargs}.items() if key in known}
        missing = [key for key, default in known.items() if default is inspect.Parameter.empty and key not in arguments]
        if missing:
            raise ConfigError(f"the config for {cls.__name__} lacks {missing}, which have no default")
        try:
            made = cls(**arguments)
        except (TypeError, ArithmeticError, LookupError, AttributeError) as error:
            raise ConfigError(f"the config makes no {cls.__name__}: {error}") from error
        carried = {key: value for key, value in values.items() if key not in known}
        made.register_to_config(**carried)
        if return_unused_kwargs:
            return made, unused
        if unused:
            logger.warning("%s takes no %s; ignored. It takes %s", cls.__name__, sorted(unused), sorted(known))
        return made

    @classmethod
    def load_config(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        return_unused_kwargs: bool = False,
        subfolder: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The config of a repo on the Hub, of a folder or of a JSON file, as a dict for `from_config`.

        Args:
            return_unused_kwargs: return a pair, the second being `kwargs`.

        Raises:
            MissingFileError: if there is no config; the message says where one is.
            ConfigError: if the file is not a JSON object.
            CheckpointError: if the repo cannot be reached.
        """
        path = Path(source_name(pretrained_model_name_or_path)).expanduser()
        if path.is_file() and path.suffix in {".safetensors", ".bin", ".ckpt", ".pt", ".pth"}:
            raise ConfigError(f"{path} is a file of weights: name the folder that holds it and {cls.config_name}")
        if not path.is_file():
            try:
                path = find_file(
                    pretrained_model_name_or_path,
                    cls.config_name,
                    subfolder=subfolder,
                    revision=revision,
                    token=token,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                )
            except MissingFileError as error:
                hint = "" if subfolder or not is_local(path) else _subfolder_hint(path, cls.config_name)
                raise MissingFileError(f"{error}{hint}") from error
        config = cls.read_config(path)
        return (config, kwargs) if return_unused_kwargs else config

    @classmethod
    def read_config(cls, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read the config from a file, or from `config_name` inside a folder, and check that it is a JSON object.

        Raises:
            ConfigError: if there is no such file, or it is not a JSON object. The message names the file.
        """
        file = Path(path)
        if file.is_dir():
            file = file / cls.config_name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"no file named {file.name} in {file.parent}") from None
        except (ValueError, RecursionError, OSError) as error:
            raise ConfigError(f"{file} is not readable as JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file} holds a JSON {type(content).__name__}, expected an object")
        return content

    def save_config(self, save_directory: str | os.PathLike[str]) -> None:
        """Write `config_name` into a folder, which is made if need be.

        Raises:
            NotADirectoryError: if `save_directory` is a file.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"save_directory={str(folder)!r} is a file; name a folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / self.config_name, self.to_json_string())

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        """Write the config to a file of any name."""
        write_text(Path(json_file_path), self.to_json_string())

    def to_json_string(self) -> str:
        """The config as the text of its file."""
        content = {"_class_name": type(self).__name__, VERSION_KEY: REFERENCE_VERSION}
        content |= {key: value for key, value in self.config.items() if key not in _FILE_KEYS | content.keys()}
        return json.dumps(content, indent=2, sort_keys=True, default=_to_json) + "\n"


def write_text(path: Path, text: str) -> None:
    """Write beside `path` and rename, so that a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def unknown_entries(cls: type[ConfigMixin], config: Mapping[str, Any]) -> list[str]:
    """The entries of a loaded config that the class has no argument for, sorted; those of the file do not count."""
    known = {*cls.config_arguments(), *cls.derived_config}
    return sorted(key for key in config if not key.startswith("_") and key not in known)


def register_to_config(init: _Init) -> _Init:
    """Mark a constructor as the config's source. Every constructor is; the name is here for code that writes it."""
    return init


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that the outermost call records its arguments before the body runs."""
    if getattr(init, "_records_config", False):
        return init
    signature = inspect.signature(init)

    @functools.wraps(init)
    def recorded(self: ConfigMixin, *args: Any, **kwargs: Any) -> None:
        if "_internal_dict" not in self.__dict__:
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            given = set(bound.arguments)
            bound.apply_defaults()
            known = type(self).config_arguments()
            values = {key: value for key, value in bound.arguments.items() if key in known}
            defaulted = sorted(set(known) - given)
            self.register_to_config(**values, _use_default_values=defaulted)
        init(self, *args, **kwargs)

    recorded._records_config = True  # type: ignore[attr-defined]
    return recorded


def _to_json(value: Any) -> Any:
    """Values that JSON has no word for: numpy and torch numbers, paths, dtypes, tuples inside objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value).removeprefix("torch.")


def _own(value: Any) -> Any:
    """A copy of plain containers, so that a list that the caller changes later does not change the config."""
    if type(value) in {list, tuple, set}:
        return type(value)(_own(item) for item in value)
    return {key: _own(item) for key, item in value.items()} if type(value) is dict else value


def _comparable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items() if not str(key).startswith("_")}
    return [_comparable(item) for item in value] if isinstance(value, list | tuple) else value


def _subfolder_hint(folder: Path, config_name: str) -> str:
    holders = sorted(entry.name for entry in folder.iterdir() if (entry / config_name).is_file())
    return f". These folders in it have one: {', '.join(holders)}; pass subfolder={holders[0]!r}." if holders else ""
