"""Adaptive layer norms: shift, scale and gate come from the conditioning vector (DiT, Peebles and Xie 2023)."""

from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
# The conditioning vector, or what was made of it ahead; see `Modulating`.
Vector: TypeAlias = Any


def modulate(hidden_states: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Tokens (B, S, C) times 1 + scale, plus shift, both (B, C) and the same for all tokens of a sample."""
    return hidden_states * (1 + scale[:, None]) + shift[:, None]


def gated(hidden_states: Tensor, gate: Tensor) -> Tensor:
    """Tokens (B, S, C) times a gate (B, C)."""
    return gate[:, None] * hidden_states


def add_gated(hidden_states: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """Tokens (B, S, C) plus an update of them times a gate (B, C)."""
    return torch.addcmul(hidden_states, gate[:, None], update)


def normalize(hidden_states: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """`modulate` after a layer norm over channels. In one function, 115 times a step of FLUX, since calls cost time."""
    normed = torch.layer_norm(hidden_states, hidden_states.shape[-1:], eps=eps)
    return torch.addcmul(shift[:, None], normed, 1 + scale[:, None])


class Modulating(nn.Module):
    """A layer whose vectors come from the conditioning vector alone, so that a run can make those of all steps ahead.

    Where it has, blocks are handed a dict in place of the vector: by the names of such layers in the block, what they
    make of it (see `offload.hoisting`).

    Attributes:
        maker: the name of the part of the layer that has the weights for it.
        made_as: the name of the layer in its block, once it has been told.
    """

    maker: ClassVar[str] = "linear"
    made_as: str = ""
    linear: nn.Module

    def make(self, emb: Vector) -> Tensor:
        """All vectors one after another, (B, n * C), from the conditioning vector (B, C)."""
        return emb[self.made_as] if isinstance(emb, dict) else self.linear(F.silu(emb))


class _Modulation(Modulating):
    """A layer norm without weights, and a linear layer that makes `parts` vectors, each (B, C), see `make`."""

    def __init__(self, embedding_dim: int, parts: int, bias: bool, eps: float = 1e-6) -> None:
        super().__init__()
        self.parts, self.eps = parts, eps
        self.linear = nn.Linear(embedding_dim, parts * embedding_dim, bias=bias)


class Modulator(Modulating, nn.Sequential):
    """An activation and a linear layer that make `parts` vectors, beside norms that are layers of their own."""

    maker: ClassVar[str] = "1"

    def __init__(self, embedding_dim: int, parts: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(embedding_dim, parts * embedding_dim))
        self.parts = parts

    def make(self, emb: Vector) -> Tensor:
        return emb[self.made_as] if isinstance(emb, dict) else self[1](self[0](emb))

    def forward(self, emb: Vector) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The vectors, (B, C) each, from `emb` (B, C)."""
        return self.make(emb).chunk(self.parts, dim=-1)


class AdaLayerNormZero(_Modulation):
    """The norm before the attention of a DiT block ("adaLN-Zero", Peebles and Xie 2023, section 3.2)."""

    def __init__(self, embedding_dim: int, bias: bool = True, eps: float = 1e-6) -> None:
        super().__init__(embedding_dim, 6, bias, eps)

    def forward(self, hidden_states: Tensor, emb: Vector) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Modulate tokens (B, S, C) by `emb` (B, C).

        Returns:
            The tokens for the attention, the gate of its result, then shift, scale and gate of the feed-forward, each
            (B, C).
        """
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.make(emb).chunk(self.parts, dim=1)
        return normalize(hidden_states, shift, scale, self.eps), gate, shift_mlp, scale_mlp, gate_mlp


class AdaLayerNormZeroX(_Modulation):
    """`AdaLayerNormZero` for blocks with two attentions, as in Stable Diffusion 3.5 medium ("MMDiT-X")."""

    def __init__(self, embedding_dim: int, bias: bool = True) -> None:
        super().__init__(embedding_dim, 9, bias)

    def forward(
        self, hidden_states: Tensor, emb: Vector
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """As `AdaLayerNormZero`, followed by the tokens for the second attention and the gate of its result."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift_2, scale_2, gate_2 = self.make(emb).chunk(
            self.parts, dim=1
        )
        first = normalize(hidden_states, shift, scale, self.eps)
        second = normalize(hidden_states, shift_2, scale_2, self.eps)
        return first, gate, shift_mlp, scale_mlp, gate_mlp, second, gate_2


class AdaLayerNormZeroSingle(_Modulation):
    """The one norm of a block whose attention and feed-forward run side by side."""

    def __init__(self, embedding_dim: int, bias: bool = True) -> None:
        super().__init__(embedding_dim, 3, bias)

    def forward(self, hidden_states: Tensor, emb: Vector) -> tuple[Tensor, Tensor]:
        """Modulate tokens (B, S, C) by `emb` (B, C); returns them and the gate (B, C) of the block's result."""
        shift, scale, gate = self.make(emb).chunk(self.parts, dim=1)
        return normalize(hidden_states, shift, scale, self.eps), gate


class AdaLayerNormContinuous(Modulating):
    """A norm with scale and shift but no gate, as before a DiT's last layer (Peebles and Xie 2023, section 3.2).

    Args:
        embedding_dim: channels of the tokens.
        conditioning_embedding_dim: length of the conditioning vector.
        eps: of the norm, which has no weights of its own.
        bias: whether the linear layer has one.
    """

    def __init__(
        self, embedding_dim: int, conditioning_embedding_dim: int, *, eps: float = 1e-6, bias: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(conditioning_embedding_dim, 2 * embedding_dim, bias=bias)
        self.eps = eps

    def forward(self, hidden_states: Tensor, emb: Vector) -> Tensor:
        """Modulate tokens (B, S, embedding_dim) by a vector (B, conditioning_embedding_dim)."""
        # The scale comes first here, unlike in the blocks.
        scale, shift = self.make(emb).chunk(2, dim=1)
        return normalize(hidden_states, shift, scale, self.eps)


def table_vectors(table: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
    """A block's own modulation: its learned table plus what all blocks share ("adaLN-single", Chen et al. 2024).

    Args:
        table: (n, C), learned by the block.
        emb: (B, n * C), made once for all blocks, or (B, C), which is added to every row.

    Returns:
        The n vectors, each (B, C).
    """
    channels = table.shape[1]
    return (table[None] + emb.reshape(emb.shape[0], -1, channels)).unbind(1)
