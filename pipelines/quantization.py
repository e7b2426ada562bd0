"""Which components of a pipeline are quantised while it is loaded, and how."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from diffusion_core.errors import UnsupportedError

from ..models.base import Model
from ..models.quantization import TorchAoConfig, read_quantization, refuse_backend

# What is quantised unless components are named: the parts that hold most of a pipeline's weights in linear layers.
_LARGE = ("unet", "transformer", "prior", "text_encoder")


class PipelineQuantizationConfig:
    """Quantise components of a pipeline: `Pipeline.from_pretrained(folder, quantization_config=...)`.

    Either `quant_mapping`, or `quant_backend` with `quant_kwargs`. Models of this library and text encoders of
    `transformers` are quantised; the latter by `transformers` itself.

    Args:
        quant_backend: "torchao".
        quant_kwargs: the arguments of its configuration, `{"quant_type": Int8WeightOnlyConfig()}`.
        components_to_quantize: names of components; None is the denoisers and the text encoders.
        quant_mapping: a configuration for each component, `{"transformer": TorchAoConfig(...)}`.

    Raises:
        ValueError: if neither or both are given, or `quant_kwargs` lacks something.
        UnsupportedError: for a backend that is not used here; the message says what to use.
        TypeError: if an entry is no configuration.
    """

    def __init__(
        self,
        quant_backend: str | None = None,
        quant_kwargs: Mapping[str, Any] | None = None,
        components_to_quantize: Sequence[str] | str | None = None,
        quant_mapping: Mapping[str, Any] | None = None,
    ) -> None:
        if (quant_backend is None) == (quant_mapping is None):
            raise ValueError("PipelineQuantizationConfig takes either quant_backend and quant_kwargs, or quant_mapping")
        if quant_mapping is not None and (quant_kwargs or components_to_quantize):
            raise ValueError("quant_kwargs and components_to_quantize go with quant_backend; quant_mapping says it all")
        self.quant_backend = quant_backend
        self.quant_kwargs = dict(quant_kwargs or {})
        named = [components_to_quantize] if isinstance(components_to_quantize, str) else components_to_quantize
        self.components_to_quantize = None if named is None else list(named)
        self.quant_mapping = None if quant_mapping is None else dict(quant_mapping)
        if self.quant_mapping is not None:
            self._by_name = {name: _read(name, value) for name, value in self.quant_mapping.items()}
            return
        if quant_backend != "torchao":
            refuse_backend(str(quant_backend))
        if "quant_type" not in self.quant_kwargs:
            raise ValueError('quant_kwargs for "torchao" needs quant_type, such as Int8WeightOnlyConfig()')
        self._for_all = TorchAoConfig(**self.quant_kwargs)

    def by_component(self, classes: Mapping[str, Any]) -> dict[str, TorchAoConfig]:
        """The configuration of each component that is to be quantised.

        Args:
            classes: the classes of the components that are loaded, by name.

        Raises:
            ValueError: if a name is no such component, or one that cannot be quantised.
        """
        if self.quant_mapping is not None:
            found = self._by_name
        elif self.components_to_quantize is not None:
            found = dict.fromkeys(self.components_to_quantize, self._for_all)
        else:
            found = {name: self._for_all for name, cls in classes.items() if name.startswith(_LARGE) and _takes_it(cls)}
        for name in found:
            if name not in classes:
                raise ValueError(f"quantization_config names {name!r}; the components to load are {', '.join(classes)}")
            if not _takes_it(classes[name]):
                raise ValueError(
                    f"quantization_config names {name}, a {classes[name].__name__}, which is not quantised"
                )
        return found

    def __repr__(self) -> str:
        if self.quant_mapping is not None:
            return f"PipelineQuantizationConfig(quant_mapping={self.quant_mapping})"
        return f"PipelineQuantizationConfig({self.quant_backend!r}, {self.quant_kwargs}, {self.components_to_quantize})"


def _read(name: str, value: Any) -> TorchAoConfig:
    config = read_quantization(value)
    if not isinstance(config, TorchAoConfig):
        raise UnsupportedError(f"quant_mapping[{name!r}]: {value!r} is for single files; use a TorchAoConfig")
    return config


def _takes_it(cls: Any) -> bool:
    return issubclass(cls, Model) or (issubclass(cls, nn.Module) and cls.__module__.startswith("transformers."))
