"""From a checkpoint to a pipeline: everything is checked first, then the components are loaded one by one."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffusion_core.config import ConfigMixin
from diffusion_core.errors import CheckpointError, ConfigError, DiffusionCoreError, MissingFileError
from diffusion_core.hub import find_file, find_weights, is_local, list_files, snapshot
from diffusion_core.logging import get_logger, transformers_quiet
from diffusion_core.progress import progress_bar

from ..models.foreign import load_transformers_model, most_common_dtype, sizes_in, skeleton_of
from ..models.quantization import TorchAoConfig
from ..offload.checkpoint import Checkpoint, read_header
from ..offload.device_map import stored_bytes
from ..offload.dtypes import parse_dtype
from ..offload.layout import Layout, MapRequest
from ..offload.loading import LoadOptions, build_without_weights, planned_bytes
from .components import ABSENT, Entry, class_of, public, public_names, unwrap
from .files import IN_SEVERAL_FOLDERS, Weights, by_component, choose, needed, numbered_folders, weights_in
from .quantization import PipelineQuantizationConfig

logger = get_logger(__name__)

INDEX_NAME = "model_index.json"

# Arguments of the reference that ask for something that is done in another way here, with that way.
_ELSEWHERE = {
    "custom_pipeline": "code from a repo is never run; write a subclass of Pipeline and call its from_pretrained",
    "custom_revision": "code from a repo is never run",
    "dduf_file": "unpack the file into a folder",
    "load_connected_pipeline": "load the other pipeline by itself and hand it over as a component",
    "mirror": "set the environment variable HF_ENDPOINT",
    "provider": "ONNX models are not read",
    "provider_options": "ONNX models are not read",
    "proxies": "set the environment variable HTTPS_PROXY",
    "sess_options": "ONNX models are not read",
    "use_flashpack": "safetensors files are mapped, which needs no other format",
    "use_onnx": "ONNX models are not read",
}
# Arguments of the reference that change nothing here.
_WITHOUT_EFFECT = frozenset({"offload_state_dict", "trust_remote_code"})
# Entries of model_index.json that describe the file. Others with an underscore are settings of another class.
_MARKS = frozenset({"_class_name", "_diffusers_version", "_ignore_files", "_name_or_path", "_use_default_values"})


@dataclass(frozen=True)
class WeightOptions:
    """How the weights of components are read; the arguments of `Pipeline.from_pretrained` of the same names."""

    dtype: Any = None
    variant: str | None = None
    use_safetensors: bool | None = None
    disable_mmap: bool = False
    request: MapRequest = field(default_factory=MapRequest)
    quantization: PipelineQuantizationConfig | None = None

    def dtype_of(self, component: str) -> Any:
        """The dtype for one component, a torch dtype or "auto"; None leaves it to the component."""
        given = self.dtype
        if isinstance(given, Mapping):
            given = given.get(component, given.get("default"))
        return None if given is None else as_dtype(given)


def read_index(source: str, hub: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of `model_index.json`, and `hub` with the commit that it came from.

    Args:
        source: a local folder or a repo id.
        hub: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`.

    Raises:
        MissingFileError: if there is no such file.
        ConfigError: if it is not a JSON object.
    """
    try:
        path = find_file(source, INDEX_NAME, **hub)
    except MissingFileError as error:
        if is_local(source) and (snapshot(source) / "config.json").is_file():
            raise MissingFileError(f"{error}. It is a model, not a pipeline: load it with AutoModel.") from error
        raise
    # The cache of the Hub keeps a folder for each commit.
    commit = {} if is_local(source) or path.parents[1].name != "snapshots" else {"revision": path.parent.name}
    return ConfigMixin.read_config(path), {**hub, **commit}


