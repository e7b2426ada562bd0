"""Read GGUF files: a head with keys and a table of tensors, then the tensors, aligned, as rows of blocks.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. Weights stay in
the mapped file as they are, and each layer decodes its own just before it computes.
"""

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from diffusion_core.errors import CorruptFileError, MissingFileError
from diffusion_core.hub import likely_cause

from .checkpoint import is_remote
from .gguf_formats import FORMATS, PLAIN, Format, dequantized
from .quantized import Parts

MAGIC = b"GGUF"
_ALIGNMENT_KEY = "general.alignment"
_SHAPE_KEY = "comfy.gguf.orig_shape."
# Kinds of values in the head: those of fixed size as `struct` has them, then texts and lists.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_MOST = 1 << 24


@dataclass(frozen=True)
class Stored:
    """One tensor of a file.

    Attributes:
        shape: with the axis that lies together last, as torch has it.
        form: its block format, or its dtype if it is stored number by number.
        begin, end: where its bytes are, counted from the start of the file.
    """

    shape: tuple[int, ...]
    form: Format | torch.dtype
    begin: int
    end: int

    @property
    def row(self) -> int:
        """Bytes of a row: of all values along the last axis."""
        return (self.end - self.begin) * (self.shape[-1] if self.shape else 1) // max(1, math.prod(self.shape))


class _Head:
    """Reads the head of a file, number by number, and not past its end."""

    def __init__(self, content: Any, size: int) -> None:
        self._content, self._size = content, size
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > self._size - self.at:
            raise ValueError(f"it ends at byte {self._size}, within its head")
        self.at += count
        return bytes(self._content[self.at - count : self.at])

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, what: str) -> int:
        found = self.number("Q")
        if found > _MOST:
            raise ValueError(f"it announces {found} {what}")
        return found

    def text(self) -> str:
        return self.take(self.count("letters of a name")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            inner = self.number("I")
            return [self.value(inner) for _ in range(self.count("entries of a list"))]
        raise ValueError(f"it holds a value of the unknown kind {kind}")


class GGUFFile:
    """A GGUF file.

    Attributes:
        keys: what the head says about the model.
        tensors: what there is, by name.

    Raises:
        MissingFileError: there is no such file.
        CorruptFileError: it is not a whole GGUF file, or holds tensors in a format that is not known here.
    """

    def __init__(self, path: Path, *, disable_mmap: bool = False) -> None:
        self.path = path
        if not path.is_file():
            raise MissingFileError(f"there is no file {path}")
        size = path.stat().st_size
        try:
            with path.open("rb") as stream:
                if stream.read(4) != MAGIC:
                    raise ValueError(f"it does not begin with GGUF{likely_cause(path)}")
                # Private and writable: torch wants to be able to write.
                self._content: Any = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self.keys, self.tensors = _parsed(_Head(self._content, size), size)
        except (ValueError, struct.error, RecursionError, OSError) as error:
            raise CorruptFileError(f"{path} ({size} bytes) is not a GGUF file that can be read: {error}") from error
        self._read_at_once = disable_mmap or is_remote(path)

    def raw(self, name: str) -> torch.Tensor:
        """The bytes of a tensor as (rows, bytes of a row), uint8: a view of the mapped file."""
        stored = self.tensors[name]
        count = stored.end - stored.begin
        if count == 0:
            return torch.empty(0, stored.row, dtype=torch.uint8)
        view = torch.frombuffer(self._content, dtype=torch.uint8, count=count, offset=stored.begin)
        rows = view.view(-1, stored.row)
        return rows.clone() if self._read_at_once else rows

    def prefetch(self, name: str) -> None:
        """Ask the system to read a tensor in one go."""
        stored = self.tensors[name]
        begin = stored.begin - stored.begin % mmap.PAGESIZE
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._content.madvise(mmap.MADV_WILLNEED, begin, stored.end - begin)


def _parsed(head: _Head, size: int) -> tuple[dict[str, Any], dict[str, Stored]]:
    head.take(4)
    version = head.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not known; 2 and 3 are")
    tensors, pairs = head.count("tensors"), head.count("keys")
    keys: dict[str, Any] = {}
    for _ in range(pairs):
        name = head.text()
        keys[name] = head.value(head.number("I"))
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensors):
        name = head.text()
        axes = head.number("I")
        if axes > 8:
            raise ValueError(f"{name!r} has {axes} axes")
        shape = tuple(reversed([head.number("Q") for _ in range(axes)]))
        entries.append((name, shape, head.number("I"), head.number("Q")))
    alignment = keys.get(_ALIGNMENT_KEY, 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{_ALIGNMENT_KEY} is {alignment!r}")
    start = -(-head.at // alignment) * alignment
    found: dict[str, Stored] = {}
    for name, shape, kind, offset in entries:
        if name in found:
            raise ValueError(f"it lists {name!r} twice")
        stored = _stored(name, shape, kind, start + offset)
        if stored.end > size:
            raise ValueError(f"it was cut off: {name!r} ends at byte {stored.end}")
        original = keys.get(f"{_SHAPE_KEY}{name}")
        if isinstance(original, list) and math.prod(cast("list[int]", original)) == math.prod(shape):
            stored = Stored(tuple(cast("list[int]", original)), stored.form, stored.begin, stored.end)
        found[name] = stored
    return keys, found


def _stored(name: str, shape: tuple[int, ...], kind: int, begin: int) -> Stored:
    numbers = math.prod(shape)
    if kind in PLAIN:
        return Stored(shape, PLAIN[kind], begin, begin + numbers * PLAIN[kind].itemsize)
    if kind not in FORMATS:
        known = ", ".join(form.name for form in FORMATS.values())
        raise ValueError(f"{name!r} is in the format number {kind}, which is not read; {known} are")
    form = FORMATS[kind]
    if not shape or shape[-1] % form.numbers:
        raise ValueError(f"{name!r} has rows of {shape[-1:]} numbers, which are no whole blocks of {form.name}")
    return Stored(shape, form, begin, begin + numbers // form.numbers * form.size)


class GGUFParts(Parts):
    """The blocks of a weight, decoded each time it is asked for.

    Args:
        raw: (rows, bytes of a row), uint8.
        form: their format.
        dtype: what the layer computes in.
    """

    def __init__(self, raw: torch.Tensor, form: Format, dtype: torch.dtype) -> None:
        super().__init__({"raw": nn.Parameter(raw, requires_grad=False)})
        self.shape, self.dtype = (raw.shape[0], raw.shape[1] // form.size * form.numbers), dtype
        self.kind, self.method = form.name, "gguf"
        self._format = form

    def packed(self) -> torch.Tensor:
        raw = self._parameters["raw"]
        assert raw is not None
        return dequantized(raw, self._format, self.dtype)
