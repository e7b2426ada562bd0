"""Padding in attention: tokens that do not count are left out, for kernels that take no mask of it."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

DEFAULT_MAX_BYTES = 2**28


@dataclass(frozen=True)
class Call:
    """The arguments of one attention, see `attention`: tensors (batch, tokens, heads, head size).

    Attributes:
        mask: of four axes, (1 or batch, 1 or heads, 1 or query tokens, key tokens), or None.
        max_bytes: for the backend that keeps to a bound.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    max_bytes: int = DEFAULT_MAX_BYTES

    @property
    def masks_padding(self) -> bool:
        """Whether the mask says which keys count, the same ones for all heads and queries."""
        mask = self.mask
        return mask is not None and mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1


@dataclass(frozen=True)
class PackedCall:
    """The samples of a batch one after another, without padding: tensors (all tokens, heads, head size).

    Attributes:
        query_ends, key_ends: where each sample ends, after a 0; int32 on the device.
        query_lengths, key_lengths: tokens of each sample.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_ends: torch.Tensor
    key_ends: torch.Tensor
    query_lengths: list[int]
    key_lengths: list[int]
    is_causal: bool
    scale: float | None


@dataclass(frozen=True)
class Padding:
    """Which keys count.

    Attributes:
        keep: bool (batch, key tokens), or None where all count.
        lengths: how many count, for each sample.
    """

    keep: torch.Tensor | None
    lengths: list[int]


class _Read(threading.local):
    """What was read of masks: all layers of a run have the same few, and reading one waits for the device."""

    def __init__(self) -> None:
        self.lengths: dict[Any, tuple[weakref.ref[torch.Tensor], tuple[int, ...]]] = {}


_read = _Read()
_MOST = 4  # masks at a time: with the prompt and without it, of the text and of the picture


def padding_of(call: Call) -> Padding:
    """Which keys of a call count. Waits for the device where a mask has not just been read."""
    batch, tokens = call.key.shape[:2]
    if call.mask is None:
        return Padding(None, [tokens] * batch)
    keep = call.mask[:, 0, 0].expand(batch, -1)
    lengths = _lengths(keep)
    return Padding(keep if min(lengths) < tokens else None, list(lengths))


def _lengths(keep: torch.Tensor) -> tuple[int, ...]:
    """How many keys count, for each sample."""
    # Tensors of inference mode do not count their changes, so that nothing about them can be remembered.
    if keep.is_inference():
        return _counted(keep)
    whole = keep if keep._base is None else keep._base
    key = (keep.data_ptr(), keep.stride(), keep.shape, keep._version)
    mask, lengths = _read.lengths.pop(key, (None, ()))
    # An address is a mask's own only while that is there; remembering it must not keep it.
    if mask is None or mask() is not whole:
        mask, lengths = weakref.ref(whole), _counted(keep)
    _read.lengths[key] = mask, lengths
    if len(_read.lengths) > _MOST:
        del _read.lengths[next(iter(_read.lengths))]
    return lengths


def _counted(keep: torch.Tensor) -> tuple[int, ...]:
    """The numbers of a mask, for which the device has to be waited for."""
    return tuple(cast("Any", keep.sum(dim=1)).tolist())


def packed(call: Call) -> PackedCall:
    """A call without what does not count. All queries stay: what they see is the same as with the mask."""
    padding = padding_of(call)
    batch, queries = call.query.shape[:2]
    device = call.query.device

    def ends(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)

    def joined(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.flatten(0, 1) if padding.keep is None else tokens[padding.keep]

    return PackedCall(
        call.query.flatten(0, 1),
        joined(call.key),
        joined(call.value),
        ends([queries] * batch),
        ends(padding.lengths),
        [queries] * batch,
        padding.lengths,
        call.is_causal,
        call.scale,
    )


def split(call: Call, dense: Callable[[Call], torch.Tensor]) -> torch.Tensor:
    """Attend to what counts, samples of one length at a time."""
    padding = padding_of(call)
    query, key, value = call.query, call.key, call.value
    if padding.keep is None:
        return dense(Call(query, key, value, None, call.is_causal, call.scale))
    # As a kernel with a mask: what sees nothing is zero.
    attended = query.new_zeros(*query.shape[:3], value.shape[-1])
    for length in sorted(set(padding.lengths) - {0}):
        samples = [sample for sample, own in enumerate(padding.lengths) if own == length]
        keep = padding.keep[samples]
        key_part, value_part = (
            part[samples][keep].reshape(len(samples), length, *part.shape[2:]) for part in (key, value)
        )
        attended[samples] = dense(Call(query[samples], key_part, value_part, None, False, call.scale))
    return attended


def worth_splitting(call: Call) -> bool:
    """Whether calls by length beat one call of torch with the mask, which small ones do not."""
    padding = padding_of(call)
    calls = len(set(padding.lengths) - {0})
    queries, heads = call.query.shape[1:3]
    return calls <= 1 or heads * queries * sum(padding.lengths) >= calls * _WORTH


# Scores that a call should have, of all heads: below it, starting kernels takes longer than what they leave out.
_WORTH = 2**19
