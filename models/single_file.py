"""Models from one file, as others publish them: GGUF, or safetensors without a folder, in our names or the authors'."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from diffusion_core.errors import ConfigError
from diffusion_core.hub import find_file, is_local
from diffusion_core.logging import get_logger

from ..offload.dtypes import parse_dtype
from ..offload.layout import read_request
from ..offload.loading import LoadOptions, build_without_weights, load_into, planned_bytes
from ..offload.single_file import Piece, Shapes, SingleFile
from .quantization import GGUFQuantizationConfig, TorchAoConfig, read_quantization

logger = get_logger(__name__)

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
# Names of Black Forest Labs' own code, with ours. Groups carry numbers over.
_FLUX_NAMES = (
    (r"time_in\.in_layer", "time_text_embed.timestep_embedder.linear_1"),
    (r"time_in\.out_layer", "time_text_embed.timestep_embedder.linear_2"),
    (r"vector_in\.in_layer", "time_text_embed.text_embedder.linear_1"),
    (r"vector_in\.out_layer", "time_text_embed.text_embedder.linear_2"),
    (r"guidance_in\.in_layer", "time_text_embed.guidance_embedder.linear_1"),
    (r"guidance_in\.out_layer", "time_text_embed.guidance_embedder.linear_2"),
    (r"img_in", "x_embedder"),
    (r"txt_in", "context_embedder"),
    (r"double_blocks\.(\d+)\.img_mod\.lin", r"transformer_blocks.\1.norm1.linear"),
    (r"double_blocks\.(\d+)\.txt_mod\.lin", r"transformer_blocks.\1.norm1_context.linear"),
    (r"double_blocks\.(\d+)\.img_attn\.proj", r"transformer_blocks.\1.attn.to_out.0"),
    (r"double_blocks\.(\d+)\.txt_attn\.proj", r"transformer_blocks.\1.attn.to_add_out"),
    (r"double_blocks\.(\d+)\.img_mlp\.0", r"transformer_blocks.\1.ff.net.0.proj"),
    (r"double_blocks\.(\d+)\.img_mlp\.2", r"transformer_blocks.\1.ff.net.2"),
    (r"double_blocks\.(\d+)\.txt_mlp\.0", r"transformer_blocks.\1.ff_context.net.0.proj"),
    (r"double_blocks\.(\d+)\.txt_mlp\.2", r"transformer_blocks.\1.ff_context.net.2"),
    (r"single_blocks\.(\d+)\.modulation\.lin", r"single_transformer_blocks.\1.norm.linear"),
    (r"single_blocks\.(\d+)\.linear2", r"single_transformer_blocks.\1.proj_out"),
    (r"final_layer\.linear", "proj_out"),
)
_FLUX_NORMS = (
    (r"double_blocks\.(\d+)\.img_attn\.norm\.(query|key)_norm\.scale", "transformer_blocks.{}.attn.norm_{}.weight"),
    (
        r"double_blocks\.(\d+)\.txt_attn\.norm\.(query|key)_norm\.scale",
        "transformer_blocks.{}.attn.norm_added_{}.weight",
    ),
    (r"single_blocks\.(\d+)\.norm\.(query|key)_norm\.scale", "single_transformer_blocks.{}.attn.norm_{}.weight"),
)
# Layers that are one there and several here: their names, and how many times the width each has.
_FLUX_STACKS = (
    (r"double_blocks\.(\d+)\.img_attn\.qkv", "transformer_blocks.{}.attn", ("to_q", "to_k", "to_v")),
    (r"double_blocks\.(\d+)\.txt_attn\.qkv", "transformer_blocks.{}.attn", ("add_q_proj", "add_k_proj", "add_v_proj")),
    (
        r"single_blocks\.(\d+)\.linear1",
        "single_transformer_blocks.{}",
        ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    ),
)


def _plain_names(shapes: Shapes) -> dict[str, str]:
    """The names in a file without what other programs put in front, with those names."""
    return {
        next((name[len(prefix) :] for prefix in _PREFIXES if name.startswith(prefix)), name): name for name in shapes
    }


def _is_flux(shapes: Shapes) -> bool:
    return any(name.startswith("double_blocks.") for name in _plain_names(shapes))


def _flux_pieces(shapes: Shapes) -> dict[str, Piece]:
    """For each tensor of `FluxTransformer2DModel`, where it is in a file of the authors' layout."""
    pieces: dict[str, Piece] = {}
    names = _plain_names(shapes)
    width = shapes[names["img_in.weight"]][0] if "img_in.weight" in names else 0
    for name, source in names.items():
        pieces.update(_flux_pieces_of(name, source, shapes[source], width))
    return pieces


def _flux_pieces_of(name: str, source: str, shape: tuple[int, ...], width: int) -> dict[str, Piece]:
    layer, _, leaf = name.rpartition(".")
    for pattern, ours in _FLUX_NORMS:
        if found := re.fullmatch(pattern, name):
            return {ours.format(found[1], found[2][0]): Piece(source)}
    for pattern, path, parts in _FLUX_STACKS:
        if found := re.fullmatch(pattern, layer):
            starts = [index * width for index in range(len(parts))]
            ends = [*starts[1:], shape[0]]
            return {
                f"{path.format(found[1])}.{part}.{leaf}": Piece(source, ((begin, end),))
                for part, begin, end in zip(parts, starts, ends, strict=True)
            }
    if layer == "final_layer.adaLN_modulation.1":
        half = shape[0] // 2
        # There the shift comes first, here the scale.
        return {f"norm_out.linear.{leaf}": Piece(source, ((half, 2 * half), (0, half)))}
    for pattern, ours in _FLUX_NAMES:
        if re.fullmatch(pattern, layer):
            return {f"{re.sub(pattern, ours, layer)}.{leaf}": Piece(source)}
    return {name: Piece(source)}


