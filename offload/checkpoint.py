"""Read checkpoints: sharded or single safetensors, and `.bin` when asked.

A file is checked before anything of it is used. Its tensors are then views of the mapped file, which cost no memory
of their own, or are read where mapping is slow. The format: 8 bytes with the length of a JSON header (little endian),
the header, and the bytes of all tensors without gaps (https://github.com/huggingface/safetensors#format).
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from typing_extensions import Self

from diffusion_core.errors import CorruptFileError, MissingFileError
from diffusion_core.hub import WeightFiles, likely_cause, unique_pairs

from .quantized import Parts
from .torchao_weights import composed, stored_parts

CHECKSUM_KEY = "diffusion_core.sha256"
MEMORY_FORMAT_KEY = "diffusion_core.memory_format"
# The limit of the format's own library: a longer header is a sign that the file is something else.
_LONGEST_HEADER = 100_000_000
_OWN_PAGES = 2**16
_LARGEST_DIMENSION = 2**63 - 1

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {key: getattr(torch, name) for key, name in _NAMES.items() if hasattr(torch, name)}

# Mounts on which page faults travel over a network or through a user process.
_REMOTE_TYPES = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "fuseblk", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "smb3", "smbfs", "v9fs", "vboxsf", "virtiofs", "vmhgfs",
    "wekafs",
})  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its dtype, its shape, and where its bytes are, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What the head of a safetensors file says, checked against the size of the file."""

    path: Path
    data_start: int
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the head of a safetensors file, without touching the weights.

    Raises:
        MissingFileError: if there is no such file.
        CorruptFileError: if it is not a whole, well-formed safetensors file. The message names the file, its size,
            the size that it should have, and the likely cause.
    """
    file = Path(path)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 10 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CorruptFileError(_no_header(file, size, length))
            head = stream.read(length)
    except FileNotFoundError:
        raise MissingFileError(f"there is no file {file}") from None
    except CorruptFileError:
        raise
    except OSError as error:
        raise CorruptFileError(f"{file} cannot be read: {error}") from error
    try:
        content = json.loads(head.decode("utf-8"), object_pairs_hook=unique_pairs)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        header = _parsed(file, 8 + length, cast("dict[str, Any]", content))
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{file} ({size} bytes) has a broken safetensors header: {error}{likely_cause(file)}"
        ) from None
    expected = max((info.end for info in header.tensors.values()), default=header.data_start)
    if expected != size:
        raise CorruptFileError(_wrong_size(file, size, expected))
    return header


def _parsed(file: Path, start: int, content: dict[str, Any]) -> Header:
    notes: Any = content.pop("__metadata__", None) or {}
    if not isinstance(notes, dict):
        raise ValueError("__metadata__ is not an object")
    metadata = cast("dict[str, Any]", notes)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ holds values that are not texts")
    tensors = {name: _tensor_info(name, entry, start) for name, entry in content.items()}
    reached = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != reached:
            relation = "overlaps with the tensor before it" if info.begin < reached else "leaves a gap before it"
            raise ValueError(f"{name!r} at bytes {info.begin - start} to {info.end - start} {relation}")
        reached = info.end
    return Header(file, start, tensors, metadata)


def _tensor_info(name: str, entry: Any, start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of {name!r} does not consist of dtype, shape and data_offsets")
    fields = cast("dict[str, Any]", entry)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {dtype!r}, which this version of torch does not have")
    if not _are_sizes(shape):
        raise ValueError(f"{name!r} has the shape {shape!r}, which is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r} has the data_offsets {offsets!r}, which are not a begin and an end")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise ValueError(f"{name!r} of shape {shape} and dtype {dtype} needs {needed} bytes, offsets are {offsets}")
    return TensorInfo(DTYPES[dtype], tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(item) is int and 0 <= item <= _LARGEST_DIMENSION for item in cast("list[Any]", value))


def _no_header(file: Path, size: int, length: int) -> str:
    cause = likely_cause(file)
    if size < 10:
        return f"{file} has {size} bytes, too few for a safetensors file{cause or ': download it again'}"
    if cause:
        return f"{file} ({size} bytes) is not a safetensors file{cause}"
    return (
        f"{file} ({size} bytes) announces a header of {length} bytes, for which it would need at least {8 + length}: "
        "it is no safetensors file, or was cut off. Download it again."
    )


def _wrong_size(file: Path, size: int, expected: int) -> str:
    if size < expected:
        cause = "the download or copy was cut off. Download it again."
    else:
        cause = "something was written behind the weights, or another file was mixed in. Download it again."
    return f"{file} has {size} bytes, its header says {expected}: {cause}"


def is_remote(path: str | os.PathLike[str], mounts: str | None = None) -> bool:
    """Whether a file lies on a network or user-space (FUSE, WSL) mount, where mapped files are slow or hang.

    Args:
        mounts: the text of `/proc/self/mountinfo`, read from there if None. Without such a table the answer is False,
            but for network names of Windows.
    """
    name = os.path.realpath(path)
    if name.startswith("\\\\") and not name.startswith("\\\\?\\"):
        return True
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return False
    best, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after.split():
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = name == point or name.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind in _REMOTE_TYPES or kind.split(".")[0] == "fuse"


class TensorFile(Mapping[str, torch.Tensor]):
    """A safetensors file as a mapping from names to tensors on the CPU.

    A tensor is a view of the mapped file, copied by the system only where it is written to; or a fresh copy, where
    the file is on a remote mount, `disable_mmap` says so, or the tensor's bytes are not aligned.
    """

    def __init__(self, path: str | os.PathLike[str], *, disable_mmap: bool = False) -> None:
        self.header = read_header(path)
        self.metadata = self.header.metadata
        self._stream = Path(path).open("rb")  # noqa: SIM115 - closed by `close`
        self._mapped: mmap.mmap | None = None
        if self.header.tensors and not disable_mmap and not is_remote(path):
            # Private and writable: changing a weight in place changes neither the file nor other users of it.
            # Where the system refuses (a limit on address space), reading works too.
            with contextlib.suppress(OSError):
                self._mapped = mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_COPY)

    def prefetch(self, name: str) -> None:
        """Ask the system to read a mapped tensor in one go: page by page would be slow when all of it is copied."""
        info = self.header.tensors[name]
        if self._mapped is not None and info.end > info.begin and hasattr(mmap, "MADV_WILLNEED"):
            begin = info.begin - info.begin % mmap.PAGESIZE
            self._mapped.madvise(mmap.MADV_WILLNEED, begin, info.end - begin)

    def release(self, name: str) -> None:
        """Give back the RAM of a mapped tensor that was copied: a load with a cast would hold the file besides."""
        info = self.header.tensors[name]
        begin = info.begin + -info.begin % mmap.PAGESIZE
        end = info.end - info.end % mmap.PAGESIZE
        if self._mapped is not None and end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def __getitem__(self, name: str) -> torch.Tensor:
        info = self.header.tensors[name]
        nbytes = info.end - info.begin
        if nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        if self._mapped is not None and info.begin % info.dtype.itemsize == 0:
            count = nbytes // info.dtype.itemsize
            flat = torch.frombuffer(self._mapped, dtype=info.dtype, count=count, offset=info.begin)
            return flat.view(info.shape)
        return self.read(name)

    def read(self, name: str) -> torch.Tensor:
        """A fresh copy of one tensor, read from the file."""
        info = self.header.tensors[name]
        nbytes = info.end - info.begin
        flat = _fresh_bytes(nbytes)
        content: Any = flat.numpy()
        self._stream.seek(info.begin)
        if self._stream.readinto(content) != nbytes:
            raise CorruptFileError(f"{self.header.path} became shorter while it was read")
        return flat.view(info.dtype).view(info.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.tensors)

    def __len__(self) -> int:
        return len(self.header.tensors)

    def close(self) -> None:
        """Close the file. Tensors that were handed out stay valid: each holds on to the mapping."""
        self._mapped = None
        self._stream.close()


def _fresh_bytes(nbytes: int) -> torch.Tensor:
    """Memory for one tensor, straight from the system: freed, it goes back at once, where `malloc` may keep holes."""
    if nbytes < _OWN_PAGES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


class Checkpoint(Mapping[str, torch.Tensor]):
    """All tensors of one model, over as many files as it has. Use it as a context manager.

    Attributes:
        files: the files, in order.
        infos: dtype and shape of every tensor, in the order in which they lie in the files.
        aliases: names that share the tensor of another name, as the files' metadata says.
        channels_last: names of tensors that were saved from a channels-last layout.
        quantized: names of weights that torchao makes of several tensors of the files.
    """

    def __init__(self, files: WeightFiles, *, disable_mmap: bool = False, verify_checksum: bool = False) -> None:
        """Open and check every file.

        Args:
            verify_checksum: compare the bytes with the hash that `save` wrote; reads everything once.

        Raises:
            CorruptFileError: if a file is not what it should be, lacks a tensor that the index promises, or does not
                match its hash.
            ValueError: if `verify_checksum` is asked for and a file holds no hash.
        """
        self.files = files.files
        self.aliases: dict[str, str] = {}
        self.channels_last: set[str] = set()
        self.infos: dict[str, TensorInfo] = {}
        self._sources: dict[str, Mapping[str, torch.Tensor]] = {}
        self._open: list[TensorFile] = []
        self._notes: dict[str, str] = {}
        self.quantized: dict[str, dict[str, str]] = {}
        try:
            for path in files.files:
                self._add(path, files, disable_mmap, verify_checksum)
            self._find_quantized()
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path, files: WeightFiles, disable_mmap: bool, verify_checksum: bool) -> None:
        source: Mapping[str, torch.Tensor]
        if files.safetensors:
            source = TensorFile(path, disable_mmap=disable_mmap)
            self._open.append(source)
            infos = source.header.tensors
            notes = source.metadata.items()
            self.aliases |= {name: kept for name, kept in notes if name not in infos and kept in infos}
            self.channels_last |= _listed(source.metadata.get(MEMORY_FORMAT_KEY), infos)
            self._notes |= source.metadata
            if verify_checksum:
                verify(source.header)
        else:
            if verify_checksum:
                raise ValueError(f"verify_checksum: {path.name} is no safetensors file and holds no hash")
            source = read_pickle(path)
            infos = {name: TensorInfo(tensor.dtype, tuple(tensor.shape), 0, 0) for name, tensor in source.items()}
        wanted = infos
        if files.weight_map is not None:
            promised = [name for name, file in files.weight_map.items() if file == path]
            absent = [name for name in promised if name not in infos and name not in self.aliases]
            if absent:
                raise CorruptFileError(
                    f"{path} lacks {len(absent)} tensors that the index promises: {', '.join(absent)}. "
                    "Index and file are of different saves; download both again."
                )
            chosen = set(promised)
            wanted = {name: info for name, info in infos.items() if name in chosen}
        for name in sorted(wanted, key=lambda name: wanted[name].begin):
            self.infos[name] = wanted[name]
            self._sources[name] = source

    def _find_quantized(self) -> None:
        """Put each quantised weight in the place of its parts, which have names of their own in the files."""
        for name, parts in stored_parts(self._notes).items():
            stored = {part: self.aliases.get(key, key) for part, key in parts.items()}
            absent = [key for key in stored.values() if key not in self._sources]
            if absent:
                raise CorruptFileError(f"{self.files[0]} lacks {', '.join(absent)}, of which {name!r} is made")
            self.quantized[name] = stored
        hidden = {key for parts in self.quantized.values() for key in parts.values()}
        for name, parts in self.quantized.items():
            infos = {part: self.infos[key] for part, key in parts.items()}
            shapes = {part: torch.empty(info.shape, dtype=info.dtype, device="meta") for part, info in infos.items()}
            whole = composed(name, self._notes[name], shapes)
            begin = min(info.begin for info in infos.values())
            size = sum(info.end - info.begin for info in infos.values())
            self.infos[name] = TensorInfo(whole.dtype, tuple(whole.shape), begin, begin + size)
        self.infos = {name: info for name, info in self.infos.items() if name not in hidden}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.quantized:
            parts = {part: self._sources[key][key] for part, key in self.quantized[name].items()}
            return composed(name, self._notes[name], parts)
        return self._sources[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def parts(self, name: str, dtype: torch.dtype) -> Parts | None:
        """A weight that a layer is to hold as it is stored, decoding it to `dtype` on use; None for all others."""
        return None

    def prefetch(self, name: str) -> None:
        """Ask the system to read a tensor ahead, as all of it will be copied."""
        for key in self.quantized.get(name, {"": name}).values():
            source = self._sources[key]
            if isinstance(source, TensorFile):
                source.prefetch(key)

    def release(self, name: str) -> None:
        """Give back the RAM of a tensor's mapped bytes, as all of it has been copied."""
        for key in self.quantized.get(name, {"": name}).values():
            source = self._sources[key]
            if isinstance(source, TensorFile):
                source.release(key)

    def nbytes(self) -> int:
        """The size of all tensors, each counted once."""
        return sum(math.prod(info.shape) * info.dtype.itemsize for info in self.infos.values())

    def close(self) -> None:
        """Close the files; tensors that were handed out stay valid."""
        for file in self._open:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listed(text: str | None, infos: Mapping[str, TensorInfo]) -> set[str]:
    """The names in a JSON list; what is no such list, or names nothing, does not count."""
    try:
        names: Any = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return set()
    if not isinstance(names, list):
        return set()
    return {name for name in cast("list[Any]", names) if isinstance(name, str) and name in infos}


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read a `.bin` file with `torch.load`, which here admits tensors and plain values only, never code.

    Raises:
        CorruptFileError: if it is not such a file, or holds anything else.
    """
    size = path.stat().st_size if path.is_file() else 0
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=not is_remote(path))
        except RuntimeError:  # the layout before torch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise MissingFileError(f"there is no file {path}") from None
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError,
            AttributeError, AssertionError, OverflowError, MemoryError, ImportError) as error:  # fmt: skip
        # What torch says of its own defaults would mislead, so a cause that is plain goes before it.
        reason = likely_cause(path) or f": {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise CorruptFileError(f"{path} ({size} bytes) cannot be read as a .bin file{reason}") from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path} ({size} bytes) holds a {type(content).__name__}, expected named tensors")
    entries = cast("dict[Any, Any]", content)
    odd = [key for key, value in entries.items() if not isinstance(key, str) or not isinstance(value, torch.Tensor)]
    if odd:
        raise CorruptFileError(f"{path} ({size} bytes) holds entries that are no tensors: {odd[:5]}")
    return cast("dict[str, torch.Tensor]", entries)


def verify(header: Header) -> None:
    """Compare a file's weights with the hash that its metadata holds.

    Raises:
        ValueError: if it holds none.
        CorruptFileError: if they differ.
    """
    expected = header.metadata.get(CHECKSUM_KEY)
    if expected is None:
        raise ValueError(
            f"verify_checksum: {header.path} holds no hash. Save the model with checksum=True, "
            "or load it with verify_checksum=False."
        )
    digest = hashlib.sha256()
    with header.path.open("rb") as stream:
        stream.seek(header.data_start)
        while block := stream.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise CorruptFileError(
            f"{header.path} has the right size but other bytes than were saved (sha256 {digest.hexdigest()[:16]}, "
            f"expected {expected[:16]}): the disk or the copy is faulty. Download it again."
        )


def is_finite(tensor: torch.Tensor, block: int = 1 << 22) -> bool:
    """Whether a tensor holds neither NaN nor infinity. Read in blocks, as the test makes a copy of what it tests."""
    if not tensor.is_floating_point() or tensor.is_meta:
        return True
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), block):
        part = flat[start : start + block]
        if not torch.isfinite(part.float() if part.element_size() == 1 else part).all():
            return False
    return True


if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("diffusion-core reads and writes checkpoints on little-endian machines only")
