"""`Pipeline`: components under one roof. Loading, saving, placement, progress, callbacks and the state of a call."""

import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

from torch import nn

from diffusion_core.absent import PIPELINE, refuses
from diffusion_core.config import ConfigMixin, FrozenDict
from diffusion_core.hub import source_name, upload
from diffusion_core.images import numpy_to_pil
from diffusion_core.logging import get_logger
from diffusion_core.progress import check_options, progress_bar

from ..offload.engine import execution_dtype
from ..offload.layout import read_request
from ..offload.quantized import describe_quantization, num_parameters
from ..offload.runs import cached_run
from .callbacks import Callback, StepCallback
from .components import ABSENT, entry_of, unwrap
from .loading import (
    INDEX_NAME,
    WeightOptions,
    as_dtype,
    fetch,
    is_entry,
    load,
    pipeline_class,
    read_index,
    share,
)
from .placement import PlacementMixin
from .quantization import PipelineQuantizationConfig
from .saving import save
from .speed import PipelineSpeedMixin, is_text_encoder
from .state import Run, Runs

logger = get_logger(__name__)
Self = TypeVar("Self", bound="Pipeline")


@refuses(PIPELINE)
class Pipeline(PlacementMixin, PipelineSpeedMixin, ConfigMixin):
    """Base of all pipelines, and their loader: `Pipeline.from_pretrained(folder)` makes what the folder says.

    A subclass takes its components and scalar settings as arguments of `__init__` and hands the components to
    `register_modules`. Arguments without a default are required components; those with one are scalar settings,
    unless `_optional_components` lists them.

    A component is replaced by assigning it, `pipe.scheduler = other`, and dropped by assigning None.
    """

    config_name = INDEX_NAME

    _optional_components: ClassVar[list[str]] = []
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents"]
    # The order in which components work, "text_encoder->unet->vae", and those that are left out of it.
    model_cpu_offload_seq: ClassVar[str | None] = None
    _exclude_from_cpu_offload: ClassVar[list[str]] = []

    _progress_bar_config: Mapping[str, Any] = FrozenDict()
    _component_names: tuple[str, ...] = ()
    _runs: Runs
    name_or_path: str | None = None

    def __new__(cls, *_: Any, **__: Any) -> Any:
        self = super().__new__(cls)
        self.__dict__["_runs"] = Runs.make()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_runs", "prompt_cache")}

    # ---- components and config ----

    @classmethod
    def component_arguments(cls) -> dict[str, bool]:
        """The names of the components that `__init__` takes, and whether each one is required."""
        found = list(inspect.signature(cls.__init__).parameters.values())[1:]
        return {
            each.name: each.name not in cls._optional_components
            for each in found
            if each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            and (each.default is inspect.Parameter.empty or each.name in cls._optional_components)
        }

    @classmethod
    def config_arguments(cls) -> dict[str, Any]:
        """The scalar settings, with their defaults."""
        components = cls.component_arguments()
        return {name: default for name, default in super().config_arguments().items() if name not in components}

    def register_modules(self, **components: Any) -> None:
        """Make `components` attributes of this pipeline, and part of what is saved, moved and listed."""
        names = [name for name in components if name not in self._component_names]
        self._component_names = (*self._component_names, *names)
        for name, component in components.items():
            setattr(self, name, component)

    @property
    def components(self) -> dict[str, Any]:
        """All components by name, absent ones as None: the arguments for another pipeline of the same parts."""
        return {name: getattr(self, name) for name in self._component_names}

    @property
    def parameters(self) -> dict[str, Any]:
        """The scalar settings that this pipeline was made with."""
        return {name: self.config[name] for name in self.config_arguments() if name in self.config}

    @property
    def num_components(self) -> int:
        """How many components are present."""
        return sum(component is not None for component in self.components.values())

    @property
    def config(self) -> FrozenDict:
        """The content of `model_index.json`: scalar settings, and `(library, class)` of each component as it is now."""
        entries = {name: entry_of(component) for name, component in self.components.items()}
        return FrozenDict({**self.__dict__.get("_internal_dict", {}), **entries})

    def to_json_string(self) -> str:
        """The text of `model_index.json`. Settings of other classes get an underscore: the reference warns without."""
        content = json.loads(super().to_json_string())
        known = {*self._component_names, *self.config_arguments()}
        marked = {key if key in known or key.startswith("_") else f"_{key}": value for key, value in content.items()}
        return json.dumps(marked, indent=2, sort_keys=True) + "\n"

    def __repr__(self) -> str:
        lines = [f"  {name}: {_describe(component)}" for name, component in self.components.items()]
        lines += [f"  {name}={value!r}" for name, value in self.parameters.items()]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    # ---- loading and saving ----

    @classmethod
    def from_pretrained(
        cls: type[Self],
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: Any = None,
        torch_dtype: Any = None,
        variant: str | None = None,
        use_safetensors: bool | None = None,
        device_map: Any = None,
        max_memory: Mapping[Any, int | str] | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        reserve: Any = None,
        low_cpu_mem_usage: bool = True,
        disable_mmap: bool = False,
        quantization_config: PipelineQuantizationConfig | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        **given: Any,
    ) -> Self:
        """Load a pipeline from a folder or from a repo on the Hub.

        Called on `Pipeline`, it makes the class that `model_index.json` names; called on a subclass, it makes that
        class from the components that it needs. Everything is checked before the first weight is read.

        Args:
            pretrained_model_name_or_path: a local folder, or a repo id such as "owner/name".
            dtype: the dtype of the weights: a torch dtype or its name, None for float32, "auto" to keep what the
                files have, or a dict by component, whose entry "default" stands for the others.
            torch_dtype: the older name of `dtype`.
            variant: load weight files of this variant, such as "fp16", where a component has them.
            use_safetensors: True refuses `.bin` files, False reads only those, None prefers safetensors.
            device_map: where the weights go, straight from the files: a device, which components stay on without
                hooks; "balanced" fills all devices to the same share, splitting a component by its blocks only if it
                fits nowhere whole; "auto" fills one device after another with the largest components first,
                "sequential" in the order in which they work; or a dict by component or submodule, `{"unet": 0,
                "unet.up_blocks": 1, "vae": "cpu"}`, with `""` for all else. What has no room stays on the CPU and
                comes in to be used. `hf_device_map` tells the result, `reset_device_map()` undoes it.
            max_memory: for these three words, bytes by device, as `{0: "8GB", "cpu": "30GB"}`. A device that is not
                named is not used; what is over the cpu's bytes goes to disk. By default nine tenths of what is free.
            offload_folder: where weights on disk go that are not in the checkpoint as they are needed.
            reserve: for these three words, bytes that devices keep free for what components compute: one size, as
                "2GB", or a dict by component.
            low_cpu_mem_usage: accepted; loading always takes the weights' memory plus one tensor at most.
            disable_mmap: read weight files instead of mapping them.
            quantization_config: which components to quantise while they are read, and how.
            revision: a branch, tag or commit of the repo; all files come from the same commit.
            token, cache_dir, force_download, local_files_only: how files come from the Hub.
            given: components by name that replace those of the checkpoint (None drops one), and scalar settings.

        Raises:
            TypeError: for an unknown argument, or a component of the wrong kind.
            ValueError: if `dtype` and `torch_dtype` are both given, or a value makes no sense.
            ConfigError: if `model_index.json` cannot be understood or lacks a required component.
            MissingFileError: if files are missing, or no component has the variant.
            CheckpointError: if a component cannot be loaded; the message names it.
            PlacementError: if `device_map` cannot be applied.
        """
        if dtype is not None and torch_dtype is not None:
            raise ValueError("dtype and torch_dtype are the same argument; pass one of them")
        if quantization_config is not None and not isinstance(quantization_config, PipelineQuantizationConfig):
            raise TypeError(
                "quantization_config of a pipeline is a PipelineQuantizationConfig, for example"
                f" PipelineQuantizationConfig(quant_mapping={{'transformer': ...}}), not {quantization_config!r}"
            )
        source = source_name(pretrained_model_name_or_path)
        request = read_request(device_map, max_memory, reserve, offload_folder)
        options = WeightOptions(
            dtype=torch_dtype if dtype is None else dtype,
            variant=variant,
            use_safetensors=use_safetensors,
            disable_mmap=disable_mmap,
            request=request,
            quantization=quantization_config,
        )
        hub = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
        }
        index, hub = read_index(source, hub)
        return load(pipeline_class(index, cls) if cls is Pipeline else cls, index, source, options, hub, given)

    @classmethod
    def download(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        *,
        variant: str | None = None,
        use_safetensors: bool | None = None,
        **hub: Any,
    ) -> Path:
        """Download what `from_pretrained` would read, without loading it, and return the folder.

        Args:
            pretrained_model_name: a repo id; a local folder is returned as it is.
            variant, use_safetensors: as for `from_pretrained`.
            hub: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`.

        Raises:
            MissingFileError: if no component has the variant.
            CheckpointError: if the repo cannot be reached or read.
        """
        source = source_name(pretrained_model_name)
        index, hub = read_index(source, hub)
        parts = {name: value for name, value in index.items() if is_entry(value) and tuple(value) != ABSENT}
        return fetch(source, parts, WeightOptions(variant=variant, use_safetensors=use_safetensors), hub)[0]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        **upload_options: Any,
    ) -> None:
        """Save all components and `model_index.json`, so that this library and the reference can load them.

        `model_index.json` is written last: a folder that has a new one is complete.

        Args:
            save_directory: the folder, made if need be.
            safe_serialization: safetensors files rather than pickles, for components that know both.
            variant: a part for the names of weight files, such as "fp16".
            max_shard_size: where to split weight files, in bytes or as "5GB"; None leaves it to the components.
            push_to_hub: also upload the folder.
            upload_options: for the upload: `repo_id` (the folder's name if absent), `token`, `private`,
                `commit_message`, `create_pr`.

        Raises:
            NotADirectoryError: if `save_directory` is a file.
            TypeError: if a component cannot be saved; nothing is written then.
        """
        if upload_options and not push_to_hub:
            raise TypeError(f"save_pretrained got {', '.join(upload_options)}, which only push_to_hub=True uses")
        folder = Path(save_directory).expanduser()
        options = {"safe_serialization": safe_serialization, "variant": variant, "max_shard_size": max_shard_size}
        save(self.components, folder, **options)
        self.save_config(folder)
        if push_to_hub:
            upload(folder, upload_options.pop("repo_id", folder.name), **upload_options)

    def push_to_hub(self, repo_id: str, *, variant: str | None = None, **upload_options: Any) -> str:
        """Save to a temporary folder and upload it; returns the address of the commit.

        Args:
            repo_id: such as "owner/name"; made if need be.
            variant: a part for the names of weight files, such as "fp16".
            upload_options: `token`, `private`, `commit_message`, `create_pr`.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, variant=variant)
            return upload(folder, repo_id, **{"commit_message": f"Upload {type(self).__name__}", **upload_options})

    @classmethod
    def from_pipe(cls: type[Self], pipeline: "Pipeline", **given: Any) -> Self:
        """A pipeline of this class that shares the components of another one, which stays as it is.

        Args:
            pipeline: where the components come from. Called on `Pipeline`, the result is of its class.
            given: components and settings by name that replace those of `pipeline`. `torch_dtype` or `dtype` is
                accepted where it is the dtype that the components have.

        Raises:
            TypeError: if `pipeline` is no pipeline, or for an unknown argument.
            ValueError: if required components are missing, or a dtype would change the components of `pipeline`.
        """
        if not isinstance(pipeline, Pipeline):
            raise TypeError(f"from_pipe takes a pipeline, not a {type(pipeline).__name__}")
        target = type(pipeline) if cls is Pipeline else cls
        dtype = given.pop("dtype", given.pop("torch_dtype", None))
        if dtype is not None and as_dtype(dtype) != pipeline.dtype:
            raise ValueError(
                f"dtype={dtype} would change the components that are shared with the other pipeline, which have"
                f" {pipeline.dtype}; leave it out, and call .to(dtype) if both are to change"
            )
        return share(target, pipeline.components, pipeline.config, given)

    # ---- the state of a call ----

    @contextmanager
    def run(self, **state: Any) -> Iterator[Run]:
        """Hold the state of one call; on every way out, let go of what the memory mode has brought in.

        Inside, `pipe.guidance_scale` reads what `run(guidance_scale=...)` was given, in this thread, and
        `pipe._guidance_scale = x` changes it. `pipe._interrupt = True` asks the call to stop; from a thread without a
        call of its own it asks all calls. After the call the values of the thread's last call can still be read.
        """
        for name in state.keys() - set(self._component_names):
            # What was assigned before any call would hide the call's value.
            self.__dict__.pop(name, None)
            self.__dict__.pop(f"_{name}", None)
        run = Run(**state)
        self._runs.start(run)
        try:
            with cached_run(limit=self._exact_cache_bytes):
                yield run
        finally:
            if self._runs.finish(run):
                self.maybe_free_model_hooks()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and "_runs" in self.__dict__:
            run = self._runs.current()
            state = run.__dict__ if run else {"interrupt": False}
            if name.removeprefix("_") in state:
                return state[name.removeprefix("_")]
            if name in self.config_arguments():
                return self.config[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its components are {self._listed()}")

    def __setattr__(self, name: str, value: Any) -> None:
        key = name.removeprefix("_")
        if key == "interrupt":
            self._runs.interrupt(bool(value))
            return
        run = self._runs.current()
        if run is not None and key in run.__dict__:
            setattr(run, key, value)
        else:
            super().__setattr__(name, value)
        if self.prompt_cache is not None and is_text_encoder(name, value):
            self.prompt_cache.attend(unwrap(value))

    def step_callback(self, callback: Callback | None, names: Sequence[str] | None = None) -> StepCallback:
        """Check `callback_on_step_end` and its tensor names before the first model call.

        The result is called as `callback(step, timestep, latents=latents, ...)` with all tensors that may be seen or
        changed, and returns them as a dict.
        """
        return StepCallback(self, callback, names)

    # ---- progress ----

    def progress_bar(self, iterable: Iterable[Any] | None = None, total: float | None = None) -> Any:
        """A progress bar with this pipeline's settings, over `iterable` or with `total` steps."""
        return progress_bar(iterable, total, **self._progress_bar_config)

    def set_progress_bar_config(self, **options: Any) -> None:
        """Set options of tqdm for this pipeline's bars, such as `disable=True` or `desc="Drawing"`.

        Raises:
            TypeError: if tqdm has no such option.
        """
        check_options(options)
        self._progress_bar_config = FrozenDict(options)

    # ---- the autoencoder, and pictures ----

    def enable_vae_slicing(self) -> None:
        """Let the autoencoder work on one picture at a time: less memory for batches."""
        self._vae_switch("enable_slicing")

    def disable_vae_slicing(self) -> None:
        """Let the autoencoder work on whole batches again."""
        self._vae_switch("disable_slicing")

    def enable_vae_tiling(self) -> None:
        """Let the autoencoder work on overlapping tiles: less memory for large pictures."""
        self._vae_switch("enable_tiling")

    def disable_vae_tiling(self) -> None:
        """Let the autoencoder work on whole pictures again."""
        self._vae_switch("disable_tiling")

    def _vae_switch(self, method: str) -> None:
        vae = self.components.get("vae")
        if not hasattr(vae, method):
            raise ValueError(f"{type(self).__name__} has no autoencoder with {method}(): its vae is {entry_of(vae)[1]}")
        getattr(vae, method)()

    @staticmethod
    def numpy_to_pil(images: Any) -> Any:
        """PIL images from an array of shape (N, H, W, C) with values from 0 to 1."""
        return numpy_to_pil(images)

    def _listed(self) -> str:
        return ", ".join(self._component_names) or "none"


DiffusionPipeline = Pipeline


def _describe(component: Any) -> str:
    """A component in a few words: its class, and for modules their size, dtype and device."""
    name = entry_of(component)[1] or "None"
    if not isinstance(component, nn.Module) or next(component.parameters(), None) is None:
        return name
    count = num_parameters(component)
    device = next(component.parameters()).device
    text = f"{name}, {count:,} parameters, {str(execution_dtype(component)).removeprefix('torch.')} on {device}"
    quantized = describe_quantization(component)
    return f"{text}, {quantized}" if quantized else text
