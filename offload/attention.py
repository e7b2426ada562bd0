"""`attention`: the one function through which every model attends."""

import torch
import torch.nn.functional as F


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1).

    Args:
        query: shape (batch, query tokens, heads, head size).
        key: shape (batch, key tokens, heads, head size).
        value: as `key`.
        attn_mask: broadcastable to (batch, heads, query tokens, key tokens); bool (True takes part) or added to the
            scores.
        is_causal: each query sees keys up to its own position; not together with a mask.
        scale: factor of the scores, 1 / sqrt(head size) by default.

    Returns:
        As `query`, with the head size of `value`.
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
    )
    return out.transpose(1, 2)