def load(
    cls: Any,
    index: Mapping[str, Any],
    source: str,
    options: WeightOptions,
    hub: Mapping[str, Any],
    given: dict[str, Any],
) -> Any:
    """Make a pipeline of class `cls` from what `index`, the content of `model_index.json`, says.

    Args:
        cls: the class to make, a subclass of `Pipeline`.
        index: the content of `model_index.json`.
        source: a local folder or a repo id.
        options: how the weights are read.
        hub: the arguments of `hub.snapshot`.
        given: components and settings by name that replace those of the checkpoint.
    """
    required = cls.component_arguments()
    settings = cls.config_arguments()
    given = _known_arguments(cls, given, {*required, *settings})
    entries = _entries(cls, index, [name for name in required if name not in given])
    empty = {name for name in required if name not in given and entries[name] == ABSENT}
    missing = [name for name, needs_it in required.items() if needs_it and name in empty]
    if missing:
        raise ConfigError(
            f"{cls.__name__} needs {', '.join(missing)}, which {source} does not have; pass them by name, or None"
        )
    classes = {name: class_of(entry) for name, entry in entries.items() if entry != ABSENT}
    for name in required.keys() & given.keys():
        _check_override(name, given[name], index.get(name))
    _check_dtypes(options, required)

    quantized = options.quantization.by_component(classes) if options.quantization else {}

    folder, files = fetch(source, {name: entries[name] for name in classes}, options, hub)
    layout = _layout(cls, classes, given, folder, files, options, quantized)
    components: dict[str, Any] = dict.fromkeys(entries)
    for name in progress_bar(list(classes), desc="Loading components", leave=False):
        components[name] = load_component(
            classes[name], folder, name, files[name], options, layout, quantized.get(name)
        )
    pipe = _made(cls, {**dict.fromkeys(required), **components, **given}, index)
    pipe.name_or_path = source
    if options.request.device_map is not None:
        pipe.apply_layout(layout, options.request.folder)
    return pipe


def share(cls: Any, components: Mapping[str, Any], config: Mapping[str, Any], given: dict[str, Any]) -> Any:
    """Make a pipeline of class `cls` around components that exist; `given` replaces some, or settings of `config`."""
    required = cls.component_arguments()
    settings = cls.config_arguments()
    unknown = [name for name in given if name not in required and name not in settings]
    if unknown:
        raise TypeError(f"{cls.__name__} takes no {unknown[0]!r}; {close_matches(unknown[0], {*required, *settings})}")
    parts = {name: given.get(name, components.get(name)) for name in required}
    missing = [name for name, needs_it in required.items() if needs_it and parts[name] is None and name not in given]
    if missing:
        raise ConfigError(f"{cls.__name__} needs {', '.join(missing)}, which the other pipeline does not have")
    return _made(cls, {**parts, **{key: given[key] for key in given if key in settings}}, config)


def _made(cls: Any, arguments: dict[str, Any], config: Mapping[str, Any]) -> Any:
    """Make the pipeline with the settings of `config`; those that `cls` does not know stay in its config."""
    found = {key.removeprefix("_"): value for key, value in config.items() if not is_entry(value) and key not in _MARKS}
    settings = {key: found.pop(key) for key in cls.config_arguments() if key in found}
    pipe = cls(**{**settings, **arguments})
    pipe.register_to_config(**{key: value for key, value in found.items() if key not in cls.component_arguments()})
    return pipe


def pipeline_class(index: Mapping[str, Any], base: type) -> type:
    """The class that `_class_name` names.

    Raises:
        ConfigError: if it is not one of ours.
    """
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise ConfigError(
            f"model_index.json names the class {name!r}; code from a repo is never run. Call from_pretrained on the"
            " class that you want"
        )
    found = public(name)
    if not isinstance(found, type) or not issubclass(found, base):
        known = sorted(each for each in public_names() if each.endswith("Pipeline") and public(each) is not base)
        raise ConfigError(f"model_index.json names {name}, which is not here; pipelines are {', '.join(known)}")
    return found


