"""Where the master copies of weights live: as they are, in pinned memory, or in files that are mapped into memory."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_core.errors import PlacementError

from .checkpoint import TensorFile, is_remote
from .host_memory import default_pinned_budget, pinned_size
from .saving import save_tensors


class PinnedStore:
    """Puts masters into pinned memory, until a budget is used up.

    Args:
        budget: bytes at most, as the allocator counts them; None is `default_pinned_budget()`.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._left = default_pinned_budget() if budget is None else budget

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory, or the same one where the budget does not allow it or files hold it."""
        size = pinned_size(tensor.untyped_storage().nbytes())
        if tensor.is_pinned() or size > self._left or is_mapped(tensor):
            return tensor
        self._left -= size
        return tensor.pin_memory()


class DiskStore:
    """Puts masters into files in a private folder, which is removed with the store or when Python ends.

    Each file is named by a hash of its content, so what is equal is stored once.

    Args:
        folder: where the private folder goes; None is the system's folder for temporary files.

    Raises:
        PlacementError: the folder cannot be used.
    """

    def __init__(self, folder: str | None = None) -> None:
        parent = None if folder is None else Path(folder).expanduser()
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="diffusion-core-", dir=parent))
        except OSError as error:
            raise PlacementError(f"offload_to_disk_path={folder!r} cannot be used as a folder: {error}") from error
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        if is_remote(self.path):
            self._remove()
            raise PlacementError(f"{folder!r} is on a network mount, which is not mapped safely; choose a local folder")

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors as views of a mapped file. Those that files hold already are returned as they are."""
        mapped = mapped_ranges()
        result = list(tensors)
        todo = {str(i): t.cpu() for i, t in enumerate(result) if t.numel() and not mapped.holds(t)}
        if not todo:
            return result
        flat = {name: _flat(tensor) for name, tensor in todo.items()}
        key = hashlib.sha256()
        for name, tensor in flat.items():
            key.update(f"{name}{tensor.dtype}".encode())
            content: Any = tensor.detach().view(torch.uint8).numpy()
            key.update(content)
        stem = f"group-{key.hexdigest()[:32]}"
        path = self.path / f"{stem}.safetensors"
        if not path.exists():
            save_tensors(flat, self.path, weights_name=stem, max_shard_size=sys.maxsize)
        file = TensorFile(path)
        for name, tensor in todo.items():
            stored = file[name]
            kept = tensor if _is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)
            result[int(name)] = stored.as_strided(kept.shape, kept.stride())
        file.close()
        return result

    def close(self) -> None:
        """Remove the folder. Tensors that were mapped from it stay valid."""
        self._remove()


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a file holds the memory of a tensor, so that the system can drop it when memory is short."""
    return tensor.numel() > 0 and mapped_ranges().holds(tensor)


class MappedRanges:
    """Ranges of addresses that are mapped from files, as pairs of the first and one past the last."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory begins in one of them."""
        if tensor.device.type != "cpu":
            return False
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]


def mapped_ranges() -> MappedRanges:
    """What is mapped now, as the system tells; where it does not, no tensor counts as mapped."""
    ranges: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0" and fields[5].startswith("/") and not fields[5].startswith("/dev/"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            ranges.append((start, end))
    return MappedRanges(sorted(ranges))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of axes."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory."""
    if not _is_plain(tensor):
        return tensor.contiguous().flatten()
    return tensor.as_strided((tensor.numel(),), (1,))
