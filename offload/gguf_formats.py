"""The block formats of GGUF files: how the bytes of a block become numbers.

A row of a weight is a run of blocks, each with one or two scales in half precision and a few bits for each number. The
formats are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h); "K" formats have blocks of
256 numbers in groups with scales of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# The sixteen steps of the "IQ4" formats, closer together around zero.
_STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Format:
    """One block format.

    Attributes:
        name: as ggml has it, "Q4_K".
        numbers: how many a block holds.
        size: bytes of a block.
        decode: from blocks (n, size), uint8, to numbers (n, numbers), float32.
    """

    name: str
    numbers: int
    size: int
    decode: Callable[[torch.Tensor], torch.Tensor]


def dequantized(raw: torch.Tensor, form: Format, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of rows of blocks.

    Args:
        raw: (rows, bytes of a row), uint8.

    Returns:
        (rows, numbers of a row), in `dtype`.
    """
    rows = raw.shape[0]
    return form.decode(raw.reshape(-1, form.size)).to(dtype).reshape(rows, -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half precision number at a byte of each block, as (n, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(..., k) bytes to (..., 2, k): the low four bits of each, then the high four."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """(..., k) bytes to (..., 4, k): the lowest two bits of each, then the next ones."""
    return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """(..., k) bytes to (..., 8, k): the lowest bit of each, then the next ones."""
    return torch.stack([(packed >> shift) & 1 for shift in range(8)], dim=-2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).flatten(1).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).flatten(1).float() + _half(blocks, 2)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Four bytes to 32 bits: that of each number in turn."""
    return _bits(packed).transpose(1, 2).flatten(1)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _nibbles(blocks[:, 6:]).flatten(1) | (_fifth_bits(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _nibbles(blocks[:, 8:]).flatten(1) | (_fifth_bits(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * numbers.float() + _half(blocks, 2)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    numbers = _pairs(packed.reshape(-1, 2, 32)).reshape(-1, 16, 16).float()
    factor = _half(blocks, 80) * (scales & 15).float()
    offset = _half(blocks, 82) * (scales >> 4).float()
    return (factor[:, :, None] * numbers - offset[:, :, None]).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    high, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_bits = _nibbles(scales[:, :8]).flatten(1)
    high_bits = _pairs(scales[:, 8:]).flatten(1)
    factor = _half(blocks, 108) * ((low_bits | (high_bits << 4)).float() - 32)
    numbers = _pairs(packed.reshape(-1, 2, 32)).reshape(-1, 16, 16).float()
    # A number whose high bit is not set is four less.
    less = 4 - 4 * _bits(high).reshape(-1, 16, 16).float()
    return (factor[:, :, None] * (numbers - less)).flatten(1)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes to eight scales and eight offsets of six bits, each (n, 8)."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), offsets.float()


def _affine(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers (n, 8, 32) with the scales and offsets that "Q4_K" and "Q5_K" have in front."""
    scales, offsets = _six_bits(blocks[:, 4:16])
    factor, offset = _half(blocks, 0) * scales, _half(blocks, 2) * offsets
    return (factor[:, :, None] * numbers.float() - offset[:, :, None]).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _affine(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    return _affine(blocks, low | (_bits(blocks[:, 16:48]) << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = _pairs(blocks[:, 128:192].reshape(-1, 2, 32))
    numbers = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[:, :, None] * numbers).flatten(1)


def _stepped(packed: torch.Tensor) -> torch.Tensor:
    """The steps that four bits each stand for: (..., k) bytes to (..., 2 k) numbers."""
    steps = torch.tensor(_STEPS, dtype=torch.float32, device=packed.device)
    return steps[_nibbles(packed).flatten(-2).int()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _stepped(blocks[:, 2:])


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    high = _pairs(blocks[:, 2:4]).transpose(1, 2).flatten(1)
    low = _nibbles(blocks[:, 4:8]).transpose(1, 2).flatten(1)
    factor = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return (factor[:, :, None] * _stepped(blocks[:, 8:].reshape(-1, 8, 16))).flatten(1)


FORMATS: dict[int, Format] = {
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    6: Format("Q5_0", 32, 22, _q5_0),
    7: Format("Q5_1", 32, 24, _q5_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    10: Format("Q2_K", 256, 84, _q2_k),
    11: Format("Q3_K", 256, 110, _q3_k),
    12: Format("Q4_K", 256, 144, _q4_k),
    13: Format("Q5_K", 256, 176, _q5_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    20: Format("IQ4_NL", 32, 18, _iq4_nl),
    23: Format("IQ4_XS", 256, 136, _iq4_xs),
}
"""By their numbers in files."""

PLAIN: dict[int, torch.dtype] = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
"""The dtypes of tensors that are stored number by number, by their numbers in files."""