def _layout(
    cls: Any,
    classes: Mapping[str, Any],
    given: Mapping[str, Any],
    folder: Path,
    files: Mapping[str, list[str]],
    options: WeightOptions,
    quantized: Mapping[str, TorchAoConfig],
) -> Layout:
    """Where each component that is a module goes; those that are not loaded yet are known from their files."""
    request = options.request
    existing = {name: unwrap(part) for name, part in given.items() if isinstance(part, nn.Module)}
    names = [
        name for name in cls.component_arguments() if name in existing or issubclass(classes.get(name, str), nn.Module)
    ]
    if request.device is not None:
        return Layout({name: {"": request.device} for name in names}, request.device)
    parts: dict[str, nn.Module] = {}
    size_of: dict[str, Any] = {}
    for name in in_running_order(cls, names):
        if name in existing:
            parts[name], size_of[name] = existing[name], stored_bytes
        else:
            parts[name], size_of[name] = skeleton(classes[name], folder / name, files[name], options, name)
            if name in quantized:
                size_of[name] = quantized[name].sizes(parts[name], size_of[name])

    def size(tensor_name: str, tensor: torch.Tensor) -> int:
        part, _, inner = tensor_name.partition(".")
        return size_of[part](inner, tensor)

    with_weights = {name: part for name, part in parts.items() if next(part.parameters(), None) is not None}
    return request.layout(with_weights, size)


def in_running_order(cls: Any, names: Collection[str]) -> list[str]:
    """Names of components in the order in which they work, as `model_cpu_offload_seq` says; then those not in it."""
    stated = [name for name in (cls.model_cpu_offload_seq or "").split("->") if name in names]
    return list(dict.fromkeys([*stated, *names]))


def skeleton(
    cls: Any, folder: Path, files: list[str], options: WeightOptions, name: str
) -> tuple[nn.Module, Callable[[str, torch.Tensor], int]]:
    """A component without weights, and a function that tells how many bytes each of its tensors will take."""
    dtype = options.dtype_of(name) or torch.float32
    if dtype == "auto":
        dtype = _stored_dtype(folder, choose(files, options.variant, options.use_safetensors))
    if issubclass(cls, ConfigMixin):
        config = cls.load_config(folder)
        made = build_without_weights(partial(cls.from_config, config))
        if "quantization_config" in config:
            weights = find_weights(folder, variant=options.variant, use_safetensors=options.use_safetensors)
            with Checkpoint(weights) as checkpoint:
                return made, planned_bytes(checkpoint, LoadOptions(dtype="auto"))
    else:
        made = skeleton_of(cls, folder)
    return made, sizes_in(dtype, getattr(cls, "_keep_in_fp32_modules", None) or ())


def _stored_dtype(folder: Path, weights: Weights | None) -> torch.dtype:
    """The floating dtype that most of the weights in the first safetensors file have; float32 for other files."""
    file = next((name for name in (weights.files if weights else ()) if name.endswith(".safetensors")), None)
    return torch.float32 if file is None else most_common_dtype(read_header(folder / file).tensors.values())


