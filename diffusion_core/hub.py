"""A repo id or a folder becomes local files: single files, whole snapshots, and the weights of one model.

`huggingface_hub` does the downloads and is imported only when something is not a local folder.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from diffusion_core.errors import CheckpointError, CorruptFileError, MissingFileError
from diffusion_core.logging import get_logger

logger = get_logger(__name__)

WEIGHTS_NAME = "diffusion_pytorch_model"
_LARGEST_INDEX = 256 * 2**20
_WEIGHT_FILES = frozenset({".bin", ".ckpt", ".gguf", ".pt", ".pth", ".safetensors"})


def source_name(repo_or_folder: str | os.PathLike[str]) -> str:
    """The argument as text.

    Raises:
        TypeError: if it is neither text nor a path.
    """
    if not isinstance(repo_or_folder, str | os.PathLike):
        kind = type(repo_or_folder).__name__
        raise TypeError(f"pretrained_model_name_or_path must be a folder or a repo id, not {kind}")
    return os.fspath(repo_or_folder)


def is_local(repo_or_folder: str | os.PathLike[str]) -> bool:
    """Whether the name is a folder on this machine, rather than a repo on the Hub."""
    name = source_name(repo_or_folder)
    return bool(name) and Path(name).expanduser().is_dir()


def find_file(
    repo_or_folder: str | os.PathLike[str],
    filename: str,
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Path:
    """The local path of one file of a folder or of a repo on the Hub, downloaded if need be.

    Raises:
        MissingFileError: if the file is not there; the message lists what is.
        CheckpointError: if the repo cannot be reached or read; the message says what to do.
    """
    if is_local(repo_or_folder):
        folder = Path(repo_or_folder).expanduser() / (subfolder or "")
        if not (folder / filename).is_file():
            raise MissingFileError(f"no file named {filename} in {folder}; {_contents(folder)}")
        return folder / filename
    repo = _repo_id(repo_or_folder)
    from huggingface_hub import hf_hub_download

    name = f"{subfolder}/{filename}" if subfolder else filename
    return _fetched(
        hf_hub_download,
        f"{repo}/{name}",
        repo_id=repo,
        filename=filename,
        subfolder=subfolder or None,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        force_download=force_download,
        local_files_only=local_files_only,
    )


def snapshot(
    repo_or_folder: str | os.PathLike[str],
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Path:
    """A local folder with the files of a repo that the patterns allow. A local folder is returned as it is.

    Raises:
        CheckpointError: if the repo cannot be reached or read; the message says what to do.
    """
    if is_local(repo_or_folder):
        return Path(repo_or_folder).expanduser()
    repo = _repo_id(repo_or_folder)
    from huggingface_hub import snapshot_download

    return _fetched(
        snapshot_download,
        repo,
        repo_id=repo,
        allow_patterns=allow_patterns,
        ignore_patterns=ignore_patterns,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        force_download=force_download,
        local_files_only=local_files_only,
    )


def list_files(
    repo_or_folder: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> list[str]:
    """The names of all files of a folder or of a repo, as `unet/config.json`; offline, of those in the cache.

    Raises:
        CheckpointError: if the repo cannot be reached or read, and nothing of it is in the cache.
    """
    if not is_local(repo_or_folder):
        from huggingface_hub import constants

        repo = _repo_id(repo_or_folder)
        listed = None if local_files_only or constants.HF_HUB_OFFLINE else _listed(repo, revision, token)
        if listed is not None:
            return sorted(listed)
    cached = snapshot(repo_or_folder, revision=revision, cache_dir=cache_dir, local_files_only=True)
    found = (Path(folder, name) for folder, _, names in os.walk(cached) for name in names)
    return sorted(file.relative_to(cached).as_posix() for file in found)


def upload(folder: str | os.PathLike[str], repo_id: str, *, private: bool | None = None, **kwargs: Any) -> str:
    """Make the repo if need be and upload a folder to it; `kwargs` go to `huggingface_hub`'s `upload_folder`.

    Returns the address of the commit.
    """
    from huggingface_hub import create_repo, upload_folder

    repo = create_repo(repo_id, private=private, exist_ok=True, token=kwargs.get("token")).repo_id
    kwargs.setdefault("commit_message", f"Upload {Path(folder).name}")
    return str(upload_folder(repo_id=repo, folder_path=str(folder), **kwargs))


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold one model's weights.

    Attributes:
        files: every file, in the order of their names.
        weight_map: tensor name to file, as the index promises; None for a single file.
        safetensors: False for files that `torch.load` reads.
    """

    files: tuple[Path, ...]
    weight_map: dict[str, Path] | None
    safetensors: bool


def with_variant(filename: str, variant: str | None) -> str:
    """`diffusion_pytorch_model.safetensors` and `fp16` give `diffusion_pytorch_model.fp16.safetensors`."""
    if not variant:
        return filename
    stem, _, suffix = filename.rpartition(".")
    return f"{stem}.{variant}.{suffix}" if stem else f"{filename}.{variant}"


