"""What a checkpoint holds, from its small files and the headers of its weights: nothing is loaded."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_core.config import ConfigMixin
from diffusion_core.errors import ConfigError, MissingFileError
from diffusion_core.hub import list_files, snapshot

from ..offload.checkpoint import Header, read_header
from ..offload.sizes import format_bytes
from ..offload.torchao_weights import described, stored_parts
from .components import Entry
from .files import choose, weights_in
from .loading import INDEX_NAME, is_entry


@dataclass(frozen=True)
class ComponentInfo:
    """One component of a checkpoint.

    Attributes:
        name: its folder, "" for a checkpoint of one model.
        library: as in `model_index.json`.
        class_name: likewise; None for a component that is left out.
        parameters: how many floating point numbers its weights are; None where no header says so (`.bin` files).
        dtypes: how many of them have which dtype; quantised ones under the name of their kind.
        weight_bytes: the size of its weight files.
        other_bytes: the size of its other files, weights of other variants among them.
        variants: the variants of weights that lie there; None stands for plain names.
    """

    name: str
    library: str | None
    class_name: str | None
    parameters: int | None = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    other_bytes: int = 0
    variants: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class CheckpointInfo:
    """What `describe` found; as a string, a table.

    Attributes:
        path: the folder.
        class_name: the pipeline's class, or the model's.
        components: in the order of `model_index.json`.
        settings: the pipeline's settings, or the model's config.
    """

    path: Path
    class_name: str
    components: tuple[ComponentInfo, ...]
    settings: Mapping[str, Any]

    @property
    def parameters(self) -> int:
        """Those of all components whose number is known."""
        return sum(each.parameters or 0 for each in self.components)

    @property
    def weight_bytes(self) -> int:
        """The size of the weight files of all components."""
        return sum(each.weight_bytes for each in self.components)

    def __str__(self) -> str:
        rows = [("component", "class", "parameters", "dtype", "weights"), *map(_row, self.components)]
        rows.append(("total", "", f"{self.parameters:,}", "", format_bytes(self.weight_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([f"{self.class_name} in {self.path}", *(line.rstrip() for line in lines)])


def describe(
    path: str | os.PathLike[str], *, variant: str | None = None, use_safetensors: bool | None = None, **hub: Any
) -> CheckpointInfo:
    """Components, classes, parameters, dtypes and sizes on disk of a pipeline's or model's folder.

    Args:
        path: a folder, or the id of a repo that has been downloaded.
        variant: describe weights of this variant where there are such.
        use_safetensors: as for `Pipeline.from_pretrained`.
        hub: `revision`, `cache_dir`, for a repo.

    Raises:
        MissingFileError: if there is no such folder, or it has neither `model_index.json` nor `config.json`.
        ConfigError: if a config cannot be understood.
        CorruptFileError: if a weight file is not what its name says.
    """
    folder = snapshot(path, local_files_only=True, **hub)
    index = folder / INDEX_NAME
    config = folder / "config.json"
    if index.is_file():
        content = ConfigMixin.read_config(index)
        entries = {name: value for name, value in content.items() if is_entry(value)}
    elif config.is_file():
        content = ConfigMixin.read_config(config)
        entries = {"": ("transformers" if "model_type" in content else "diffusers", _class_name(content))}
    else:
        raise MissingFileError(f"{folder} has neither {INDEX_NAME} nor config.json: it is no checkpoint")
    components = [_component(folder, name, entry, variant, use_safetensors) for name, entry in entries.items()]
    settings = {key: value for key, value in content.items() if key not in entries and not key.startswith("_")}
    return CheckpointInfo(folder, _class_name(content), tuple(components), settings)


def _class_name(content: Mapping[str, Any]) -> str:
    architectures = content.get("architectures") or [None]
    name = content.get("_class_name") or architectures[0]
    if not isinstance(name, str):
        raise ConfigError(f"the config names no class: {json.dumps(name)}")
    return name


def _component(folder: Path, name: str, entry: Entry, variant: str | None, safe: bool | None) -> ComponentInfo:
    library, class_name = entry
    place = folder / name
    if class_name is None or not place.is_dir():
        return ComponentInfo(name, library, class_name)
    files = list_files(place)
    weights = choose(files, variant, safe)
    chosen = weights.files if weights else ()
    sizes = {file: (place / file).stat().st_size for file in files}
    dtypes: Counter[str] = Counter()
    for file in chosen:
        if file.endswith(".safetensors"):
            dtypes.update(_dtypes(read_header(place / file)))
    return ComponentInfo(
        name,
        library,
        class_name,
        parameters=None if weights and weights.kind == "bin" else dtypes.total(),
        dtypes=dict(dtypes.most_common()),
        weight_bytes=sum(sizes[file] for file in chosen),
        other_bytes=sum(size for file, size in sizes.items() if file not in chosen),
        variants=tuple(sorted({each.variant for each in weights_in(files)}, key=str)),
    )


def _dtypes(header: Header) -> Counter[str]:
    """How many numbers of which dtype a file holds. A quantised weight counts where the first of its parts is."""
    found: Counter[str] = Counter()
    hidden: set[str] = set()
    for name, parts in stored_parts(header.metadata).items():
        here = [header.tensors[key] for key in parts.values() if key in header.tensors]
        hidden.update(parts.values())
        if here and next(iter(parts.values())) in header.tensors:
            kind, count = described(name, header.metadata[name], (info.shape for info in here))
            found[kind] += count
    for name, info in header.tensors.items():
        if info.dtype.is_floating_point and name not in hidden:
            found[str(info.dtype).removeprefix("torch.")] += (info.end - info.begin) // info.dtype.itemsize
    return found


def _row(info: ComponentInfo) -> tuple[str, str, str, str, str]:
    if info.class_name is None:
        return info.name, "absent", "", "", ""
    if not info.weight_bytes:
        return info.name, info.class_name, "", "", ""
    count = "unknown" if info.parameters is None else f"{info.parameters:,}"
    return info.name or "model", info.class_name, count, ", ".join(info.dtypes), format_bytes(info.weight_bytes)
