"""`Model`: what every model class is. Loading, saving, config, dtype, device, counting."""

import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import Self

from diffusion_core.absent import MODEL, refuses
from diffusion_core.config import ConfigMixin, FrozenDict, unknown_entries
from diffusion_core.errors import ConfigError, PlacementError
from diffusion_core.hub import find_weights, upload
from diffusion_core.logging import get_logger

from ..offload.casting import compute_dtypes
from ..offload.checkpoint import Checkpoint
from ..offload.dtypes import dtype_named, parse_dtype
from ..offload.engine import execution_device, placement_of
from ..offload.gates import take_compiled
from ..offload.layout import read_request
from ..offload.loading import LoadOptions, build_without_weights, load_into, planned_bytes
from ..offload.memory_format import pays_channels_last, to_memory_format
from ..offload.mixin import OffloadMixin
from ..offload.quantized import (
    dequantize,
    describe_quantization,
    is_quantized,
    num_parameters,
    quantized_weights,
    size_in_bytes,
)
from ..offload.saving import save_tensors
from ..offload.speed import SpeedMixin
from ..offload.torchao_weights import flattened
from .quantization import TorchAoConfig, read_quantization
from .single_file import load_single_file

logger = get_logger(__name__)

# Arguments of the reference that change nothing here: loading is always lean, and a proxy is set by environment.
_WITHOUT_EFFECT = frozenset({"offload_state_dict", "proxies", "resume_download"})
# The names that attention layers had before 2023, which old checkpoints on the Hub still have.
_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_HALF = frozenset({torch.float16, torch.bfloat16})


