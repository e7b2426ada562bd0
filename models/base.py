"""`Model`: what every model class is. Loading, saving, config, dtype, device, counting."""

from typing import Any

import torch
from torch import nn

from diffusion_core.config import ConfigMixin

from ..offload.mixin import OffloadMixin


class Model(ConfigMixin, OffloadMixin, nn.Module):
    """Base of all model classes. The arguments of `__init__` are the config and equal the reference's keys."""

    config_name = "config.json"

    def __getattr__(self, name: str) -> Any:
        """Submodules and tensors first, then entries of the config."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            config = self.__dict__.get("_internal_dict")
            if config is None or name not in config or name.startswith("_"):
                raise
            return config[name]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return next(tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return next(self.parameters()).device
