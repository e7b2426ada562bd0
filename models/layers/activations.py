"""Activations by the names that configs use, and the gated feed-forward inputs of transformers."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Function = Callable[..., torch.Tensor]


def _gelu(values: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return F.gelu(values)


def _gelu_tanh(values: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return F.gelu(values, approximate="tanh")


_ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], Function]] = {
    "gelu": (nn.GELU, _gelu),
    "gelu_tanh": (functools.partial(nn.GELU, approximate="tanh"), _gelu_tanh),
    "mish": (nn.Mish, F.mish),
    "relu": (nn.ReLU, F.relu),
    "silu": (nn.SiLU, F.silu),
    "swish": (nn.SiLU, F.silu),
}


def get_activation(name: str) -> nn.Module:
    """The activation called `name` in configs: gelu, gelu_tanh, mish, relu, silu or swish (the same), in any case.

    Raises:
        ValueError: if there is no activation of that name.
    """
    return _find(name)[0]()


def activation_function(name: str) -> Function:
    """As `get_activation`, as a function: a call of it costs a fifth of a module's in Python.

    It takes `inplace`: True lets it write over its input, which saves the memory of a second tensor where torch can.
    """
    return _find(name)[1]


def _find(name: str) -> tuple[Callable[[], nn.Module], Function]:
    try:
        return _ACTIVATIONS[name.lower()]
    except (KeyError, AttributeError):
        raise ValueError(f"unknown activation {name!r}; known are {sorted(_ACTIVATIONS)}") from None


class GELU(nn.Module):
    """A linear layer and the Gaussian error unit (Hendrycks and Gimpel 2016); `approximate` is "none" or "tanh"."""

    def __init__(self, dim_in: int, dim_out: int, approximate: str = "none", bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out, bias=bias)
        self.approximate = approximate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.proj(hidden_states), approximate=self.approximate)


class LinearSiLU(nn.Module):
    """A linear layer and SiLU (Elfwing et al. 2018)."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.silu(self.proj(hidden_states))


class GEGLU(nn.Module):
    """One linear layer makes values and gates; the gates pass through GELU (Shazeer 2020, "GLU variants", eq. 6)."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, 2 * dim_out, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        values, gates = self.proj(hidden_states).chunk(2, dim=-1)
        gates = F.gelu(gates)
        return values * gates if torch.is_grad_enabled() else gates.mul_(values)


class SwiGLU(nn.Module):
    """As `GEGLU`, with the gates through SiLU (Shazeer 2020, "GLU variants", eq. 6)."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, 2 * dim_out, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        values, gates = self.proj(hidden_states).chunk(2, dim=-1)
        gates = F.silu(gates)
        return values * gates if torch.is_grad_enabled() else gates.mul_(values)