@refuses(MODEL)
class Model(ConfigMixin, OffloadMixin, SpeedMixin, nn.Module):
    """Base of all model classes. The arguments of `__init__` are the config and equal the reference's keys.

    What a class says about itself:

    - `_repeated_blocks`: class names of blocks that occur many times, for regional compilation.
    - `_no_split_modules`: class names of blocks that stay on one device.
    - `_keep_in_fp32_modules`: parts of parameter names that stay float32 under float16 and bfloat16.
    - `_keys_to_ignore_on_load_unexpected`: patterns of names that a checkpoint may hold for nothing.
    - `_skip_layerwise_casting_patterns`: parts of names of layers that keep their dtype under layerwise casting.
    - `_prefers_channels_last`: convolutions are much of its work, so that a cast to half precision lays their weights
      out channels last. `to(memory_format=torch.contiguous_format)` takes that back.
    - `_skip_quantization_patterns`: regular expressions, searched in dotted names, for linear layers that are not
      quantised: those of norms and their modulation, embeddings, and the projections at both ends.
    """

    config_name = "config.json"
    _repeated_blocks: ClassVar[list[str]] = []
    _no_split_modules: ClassVar[list[str] | None] = None
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = None
    _skip_quantization_patterns: ClassVar[tuple[str, ...]] = (
        "norm",
        "embed",
        "time_emb_proj",
        "adaLN_modulation",
        "caption_projection",
        "final_layer",
        "^proj_in$",
        "^proj_out$",
    )
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _prefers_channels_last: ClassVar[bool] = False
    _layout_is_own_choice = False

    def __getattr__(self, name: str) -> Any:
        """Submodules and tensors first, then entries of the config."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            config = self.__dict__.get("_internal_dict")
            if config is None or name not in config or name.startswith("_"):
                raise
            return config[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """As for any module. `vae.decode = torch.compile(vae.decode)` goes behind what a memory mode does first."""
        if not take_compiled(self, name, value):
            super().__setattr__(name, value)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        subfolder: str | None = None,
        variant: str | None = None,
        use_safetensors: bool | None = None,
        device_map: str | int | torch.device | Mapping[str, Any] | None = None,
        max_memory: Mapping[Any, int | str] | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        strict: bool = True,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        disable_mmap: bool = False,
        verify_checksum: bool = False,
        check_finite: bool = False,
        low_cpu_mem_usage: bool = True,
        quantization_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Load a model from a repo on the Hub or a folder, in evaluation mode and with every tensor defined.

        Args:
            dtype: None gives float32 (the dtype that the class builds with; with quantised weights that of the file,
                or bfloat16 if they are quantised now), "auto" keeps what the files hold.
            torch_dtype: the same; `dtype` counts if both are given.
            subfolder: the folder of the model within the repo, such as "unet".
            variant: load the files of that variant, such as "fp16".
            use_safetensors: True takes only safetensors, False only `.bin`, None prefers safetensors.
            device_map: where the weights go, straight from the file: a device, a dict by submodule, "auto", "balanced",
                "balanced_low_0" or "sequential"; see the memory guide. `hf_device_map` tells the result.
            max_memory, offload_folder: bytes by device as `{0: "8GB"}`, and a folder for "disk"; see there.
            strict: refuse missing, unexpected and mismatched tensors; if False, warn, and give what is missing the
                layers' own initial values.
            ignore_mismatched_sizes: the same for mismatched tensors alone.
            output_loading_info: return a pair, the second being a dict of the names that differed.
            disable_mmap: read the files rather than map them; done by itself on network mounts.
            verify_checksum: compare the weights with the hash that `save_pretrained(checksum=True)` stored.
            check_finite: refuse weights that are NaN or infinite.
            low_cpu_mem_usage: accepted; loading always takes the model's memory plus one tensor at most.
            quantization_config: a `TorchAoConfig`: quantise each weight as it is read. A checkpoint that holds
                quantised weights needs none, and its own counts.
            kwargs: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`; others replace entries of
                the config.

        Raises:
            CheckpointError: with its subclasses, for files that are missing, damaged, or do not fit the model.
            ConfigError: if the config makes no sense.
            PlacementError: if `device_map` names no device that can be used.
            TypeError: if `kwargs` holds what neither the loader nor the class knows.
            ImportError: if weights are or shall be quantised, and torchao is not installed.
        """
        hub, overrides = cls._split_arguments(kwargs)
        request = read_request(device_map, max_memory, None, offload_folder)
        options = LoadOptions(
            dtype=_resolve_dtype(dtype if dtype is not None else torch_dtype),
            strict=strict,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            check_finite=check_finite,
            keep_in_fp32=functools.partial(_is_part_of, cls._keep_in_fp32_modules or ()),
            rename=_present_name,
            ignore_unexpected=cls._keys_to_ignore_on_load_unexpected or (),
            channels_last=cls._prefers_channels_last,
        )
        config = cls.load_config(pretrained_model_name_or_path, subfolder=subfolder, **hub)
        stored, wanted = cls._check_config(config, quantization_config)
        if options.dtype is None and wanted is not None:
            options.dtype = torch.bfloat16
        files = find_weights(
            pretrained_model_name_or_path,
            subfolder=subfolder,
            variant=variant,
            use_safetensors=use_safetensors,
            **hub,
        )
        build = functools.partial(cls.from_config, config, **overrides)
        with Checkpoint(files, disable_mmap=disable_mmap, verify_checksum=verify_checksum) as checkpoint:
            model = build_without_weights(build)
            if checkpoint.quantized:
                options.dtype = options.dtype or "auto"
            elif wanted is not None:
                options.quantize = wanted.quantizer(model)
            elif stored is not None:
                raise ConfigError(
                    f"{files.files[0].parent}: the config speaks of quantised weights, the files have none"
                )
            layout = request.layout({"": model}, planned_bytes(checkpoint, options))
            options.place = layout.loads_onto
            differences = load_into(model, checkpoint, build, options, str(files.files[0].parent))
        model.register_to_config(_name_or_path=os.fspath(pretrained_model_name_or_path))
        if stored or wanted:
            model.register_to_config(quantization_config=stored or wanted)
        if cls._prefers_channels_last and any(
            pays_channels_last(weight) and not weight.is_contiguous() for weight in model.parameters()
        ):
            model._note_layout()
        request.apply(model.eval(), layout)
        return (model, differences.as_loading_info()) if output_loading_info else model

    @classmethod
    def from_single_file(
        cls,
        pretrained_model_link_or_path_or_dict: str | os.PathLike[str],
        *,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        subfolder: str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        quantization_config: Any = None,
        device_map: Any = None,
        device: str | torch.device | None = None,
        disable_mmap: bool = False,
        strict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Load a model from one GGUF or safetensors file, in evaluation mode.

        The names in the file are the model's own, or, for `FluxTransformer2DModel`, those of FLUX's authors. Weights
        of linear layers in a GGUF file stay as they are stored, and are decoded when a layer computes; all others are
        decoded now.

        Args:
            pretrained_model_link_or_path_or_dict: a file, "owner/name/file" of a repo, or the address of a file on
                the Hub.
            config: a folder, a repo or a dict with the model's config; None finds it in the file (FLUX) or beside it.
            subfolder: of `config`.
            dtype: None gives `compute_dtype` of `quantization_config`, or float32.
            torch_dtype: the same; `dtype` counts if both are given.
            quantization_config: a `GGUFQuantizationConfig` for GGUF files, a `TorchAoConfig` for others, or None.
            device_map, device, strict, disable_mmap: as for `from_pretrained`.
            kwargs: as for `from_pretrained`.

        Raises:
            CheckpointError: with its subclasses, for a file that is missing, damaged, or does not fit the model.
            ConfigError: if no config is found, or `quantization_config` does not suit the file.
        """
        hub, overrides = cls._split_arguments(kwargs)
        place = hub if subfolder is None else {**hub, "subfolder": subfolder}
        if config is not None and not isinstance(config, Mapping):
            config = cls.load_config(config, **place)
        kept = functools.partial(_is_part_of, cls._keep_in_fp32_modules or ())
        return load_single_file(
            cls,
            pretrained_model_link_or_path_or_dict,
            config,
            torch_dtype if dtype is None else dtype,
            quantization_config,
            device if device_map is None else device_map,
            disable_mmap,
            LoadOptions(strict=strict, keep_in_fp32=kept),
            hub,
            overrides,
        )

    @classmethod
    def _split_arguments(cls, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Part what is for the Hub from what is for the config, and refuse the rest."""
        names = ("revision", "token", "cache_dir", "force_download", "local_files_only")
        hub = {name: kwargs[name] for name in names if name in kwargs}
        rest = {name: value for name, value in kwargs.items() if name not in {*names, *_WITHOUT_EFFECT}}
        unknown = sorted(rest.keys() - cls.config_arguments().keys())
        if unknown:
            raise TypeError(
                f"{cls.__name__}.from_pretrained takes no {', '.join(unknown)}; beside its own arguments it takes "
                f"entries of the config: {', '.join(sorted(cls.config_arguments()))}"
            )
        return hub, rest

    @classmethod
    def _check_config(cls, config: dict[str, Any], wanted: Any) -> tuple[TorchAoConfig | None, TorchAoConfig | None]:
        """How the file's weights are quantised, and how those shall be that are not."""
        unknown = [name for name in unknown_entries(cls, config) if name != "quantization_config"]
        if unknown:
            logger.warning("the config holds entries that %s does not know; ignored: %s", cls.__name__, unknown)
        stored, wanted = read_quantization(config.get("quantization_config")), read_quantization(wanted)
        if stored is not None and wanted is not None:
            logger.warning("the weights are quantised already, by %r; quantization_config does not count", stored)
        return stored, None if stored else wanted

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        save_function: Callable[..., None] | None = None,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str = "5GB",
        push_to_hub: bool = False,
        *,
        checksum: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the weights and the config into a folder, which is made if need be.

        The folder may hold the files that the model is mapped from. Older files of the same variant and format that
        this save does not write again are removed.

        Args:
            is_main_process: if False, write nothing; for runs of many processes.
            save_function: accepted and not used.
            safe_serialization: safetensors, or a pickled `.bin` if False.
            variant: a part of the file names, such as "fp16".
            max_shard_size: bytes of one file at most, or a text such as "5GB" or "5GiB".
            push_to_hub: upload the folder; `kwargs` then holds `repo_id` (else the folder's name is taken) and may
                hold `token`, `private`, `commit_message`, `create_pr`.
            checksum: store the hash of the weights, for `from_pretrained(verify_checksum=True)`.

        Raises:
            NotADirectoryError: if `save_directory` is a file.
            CheckpointError: if a tensor has no values.
            ValueError: if an argument makes no sense.
        """
        folder = Path(save_directory)
        if folder.is_file():
            raise NotADirectoryError(f"save_directory={str(folder)!r} is a file; name a folder")
        if kwargs and not push_to_hub:
            raise TypeError(f"save_pretrained takes {', '.join(sorted(kwargs))} only with push_to_hub=True")
        if not is_main_process:
            return
        # A compiled part is called by another name; checkpoints know the plain one.
        state = {name.replace("_orig_mod.", ""): tensor for name, tensor in self.state_dict().items()}
        tensors, notes = flattened(state)
        if notes and not safe_serialization:
            raise ValueError("quantised weights are stored as safetensors only; leave out safe_serialization=False")
        save_tensors(
            tensors,
            folder,
            notes=notes,
            note_layouts=not self._layout_is_own_choice,
            variant=variant,
            safetensors=safe_serialization,
            max_shard_size=max_shard_size,
            checksum=checksum,
        )
        self.save_config(folder)
        if push_to_hub:
            upload(folder, kwargs.pop("repo_id", folder.name), **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str = "5GB",
        **kwargs: Any,
    ) -> str:
        """Upload the model to a repo, which is made if need be; returns the address of the commit.

        Args:
            kwargs: `token`, `private`, `commit_message`, `commit_description`, `create_pr`.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(
                folder, safe_serialization=safe_serialization, variant=variant, max_shard_size=max_shard_size
            )
            kwargs.setdefault("commit_message", f"Upload {type(self).__name__}")
            return upload(folder, repo_id, **kwargs)

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether training recomputes activations: never here."""
        return False

    def disable_gradient_checkpointing(self) -> None:
        """There is nothing to undo: it cannot be enabled."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in: that of its weights, but for layers that are kept in float32."""
        kept = self._keep_in_fp32_modules or ()
        only: torch.dtype | None = None
        for name, dtype in compute_dtypes(self):
            if not dtype.is_floating_point:
                continue
            # One byte is a form of storage; nothing computes in it.
            if dtype.itemsize > 1 and not _is_part_of(kept, name):
                return dtype
            only = only or dtype
        return only or torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        """The device that the model computes on, wherever its weights are kept; meta only if all of it is there."""
        return execution_device(self)

    def _float_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in itertools.chain(self.named_parameters(), self.named_buffers()):
            if tensor.is_floating_point():
                yield name, tensor

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """`nn.Module.to`, with three differences.

        Names of dtypes are taken, such as "bfloat16". Layers in `_keep_in_fp32_modules` stay float32 under half
        precisions. `memory_format=torch.channels_last` applies to weights with 4 axes, its 3d form to those with 5,
        either spelling to both; others are left alone.
        """
        memory_format = kwargs.pop("memory_format", None)
        args = tuple(dtype_named(value) or value if isinstance(value, str) else value for value in args)
        if isinstance(kwargs.get("dtype"), str):
            kwargs["dtype"] = parse_dtype(kwargs["dtype"])
        if args or kwargs or memory_format is None:
            super().to(*args, **kwargs)
        if memory_format is not None:
            to_memory_format(self, memory_format)
            self._layout_is_own_choice = False
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move or convert every tensor. All of `to`, `half`, `cuda` and a parent's `to` come through here.

        Raises:
            ValueError: for another dtype, if the model is quantised. Nothing has changed then.
        """
        if recurse and self.is_quantized and fn(torch.empty(0, dtype=self.dtype)).dtype != self.dtype:
            raise ValueError(
                f"{type(self).__name__} is quantised for {self.dtype} and cannot be cast; choose the dtype when it is "
                "loaded, or call dequantize() first"
            )
        parts, lay_out = self._keep_in_fp32_modules, self._prefers_channels_last
        if not parts and not lay_out:
            return super()._apply(fn, recurse)
        kept = {id(tensor) for name, tensor in self._float_tensors() if _is_part_of(parts or (), name)}

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            if lay_out and result.dtype != tensor.dtype and pays_channels_last(result):
                result = result.to(memory_format=torch.channels_last)
                self._note_layout()
            if id(tensor) not in kept or result.dtype not in _HALF:
                return result
            # The values come from before the rounding, the place and layout from after it.
            return torch.empty_like(result, dtype=torch.float32).copy_(tensor)

        return super()._apply(convert, recurse)

    def _note_layout(self) -> None:
        if not self._layout_is_own_choice:
            self._layout_is_own_choice = True
            logger.info(
                "%s is laid out channels last, which is faster in half precision; to(memory_format="
                "torch.contiguous_format) takes it back",
                type(self).__name__,
            )

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of values in all parameters, shared ones counted once.

        Args:
            only_trainable: count those that take gradients.
            exclude_embeddings: leave out the tables of `nn.Embedding` layers.
        """
        tables = {id(layer.weight) for layer in self.modules() if isinstance(layer, nn.Embedding)}

        def counts(parameter: nn.Parameter) -> bool:
            return (parameter.requires_grad or not only_trainable) and not (
                exclude_embeddings and id(parameter) in tables
            )

        return num_parameters(self, counts)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """The bytes of all parameters, and of buffers unless `return_buffers` is False; shared ones count once."""
        tensors = [*self.parameters(), *(self.buffers() if return_buffers else ())]
        return sum(map(size_in_bytes, tensors))

    @property
    def is_quantized(self) -> bool:
        """Whether weights of the model are quantised."""
        return is_quantized(self)

    @property
    def quantization_method(self) -> str | None:
        """How weights are quantised, "torchao" or "gguf"; None if they are not."""
        first = next(quantized_weights(self), None)
        return None if first is None else getattr(first[1], "method", "torchao")

    def dequantize(self) -> Self:
        """Give every quantised layer plain weights in the dtype that the model computes in; returns the model.

        Raises:
            ValueError: if the model is not quantised.
            PlacementError: if it is under a memory mode; the message says how to end that.
        """
        if not self.is_quantized:
            raise ValueError(f"{type(self).__name__} is not quantised")
        placement = placement_of(self)
        if placement is not None:
            raise PlacementError(f"the model is under {placement.plan.name}; call {placement.plan.remedy} first")
        dequantize(self)
        content = {key: value for key, value in self.config.items() if key != "quantization_config"}
        self._internal_dict = FrozenDict(content)
        return self

    def extra_repr(self) -> str:
        """For the text of a model, how it is quantised."""
        return describe_quantization(self)


# The name that code written for the reference imports.
ModelMixin = Model


def _resolve_dtype(value: torch.dtype | str | None) -> Any:
    if isinstance(value, Mapping):
        raise TypeError("dtype: a dict of dtypes by component is for pipelines; a model takes one dtype")
    return value if isinstance(value, str) and value == "auto" else parse_dtype(value)


def _is_part_of(parts: list[str] | tuple[str, ...], name: str) -> bool:
    """Whether a dotted name holds one of the parts as whole components."""
    return any(f".{part}." in f".{name}." for part in parts)


def _present_name(name: str) -> str:
    """The present form of a name from an old attention layer; other names as they are."""
    path, _, leaf = name.rpartition(".")
    owner, _, layer = path.rpartition(".")
    return f"{owner}.{_OLD_ATTENTION[layer]}.{leaf}" if owner and layer in _OLD_ATTENTION else name
