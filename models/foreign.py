"""Models of `transformers` (text and image encoders) through the same checked, mapped path as our own.

The files are opened and checked here; `transformers` then gets their tensors, and renames them as its version needs.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from diffusion_core.errors import CheckpointError, ConfigError, KeyMismatchError, NumericalError
from diffusion_core.hub import find_file, find_weights
from diffusion_core.logging import get_logger, transformers_quiet

from ..offload.checkpoint import Checkpoint, TensorInfo, is_finite
from ..offload.dtypes import parse_dtype
from ..offload.layout import read_request
from ..offload.loading import BUILDING, Differences, build_without_weights, named_tensors
from .quantization import TorchAoConfig

logger = get_logger(__name__)


@transformers_quiet()
def load_transformers_model(
    cls: Any,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    torch_dtype: torch.dtype | str | None = None,
    subfolder: str | None = None,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    device_map: Any = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    disable_mmap: bool = False,
    verify_checksum: bool = False,
    check_finite: bool = False,
    quantization_config: TorchAoConfig | None = None,
    **options: Any,
) -> Any:
    """Load a model of `transformers`, such as `CLIPTextModel`, in evaluation mode and with every tensor defined.

    Weights of the right dtype stay mapped files; others are converted one by one. What is quantised, or shall be, is
    left to the class's own `from_pretrained`.

    Args:
        cls: the class, or `transformers.AutoModel`.
        pretrained_model_name_or_path: a repo on the Hub or a folder with `config.json` and the weights.
        dtype: None gives float32, bfloat16 for a quantised model; "auto" the one that most of the file's weights have.
        device_map, max_memory, offload_folder: as for `Model.from_pretrained`. What is spread is read on the CPU first.
        quantization_config: how to quantise the weights while they are read.
        options: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`.

    Raises:
        CheckpointError: with its subclasses, for files that are missing, damaged, or lack tensors of the model.
        ConfigError: if the config makes no sense.
    """
    dtype = dtype if dtype is not None else torch_dtype
    wanted = None if dtype == "auto" else parse_dtype(dtype) or torch.float32
    request = read_request(device_map, max_memory, None, offload_folder)
    place = {"subfolder": subfolder, **options}
    folder = find_file(pretrained_model_name_or_path, "config.json", **place).parent
    config = _read_config(cls, folder)
    stored = getattr(config, "quantization_config", None)
    if stored is not None or quantization_config is not None:
        logger.info("%s is quantised; transformers loads it by itself", folder)
        chosen = {"dtype": dtype or torch.bfloat16, "variant": variant, "use_safetensors": use_safetensors}
        if stored is None and quantization_config is not None:
            chosen["quantization_config"] = quantization_config.for_transformers()
        return cls.from_pretrained(folder, device_map=request.device or torch.device("cpu"), **chosen).eval()
    cls = _concrete(cls, config)
    files = find_weights(
        pretrained_model_name_or_path,
        variant=variant,
        use_safetensors=use_safetensors,
        weights_name="model",
        pickle_name="pytorch_model",
        **place,
    )
    with Checkpoint(files, disable_mmap=disable_mmap, verify_checksum=verify_checksum) as checkpoint:
        chosen_dtype = wanted or most_common_dtype(checkpoint.infos.values())
        layout = request.layout({"": _skeleton(cls, config)}, sizes_in(chosen_dtype))
        tensors = _converted(cls, checkpoint, wanted)
    if check_finite:
        bad = [name for name, tensor in tensors.items() if not is_finite(tensor)]
        if bad:
            raise NumericalError(f"{folder} holds NaN or infinity in {', '.join(bad)}: the file is damaged")
    # transformers assembles on the CPU; sent there and back, weights would only take longer.
    model = _assembled(cls, folder, config, tensors, chosen_dtype).to(layout.single or torch.device("cpu"))
    request.apply(model, layout)
    return model


@transformers_quiet()
def skeleton_of(cls: Any, folder: Path) -> Any:
    """The model of `transformers` that a folder holds, with its weights on meta."""
    config = _read_config(cls, folder)
    return _skeleton(_concrete(cls, config), config)


def _skeleton(cls: Any, config: Any) -> Any:
    return build_without_weights(lambda: cls._from_config(config))


def sizes_in(dtype: torch.dtype, kept: Collection[str] = ()) -> Callable[[str, torch.Tensor], int]:
    """A function that tells the bytes of a tensor once its module is in `dtype`.

    Args:
        kept: parts of names of tensors that stay float32 under half precisions.
    """

    def size(name: str, tensor: torch.Tensor) -> int:
        stays = not tensor.is_floating_point()
        wide = dtype.itemsize == 2 and bool(set(kept).intersection(name.split(".")))
        return tensor.numel() * (tensor.element_size() if stays else 4 if wide else dtype.itemsize)

    return size


def _read_config(cls: Any, folder: Path) -> Any:
    import transformers

    source = getattr(cls, "config_class", None) or transformers.AutoConfig
    try:
        return source.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'config.json'} is no config that transformers understands: {error}") from error


def _concrete(cls: Any, config: Any) -> Any:
    """The class itself, or the one that an automatic class picks for the config."""
    if getattr(cls, "config_class", None) is not None:
        return cls
    return type(build_without_weights(lambda: cls.from_config(config)))


def _converted(cls: Any, checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors in their final dtype, but for those whose precision the class decides itself."""
    kept = {*(getattr(cls, "_keep_in_fp32_modules", None) or ()), *(_strict_parts(cls))}
    result: dict[str, torch.Tensor] = {}
    for name, info in checkpoint.infos.items():
        convert = dtype is not None and info.dtype.is_floating_point and not kept.intersection(name.split("."))
        if convert and info.dtype != dtype:
            checkpoint.prefetch(name)
        result[name] = checkpoint[name].to(dtype=dtype if convert else None)
    for alias, original in checkpoint.aliases.items():
        result.setdefault(alias, result[original])
    return result


def _strict_parts(cls: Any) -> Any:
    return getattr(cls, "_keep_in_fp32_modules_strict", None) or ()


def most_common_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """The floating dtype that most bytes of some stored tensors are in."""
    sizes: Counter[torch.dtype] = Counter()
    for info in infos:
        if info.dtype.is_floating_point:
            sizes[info.dtype] += info.end - info.begin + 1
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _assembled(cls: Any, folder: Path, config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    with BUILDING:
        model, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            torch_dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    mismatched = [(name, tuple(there), tuple(here)) for name, there, here in info["mismatched_keys"]]
    differences = Differences(sorted(info["missing_keys"]), [], sorted(mismatched))
    if differences.describe():
        error = KeyMismatchError(f"{folder} does not fit {cls.__name__}:\n{differences.describe()}")
        error.missing, error.mismatched = differences.missing, differences.mismatched
        raise error
    if info["unexpected_keys"]:
        logger.info("%s: %s has no use for %s", folder, cls.__name__, sorted(info["unexpected_keys"]))
    undefined = [name for name, tensor in named_tensors(model).items() if tensor.is_meta]
    if undefined:
        raise CheckpointError(f"{cls.__name__} was loaded from {folder} without values for {undefined}")
    model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()
