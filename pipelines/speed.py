"""The switches of a pipeline that concern how its models compute."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from diffusion_core.logging import get_logger

from ..offload.attention import AttentionSettings, SliceSize
from ..offload.prompt_cache import PromptCache
from ..offload.runs import LIMIT
from ..offload.sizes import parse_bytes
from ..offload.speed import SpeedMixin
from .components import unwrap

logger = get_logger(__name__)


class PipelineSpeedMixin:
    """Switches that act on every component that has them. The state is in the components."""

    components: Any
    _exact_cache_bytes: int = LIMIT
    prompt_cache: PromptCache | None = None

    # ---- attention ----

    def enable_attention_slicing(self, slice_size: SliceSize = "auto") -> None:
        """Compute attention in parts: less memory where torch has no fused kernel, more time, the same pictures.

        Args:
            slice_size: how many heads of one sample at a time; "auto" for half of them, "max" for one at a time.

        Raises:
            ValueError: if it is none of these.
        """
        self.set_attention_slice(slice_size)

    def disable_attention_slicing(self) -> None:
        """Compute attention at once again."""
        self.set_attention_slice(None)

    def set_attention_slice(self, slice_size: SliceSize) -> None:
        """As `enable_attention_slicing`, with None for all at once."""
        AttentionSettings(slice_size=slice_size)
        for model in self._fast().values():
            model.set_attention_slice(slice_size)

    def set_attention_backend(
        self,
        backend: str | Mapping[str, str],
        *,
        strict: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        """Choose what computes attention, in every model of the pipeline or by component.

        Args:
            backend: one for all that can use it, or a dict by the names of components; see the models' method and
                docs/attention.md. Components that the dict does not name stay as they are.
            strict: raise where a backend cannot be used, now or in a call, in place of leaving it to torch.
            max_bytes: for "chunked": how many bytes it may take besides its result.

        Raises:
            ValueError: if there is no such backend or component, or the backend cannot be used: by the component that
                the dict names, by any of them with `strict`, by none of them without. Nothing is changed then.
            MissingPackageError: if it needs a package that is not installed. Nothing is changed then.
        """
        models = self._fast()
        named = isinstance(backend, Mapping)
        chosen: dict[str, Any] = dict(backend) if isinstance(backend, Mapping) else dict.fromkeys(models, backend)
        unknown = sorted(chosen.keys() - models.keys())
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no models {unknown} that attend through this library; it has "
                f"{sorted(models)}"
            )
        checked, refused = dict[str, AttentionSettings](), dict[str, ValueError]()
        for name, own in chosen.items():
            try:
                checked[name] = models[name]._checked_attention(own, strict=strict, max_bytes=max_bytes)
            except ValueError as error:
                if named or strict:
                    raise
                refused[name] = error
        if refused and not checked:
            raise next(iter(refused.values()))
        for name, error in refused.items():
            logger.warning("%s attends as before: %s", name, error)
        for name, settings in checked.items():
            models[name]._set_attention(settings)

    def reset_attention_backend(self) -> None:
        """Let the surroundings choose again: `attention_backend(...)`, the environment, or torch."""
        for model in self._fast().values():
            model.reset_attention_backend()

    def enable_xformers_memory_efficient_attention(self, attention_op: Any = None) -> None:
        """Use xFormers where it is installed and can compute a model; torch's kernels need as little memory.

        Raises:
            ValueError: if `attention_op`, an operator of xFormers, is given.
        """
        for model in self._fast().values():
            model.enable_xformers_memory_efficient_attention(attention_op)

    def disable_xformers_memory_efficient_attention(self) -> None:
        """Undo `enable_xformers_memory_efficient_attention`."""
        for model in self._fast().values():
            model.disable_xformers_memory_efficient_attention()

    # ---- caches ----

    def enable_exact_caches(self, limit: int | str = LIMIT) -> None:
        """Compute once a call what does not change from step to step, as pipelines do by default; see the caches guide.

        Keys and values of the text, its projections, tables of positions, embeddings of guidance and pooled text, and
        under memory modes the modulation of all steps. Pictures are the same bit for bit.

        Args:
            limit: how much these may take together, on the device: bytes, or a text such as "256MB". What comes after
                that is computed in each step.

        Raises:
            ValueError: if it is no size.
        """
        self._exact_cache_bytes = parse_bytes(limit, "limit")

    def disable_exact_caches(self) -> None:
        """Compute everything in each step."""
        self._exact_cache_bytes = 0

    def enable_prompt_cache(self, limit: int | str = "64MB") -> None:
        """Keep what text encoders make of prompts from call to call: the same prompt is not encoded again.

        Results are kept in the host's memory. They count only for an encoder with the same weights, which may have
        moved since; see `PromptCache`. `pipe.prompt_cache` tells its `size`, `hits` and `misses`.

        Args:
            limit: how much they may take together, bytes or a text; the least recently used ones are dropped.

        Raises:
            ValueError: if it is no size.
        """
        cache = PromptCache(limit)
        self.disable_prompt_cache()
        self.prompt_cache = cache
        for name, part in self.components.items():
            if is_text_encoder(name, part):
                cache.attend(unwrap(part))

    def disable_prompt_cache(self) -> None:
        """Undo `enable_prompt_cache`. Without it there is nothing to do."""
        if self.prompt_cache is not None:
            self.prompt_cache.remove()
        self.prompt_cache = None

    # ---- the denoiser and the autoencoder ----

    def fuse_qkv_projections(self, unet: bool = True, vae: bool = True) -> None:
        """Compute queries, keys and values of each attention layer in one multiplication.

        Args:
            unet: in the denoiser, be it a UNet or a transformer, and what steers it.
            vae: in the autoencoder.

        Raises:
            ValueError: if none of them has layers that can do so, or weights are quantised already. Nothing is
                changed then.
            PlacementError: under a memory mode or layerwise casting; enable those afterwards. Nothing is changed then.
        """
        able = {name: model for name, model in self._fast().items() if (vae if name == "vae" else unet)}
        able = {name: model for name, model in able.items() if model._fusing()}
        if not able:
            raise ValueError(f"{type(self).__name__} has no attention layers of this kind that can be fused")
        for model in able.values():
            model._checked_fusing()
        for model in able.values():
            model.fuse_qkv_projections()

    def unfuse_qkv_projections(self, unet: bool = True, vae: bool = True) -> None:
        """Undo `fuse_qkv_projections`. Without it there is nothing to do."""
        for name, model in self._fast().items():
            if vae if name == "vae" else unet:
                model.unfuse_qkv_projections()

    def enable_freeu(self, s1: float, s2: float, b1: float, b2: float) -> None:
        """Weigh features and skips of the UNet against each other; see `UNet2DConditionModel.enable_freeu`.

        Raises:
            ValueError: if the pipeline has no UNet.
        """
        self._named(unet=True)[0].enable_freeu(s1=s1, s2=s2, b1=b1, b2=b2)

    def disable_freeu(self) -> None:
        """Undo `enable_freeu`."""
        self._named(unet=True)[0].disable_freeu()

    def _fast(self) -> dict[str, Any]:
        """The components that are models of this library."""
        found = {name: unwrap(part) for name, part in self.components.items()}
        return {name: part for name, part in found.items() if isinstance(part, SpeedMixin)}

    def _named(self, **wanted: bool) -> list[Any]:
        """The components of these names, of which each must be there."""
        parts = {name: unwrap(self.components.get(name)) for name, is_wanted in wanted.items() if is_wanted}
        absent = [name for name, part in parts.items() if not isinstance(part, nn.Module)]
        if absent:
            raise ValueError(f"{type(self).__name__} has no {' and no '.join(absent)}")
        return list(parts.values())


def is_text_encoder(name: str, part: Any) -> bool:
    """Whether a component is what `prompt_cache` answers for."""
    return name.startswith("text_encoder") and isinstance(unwrap(part), nn.Module)
