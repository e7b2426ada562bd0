"""Several linear layers with the same input as one, with a state dict that does not show it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class FusedLinear(nn.Module):
    """Linear layers side by side: one multiplication gives all their outputs, one after another.

    Args:
        parts: layers with the same number of inputs, all with a bias or all without.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [part.out_features for part in parts]
        needs_grad = parts[0].weight.requires_grad
        self.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), needs_grad)
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), needs_grad) if biases else None

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the layers, for tokens (..., inputs)."""
        return nn.functional.linear(tokens, self.weight, self.bias).split(self.sizes, dim=-1)

    def parts(self) -> list[nn.Linear]:
        """The layers, each with weights of its own again."""
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.detach().split(self.sizes)
        return [_linear(*pair) for pair in zip(self.weight.detach().split(self.sizes), biases, strict=True)]


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.clone())
    return made


class Fusing(nn.Module):
    """A layer whose projections can become one. A subclass says which in `_projections`."""

    _fused: tuple[str, tuple[str, ...]] | None = None
    _hooks: tuple[Any, ...] = ()

    def _projections(self) -> tuple[str, tuple[str, ...]]:
        """The name of the fused layer, and the names of those that it stands for."""
        raise AttributeError(f"{type(self).__name__} does not say which projections it has")

    def fuse_projections(self) -> None:
        """Put the projections into one layer. Done twice it is done once."""
        if self._fused is not None:
            return
        into, names = self._projections()
        self.add_module(into, FusedLinear([getattr(self, name) for name in names]))
        for name in names:
            delattr(self, name)
        self._fused = (into, names)
        self._hooks = (
            self.register_state_dict_post_hook(_show_parts),
            self.register_load_state_dict_pre_hook(_take_parts),
        )

    def unfuse_projections(self) -> None:
        """Give each projection a layer of its own again."""
        if self._fused is None:
            return
        into, names = self._fused
        for name, part in zip(names, getattr(self, into).parts(), strict=True):
            self.add_module(name, part.train(self.training))
        delattr(self, into)
        for hook in self._hooks:
            hook.remove()
        self._fused, self._hooks = None, ()


def _show_parts(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """In a state dict, the tensors of the parts in place of the fused ones."""
    into, names = layer._fused
    sizes = getattr(layer, into).sizes
    for leaf in ("weight", "bias"):
        whole = state.pop(f"{prefix}{into}.{leaf}", None)
        if whole is not None:
            state.update({f"{prefix}{name}.{leaf}": part for name, part in zip(names, whole.split(sizes), strict=True)})


def _take_parts(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The way back, for `load_state_dict`."""
    into, names = layer._fused
    for leaf in ("weight", "bias"):
        keys = [f"{prefix}{name}.{leaf}" for name in names]
        if all(key in state for key in keys):
            state[f"{prefix}{into}.{leaf}"] = torch.cat([state.pop(key) for key in keys])
