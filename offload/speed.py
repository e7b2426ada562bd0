"""`SpeedMixin`: how a model attends, which projections are one, and compilation by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from diffusion_core.errors import PlacementError
from diffusion_core.logging import get_logger

from .attention import DEFAULT, AttentionSettings, SliceSize, check_fit, say_again
from .attention_backends import backend_named
from .casting import is_cast
from .engine import execution_device, execution_dtype, placement_of

logger = get_logger(__name__)
_PROCESSOR = ".processor"  # what the reference appends to the name of a layer


class SpeedMixin:
    """Methods for any `torch.nn.Module` class. Layers that attend have an attribute `attention_settings`."""

    _repeated_blocks: ClassVar[list[str]]

    # ---- how layers attend ----

    def set_attention_backend(self, backend: str, *, strict: bool = False, max_bytes: int | None = None) -> None:
        """Choose what computes attention in this model; other models keep theirs. docs/attention.md lists all.

        Args:
            backend: such as "native", "flash", "sage", "xformers", "flex" or "chunked".
            strict: raise in a call that the backend cannot take. Otherwise torch computes such calls, which is said
                once.
            max_bytes: for "chunked": how many bytes it may take besides its result.

        Raises:
            ValueError: if there is no such backend, or it could take no call of this model as it is: for its device,
                dtype or heads; with `strict` also if it cannot take the heads of some layers. Nothing is changed then.
            MissingPackageError: if it needs a package that is not installed. Nothing is changed then.
        """
        self._set_attention(self._checked_attention(backend, strict=strict, max_bytes=max_bytes))

    def _checked_attention(
        self, backend: str, *, strict: bool = False, max_bytes: int | None = None
    ) -> AttentionSettings:
        """The settings for a backend, of which is known that it works for this model."""
        found = backend_named(backend)
        settings = AttentionSettings(found.name, strict=strict)
        if max_bytes is not None:
            settings = replace(settings, max_bytes=max_bytes)
        sizes = {layer.dim_head for layer in self._attending().values() if hasattr(layer, "dim_head")}
        refused = check_fit(found, execution_device(self._itself), execution_dtype(self._itself), sizes)
        if refused:
            heads = f"heads of {' and '.join(map(str, sorted(refused)))} in {type(self).__name__}"
            if strict:
                raise ValueError(f"attention backend {found.name!r} cannot compute {heads}; strict=False lets torch")
            logger.warning(f"attention backend {found.name!r} cannot compute {heads}: torch does")
        return settings

    def _set_attention(self, settings: AttentionSettings) -> None:
        say_again(settings.backend or "native")
        self._change_attention(backend=settings.backend, strict=settings.strict, max_bytes=settings.max_bytes)

    def reset_attention_backend(self) -> None:
        """Let the surroundings choose again: `attention_backend(...)`, the environment, or torch."""
        self._set_attention(DEFAULT)

    def set_attention_slice(self, slice_size: SliceSize = "auto") -> None:
        """Compute attention in parts: less memory where torch has no fused kernel, more time, the same numbers.

        Args:
            slice_size: how many heads of one sample at a time; "auto" for half of them, "max" for one at a time,
                None for all at once.

        Raises:
            ValueError: if it is none of these.
        """
        self._change_attention(slice_size=slice_size)

    def enable_xformers_memory_efficient_attention(self, attention_op: Any = None) -> None:
        """Use xFormers where it is installed and can compute this model; torch's kernels need as little memory.

        Raises:
            ValueError: if `attention_op`, an operator of xFormers, is given.
        """
        if attention_op is not None:
            raise ValueError("attention_op is not taken; xFormers chooses among its operators by itself")
        try:
            self.set_attention_backend("xformers")
        except (ImportError, ValueError) as error:
            logger.info("%s: torch's fused kernels compute, with as little memory", error)
            self.reset_attention_backend()

    def disable_xformers_memory_efficient_attention(self) -> None:
        """Undo `enable_xformers_memory_efficient_attention`."""
        if any(layer.attention_settings.backend == "xformers" for layer in self._attending().values()):
            self.reset_attention_backend()

    @property
    def attn_processors(self) -> dict[str, AttentionSettings]:
        """How each layer attends, by its name and ".processor"."""
        return {name + _PROCESSOR: layer.attention_settings for name, layer in self._attending().items()}

    def set_attn_processor(self, processor: AttentionSettings | Mapping[str, AttentionSettings]) -> None:
        """Set how layers attend: one setting for all, or a dict by the names of `attn_processors`.

        Raises:
            TypeError: for processors with code of their own, which are not called here.
            ValueError: if a dict does not name exactly the layers that attend. Nothing is changed then.
        """
        layers = self._attending()
        named = cast("Mapping[str, Any]", processor) if isinstance(processor, Mapping) else None
        if named is not None and named.keys() != self.attn_processors.keys():
            differing = sorted(named.keys() ^ self.attn_processors.keys())
            raise ValueError(f"set_attn_processor needs one entry for each layer that attends; differing: {differing}")
        chosen = {name: processor if named is None else named[name + _PROCESSOR] for name in layers}
        for value in chosen.values():
            if not isinstance(value, AttentionSettings):
                raise TypeError(
                    f"{type(value).__name__} is no attention setting, and processors with code of their own are not "
                    "called: subclass the attention layer, or take AttnProcessor, AttnProcessor2_0 or "
                    "SlicedAttnProcessor of diffusion_core.models.attention_processor"
                )
        for name, layer in layers.items():
            layer.attention_settings = chosen[name]

    def set_default_attn_processor(self) -> None:
        """Let every layer attend as it did at first."""
        self.set_attn_processor(DEFAULT)

    def _change_attention(self, **changes: Any) -> None:
        settings = {name: replace(layer.attention_settings, **changes) for name, layer in self._attending().items()}
        for name, layer in self._attending().items():
            layer.attention_settings = settings[name]

    def _attending(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self._itself.named_modules())
        return {name: part for name, part in found.items() if hasattr(part, "attention_settings")}

    # ---- projections that are one ----

    def fuse_qkv_projections(self) -> None:
        """Compute queries, keys and values of each attention layer in one multiplication.

        The state dict stays as it was, and so do files that are saved. `unfuse_qkv_projections` undoes it.

        Raises:
            ValueError: if no layer of the model can do so, or weights are quantised already. Nothing is changed then.
            PlacementError: under a memory mode or layerwise casting; enable those afterwards.
        """
        for layer in self._checked_fusing():
            layer.fuse_projections()

    def _checked_fusing(self) -> list[Any]:
        """The layers that can be fused, of which is known that nothing is in the way."""
        layers = self._fusing()
        if not layers:
            raise ValueError(f"{type(self).__name__} has no attention layers whose projections can be fused")
        self._refuse_while_placed("fuse_qkv_projections")
        for layer in layers:
            layer.check_fusing()
        return layers

    def _fusing(self) -> list[Any]:
        return [part for part in self._itself.modules() if hasattr(part, "fuse_projections")]

    def unfuse_qkv_projections(self) -> None:
        """Undo `fuse_qkv_projections`. Without it there is nothing to do.

        Raises:
            PlacementError: under a memory mode or layerwise casting, which are to be disabled first.
        """
        fused = [layer for layer in self._fusing() if layer._fused]
        if fused:
            self._refuse_while_placed("unfuse_qkv_projections")
        for layer in fused:
            layer.unfuse_projections()

    def _refuse_while_placed(self, method: str) -> None:
        placement = placement_of(self._itself)
        if placement is not None:
            raise PlacementError(
                f"{method}() changes weights that are under {placement.plan.name}; call {placement.plan.remedy} first"
            )
        if is_cast(self._itself):
            raise PlacementError(f"{method}() changes weights that are cast; call disable_layerwise_casting() first")

    # ---- compilation ----

    def compile_repeated_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Compile every block that occurs many times, in place: the code is made once and serves them all.

        Args:
            args, kwargs: those of `torch.compile`, such as `fullgraph=True`.

        Raises:
            ValueError: if the class names no such blocks.
        """
        blocks = [part for part in self._itself.modules() if type(part).__name__ in self._repeated_blocks]
        if not blocks:
            raise ValueError(
                f"{type(self).__name__} has no repeated blocks; compile it whole with torch.compile(model)"
            )
        for block in blocks:
            block.compile(*args, **kwargs)

    @property
    def _itself(self) -> Any:
        return self
