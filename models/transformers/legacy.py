"""`Transformer2DModel`: a name in old checkpoints, for what now has a class of its own."""

import os
from collections.abc import Mapping
from typing import Any

from diffusion_core.errors import ConfigError

from ..base import Model
from .pixart import PixArtTransformer2DModel

_HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only")


class Transformer2DModel(Model):
    """The class that checkpoints of PixArt-alpha name; what is loaded or built is a `PixArtTransformer2DModel`.

    Saving it writes the present name. The other kinds of the old class are not here.
    """

    def __init__(self, **_: Any) -> None:
        raise TypeError("Transformer2DModel is an old name: build a PixArtTransformer2DModel with the same arguments")

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, subfolder: str | None = None, **kwargs: Any
    ) -> Any:
        """Load a PixArt-alpha checkpoint; `kwargs` are those of `Model.from_pretrained`.

        Raises:
            ConfigError: if the config is of another kind (`norm_type`).
            CheckpointError: with its subclasses, as for `Model.from_pretrained`.
        """
        hub = {name: kwargs[name] for name in _HUB if name in kwargs}
        _check_kind(cls.load_config(pretrained_model_name_or_path, subfolder=subfolder, **hub))
        return PixArtTransformer2DModel.from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """A `PixArtTransformer2DModel` with initial weights; see `ConfigMixin.from_config`."""
        _check_kind(config)
        return PixArtTransformer2DModel.from_config(config, return_unused_kwargs, **kwargs)


def _check_kind(config: Mapping[str, Any]) -> None:
    if config.get("norm_type") != "ada_norm_single":
        raise ConfigError(
            f"a Transformer2DModel with norm_type={config.get('norm_type')!r} is not supported; only PixArt-alpha's "
            "'ada_norm_single' is"
        )
