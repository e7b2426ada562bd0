"""Which files of a checkpoint a pipeline needs: one set of weights for each component, and its small files."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

_WEIGHTS = re.compile(r"(?:diffusion_pytorch_model|pytorch_model|model)(?P<middle>[.-].*)?\.(?P<kind>safetensors|bin)")
_NUMBERED = re.compile(r"(?P<name>.+)_\d+")
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
# Classes of components that lie in several folders, `controlnet`, `controlnet_1` and so on.
IN_SEVERAL_FOLDERS = frozenset({"FluxMultiControlNetModel", "MultiControlNetModel"})
# What tokenizers, processors and configs are made of. Never code, never weights of other frameworks.
_SMALL_FILES = frozenset({".jinja", ".json", ".model", ".spm", ".txt"})


@dataclass(frozen=True)
class Weights:
    """One complete set of weight files in the folder of a component.

    Attributes:
        variant: the part of the names such as "fp16", None for plain names.
        kind: "safetensors" or "bin".
        files: the names, the index of shards among them.
    """

    variant: str | None
    kind: str
    files: tuple[str, ...]


def weights_in(names: Iterable[str]) -> list[Weights]:
    """All sets of weights among the file names of one folder."""
    sets: dict[tuple[str | None, str], list[str]] = {}
    for name in names:
        key = _parse(name)
        if key is not None:
            sets.setdefault(key, []).append(name)
    return [Weights(variant, kind, tuple(sorted(files))) for (variant, kind), files in sets.items()]


def choose(names: Iterable[str], variant: str | None, use_safetensors: bool | None) -> Weights | None:
    """The set to load: the asked variant before plain names, safetensors before `.bin`; None if there is no weight.

    Args:
        names: the file names of one folder.
        variant: such as "fp16"; a component that has no such files is loaded from its plain ones.
        use_safetensors: True takes only safetensors, False only `.bin`, None either.
    """
    kinds = {True: ("safetensors",), False: ("bin",), None: ("safetensors", "bin")}[use_safetensors]
    found = {(each.variant, each.kind): each for each in weights_in(names)}
    wanted = [(each, kind) for each in dict.fromkeys([variant, None]) for kind in kinds]
    return next((found[key] for key in wanted if key in found), None)


def by_component(files: Iterable[str], components: Collection[str]) -> dict[str, list[str]]:
    """The files of each component, named from its folder on."""
    found: dict[str, list[str]] = {name: [] for name in components}
    for file in files:
        folder, _, rest = file.partition("/")
        if rest and folder in found:
            found[folder].append(rest)
    return found


def numbered_folders(files: Iterable[str], components: Collection[str]) -> set[str]:
    """The folders that carry the name of a component and a number, such as `controlnet_1`."""
    folders = {file.partition("/")[0] for file in files}
    return {folder for folder in folders if (match := _NUMBERED.fullmatch(folder)) and match["name"] in components}


def needed(files: Mapping[str, list[str]], variant: str | None, use_safetensors: bool | None) -> list[str]:
    """What to download: for each component its small files and one set of weights.

    Args:
        files: for each component its files, as `by_component` gives them.
    """
    chosen: list[str] = []
    for component, names in files.items():
        folders: dict[str, list[str]] = {}
        for name in names:
            folders.setdefault(str(PurePosixPath(component, name).parent), []).append(PurePosixPath(name).name)
        for folder, inside in folders.items():
            weights = choose(inside, variant, use_safetensors)
            small = [name for name in inside if PurePosixPath(name).suffix in _SMALL_FILES and _parse(name) is None]
            chosen += [f"{folder}/{name}" for name in (*small, *(weights.files if weights else ()))]
    return sorted(chosen)


def _parse(name: str) -> tuple[str | None, str] | None:
    """Variant and kind of a weight file or of an index of shards; None for any other file.

    The variant stands before the last suffix, `model.fp16-00001-of-00002.safetensors` and
    `model.safetensors.index.fp16.json`; older files have it after the number of the shard or before `.index`.
    """
    is_index = name.endswith(".json") and ".index." in name
    if is_index:
        name = name.removesuffix(".json").replace(".index", "", 1)
        for kind in ("safetensors", "bin"):
            stem, found, variant = name.partition(f".{kind}")
            if found:
                name = f"{stem}{variant}.{kind}"
    match = _WEIGHTS.fullmatch(name)
    if match is None:
        return None
    variant = _SHARD.sub("", match["middle"] or "")
    return (variant.removeprefix(".") or None), match["kind"]
