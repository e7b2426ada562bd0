"""The transformer of UNets: self-attention, cross-attention and a feed-forward over the pixels of feature maps."""

from collections.abc import Callable

import torch
from torch import nn

from .activations import GEGLU, GELU, LinearSiLU, SwiGLU
from .attention import Attention

_INPUTS: dict[str, Callable[..., nn.Module]] = {
    "gelu": GELU,
    "gelu-approximate": lambda dim, inner, bias: GELU(dim, inner, approximate="tanh", bias=bias),
    "geglu": GEGLU,
    "linear-silu": LinearSiLU,
    "swiglu": SwiGLU,
}


class FeedForward(nn.Module):
    """Two linear layers with an activation, gated or not, between (Vaswani et al. 2017, section 3.3; Shazeer 2020).

    Args:
        dim: channels of the input.
        dim_out: channels of the output, `dim` by default.
        mult: channels between, as a multiple of `dim`.
        inner_dim: channels between, in place of `mult`.
        dropout: probability, before the second layer, in training.
        activation_fn: "geglu", "swiglu", "gelu", "gelu-approximate" or "linear-silu".
        bias: whether the layers have biases.

    Raises:
        ValueError: for another activation.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        *,
        mult: int = 4,
        inner_dim: int | None = None,
        dropout: float = 0.0,
        activation_fn: str = "geglu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation_fn not in _INPUTS:
            raise ValueError(f"activation_fn={activation_fn!r} is unknown; known are {sorted(_INPUTS)}")
        inner = inner_dim or mult * dim
        self.dropout = dropout
        first = _INPUTS[activation_fn](dim, inner, bias=bias)
        self.net = nn.ModuleList([first, nn.Dropout(dropout), nn.Linear(inner, dim_out or dim, bias=bias)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        first, drop, second = self.net
        hidden_states = first(hidden_states)
        if self.dropout:
            hidden_states = drop(hidden_states)
        return second(hidden_states)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, each after a layer norm and added to its input.

    The block of latent diffusion (Rombach et al. 2022, appendix E.2.1).

    Args:
        dim: channels of the tokens.
        num_attention_heads: number of heads.
        attention_head_dim: channels of a head.
        cross_attention_dim: channels of the text tokens; None leaves the cross-attention out.
        only_cross_attention: the first attention looks at the text too, in place of the tokens themselves.
        upcast_attention: see `Attention`.
        dropout: probability, in training.
        activation_fn: see `FeedForward`.
        attention_bias: whether the projections to query, key and value have biases.
        norm_eps: of the layer norms.
    """

    def __init__(
        self,
        dim: int,
        num_attention_heads: int,
        attention_head_dim: int,
        *,
        cross_attention_dim: int | None = None,
        only_cross_attention: bool = False,
        upcast_attention: bool | None = False,
        dropout: float = 0.0,
        activation_fn: str = "geglu",
        attention_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()

        def attention(context_dim: int | None) -> Attention:
            return Attention(
                dim,
                cross_attention_dim=context_dim,
                heads=num_attention_heads,
                dim_head=attention_head_dim,
                bias=attention_bias,
                upcast_attention=upcast_attention,
                dropout=dropout,
            )

        self.only_cross_attention = only_cross_attention
        self.attends_to_text = cross_attention_dim is not None
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn1 = attention(cross_attention_dim if only_cross_attention else None)
        if cross_attention_dim is not None:
            self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
            self.attn2 = attention(cross_attention_dim)
        self.norm3 = nn.LayerNorm(dim, eps=norm_eps)
        self.ff = FeedForward(dim, dropout=dropout, activation_fn=activation_fn)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Transform tokens (B, S, dim), told the text (B, T, cross_attention_dim); masks as in `Attention`."""
        context = encoder_hidden_states if self.only_cross_attention else None
        hidden_states = self.attn1(self.norm1(hidden_states), context, attention_mask) + hidden_states
        if self.attends_to_text:
            attended = self.attn2(self.norm2(hidden_states), encoder_hidden_states, encoder_attention_mask)
            hidden_states = attended + hidden_states
        return self.ff(self.norm3(hidden_states)) + hidden_states


class SpatialTransformer(nn.Module):
    """Transformer blocks over the pixels of feature maps (B, C, H, W), with a projection before and after.

    Rombach et al. 2022, appendix E.2.1. The result is added to the input and keeps its memory format.

    Args:
        channels: of the maps, and of the tokens.
        heads: number of heads, a divisor of `channels`.
        num_layers: number of blocks.
        cross_attention_dim: channels of the text tokens.
        groups: of the norm before everything else.
        linear_projection: the projections are linear layers, as since Stable Diffusion 2, not 1x1 convolutions.
        only_cross_attention, upcast_attention: see `BasicTransformerBlock`.
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        *,
        num_layers: int = 1,
        cross_attention_dim: int | None = None,
        groups: int = 32,
        linear_projection: bool = False,
        only_cross_attention: bool = False,
        upcast_attention: bool | None = False,
    ) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"{channels} channels cannot be split into {heads} heads: not a multiple")
        self.linear_projection = linear_projection
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.proj_in = nn.Linear(channels, channels) if linear_projection else nn.Conv2d(channels, channels, 1)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                channels,
                heads,
                channels // heads,
                cross_attention_dim=cross_attention_dim,
                only_cross_attention=only_cross_attention,
                upcast_attention=upcast_attention,
            )
            for _ in range(num_layers)
        )
        self.proj_out = nn.Linear(channels, channels) if linear_projection else nn.Conv2d(channels, channels, 1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Transform maps (B, channels, H, W), told the text (B, T, cross_attention_dim); masks as in `Attention`."""
        batch, channels, height, width = hidden_states.shape
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        if not self.linear_projection:
            hidden_states = self.proj_in(hidden_states)
        hidden_states = hidden_states.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        if self.linear_projection:
            hidden_states = self.proj_in(hidden_states)
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask)
        if self.linear_projection:
            hidden_states = self.proj_out(hidden_states)
        hidden_states = hidden_states.reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        if not self.linear_projection:
            hidden_states = self.proj_out(hidden_states)
        return residual + hidden_states
