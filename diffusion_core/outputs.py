"""`BaseOutput`: what calls return, a dataclass that also reads as a dict and as a tuple."""

from collections import OrderedDict
from dataclasses import fields, is_dataclass
from typing import Any

import torch.utils._pytree as pytree


class BaseOutput(OrderedDict[str, Any]):
    """Base of output dataclasses: `out.sample`, `out["sample"]` and `out[0]` are the same value.

    Fields that are None are left out of the dict and of the tuple, as users of the reference expect.

    Subclasses are made with `@dataclass` and are known to torch's pytree, so that they may leave a compiled graph.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        pytree.register_pytree_node(
            cls,
            lambda output: (list(output.values()), list(output.keys())),
            lambda values, keys: cls(**dict(zip(keys, values, strict=True))),
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        )

    def __post_init__(self) -> None:
        assert is_dataclass(self), f"{type(self).__name__} must be a dataclass"
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are not None, in the order of the fields."""
        return tuple(self.values())