def find_weights(
    repo_or_folder: str | os.PathLike[str],
    *,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    weights_name: str = WEIGHTS_NAME,
    pickle_name: str | None = None,
    subfolder: str | None = None,
    **options: Any,
) -> WeightFiles:
    """The weight files of one model: safetensors before pickles, and an index before a single file.

    Args:
        variant: the part of the names such as "fp16"; only files of that variant count.
        use_safetensors: True takes only safetensors, False only `.bin`, None prefers safetensors and warns otherwise.
        weights_name: the stem of the names; `model` for components of transformers.
        pickle_name: the stem of `.bin` names where it differs, as `pytorch_model`.
        options: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`, as for `find_file`.

    Raises:
        MissingFileError: if no such file exists, or an index names files that do not; all of them are listed.
        CorruptFileError: if the index cannot be understood.
    """
    place = {"subfolder": subfolder, **options}
    exists = _presence(repo_or_folder, **place)
    tried: list[str] = []
    for safetensors in {True: (True,), False: (False,), None: (True, False)}[use_safetensors]:
        suffix = "safetensors" if safetensors else "bin"
        stem = weights_name if safetensors else pickle_name or weights_name
        single = with_variant(f"{stem}.{suffix}", variant)
        indexes = [with_variant(f"{stem}.{suffix}.index.json", variant)]
        if variant:  # the order of an older layout
            indexes.append(f"{stem}.{suffix}.{variant}.index.json")
        index = next((name for name in indexes if exists(name)), None)
        tried += [*indexes[:1], single]
        if index is None and not exists(single):
            continue
        if not safetensors and use_safetensors is None:
            logger.warning(
                "%s has no safetensors weights; reading .bin files, in which torch admits tensors only. "
                "Save the model again to convert it.",
                repo_or_folder,
            )
        if index is None:
            return WeightFiles((find_file(repo_or_folder, single, **place),), None, safetensors)
        names = read_index(find_file(repo_or_folder, index, **place))
        wanted = sorted(set(names.values()))
        missing = [name for name in wanted if not exists(name)]
        if missing and exists(single):
            logger.warning("%s names files that are absent (%s); reading %s instead", index, missing[0], single)
            return WeightFiles((find_file(repo_or_folder, single, **place),), None, safetensors)
        if missing:
            raise MissingFileError(
                f"{index} in {_place(repo_or_folder, subfolder)} names {len(wanted)} files, of which "
                f"{len(missing)} are missing: {', '.join(missing)}. Download them again."
            )
        paths = {name: find_file(repo_or_folder, name, **place) for name in wanted}
        return WeightFiles(tuple(paths.values()), {key: paths[name] for key, name in names.items()}, safetensors)
    raise MissingFileError(_nothing_found(repo_or_folder, subfolder, variant, use_safetensors, tried))


def read_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """The `weight_map` of a shard index: tensor name to file name. Other entries, also `metadata`, are optional.

    Raises:
        CorruptFileError: if it is not such a file, or a name would leave the folder. The message names the file.
    """
    file = Path(path)
    size = file.stat().st_size
    if size > _LARGEST_INDEX:
        raise CorruptFileError(f"{file} has {size} bytes, too many for an index; is it a weight file?")
    try:
        content = json.loads(file.read_bytes().decode("utf-8"), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{file} ({size} bytes) is not a shard index: {error}{likely_cause(file)}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{file} is not a shard index: it has no filled object named weight_map")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _stays_inside(name):
            raise CorruptFileError(f"{file} maps {key!r} to {name!r}, which is not the plain name of a file beside it")
    return weight_map


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for `json.loads` that refuses a key given twice, of which plain JSON would drop one unseen."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in names if names.count(key) > 1)!r} occurs twice")
    return result


def likely_cause(file: Path) -> str:
    """What a file that cannot be read probably is, as the end of a message; empty if nothing is recognised."""
    try:
        with file.open("rb") as stream:
            head = stream.read(512)
    except OSError as error:
        return f"; it cannot be read: {error}"
    text = head.lstrip().lower()
    if not head:
        return ". The file is empty: download it again."
    if text.startswith(b"version https://git-lfs"):
        return ". It is a git-lfs pointer, not the file itself: run `git lfs pull`, or download from the Hub."
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return ". It is a web page saved under this name: the download needs a login, or its address was wrong."
    if head.startswith((b"PK\x03\x04", b"\x80\x02")) and file.suffix == ".bin":
        return ". It was cut off, or holds more than tensors, which is never read."
    if text.startswith(b"{") and file.suffix != ".json":
        return ". It is JSON text, perhaps a server's message saved under this name: download it again."
    if head.startswith((b"PK\x03\x04", b"\x80\x02")):
        return ". It is a file for `torch.load`: give it the suffix .bin and pass use_safetensors=False."
    if head.startswith(b"GGUF"):
        return ". It is a GGUF file."
    return ""


