"""How the weights of models are quantised: the configurations that users pass to `from_pretrained`."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from diffusion_core.errors import ConfigError, UnsupportedError
from diffusion_core.logging import get_logger

from ..offload.device_map import SizeOf
from ..offload.dtypes import parse_dtype
from ..offload.quantized import size_in_bytes
from ..offload.torchao_weights import config_from_dict, config_to_dict, is_config, quantize_weight, torchao

logger = get_logger(__name__)

_INSTEAD = (
    "use TorchAoConfig(Int8WeightOnlyConfig()) with a configuration of torchao.quantization, which has 8 and 4 bits "
    "and runs on CPUs and GPUs, or load a GGUF file"
)
_OTHERS = {
    "BitsAndBytesConfig": f"weights of bitsandbytes are not read; {_INSTEAD}",
    "QuantoConfig": f"weights of quanto are not read, and quanto is not developed any more; {_INSTEAD}",
    "NVIDIAModelOptConfig": f"weights of ModelOpt are not read; {_INSTEAD}",
    "AutoRoundConfig": f"weights of AutoRound are not read; {_INSTEAD}",
}


class _Refused:
    """A configuration of the reference that nothing here can apply."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError(f"{type(self).__name__} is not supported: {_OTHERS[type(self).__name__]}")


class BitsAndBytesConfig(_Refused):
    """Refused when it is made, with what to use in its place."""


class QuantoConfig(_Refused):
    """Refused when it is made, with what to use in its place."""


class GGUFQuantizationConfig:
    """Keep the weights of a GGUF file as they are stored, and decode those of each layer when it computes.

    Args:
        compute_dtype: what layers compute in; None is the `dtype` that the model is loaded in. If both are given and
            differ, `dtype` counts.
    """

    quant_method: ClassVar[str] = "gguf"

    def __init__(self, compute_dtype: torch.dtype | str | None = None) -> None:
        self.compute_dtype = parse_dtype(compute_dtype, "compute_dtype")

    def __repr__(self) -> str:
        return f"GGUFQuantizationConfig(compute_dtype={self.compute_dtype})"