def load_component(
    cls: Any,
    folder: Path,
    name: str,
    files: list[str],
    options: WeightOptions,
    layout: Layout,
    quantized: TorchAoConfig | None = None,
) -> Any:
    """Load one component from its folder below `folder`, straight to where `layout` has it.

    Args:
        quantized: how it is quantised meanwhile.

    Raises:
        DiffusionCoreError: if it cannot be loaded; the message names the component.
    """
    weights = choose(files, options.variant, options.use_safetensors)
    arguments = {
        "dtype": options.dtype_of(name),
        "variant": weights.variant if weights else None,
        "use_safetensors": options.use_safetensors,
        "disable_mmap": options.disable_mmap,
        "device_map": layout.of(name) if name in layout.places else options.request.device,
    }
    if quantized is not None:
        arguments["quantization_config"] = quantized
    is_ours, is_model = issubclass(cls, ConfigMixin), issubclass(cls, nn.Module)
    try:
        if is_ours and is_model:
            return cls.from_pretrained(folder, subfolder=name, **arguments)
        if is_model:
            return _load_foreign(cls, folder, name, arguments)
        if hasattr(cls, "component_arguments"):  # a pipeline, whose weights lie one folder deeper
            variants = {each.variant for each in weights_in(file.rpartition("/")[2] for file in files)}
            arguments["variant"] = options.variant if options.variant in variants else None
            return cls.from_pretrained(folder / name, **arguments)
        _check_vocabulary(cls, folder / name, files)
        with transformers_quiet():
            return cls.from_pretrained(str(folder / name))
    except DiffusionCoreError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, ImportError) as error:
        raise CheckpointError(f"the component {name}, a {cls.__name__} in {folder / name}: {error}") from error


def _check_vocabulary(cls: Any, folder: Path, files: list[str]) -> None:
    """Refuse a tokenizer without words: transformers makes one that turns every prompt into nothing."""
    wanted = dict(getattr(cls, "vocab_files_names", None) or {})
    whole = wanted.pop("tokenizer_file", "tokenizer.json")
    lacking = [wanted[key] for key in ("vocab_file", "merges_file") if key in wanted and wanted[key] not in files]
    if wanted and whole not in files and lacking:
        raise MissingFileError(f"the tokenizer in {folder} lacks {', '.join(lacking)}, and has no {whole}")


def as_dtype(dtype: Any) -> Any:
    """A floating point dtype from a torch dtype or its name, "auto" as it is, and float32 for None.

    Raises:
        ValueError: if there is no such floating point dtype.
        TypeError: if it is something else.
    """
    return dtype if dtype == "auto" else parse_dtype(dtype) or torch.float32


