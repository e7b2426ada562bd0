"""`JointAttention`: text and image tokens attend to each other, each stream with its own projections."""

import torch
from torch import nn

from ...offload.attention import DEFAULT, attention
from .fusing import Fusing
from .norms import make_norm
from .rotary import RotaryTable, rotate

Tensor = torch.Tensor


class JointAttention(Fusing):
    """Attention over text and image tokens together (MM-DiT, Esser et al. 2024, figure 2b), or over one stream.

    Args:
        dim: channels of the image tokens, and of both outputs.
        heads: number of heads.
        dim_head: channels of a head.
        context_dim: channels of the text tokens; None makes an attention over one stream.
        bias: whether the projections to query, key and value have biases, those of the text included.
        out_bias: whether the output projections have.
        qk_norm: "rms_norm" or "layer_norm" over each head of query and key, or None.
        qk_norm_affine: whether these norms have weights.
        eps: of these norms.
        context_pre_only: the text is attended to but not updated: its queries are not made, though the weights for
            them exist in checkpoints. `forward` then returns the image tokens alone.
        pre_only: no output projection, as where a block projects its parts together.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        dim_head: int,
        context_dim: int | None = None,
        bias: bool = True,
        out_bias: bool = True,
        qk_norm: str | None = None,
        qk_norm_affine: bool = True,
        eps: float = 1e-6,
        context_pre_only: bool = False,
        pre_only: bool = False,
    ) -> None:
        super().__init__()
        inner = heads * dim_head
        self.heads, self.dim_head = heads, dim_head
        self.attention_settings = DEFAULT
        self.context_pre_only = context_pre_only

        def norm() -> nn.Module | None:
            return make_norm(qk_norm, dim_head, eps, qk_norm_affine)

        self.norm_q, self.norm_k = norm(), norm()
        self.to_q = nn.Linear(dim, inner, bias=bias)
        self.to_k = nn.Linear(dim, inner, bias=bias)
        self.to_v = nn.Linear(dim, inner, bias=bias)
        self.takes_text = context_dim is not None
        if context_dim is not None:
            self.add_k_proj = nn.Linear(context_dim, inner, bias=bias)
            self.add_v_proj = nn.Linear(context_dim, inner, bias=bias)
            self.add_q_proj = nn.Linear(context_dim, inner, bias=bias)
        # A list, since checkpoints call it `to_out.0`.
        self.to_out = None if pre_only else nn.ModuleList([nn.Linear(inner, dim, bias=out_bias)])
        if context_dim is not None:
            self.to_add_out = None if context_pre_only else nn.Linear(inner, context_dim, bias=out_bias)
            self.norm_added_q, self.norm_added_k = norm(), norm()

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        rotary: RotaryTable | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: image tokens (B, S, dim), or the tokens of both kinds where one stream holds both.
            encoder_hidden_states: text tokens (B, T, context_dim).
            rotary: of the text tokens and then the image tokens, see `rotary_table`.
            attention_mask: (B, T + S), text first; bool (True takes part) or added to the scores.

        Returns:
            The image tokens (B, S, dim), and the text tokens or None where there are none or they are not updated.

        Raises:
            ValueError: if the text is missing, or given where none is taken.
        """
        if self.takes_text == (encoder_hidden_states is None):
            raise ValueError(f"encoder_hidden_states {'are missing' if self.takes_text else 'are not taken here'}")
        # Plain lines, `view`, and each submodule looked up once: a step of FLUX has a thousand Python calls less.
        query, key, value = self._project(hidden_states)
        split = (*query.shape[:2], self.heads, self.dim_head)
        query, key, value = query.view(split), key.view(split), value.view(split)
        norm_q, norm_k = self.norm_q, self.norm_k
        if norm_q is not None and norm_k is not None:
            query, key = norm_q(query), norm_k(key)
        if encoder_hidden_states is not None:
            of_text = [part.view(*part.shape[:2], *split[2:]) for part in self._project_text(encoder_hidden_states)]
            norm_q, norm_k = self.norm_added_q, self.norm_added_k
            key = torch.cat([of_text[-2] if norm_k is None else norm_k(of_text[-2]), key], dim=1)
            value = torch.cat([of_text[-1], value], dim=1)
            if not self.context_pre_only:
                query = torch.cat([of_text[0] if norm_q is None else norm_q(of_text[0]), query], dim=1)
        if rotary is not None:
            query, key = rotate((query, key), rotary)
        mask = None if attention_mask is None else attention_mask[:, None, None]
        attended = attention(query, key, value, attn_mask=mask, settings=self.attention_settings)
        attended = attended.flatten(2).to(query.dtype)
        text = None
        if encoder_hidden_states is not None and (project_text := self.to_add_out) is not None:
            text, attended = attended.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
            text = project_text(text)
        if self.to_out is not None:
            (project,) = self.to_out
            attended = project(attended)
        return attended, text

    def _projections(self) -> dict[str, tuple[str, ...]]:
        """Those of the picture, and those of the text that are used."""
        fused: dict[str, tuple[str, ...]] = {"to_qkv": ("to_q", "to_k", "to_v")}
        if self.takes_text and self.context_pre_only:
            fused["to_added_kv"] = ("add_k_proj", "add_v_proj")
        elif self.takes_text:
            fused["to_added_qkv"] = ("add_q_proj", "add_k_proj", "add_v_proj")
        return fused

    def _project(self, tokens: Tensor) -> tuple[Tensor, ...]:
        if self._fused:
            return self._project_all("to_qkv", tokens)
        return self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)

    def _project_text(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Queries, unless the text has none, keys and values."""
        if self._fused:
            return self._project_all("to_added_kv" if self.context_pre_only else "to_added_qkv", tokens)
        keys_and_values = self.add_k_proj(tokens), self.add_v_proj(tokens)
        return keys_and_values if self.context_pre_only else (self.add_q_proj(tokens), *keys_and_values)