class TorchAoConfig:
    """Quantise the linear layers of a model with torchao while it is loaded, each weight as it is read.

    Args:
        quant_type: a configuration of `torchao.quantization`, such as `Int8WeightOnlyConfig()` or
            `Int8DynamicActivationInt8WeightConfig()`.
        modules_to_not_convert: names of submodules that stay as they are, with all that is in them: whole dotted names
            or parts of such, "proj_out" or "transformer_blocks.0.attn". None is what the model's class states in
            `_skip_quantization_patterns`: norms, embeddings, modulation, and the projections at the ends. An empty
            list quantises every linear layer, as the reference does by default.

    Raises:
        TypeError: if `quant_type` is no configuration of torchao.
        ImportError: if torchao is not installed.
    """

    quant_method: ClassVar[str] = "torchao"

    def __init__(self, quant_type: Any, modules_to_not_convert: Sequence[str] | None = None) -> None:
        if isinstance(quant_type, str):
            raise TypeError(
                f"quant_type={quant_type!r}: names are not taken any more; pass a configuration of "
                "torchao.quantization, such as Int8WeightOnlyConfig()"
            )
        torchao()
        if not is_config(quant_type):
            raise TypeError(
                f"quant_type must be a configuration of torchao.quantization, not {type(quant_type).__name__}"
            )
        if isinstance(modules_to_not_convert, str):
            modules_to_not_convert = [modules_to_not_convert]
        self.quant_type = quant_type
        self.modules_to_not_convert = None if modules_to_not_convert is None else list(modules_to_not_convert)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "TorchAoConfig":
        """From the entry `quantization_config` of a config file.

        Raises:
            ConfigError: if it makes no sense.
        """
        kind = content.get("quant_type")
        try:
            if not isinstance(kind, Mapping) or set(kind) != {"default"}:
                raise ValueError(f"quant_type is {kind!r}, expected a dict with the entry 'default'")
            return cls(config_from_dict(kind["default"]), content.get("modules_to_not_convert"))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"quantization_config: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """What a config file holds; the same as the reference's."""
        return {
            "quant_method": self.quant_method,
            "quant_type": {"default": config_to_dict(self.quant_type)},
            "modules_to_not_convert": self.modules_to_not_convert,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchAoConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(type(self.quant_type).__name__)

    def __repr__(self) -> str:
        kept = "" if self.modules_to_not_convert is None else f", modules_to_not_convert={self.modules_to_not_convert}"
        return f"TorchAoConfig({self.quant_type!r}{kept})"

    def quantizer(self, model: nn.Module) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """A function that quantises a weight of the model by its name, if it is to be quantised.

        Raises:
            ValueError: if `modules_to_not_convert` names what the model does not have, or nothing is left.
        """
        names = _chosen_layers(model, self.modules_to_not_convert)
        if not names:
            raise ValueError(f"no linear layer of {type(model).__name__} is left to be quantised by {self!r}")

        def quantize(name: str, weight: torch.Tensor) -> torch.Tensor:
            return quantize_weight(name, weight, self.quant_type) if name in names else weight

        return quantize

    def sizes(self, model: nn.Module, size: SizeOf) -> SizeOf:
        """A function that tells the bytes that a tensor of the model will take, once it is quantised.

        Args:
            size: tells the bytes of those that are not.
        """
        names = _chosen_layers(model, self.modules_to_not_convert)

        def quantized(name: str, tensor: torch.Tensor) -> int:
            if name not in names:
                return size(name, tensor)
            weight = torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta")
            return size_in_bytes(quantize_weight(name, weight, self.quant_type))

        return quantized

    def for_transformers(self) -> Any:
        """The same for models of `transformers`."""
        from transformers import TorchAoConfig as Theirs

        return Theirs(self.quant_type, modules_to_not_convert=self.modules_to_not_convert)


def _chosen_layers(model: nn.Module, excluded: Sequence[str] | None) -> set[str]:
    """The names of the weights to be quantised: those of linear layers that neither a list nor the class excludes."""
    kept = [rf"(^|\.){re.escape(part)}(\.|$)" for part in getattr(model, "_keep_in_fp32_modules", None) or ()]
    if excluded is None:
        patterns = [*getattr(model, "_skip_quantization_patterns", ()), *kept]
    else:
        patterns = [rf"(^|\.){re.escape(name)}(\.|$)" for name in excluded]
        modules = [name for name, _ in model.named_modules()]
        for name, pattern in zip(excluded, patterns, strict=True):
            if not any(re.search(pattern, each) for each in modules):
                logger.warning("modules_to_not_convert names %r, which %s does not have", name, type(model).__name__)
        patterns += kept
    return {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and not any(re.search(pattern, name) for pattern in patterns)
    }


def read_quantization(value: Any) -> TorchAoConfig | None:
    """A configuration from what users and config files have: one of ours, of transformers or the reference, or a dict.

    Raises:
        UnsupportedError: it is of a library that is not used here; the message says what to use.
        ConfigError: it makes no sense.
        TypeError: it is no such thing.
    """
    if value is None or isinstance(value, TorchAoConfig):
        return value
    method = value.get("quant_method") if isinstance(value, Mapping) else getattr(value, "quant_method", None)
    method = getattr(method, "value", method)
    if method == "torchao":
        return TorchAoConfig.from_dict(value) if isinstance(value, Mapping) else _of_other(value)
    name = type(value).__name__
    if name in _OTHERS:
        raise UnsupportedError(f"{name} is not supported: {_OTHERS[name]}")
    if isinstance(value, Mapping):
        raise ConfigError(f"quantization_config: weights quantised by {method!r} are not read; {_INSTEAD}")
    if method is not None:
        refuse_backend(str(method))
    raise TypeError(f"quantization_config must be a TorchAoConfig, not {value!r}")


def refuse_backend(name: str) -> None:
    """Say that weights are not quantised by this library.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(f"quantising by {name!r} is not supported; {_INSTEAD}")


def _of_other(value: Any) -> TorchAoConfig:
    return TorchAoConfig(value.quant_type, getattr(value, "modules_to_not_convert", None))
