"""`Attention`: the attention layer of UNets and autoencoders, over tokens or over the pixels of feature maps."""

import torch
from torch import nn

from ...offload.attention import DEFAULT, attention
from ...offload.runs import once
from .fusing import Fusing
from .norms import make_norm


class Attention(Fusing):
    """Multi-head self- or cross-attention with its projections (Vaswani et al. 2017, section 3.2).

    Args:
        query_dim: channels of the input and of the output.
        cross_attention_dim: channels of the tokens that are attended to; None means `query_dim`.
        heads: number of heads.
        dim_head: channels of a head.
        bias: whether the projections to query, key and value have biases.
        out_bias: whether the output projection has a bias.
        norm_num_groups: groups of a group norm before everything else, or None.
        eps: of that norm and of `qk_norm`.
        residual_connection: add the input to the output.
        rescale_output_factor: the output is divided by it, after the residual was added.
        upcast_attention: scores in float32. Every kernel behind `attention` sums scores in float32, so
            the flag is met either way; it is taken since configs have it.
        dropout: probability, after the output projection, in training.
        qk_norm: "layer_norm" or "rms_norm" over each head of query and key, or None.
    """

    def __init__(
        self,
        query_dim: int,
        *,
        cross_attention_dim: int | None = None,
        heads: int = 8,
        dim_head: int = 64,
        bias: bool = False,
        out_bias: bool = True,
        norm_num_groups: int | None = None,
        eps: float = 1e-5,
        residual_connection: bool = False,
        rescale_output_factor: float = 1.0,
        upcast_attention: bool | None = False,
        dropout: float = 0.0,
        qk_norm: str | None = None,
    ) -> None:
        super().__init__()
        inner_dim = heads * dim_head
        context_dim = query_dim if cross_attention_dim is None else cross_attention_dim
        self.heads, self.dim_head, self.dropout = heads, dim_head, dropout
        self.attention_settings, self.crosses = DEFAULT, cross_attention_dim is not None
        self.residual_connection, self.rescale_output_factor = residual_connection, rescale_output_factor
        self.group_norm = None if norm_num_groups is None else nn.GroupNorm(norm_num_groups, query_dim, eps=eps)
        self.to_q = nn.Linear(query_dim, inner_dim, bias=bias)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=bias)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=bias)
        self.norm_q = make_norm(qk_norm, dim_head, eps)
        self.norm_k = make_norm(qk_norm, dim_head, eps)
        self.to_out = nn.ModuleList([nn.Linear(inner_dim, query_dim, bias=out_bias), nn.Dropout(dropout)])

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to `encoder_hidden_states`, or to itself without.

        Args:
            hidden_states: tokens (B, S, C), or feature maps (B, C, H, W) whose pixels are the tokens.
            encoder_hidden_states: tokens (B, T, cross_attention_dim).
            attention_mask: (B, T) or (B, 1 or S, T); bool (True takes part) or added to the scores.

        Returns:
            As `hidden_states`.

        Raises:
            ValueError: if the mask is not made for the number of tokens.
        """
        residual, maps = hidden_states, hidden_states.dim() == 4
        if self.group_norm is not None:
            hidden_states = self._normalize(hidden_states, maps)
        if maps:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        split = (hidden_states.shape[0], -1, self.heads, self.dim_head)
        # Not a comprehension: each of its turns is a Python call, of which a UNet's step would have 128 more.
        query, key, value = self._project(hidden_states, context)
        query, key, value = query.reshape(split), key.reshape(split), value.reshape(split)
        if self.norm_q is not None and self.norm_k is not None:
            query, key = self.norm_q(query), self.norm_k(key)
        mask = None if attention_mask is None else per_head(attention_mask, key.shape[1])
        hidden_states = attention(query, key, value, attn_mask=mask, settings=self.attention_settings).flatten(2)
        project, drop = self.to_out._modules.values()  # without the Python call of a list's `__iter__`
        hidden_states = project(hidden_states)
        if self.dropout:
            hidden_states = drop(hidden_states)
        if maps:
            hidden_states = hidden_states.transpose(1, 2).reshape(residual.shape)
        if self.residual_connection:
            hidden_states = residual + hidden_states
        return hidden_states if self.rescale_output_factor == 1.0 else hidden_states / self.rescale_output_factor

    def _projections(self) -> dict[str, tuple[str, ...]]:
        """What attends to itself has three projections of one input; otherwise keys and values share theirs."""
        return {"to_kv": ("to_k", "to_v")} if self.crosses else {"to_qkv": ("to_q", "to_k", "to_v")}

    def _project(self, tokens: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries of `tokens`, keys and values of `context`."""
        if self.crosses:
            return self.to_q(tokens), *once(self._keys_and_values, context)
        if not self._fused:
            return self.to_q(tokens), self.to_k(context), self.to_v(context)
        whole = self._project_all("to_qkv", tokens)
        return whole if tokens is context else (whole[0], *self._project_all("to_qkv", context)[1:])

    def _keys_and_values(self, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._project_all("to_kv", context) if self._fused else (self.to_k(context), self.to_v(context))

    def _normalize(self, hidden_states: torch.Tensor, maps: bool) -> torch.Tensor:
        assert self.group_norm is not None
        return self.group_norm(hidden_states) if maps else self.group_norm(hidden_states.mT).mT


def per_head(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """A mask (B, T) or (B, S, T) as one that broadcasts over heads, (B, 1, 1 or S, T)."""
    if mask.shape[-1] != tokens:
        raise ValueError(f"the attention mask is made for {mask.shape[-1]} tokens, but there are {tokens}")
    return mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