def close_matches(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the names that it may have been meant for, else all."""
    similar = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(similar)}?" if similar else f"known are {', '.join(sorted(known))}"


def _known_arguments(cls: type, given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Those of `given` that `cls` takes; an error for any other that asks for something."""
    taken = {}
    for name, value in given.items():
        if name in known:
            taken[name] = value
        elif name in _ELSEWHERE and value:
            raise ValueError(f"{name}={value!r} is not supported: {_ELSEWHERE[name]}")
        elif name not in _ELSEWHERE and name not in _WITHOUT_EFFECT:
            raise TypeError(f"{cls.__name__}.from_pretrained has no argument {name!r}; {close_matches(name, known)}")
    return taken


def is_entry(value: Any) -> bool:
    """Whether a value of `model_index.json` is a component's pair of library and class, rather than a setting."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(x, str | None) for x in value)


def _entries(cls: Any, index: Mapping[str, Any], names: Collection[str]) -> dict[str, Entry]:
    """The entries of the components `names`; what `cls` does not take is left out."""
    entries: dict[str, Entry] = {}
    for name in names:
        value = index.get(name, ABSENT)
        if not (is_entry(value) or value is None):
            raise ConfigError(f"model_index.json has {name}: {value!r}, expected a pair of a library and a class")
        entries[name] = tuple(value) if value else ABSENT
    left_out = [key for key, value in index.items() if is_entry(value) and key not in cls.component_arguments()]
    if left_out:
        logger.info("%s takes no %s; left out", cls.__name__, ", ".join(left_out))
    return entries


def _check_override(name: str, component: Any, entry: Any) -> None:
    """Refuse an object that cannot stand in for the component that the checkpoint names."""
    if component is None or not is_entry(entry) or tuple(entry) == ABSENT:
        return
    try:
        expected = class_of(tuple(entry))
    except ConfigError:  # what is replaced need not be known here
        return
    if isinstance(component, str | Path | type):
        remedy = f"load it first, with {expected.__name__}.from_pretrained"
        raise TypeError(f"{name}={component!r} is not a component; {remedy}")
    if issubclass(expected, nn.Module) != isinstance(component, nn.Module):
        raise TypeError(f"{name}: {type(component).__name__} cannot take the place of {expected.__name__}")
    kinds = {_kind_of(expected), _kind_of(type(unwrap(component)))}
    if len(kinds - {None}) > 1:
        raise TypeError(f"{name}: {type(component).__name__} cannot take the place of {expected.__name__}")
    if hasattr(expected, "set_timesteps") and not hasattr(component, "set_timesteps"):
        raise TypeError(f"{name}: {type(component).__name__} is no scheduler")


def _kind_of(cls: type) -> str | None:
    """For one of our models, what it is: "unets", "autoencoders" and so on. Models of a kind replace one another."""
    package, *rest = cls.__module__.split(".")
    return rest[1] if package == "diffusion_core" and rest[:1] == ["models"] and len(rest) > 2 else None


def _check_dtypes(options: WeightOptions, components: Collection[str]) -> None:
    if not isinstance(options.dtype, Mapping):
        as_dtype(options.dtype)
        return
    for name, dtype in options.dtype.items():
        if name != "default" and name not in components:
            raise ValueError(f"dtype names {name!r}, which is no component; {close_matches(name, components)}")
        as_dtype(dtype)


def fetch(
    source: str, components: Mapping[str, Sequence[str | None]], options: WeightOptions, hub: Mapping[str, Any]
) -> tuple[Path, dict[str, list[str]]]:
    """The folder that has the files of the components, after a download if need be, and their names.

    Args:
        source: a local folder or a repo id.
        components: their entries in `model_index.json`, by name.
        options: how the weights are read.
        hub: the arguments of `hub.snapshot`.

    Raises:
        MissingFileError: if a component has no files, or none has the variant that is asked for.
    """
    folder = snapshot(source) if is_local(source) else None
    listed: list[str] = []
    if folder is None:
        listed = list_files(source, **hub)
        files = by_component(listed, components)
    else:
        files = {name: list_files(folder / name) if is_local(folder / name) else [] for name in components}
    absent = [name for name in components if not files[name]]
    if absent:
        raise MissingFileError(f"{source} has no files for {', '.join(absent)}, which its model_index.json promises")
    _check_variant(source, files, options.variant)
    if folder is not None:
        return folder, files
    several = [name for name, (_, made) in components.items() if made in IN_SEVERAL_FOLDERS]
    further = by_component(listed, numbered_folders(listed, several))
    wanted = needed({**files, **further}, options.variant, options.use_safetensors)
    folder = snapshot(source, allow_patterns=[INDEX_NAME, *wanted], **hub)
    return folder, by_component(wanted, components)


def _check_variant(source: str, files: Mapping[str, list[str]], variant: str | None) -> None:
    """Refuse a variant that no component has."""
    if variant is None:
        return
    inner = (file.rpartition("/")[2] for names in files.values() for file in names)
    found = {each.variant for each in weights_in(inner)}
    if found and variant not in found:
        there = sorted(each for each in found if each)
        remedy = f"its variants are {', '.join(there)}" if there else "it has none; leave variant out"
        raise MissingFileError(f"{source} has no weights of the variant {variant!r}; {remedy}")


def _load_foreign(cls: Any, folder: Path, name: str, arguments: dict[str, Any]) -> Any:
    """A model of another library: of transformers through our own reader, of others by its own loader."""
    from transformers import PreTrainedModel

    if issubclass(cls, PreTrainedModel):
        return load_transformers_model(cls, folder, subfolder=name, **arguments)
    dtype = None if arguments["dtype"] == "auto" else arguments["dtype"] or torch.float32
    model = cls.from_pretrained(str(folder / name)).eval().to(dtype=dtype)
    device = None if arguments["device_map"] is None else arguments["device_map"].single
    return model if device is None else model.to(device)
