"""Several linear layers with the same input as one, with a state dict that does not show it."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class FusedLinear(nn.Linear):
    """Linear layers side by side, with their outputs one after another.

    Args:
        parts: layers with the same number of inputs, all with a bias or all without.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self.sizes = [part.out_features for part in parts]
        bias = parts[0].bias is not None
        super().__init__(parts[0].in_features, sum(self.sizes), bias=bias, device="meta")
        for name in ("weight", "bias") if bias else ("weight",):
            values = [getattr(part, name) for part in parts]
            setattr(self, name, nn.Parameter(torch.cat([value.detach() for value in values]), values[0].requires_grad))
        self.train(parts[0].training)

    def parts(self) -> list[nn.Linear]:
        """The layers, each with weights of its own again."""
        made = [nn.Linear(self.in_features, size, bias=self.bias is not None, device="meta") for size in self.sizes]
        for name in ("weight", "bias") if self.bias is not None else ("weight",):
            whole = getattr(self, name)
            for part, values in zip(made, _pieces(whole.detach(), self.sizes), strict=True):
                setattr(part, name, nn.Parameter(values.clone(), whole.requires_grad))
        return [part.train(self.training) for part in made]


def _pieces(whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The rows of each part. By slices, which quantised weights know, as they do not know `split`."""
    ends = list(itertools.accumulate(sizes))
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class Fusing(nn.Module):
    """A layer whose projections can become fewer. A subclass says which in `_projections`."""

    _fused: Mapping[str, tuple[str, ...]] = {}
    _hooks: tuple[Any, ...] = ()

    def _projections(self) -> dict[str, tuple[str, ...]]:
        """The names of the fused layers, each with the names of those that it stands for."""
        raise AttributeError(f"{type(self).__name__} does not say which projections it has")

    def check_fusing(self) -> None:
        """Whether the projections are what can be fused.

        Raises:
            ValueError: if they are quantised, wrapped or not all of a kind.
        """
        if self._fused:
            return
        for names in self._projections().values():
            parts = [getattr(self, name) for name in names]
            strange = [type(part).__name__ for part in parts if type(part) is not nn.Linear]
            strange += [type(part.weight.data).__name__ for part in parts if type(part.weight.data) is not torch.Tensor]
            if strange:
                raise ValueError(f"projections are fused before they become {strange[0]}: fuse them first")
            if len({(part.weight.dtype, part.weight.device, part.bias is None) for part in parts}) > 1:
                raise ValueError(f"{', '.join(names)} differ in dtype, device or bias, and cannot be one layer")

    def fuse_projections(self) -> None:
        """Put the projections into fewer layers. Done twice it is done once.

        Raises:
            ValueError: if they cannot be fused; nothing is changed then.
        """
        if self._fused:
            return
        self.check_fusing()
        fused = self._projections()
        for into, names in fused.items():
            self.add_module(into, FusedLinear([getattr(self, name) for name in names]))
            for name in names:
                delattr(self, name)
        self._fused = fused
        self._hooks = (
            self.register_state_dict_post_hook(_show_parts),
            self.register_load_state_dict_pre_hook(_take_parts),
        )

    def unfuse_projections(self) -> None:
        """Give each projection a layer of its own again."""
        for into, names in self._fused.items():
            for name, part in zip(names, getattr(self, into).parts(), strict=True):
                self.add_module(name, part)
            delattr(self, into)
        for hook in self._hooks:
            hook.remove()
        self._fused, self._hooks = {}, ()

    def _project_all(self, into: str, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the layers that one fused layer stands for."""
        layer: Any = getattr(self, into)
        return layer(tokens).split(layer.sizes, dim=-1)


def _show_parts(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """In a state dict, the tensors of the parts in place of the fused ones."""
    for into, names in layer._fused.items():
        sizes = getattr(layer, into).sizes
        for leaf in ("weight", "bias"):
            whole = state.pop(f"{prefix}{into}.{leaf}", None)
            if whole is not None:
                parts = zip(names, _pieces(whole, sizes), strict=True)
                state.update({f"{prefix}{name}.{leaf}": part for name, part in parts})


def _take_parts(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The way back, for `load_state_dict`."""
    for into, names in layer._fused.items():
        for leaf in ("weight", "bias"):
            keys = [f"{prefix}{name}.{leaf}" for name in names]
            if all(key in state for key in keys):
                state[f"{prefix}{into}.{leaf}"] = torch.cat([state.pop(key) for key in keys])
