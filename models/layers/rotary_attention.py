"""`RotaryAttention`: attention of video transformers, with norms over all heads and rotary positions."""

import torch
from torch import nn

from ...offload.attention import attention
from .attention import Attention, per_head
from .rotary import RotaryTable, rotate


class RotaryAttention(Attention):
    """Attention whose queries and keys pass an RMS norm over all channels, before they are parted into heads.

    Args:
        query_dim: channels of the input and of the output.
        heads: number of heads.
        dim_head: channels of a head.
        cross_attention_dim: channels of the tokens that are attended to; None means `query_dim`.
        bias: whether the projections to query, key and value have biases.
        out_bias: whether the output projection has.
        eps: of the norms.
    """

    def __init__(
        self,
        query_dim: int,
        *,
        heads: int,
        dim_head: int,
        cross_attention_dim: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(
            query_dim,
            cross_attention_dim=cross_attention_dim,
            heads=heads,
            dim_head=dim_head,
            bias=bias,
            out_bias=out_bias,
        )
        self.norm_q = nn.RMSNorm(heads * dim_head, eps=eps)
        self.norm_k = nn.RMSNorm(heads * dim_head, eps=eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary: RotaryTable | None = None,
    ) -> torch.Tensor:
        """Attend to `encoder_hidden_states`, or to itself without; tokens and masks as in `Attention`.

        Args:
            rotary: turns queries and keys, see `rotate`; only where the tokens attend to themselves.
        """
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = self._project(hidden_states, context)
        split = (-1, (self.heads, self.dim_head))
        query, key = self.norm_q(query).unflatten(*split), self.norm_k(key).unflatten(*split)
        if rotary is not None:
            query, key = rotate((query, key), rotary)
        mask = None if attention_mask is None else per_head(attention_mask, key.shape[1])
        attended = attention(query, key, value.unflatten(*split), attn_mask=mask, settings=self.attention_settings)
        return self.to_out[0](attended.flatten(2))
