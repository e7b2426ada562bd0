"""What the reference has and this library has not: every name is known, and says what to do in its place."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import UnsupportedError

_Class = TypeVar("_Class", bound=type)

_ADAPTERS = (
    "adapters are not loaded. Merge them where they were made, with `fuse_lora()` and `save_pretrained(folder)` of "
    "diffusers or `merge_and_unload()` of peft, and load that folder"
)
_SINGLE_FILE = (
    "files that hold a whole pipeline are not read. Convert the file once to a folder, with `from_single_file(...)` "
    "and `save_pretrained(folder)` of diffusers, and use `from_pretrained(folder)`"
)
_KERNEL = "the kernel is chosen by `set_attention_backend(name)`, here with '_native_npu' or '_native_xla'"

MODEL: dict[str, str] = {
    **dict.fromkeys(
        (
            "active_adapters",
            "add_adapter",
            "delete_adapters",
            "disable_adapters",
            "disable_lora",
            "enable_adapters",
            "enable_lora",
            "enable_lora_hotswap",
            "fuse_lora",
            "load_attn_procs",
            "load_lora_adapter",
            "save_attn_procs",
            "save_lora_adapter",
            "set_adapter",
            "set_adapters",
            "unfuse_lora",
            "unload_lora",
        ),
        _ADAPTERS,
    ),
    **dict.fromkeys(
        (
            "enable_npu_flash_attention",
            "enable_xla_flash_attention",
            "set_use_npu_flash_attention",
            "set_use_xla_flash_attention",
        ),
        _KERNEL,
    ),
    "enable_gradient_checkpointing": "this library runs models and does not train them; train with diffusers, and "
    "load the result here",
    "enable_parallelism": "a model is not run on several devices at once; `device_map` spreads its weights over them",
    "register_for_auto_class": "code from a repo is never run; import the class and load with it",
}

PIPELINE: dict[str, str] = {
    **dict.fromkeys(
        (
            "delete_adapters",
            "disable_lora",
            "enable_lora",
            "enable_lora_hotswap",
            "fuse_lora",
            "get_active_adapters",
            "get_list_adapters",
            "load_lora_weights",
            "lora_state_dict",
            "save_lora_weights",
            "set_adapters",
            "set_lora_device",
            "unfuse_lora",
            "unload_lora_weights",
        ),
        _ADAPTERS,
    ),
    **dict.fromkeys(
        (
            "load_ip_adapter",
            "prepare_ip_adapter_image_embeds",
            "set_ip_adapter_scale",
            "unload_ip_adapter",
        ),
        "prompts as pictures (IP-Adapter) are not supported; start from a picture with an image-to-image pipeline",
    ),
    **dict.fromkeys(
        ("load_textual_inversion", "unload_textual_inversion"),
        "learned words are not loaded. Add them once with diffusers, `save_pretrained(folder)`, and load that folder",
    ),
    "from_single_file": _SINGLE_FILE,
    "register_for_auto_class": "code from a repo is never run; import the class and load with it",
}


class _Absent:
    """An attribute of a class that refuses to be called, for the class and for its objects."""

    def __init__(self, name: str, remedy: str) -> None:
        self.name, self.remedy = name, remedy

    def __get__(self, owner: Any, owner_class: type) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise UnsupportedError(f"{owner_class.__name__}.{self.name}() is not supported: {self.remedy}")

        return refuse


def refuses(remedies: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """A decorator of classes: calling one of these methods raises `UnsupportedError` with the remedy."""

    def mark(cls: _Class) -> _Class:
        for name, remedy in remedies.items():
            setattr(cls, name, _Absent(name, remedy))
        return cls

    return mark
