"""`OffloadMixin`: the memory and speed methods that every model inherits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import nn


class OffloadMixin:
    """Methods for any `torch.nn.Module` class; see the memory guide.

    `_entry_points` names the methods that compute; weights come in for them as for a call of the model.
    """

    _entry_points: ClassVar[tuple[str, ...]] = ("forward",)
    _skip_keys: ClassVar[Any] = None

    def enable_group_offload(
        self,
        onload_device: torch.device | str | int,
        offload_device: torch.device | str | int = "cpu",
        offload_type: str = "block_level",
        num_blocks_per_group: int | None = None,
        non_blocking: bool = False,
        use_stream: bool = False,
        record_stream: bool = False,
        low_cpu_mem_usage: bool = False,
        offload_to_disk_path: str | None = None,
        block_modules: Sequence[str] | None = None,
        exclude_kwargs: Sequence[str] | None = None,
    ) -> None:
        """Keep the weights off the device, and bring in a group of layers while it computes.

        The arguments, and what is raised, are those of `apply_group_offloading`. `disable_group_offload` undoes it.
        """
        from .group_offload import apply_group_offloading

        apply_group_offloading(
            cast("nn.Module", self),
            onload_device,
            offload_device,
            offload_type,
            num_blocks_per_group,
            non_blocking,
            use_stream,
            record_stream,
            low_cpu_mem_usage,
            offload_to_disk_path,
            block_modules,
            exclude_kwargs,
            remedy="disable_group_offload()",
        )

    def hoist_modulation(self) -> None:
        """Keep the weights of adaptive norms off the device: their vectors are made for all steps as a run begins.

        Group, sequential and model offload do so by themselves. This is for a model that stays on its device, or under
        a device map: these weights then are at home on the CPU, and each comes in once a run. Runs are calls of
        pipelines, and `cached_run(timesteps)` around calls of the model; other calls bring the weights in each time.
        The numbers are the same bit for bit. `unhoist_modulation` undoes it.

        Raises:
            ValueError: if the model has no such layers.
            PlacementError: if a call is going on.
        """
        from .hoisting import modulating_layers
        from .placed import place_anew

        if not modulating_layers(cast("nn.Module", self)):
            raise ValueError(
                f"{type(self).__name__} has no weights whose results depend on timestep and pooled text alone"
            )
        self.__dict__["_hoists"] = True
        place_anew(cast("nn.Module", self))

    def unhoist_modulation(self) -> None:
        """Let each step make its modulation itself, under memory modes too."""
        from .placed import place_anew

        self.__dict__["_hoists"] = False
        place_anew(cast("nn.Module", self))

    def enable_cache(self, config: Any) -> None:
        """Answer for parts of the model from earlier steps: faster, and no longer exact; see the caches guide.

        Args:
            config: a `FirstBlockCacheConfig`, `TaylorSeerCacheConfig`, `MagCacheConfig` or
                `PyramidAttentionBroadcastConfig`.

        Raises:
            ValueError: if there is a cache already, or the model has nothing that the cache could act on.
            UnsupportedError: for the config of a cache that is not supported.
            TypeError: if it is no config.
        """
        from .step_caches import enable

        enable(cast("nn.Module", self), config)

    def disable_cache(self) -> None:
        """Undo `enable_cache`: every step computes everything. Without it there is nothing to do."""
        from .step_caches import disable

        disable(cast("nn.Module", self))

    @property
    def is_cache_enabled(self) -> bool:
        """Whether there is a step cache."""
        return "_step_cache" in self.__dict__

    def cache_context(self, name: str) -> AbstractContextManager[None]:
        """Context: for step caches, calls in it belong together. Calls are told apart by their text without it."""
        from .step_caches import cache_context

        return cache_context(name)

    def disable_group_offload(self) -> None:
        """Undo `enable_group_offload`: all weights are back where they were. Without it there is nothing to do."""
        from .group_offload import remove_group_offloading

        remove_group_offloading(cast("nn.Module", self))

    def enable_layerwise_casting(
        self,
        storage_dtype: torch.dtype | None = torch.float8_e4m3fn,
        compute_dtype: torch.dtype | None = None,
        skip_modules_pattern: str | Sequence[str] | None = None,
        skip_modules_classes: Any = None,
        non_blocking: bool = False,
        *,
        storage: str = "plain",
    ) -> None:
        """Store weights in fewer bits, and decode those of a layer just before it computes.

        The arguments, and what is raised, are those of `apply_layerwise_casting`, but that for
        `skip_modules_pattern` None means "auto". `disable_layerwise_casting` undoes it.
        """
        from .casting import apply_layerwise_casting

        pattern = "auto" if skip_modules_pattern is None else skip_modules_pattern
        apply_layerwise_casting(
            cast("nn.Module", self),
            storage_dtype,
            compute_dtype,
            pattern,
            skip_modules_classes,
            non_blocking,
            storage=storage,
        )

    def disable_layerwise_casting(self) -> None:
        """Undo `enable_layerwise_casting`: exact weights where they are a mapped file, else the decoded ones."""
        from .casting import remove_layerwise_casting

        remove_layerwise_casting(cast("nn.Module", self))
