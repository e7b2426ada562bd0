"""`Model`: what every model class is. Loading, saving, config, dtype, device, counting."""

import torch
from torch import nn

from diffusion_core.config import ConfigMixin


class Model(ConfigMixin, nn.Module):
    """Base of all model classes. The arguments of `__init__` are the config and equal the reference's keys."""

    config_name = "config.json"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return next(tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return next(self.parameters()).device
