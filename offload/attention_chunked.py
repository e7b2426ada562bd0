"""Exact attention within a memory bound, of plain torch operations: for devices without a fused kernel."""

import torch

from .attention_masks import Call

_BYTES = 4  # of float32, in which scores are kept


def chunked(call: Call) -> torch.Tensor:
    """Attention by blocks of queries and keys (Rabe & Staats 2021), besides its result within `call.max_bytes`.

    The softmax of a block is corrected by what later keys show (Milakov & Gimelshein 2018, algorithm 3), so that the
    result is that of the whole up to rounding.

    Raises:
        ValueError: if `max_bytes` does not hold one query and one key.
    """
    query, key, value = (part.transpose(1, 2) for part in (call.query, call.key, call.value))
    batch, heads, queries, size = query.shape
    keys, value_size = value.shape[2:]
    scale = size**-0.5 if call.scale is None else call.scale
    attended = torch.empty(batch, queries, heads, value_size, dtype=value.dtype, device=value.device)
    rows, columns = _block(call.max_bytes, queries, keys, size, value_size)
    for sample in range(batch):
        for head in range(heads):
            mask = None if call.mask is None else _of_head(call.mask, sample, head)
            for start in range(0, queries, rows):
                end = min(start + rows, queries)
                part = query[sample, head, start:end].float() * scale
                seen = min(end, keys) if call.is_causal else keys
                attended[sample, start:end, head] = _rows(
                    part,
                    key[sample, head, :seen],
                    value[sample, head, :seen],
                    mask if mask is None or len(mask) == 1 else mask[start:end],
                    columns,
                    start if call.is_causal else None,
                )
    return attended


def _rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    columns: int,
    first: int | None,
) -> torch.Tensor:
    """Some queries (float32, scaled) of one head, `columns` keys at a time; `first` is their position if causal."""
    highest = query.new_full((len(query), 1), -torch.inf)
    total = torch.zeros_like(highest)
    attended = query.new_zeros(len(query), value.shape[1])
    for start in range(0, len(key), columns):
        some = slice(start, start + columns)
        scores = query @ key[some].float().T
        if mask is not None:
            part = mask[:, some]
            scores = scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part)
        if first is not None:
            places = torch.arange(start, start + scores.shape[1], device=scores.device)
            own = torch.arange(first, first + len(query), device=scores.device)
            scores.masked_fill_(places > own[:, None], -torch.inf)
        now = torch.maximum(highest, scores.amax(dim=1, keepdim=True))
        # Where nothing counts so far, -inf - -inf would be no number.
        base = now.masked_fill(now == -torch.inf, 0.0)
        weights = scores.sub_(base).exp_()
        fade = (highest - base).exp_()
        total = total.mul_(fade).add_(weights.sum(dim=1, keepdim=True))
        attended = attended.mul_(fade).addmm_(weights, value[some].float())
        highest = now
    # A query that sees nothing gets zeros, as from torch.
    return attended.div_(total.masked_fill_(total == 0.0, 1.0))


def _block(max_bytes: int, queries: int, keys: int, size: int, value_size: int) -> tuple[int, int]:
    """How many queries and keys to take at a time."""
    # Of a key: itself, its value and places. Of a query: itself, its result and a few numbers. Of a pair: its score
    # and, while a mask is applied, as much again.
    of_key, of_query, of_pair = _BYTES * (size + value_size) + 16, _BYTES * (2 * size + 2 * value_size + 16), 3 * _BYTES
    # Half for keys is enough that each block has dozens of queries, for which its keys are read once.
    columns = min(keys, max(max_bytes // 2 // of_key, 1))
    rows = min(queries, (max_bytes - columns * of_key) // (of_query + columns * of_pair))
    if rows < 1:
        raise ValueError(
            f"max_bytes={max_bytes} is too little for attention with heads of {size}; "
            f"it takes {of_query + of_key + of_pair} at least"
        )
    return rows, columns


def _of_head(mask: torch.Tensor, sample: int, head: int) -> torch.Tensor:
    """The mask (1 or query tokens, key tokens) of one head of one sample."""
    return mask[sample if len(mask) > 1 else 0, head if mask.shape[1] > 1 else 0]
