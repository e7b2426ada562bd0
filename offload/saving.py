"""Write checkpoints: safetensors or `.bin`, in shards, beside the old files and then renamed over them."""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from diffusion_core.config import write_text
from diffusion_core.errors import CheckpointError
from diffusion_core.hub import WEIGHTS_NAME, with_variant

from .checkpoint import CHECKSUM_KEY, DTYPES, MEMORY_FORMAT_KEY
from .sizes import parse_bytes

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LINE = 64
_NO_HASH = "0" * hashlib.sha256().digest_size * 2


def save_tensors(
    tensors: Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    variant: str | None = None,
    safetensors: bool = True,
    max_shard_size: int | str = "5GB",
    checksum: bool = False,
    weights_name: str = WEIGHTS_NAME,
    notes: Mapping[str, str] | None = None,
    note_layouts: bool = True,
) -> list[Path]:
    """Write named tensors as one checkpoint, and remove what an older save of the same variant and format left.

    Nothing of the folder changes before all is written, so it may hold the very files that the tensors are mapped
    from. A tensor with two names is stored once; the other name is noted in the metadata.

    Args:
        max_shard_size: bytes or a text such as "5GB" or "5GiB"; a single larger tensor gets a shard of its own.
        checksum: note the sha256 of the weights in each file, for `verify_checksum` when loading.
        notes: what else each file's metadata says.
        note_layouts: note which weights are channels last, so that loading lays them out alike.

    Returns:
        The weight files, in order.

    Raises:
        ValueError: if an argument makes no sense.
        CheckpointError: if a tensor has no values (it is on meta) or cannot be stored.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # pyright: ignore[reportUnknownVariableType]

    if variant is not None and (not variant or Path(variant).name != variant or "\\" in variant):
        raise ValueError(f"variant={variant!r} cannot be part of a file name")
    if checksum and not safetensors:
        raise ValueError("checksum=True needs safe_serialization=True: a .bin file has no place for a hash")
    limit = parse_bytes(max_shard_size, "max_shard_size")
    if limit == 0:
        raise ValueError("max_shard_size must not be zero")
    stored, aliases = _without_aliases(tensors)
    for name, tensor in stored.items():
        _check_storable(name, tensor)
    suffix = "safetensors" if safetensors else "bin"
    single = with_variant(f"{weights_name}.{suffix}", variant)
    split = split_state_dict_into_shards_factory(
        {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()},
        get_storage_size=int,
        filename_pattern=f"{single.removesuffix('.' + suffix)}{{suffix}}.{suffix}",
        max_shard_size=limit,
    )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    beside: dict[Path, Path] = {}
    try:
        for filename, names in split.filename_to_tensors.items():
            final = target / filename
            beside[final] = final.with_name(f".{filename}.{secrets.token_hex(4)}.tmp")
            part = {name: stored[name] for name in names}
            if safetensors:
                _write_safetensors(beside[final], part, {**(notes or {}), **aliases}, checksum, note_layouts)
            else:
                own_aliases = {name: stored[kept] for name, kept in aliases.items() if kept in part}
                torch.save({**part, **own_aliases}, beside[final])
        for final, temporary in beside.items():
            temporary.replace(final)
    finally:
        for temporary in beside.values():
            temporary.unlink(missing_ok=True)
    written = list(beside)
    index = with_variant(f"{weights_name}.{suffix}.index.json", variant)
    if split.is_sharded:
        files = dict(split.tensor_to_filename)
        files |= {} if safetensors else {name: files[kept] for name, kept in aliases.items()}
        total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        about = {**aliases, "total_size": total} if safetensors else {"total_size": total}
        write_text(
            target / index, json.dumps({"metadata": about, "weight_map": files}, indent=2, sort_keys=True) + "\n"
        )
        written.append(target / index)
    _remove_stale(target, weights_name, suffix, variant, {path.name for path in written})
    return list(beside)


def _without_aliases(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors under the first of their names, and the other names with the one that they stand for."""
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout == torch.strided
        place: Any = id(tensor)
        if plain and tensor.numel() > 0 and not tensor.is_meta:
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            stored[name] = tensor
    return stored, aliases


def _check_storable(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values to save; load the model first")
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        raise CheckpointError(f"{name} is a {type(tensor).__name__}, not a plain tensor; dequantise the model first")
    if tensor.dtype not in _CODES or tensor.layout != torch.strided:
        raise CheckpointError(f"{name} has dtype {tensor.dtype} and layout {tensor.layout}, which have no stored form")


def _write_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], extra: dict[str, str], checksum: bool, note_layouts: bool
) -> None:
    """Write one file, a tensor at a time.

    The format allows no gaps. So what is a multiple of a cache line goes first, then large elements before small
    ones: mapped tensors are then aligned as allocated ones are, and kernels round alike.
    """
    notes = {"format": "pt", **extra}
    layouts = sorted(name for name, tensor in tensors.items() if _is_channels_last(tensor))
    if layouts and note_layouts:
        notes[MEMORY_FORMAT_KEY] = json.dumps(layouts)
    if checksum:
        notes[CHECKSUM_KEY] = _NO_HASH
    header: dict[str, Any] = {"__metadata__": notes}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    ordered = sorted(tensors, key=lambda name: (sizes[name] % _LINE != 0, -tensors[name].element_size(), name))
    end = 0
    for name in ordered:
        tensor, begin = tensors[name], end
        end += sizes[name]
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _LINE)
    digest = hashlib.sha256() if checksum else None
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            _write_bytes(stream, tensors[name], digest)
        if digest is not None:
            stream.seek(8)
            stream.write(text.replace(_NO_HASH.encode(), digest.hexdigest().encode(), 1))


def _write_bytes(stream: IO[bytes], tensor: torch.Tensor, digest: Any) -> None:
    if tensor.numel() == 0:
        return
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    stream.write(content)
    if digest is not None:
        digest.update(content)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _remove_stale(folder: Path, stem: str, suffix: str, variant: str | None, keep: set[str]) -> None:
    """Remove files of the same variant and format that this save did not write. The index goes first: it decides."""
    stem, suffix = re.escape(stem), re.escape(suffix)
    part = rf"\.{re.escape(variant)}" if variant else ""
    shard = r"-\d{5}-of-\d{5}"
    indexes = [rf"{stem}\.{suffix}\.index{part}\.json", rf"{stem}\.{suffix}{part}\.index\.json"]
    weights = [rf"{stem}{part}({shard})?\.{suffix}", rf"{stem}({shard}){part}\.{suffix}"]
    for pattern in ["|".join(indexes), "|".join(weights)]:
        for path in sorted(folder.iterdir()):
            if path.name not in keep and re.fullmatch(pattern, path.name):
                path.unlink()
