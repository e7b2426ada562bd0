"""How weights are stored in fewer bits: the two directions, encode and decode, as pure functions of tensors."""

from dataclasses import dataclass

import torch

# What is worked on at a time, in values: encoding must not need a float copy of a whole large weight.
_BLOCK = 1 << 22
_INT8_MAX = 127
_EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Encoding:
    """A form of storage.

    - "plain": each value is cast to `dtype`.
    - "int8": each row (axis 0) is divided by its scale, max|row| / 127, and rounded to an integer.
    - "fp8_scaled": each row is divided by a power of two that brings its largest value just below the dtype's own, so
      that small weights do not fall among the subnormal numbers, where 8-bit floats have few bits left.

    Scales are bfloat16 numbers by construction, so a scale is stored in two bytes and times it is exact in float32.

    Attributes:
        storage: "plain", "int8" or "fp8_scaled".
        dtype: of the stored tensor.
    """

    storage: str
    dtype: torch.dtype

    @property
    def scaled(self) -> bool:
        """Whether there is a scale a row."""
        return self.storage != "plain"

    def overflows(self, values: torch.Tensor) -> bool:
        """Whether a value is not finite, or too large for a plain cast, which would make it so."""
        if values.is_meta or values.numel() == 0:
            return False
        if values.element_size() == 1:
            is_e4m3 = values.dtype == torch.float8_e4m3fn
            return is_e4m3 and bool((values.view(torch.uint8).bitwise_and(0x7F) == 0x7F).any())
        limit = torch.finfo(torch.float32).max if self.scaled else torch.finfo(self.dtype).max
        low, high = torch.aminmax(values)
        return not (float(low) >= -limit and float(high) <= limit)

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stored form of `values`, in their memory layout, and the scales: of shape (rows, 1, ...), or None."""
        if not self.scaled:
            return values.to(self.dtype), None
        stored = torch.empty_like(values, dtype=self.dtype)
        scale = torch.empty((values.shape[0], *[1] * (values.dim() - 1)), dtype=torch.bfloat16, device=values.device)
        for block, into, scales in zip(_blocks(values), _blocks(stored), _blocks(scale, values), strict=True):
            rows = block.to(torch.float32)
            largest = rows.abs().amax(dim=tuple(range(1, rows.dim())), keepdim=True)
            scales.copy_(self._scale(largest))
            rows = rows / scales
            into.copy_(rows.round_().clamp_(-_INT8_MAX, _INT8_MAX) if self.storage == "int8" else rows)
        return stored, scale

    def _scale(self, largest: torch.Tensor) -> torch.Tensor:
        """The scales of rows whose largest absolute values are given; 1 where all of a row is zero."""
        if self.storage == "int8":
            scale = (largest / _INT8_MAX).to(torch.bfloat16).to(torch.float32)
        else:
            _, exponent = torch.frexp(largest / torch.finfo(self.dtype).max)
            scale = torch.ldexp(torch.ones_like(largest), exponent)
        tiny = torch.finfo(torch.bfloat16).tiny
        return torch.where(largest == 0, torch.ones_like(scale), scale.clamp(min=tiny))

    def decode(self, stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The values in `dtype`, from the stored form or from rows of it with their scales."""
        if scale is None:
            return _widened(stored, dtype)
        # float16 has too few exponents for the scales of small weights.
        wide = torch.float32 if dtype == torch.float16 else dtype
        return (_widened(stored, wide) * scale.to(stored.device, wide)).to(dtype)


def _widened(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`stored.to(dtype)`, for 8-bit floats on the CPU several times faster than torch's own conversion.

    A float16 has the same sign and fraction further left, and a larger exponent offset, which is a power of two. Stored
    values are finite, so that no NaN has to be told apart.
    """
    if stored.device.type != "cpu" or stored.dtype not in _EIGHT_BIT_FLOATS or torch.compiler.is_compiling():
        return stored.to(dtype)
    bits = stored.detach().view(torch.int8).to(torch.int16)
    if stored.dtype == torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).to(dtype)
    # The sign, that `int8` to `int16` repeats, is cleared in the exponent's highest bit.
    halves = bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)
    return halves.to(dtype, copy=True).mul_(256)


def _blocks(tensor: torch.Tensor, like: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Views of runs of rows, as many at a time as hold about `_BLOCK` values (of `like`, which has as many rows)."""
    counted = tensor if like is None else like
    if tensor.dim() == 0 or counted.numel() <= _BLOCK:
        return (tensor,)
    rows = max(1, _BLOCK * counted.shape[0] // counted.numel())
    return torch.split(tensor, rows)


def parse_encoding(storage: str, dtype: torch.dtype | None) -> Encoding:
    """The encoding that the arguments `storage` and `storage_dtype` ask for.

    Raises:
        ValueError: if they are unknown or do not go together.
        TypeError: if the dtype is none.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"storage_dtype must be a torch.dtype, such as torch.float8_e4m3fn, not {dtype!r}")
    if storage == "plain":
        dtype = dtype or torch.float8_e4m3fn
        if not dtype.is_floating_point:
            raise ValueError(f"storage_dtype={dtype} is not a floating-point dtype; for integers use storage='int8'")
        return Encoding("plain", dtype)
    if storage == "int8":
        # The default of the signature is not a wish.
        if dtype not in (None, torch.int8, torch.float8_e4m3fn):
            raise ValueError(f"storage='int8' stores torch.int8; leave out storage_dtype={dtype}")
        return Encoding("int8", torch.int8)
    if storage == "fp8_scaled":
        dtype = dtype or torch.float8_e4m3fn
        if dtype not in _EIGHT_BIT_FLOATS:
            raise ValueError(f"storage='fp8_scaled' takes torch.float8_e4m3fn or float8_e5m2, not {dtype}")
        return Encoding("fp8_scaled", dtype)
    raise ValueError(f"storage={storage!r} is unknown; choose 'plain', 'int8' or 'fp8_scaled'")