def _flux_config(shapes: Shapes) -> dict[str, Any]:
    """What the shapes in a file of the authors' layout say about the model."""
    sizes = {name: shapes[source] for name, source in _plain_names(shapes).items()}
    try:
        width, channels = sizes["img_in.weight"]
        head = sizes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
        out = sizes["final_layer.linear.weight"][0]
        config: dict[str, Any] = {
            "in_channels": channels,
            "out_channels": None if out == channels else out,
            "num_layers": _count(sizes, r"double_blocks\.(\d+)\."),
            "num_single_layers": _count(sizes, r"single_blocks\.(\d+)\."),
            "attention_head_dim": head,
            "num_attention_heads": width // head,
            "joint_attention_dim": sizes["txt_in.weight"][1],
            "pooled_projection_dim": sizes["vector_in.in_layer.weight"][1],
            "guidance_embeds": "guidance_in.in_layer.weight" in sizes,
            # As the only published width has it: 16, 56 and 56 of 128.
            "axes_dims_rope": (head // 8, head * 7 // 16, head * 7 // 16),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"the file is no whole FLUX model ({error}); pass config=, the folder of one") from error
    return config


def _count(names: Mapping[str, Any], pattern: str) -> int:
    return 1 + max((int(found[1]) for name in names if (found := re.match(pattern, name))), default=-1)


def _own_pieces(shapes: Shapes) -> dict[str, Piece]:
    return {name: Piece(source) for name, source in _plain_names(shapes).items()}


def _arrangement(cls: Any) -> Callable[[Shapes], Mapping[str, Piece]]:
    def arrange(shapes: Shapes) -> Mapping[str, Piece]:
        if not _is_flux(shapes):
            return _own_pieces(shapes)
        if cls.__name__ != "FluxTransformer2DModel":
            raise ConfigError(f"the file holds a FLUX transformer, not a {cls.__name__}")
        return _flux_pieces(shapes)

    return arrange


def _local(file: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    """The file itself, or a download: from "owner/name/path/in/the/repo", or the address of a file on the Hub."""
    path = Path(os.fspath(file)).expanduser()
    if path.is_file():
        return path
    text = os.fspath(file)
    if "://" in text:
        parts = urlparse(text).path.strip("/").split("/")
        if len(parts) < 5 or parts[2] not in ("blob", "resolve"):
            raise ConfigError(f"{text} is not the address of a file on the Hub: .../owner/name/blob/main/file")
        return find_file("/".join(parts[:2]), "/".join(parts[4:]), **{"revision": parts[3], **hub})
    if is_local(path.parent) or path.is_absolute():
        return find_file(path.parent, path.name)
    parts = text.split("/")
    if len(parts) < 3:
        raise ConfigError(f"{text} is neither a file nor 'owner/name/file' of a repo")
    return find_file("/".join(parts[:2]), "/".join(parts[2:]), **hub)


def load_single_file(
    cls: Any,
    file: str | os.PathLike[str],
    config: Any,
    dtype: Any,
    quantization_config: Any,
    device_map: Any,
    disable_mmap: bool,
    options: LoadOptions,
    hub: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> Any:
    """See `Model.from_single_file`."""
    path = _local(file, hub)
    if path.suffix not in (".gguf", ".safetensors"):
        raise ConfigError(f"{path.name}: files that are read end in .gguf or .safetensors")
    gguf = quantization_config if isinstance(quantization_config, GGUFQuantizationConfig) else None
    wanted = None if gguf is not None else read_quantization(quantization_config)
    if wanted is not None and path.suffix == ".gguf":
        raise ConfigError(f"{path.name} is quantised already; use GGUFQuantizationConfig, or leave it out")
    if gguf is not None and path.suffix != ".gguf":
        raise ConfigError(f"{path.name} is no GGUF file; use TorchAoConfig, or leave quantization_config out")
    options.dtype = _dtype(dtype, gguf, wanted)
    request = read_request(device_map)
    with SingleFile(path, _arrangement(cls), disable_mmap) as checkpoint:
        entries = _config(cls, config, path, checkpoint.shapes, hub)
        build = functools.partial(cls.from_config, entries, **overrides)
        model = build_without_weights(build)
        if wanted is not None:
            options.quantize = wanted.quantizer(model)
            model.register_to_config(quantization_config=wanted)
        layout = request.layout({"": model}, planned_bytes(checkpoint, options))
        options.place = layout.loads_onto
        load_into(model, checkpoint, build, options, str(path))
    model.register_to_config(_name_or_path=str(path))
    request.apply(model.eval(), layout)
    return model


def _dtype(dtype: Any, gguf: GGUFQuantizationConfig | None, wanted: TorchAoConfig | None) -> Any:
    given = dtype if dtype == "auto" else parse_dtype(dtype)
    if gguf is not None and gguf.compute_dtype is not None:
        if given not in (None, gguf.compute_dtype):
            logger.warning("layers compute in dtype=%s, not in compute_dtype=%s", given, gguf.compute_dtype)
        given = given or gguf.compute_dtype
    return given or (torch.float32 if wanted is None else torch.bfloat16)


def _config(cls: Any, config: Any, path: Path, shapes: Shapes, hub: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if config is not None:
        return cls.load_config(config, **hub)
    if _is_flux(shapes):
        return _flux_config(shapes)
    if (path.parent / cls.config_name).is_file():
        return cls.load_config(path.parent)
    raise ConfigError(f"{path} does not tell the sizes of its model: pass config=, a folder or repo with config.json")