def _stays_inside(name: str) -> bool:
    plain = name not in {"", ".", ".."} and name.isprintable() and len(name.encode()) < 256
    return plain and PurePosixPath(name).name == name and PureWindowsPath(name).name == name


def _presence(
    repo_or_folder: str | os.PathLike[str],
    *,
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Callable[[str], bool]:
    """A test for names of files: by a look at the folder, by one listing of the repo, or by the cache if offline."""
    if is_local(repo_or_folder):
        folder = Path(repo_or_folder).expanduser() / (subfolder or "")
        return lambda name: (folder / name).is_file()
    repo = _repo_id(repo_or_folder)
    from huggingface_hub import constants, try_to_load_from_cache

    prefix = f"{subfolder}/" if subfolder else ""
    listed = None if local_files_only or constants.HF_HUB_OFFLINE else _listed(repo, revision, token)
    if listed is not None:
        return lambda name: prefix + name in listed
    cached = {"cache_dir": cache_dir, "revision": revision}
    return lambda name: isinstance(try_to_load_from_cache(repo, prefix + name, **cached), str)


def _listed(repo: str, revision: str | None, token: str | bool | None) -> set[str] | None:
    """The names of a repo's files; None without a connection, when the cache may still hold everything."""
    from huggingface_hub import HfApi

    try:
        return set(HfApi().list_repo_files(repo, revision=revision, token=token))
    except Exception as error:
        if getattr(error, "response", None) is not None:  # a repo that is refused or absent
            raise _explained(error, repo) from error
        logger.info("cannot list %s (%s); looking in the cache", repo, error)
        return None


def _repo_id(repo_or_folder: str | os.PathLike[str]) -> str:
    """The argument as a repo id, if it can be one.

    Raises:
        MissingFileError: if it reads like the path of a folder that is not there.
    """
    name = source_name(repo_or_folder)
    path = Path(name).expanduser()
    if path.suffix.lower() in _WEIGHT_FILES:
        found = "is a file of weights" if path.is_file() else "reads like a file of weights, and is not there"
        raise MissingFileError(
            f"{name} {found}; name the folder or repo that holds it with its config. A file that holds a whole "
            "pipeline is converted once, with `from_single_file(...)` and `save_pretrained(folder)` of diffusers"
        )
    if path.is_file():
        raise MissingFileError(f"{name} is a file; name the folder or repo that holds it")
    is_path = isinstance(repo_or_folder, os.PathLike) or path.is_absolute() or "\\" in name
    if is_path or name.startswith((".", "~")) or name.count("/") > 1 or not name.strip():
        raise MissingFileError(f"there is no folder {name!r}, and it is not a repo id such as 'owner/name'")
    return name


def _fetched(download: Callable[..., str], what: str, **arguments: Any) -> Path:
    try:
        return Path(download(**arguments))
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        raise _explained(error, what) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] not in {"huggingface_hub", "httpx", "requests"}:
            raise
        raise _explained(error, what) from error


def _explained(error: Exception, what: str) -> CheckpointError:
    """An error of `huggingface_hub` in our words, with the remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{what} is gated: accept its terms on the Hub, then log in or pass `token=`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{what}: no such repo on the Hub, or it is private (then log in or pass `token=`). It is no local folder."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{what}: the repo has no such revision")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return MissingFileError(
            f"{what} is neither a local folder nor in the local cache, and was not downloaded: there is no connection "
            "to the Hub, or `local_files_only=True` or HF_HUB_OFFLINE forbids it. Name a local folder, or go online."
        )
    if isinstance(error, errors.EntryNotFoundError):
        return MissingFileError(f"{what} does not exist on the Hub")
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"{what} is neither a local folder nor a valid repo id: {error}")
    return CheckpointError(f"cannot get {what} from the Hub: {error}")


def _place(repo_or_folder: str | os.PathLike[str], subfolder: str | None) -> str:
    return f"{os.fspath(repo_or_folder)}/{subfolder}" if subfolder else os.fspath(repo_or_folder)


def _contents(folder: Path, limit: int = 12) -> str:
    if not folder.is_dir():
        return "that folder does not exist"
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
    return f"it holds {shown}" if names else "it is empty"


def _nothing_found(
    repo_or_folder: str | os.PathLike[str],
    subfolder: str | None,
    variant: str | None,
    use_safetensors: bool | None,
    tried: list[str],
) -> str:
    message = f"no weights in {_place(repo_or_folder, subfolder)}: looked for {', '.join(tried)}"
    if is_local(repo_or_folder):
        message += f"; {_contents(Path(repo_or_folder).expanduser() / (subfolder or ''))}"
    if variant:
        message += f". Without variant={variant!r} the plain files are looked for."
    if use_safetensors:
        message += ". With use_safetensors=None, .bin files count too."
    return message
