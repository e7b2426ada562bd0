"""`AutoModel`: the right class for a checkpoint, as its files name it."""

import importlib
import os
from collections.abc import Mapping
from typing import Any, cast

from diffusion_core.config import ConfigMixin
from diffusion_core.errors import ConfigError, MissingFileError
from diffusion_core.hub import find_file

from .base import Model
from .foreign import load_transformers_model

_LIBRARIES = frozenset({"diffusers", "diffusion_core"})
_HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only")


class _PipelineIndex(ConfigMixin):
    config_name = "model_index.json"


class AutoModel:
    """Loads a model without its class being named. It is never an object itself; nothing from a repo is executed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "AutoModel makes no objects: use AutoModel.from_pretrained(path) or AutoModel.from_config(config)"
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, subfolder: str | None = None, **kwargs: Any
    ) -> Any:
        """Load the model of a repo or folder; `kwargs` are those of `Model.from_pretrained`.

        `model_index.json` says which class the component in `subfolder` has; without one, `config.json` says it, by
        `_class_name` for our classes and by `model_type` for those of transformers.

        Raises:
            ConfigError: if the files name no class, or one that is not here; the message names it.
            CheckpointError: with its subclasses, as for `Model.from_pretrained`.
            ValueError: for `trust_remote_code=True`.
        """
        if kwargs.pop("trust_remote_code", False):
            raise ValueError("trust_remote_code=True: code from a repo is never run; import the class and load with it")
        hub = {name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs}
        loader = cls._find(pretrained_model_name_or_path, subfolder, hub)
        if isinstance(loader, type) and issubclass(loader, Model):
            return loader.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        return load_transformers_model(loader, pretrained_model_name_or_path, subfolder=subfolder, **kwargs)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | os.PathLike[str], *, subfolder: str | None = None, **kwargs: Any
    ) -> Any:
        """A model with initial weights, from a config, or from the config in a repo, folder or file.

        Raises:
            ConfigError: as for `from_pretrained`.
        """
        if not isinstance(config, Mapping):
            hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
            config = cast("dict[str, Any]", Model.load_config(config, subfolder=subfolder, **hub))
        found = _from_config_file(config, "the config")
        if isinstance(found, type) and issubclass(found, Model):
            return found.from_config(config, **kwargs)
        import transformers

        entries = {key: value for key, value in config.items() if key != "model_type"}
        made = transformers.AutoConfig.for_model(config["model_type"], **entries)
        return (
            found._from_config(made, **kwargs) if hasattr(found, "_from_config") else found.from_config(made, **kwargs)
        )

    @classmethod
    def _find(cls, path: str | os.PathLike[str], subfolder: str | None, hub: dict[str, Any]) -> Any:
        if subfolder:
            try:
                index = _PipelineIndex.read_config(find_file(path, _PipelineIndex.config_name, **hub))
            except MissingFileError:
                index = {}
            entry = index.get(subfolder)
            if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
                return _from_index(entry[0], entry[1], f"{os.fspath(path)}/{_PipelineIndex.config_name}")
        where = f"{os.fspath(path)}/{subfolder or ''}".rstrip("/")
        return _from_config_file(Model.load_config(path, subfolder=subfolder, **hub), where)


def _from_index(library: str, name: str, where: str) -> Any:
    if library == "transformers":
        import transformers

        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
        raise ConfigError(f"{where} names {name} of transformers, which is no model class of the installed version")
    return _own_class(name, where if library in _LIBRARIES else f"{where} ({library})")


def _from_config_file(config: Mapping[str, Any], where: str) -> Any:
    name = config.get("_class_name")
    if isinstance(name, str):
        return _own_class(name, where)
    if isinstance(config.get("model_type"), str):
        return _transformers_class(config)
    remote = "; it needs code from the repo, which is never run" if config.get("auto_map") else ""
    raise ConfigError(f"{where} names no class: its config.json has neither _class_name nor model_type{remote}")


def _transformers_class(config: Mapping[str, Any]) -> Any:
    """The class that wrote the config, or the one that transformers has for its kind of model."""
    import transformers

    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModel


def _own_class(name: str, where: str) -> type[Model]:
    found = getattr(importlib.import_module(__package__ or ""), name, None)
    if isinstance(found, type) and issubclass(found, Model):
        return found
    raise ConfigError(
        f"{where} names the class {name}, which is no model of this library. If it is a pipeline or a scheduler, load "
        "it with Pipeline.from_pretrained or the scheduler's class."
    )
