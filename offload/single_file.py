"""One file of weights, GGUF or safetensors, whose names and rows may have to be arranged to be those of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from .checkpoint import Checkpoint, TensorFile, TensorInfo
from .gguf import GGUFFile, GGUFParts
from .gguf_formats import Format, dequantized
from .quantized import Parts

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Piece:
    """A tensor of a model within a tensor of a file.

    Attributes:
        name: of the tensor in the file.
        rows: ranges of its first axis, one after another; None is all of it.
    """

    name: str
    rows: tuple[tuple[int, int], ...] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor of the file; a view of it if it lies in one range."""
        if self.rows is None:
            return tensor
        ranges = [tensor[begin:end] for begin, end in self.rows]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, from that of the tensor of the file."""
        return whole if self.rows is None else (sum(end - begin for begin, end in self.rows), *whole[1:])


class SingleFile(Checkpoint):
    """A file of weights as a checkpoint of a model.

    Args:
        arrange: from the shapes of the tensors in the file, which pieces of them the model's tensors are.
    """

    def __init__(
        self, path: Path, arrange: Callable[[Shapes], Mapping[str, Piece]], disable_mmap: bool = False
    ) -> None:
        self.files = (path,)
        self.aliases, self.channels_last, self.quantized, self.infos = {}, set(), {}, {}
        self._gguf: GGUFFile | None = None
        self._plain: TensorFile | None = None
        if path.suffix == ".gguf":
            self._gguf = GGUFFile(path, disable_mmap=disable_mmap)
            found = {name: (each.shape, each.form, each.end - each.begin) for name, each in self._gguf.tensors.items()}
        else:
            self._plain = TensorFile(path, disable_mmap=disable_mmap)
            infos = self._plain.header.tensors
            found = {name: (each.shape, each.dtype, each.end - each.begin) for name, each in infos.items()}
        self.shapes = {name: shape for name, (shape, _, _) in found.items()}
        self._pieces = dict(arrange(self.shapes))
        for name, piece in self._pieces.items():
            whole, form, size = found[piece.name]
            shape = piece.shape(whole)
            own = size if whole == shape or not whole[0] else size * shape[0] // whole[0]
            # Blocks are decoded to the dtype that the model computes in; what stands here for them does not matter.
            self.infos[name] = TensorInfo(torch.float16 if isinstance(form, Format) else form, shape, 0, own)
            if isinstance(form, Format):
                self.quantized[name] = {"raw": piece.name}

    def __getitem__(self, name: str) -> torch.Tensor:
        piece = self._pieces[name]
        if self._gguf is None:
            assert self._plain is not None
            return piece.of(self._plain[piece.name])
        stored, raw = self._gguf.tensors[piece.name], self._gguf.raw(piece.name)
        if isinstance(stored.form, Format):
            return dequantized(piece.of(raw), stored.form, torch.float32).reshape(self.infos[name].shape)
        if raw.storage_offset() % stored.form.itemsize:
            raw = raw.clone()
        return piece.of(raw.flatten().view(stored.form).view(stored.shape))

    def parts(self, name: str, dtype: torch.dtype) -> Parts | None:
        piece = self._pieces[name]
        form = None if self._gguf is None else self._gguf.tensors[piece.name].form
        if self._gguf is None or not isinstance(form, Format) or len(self.infos[name].shape) != 2:
            return None
        return GGUFParts(piece.of(self._gguf.raw(piece.name)), form, dtype)

    def prefetch(self, name: str) -> None:
        reader = self._gguf or self._plain
        if reader is not None:
            reader.prefetch(self._pieces[name].name)

    def release(self, name: str) -> None:
        if self._plain is not None and self._pieces[name].rows is None:
            self._plain.release(self._pieces[name].name)

    def close(self) -> None:
        if self._plain is not None:
            self._plain.close()
