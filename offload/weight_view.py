"""`WeightView`: a stored weight as everything but the layer itself sees it, in full precision."""

# pyright: reportPrivateUsage=false

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

_Tensor: Any = torch.Tensor
# Answered from the outside of a weight, without decoding it.
_OUTSIDE = {
    *(getattr(_Tensor, name).__get__ for name in (
        "dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_xpu", "is_mps",
        "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes", "grad", "grad_fn", "is_nested",
    )),
    *(getattr(_Tensor, name) for name in (
        "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex", "__len__",
        "get_device", "__hash__", "requires_grad_",
    )),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
_IN_PLACE = {"__setitem__", *(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor",
                                "lshift", "rshift")
)}  # fmt: skip


class Source(Protocol):
    """What a view reads and writes."""

    def exact(self) -> torch.Tensor:
        """The values as precisely as they are known. Changing them changes nothing yet."""
        ...

    def store(self, values: torch.Tensor) -> None:
        """Take changed values over."""
        ...


class WeightView(torch.Tensor):
    """A tensor without memory that stands for a stored weight, or for a part of it.

    Its shape, dtype and device are those of the weight as the layer computes with it. Operators see the exact values,
    and what they change in place, through the view, `.data` or slices, is stored again. So code that knows nothing of
    casting reads the right dtype, ties nothing to 8 bits, and merges LoRA weights.
    """

    _source: Source
    _part: torch.Tensor | None
    _whole: torch.Tensor | None

    @staticmethod
    def of(
        source: Source, like: torch.Tensor, dtype: torch.dtype, part: torch.Tensor | None = None, whole: Any = None
    ) -> "WeightView":
        """A view of what `source` holds, with the shape and device of `like`.

        Args:
            part: the values that the view shows, if not all: a view into `whole`.
            whole: what `source.exact()` gave, and `source.store` shall get when the part was changed.
        """
        view = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            WeightView, like.shape, strides=like.stride(), dtype=dtype, device=like.device
        )
        view._source, view._part, view._whole = source, part, whole
        return view

    @property
    def data(self) -> "WeightView":
        """The same view, as changes through it count too; setting it sets the values."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        # A copy would repeat smaller ones.
        if self.shape != values.shape:
            raise ValueError(
                f"the weight is stored with the shape {tuple(self.shape)}; new values have {tuple(values.shape)}. "
                "Assign a new nn.Parameter to the layer to change the shape."
            )
        self.copy_(values)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OUTSIDE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the exact values, and store what it changed."""
    if func == _Tensor.detach:
        return args[0]
    name = getattr(func, "__name__", "").split(".")[0]
    opened: dict[int, tuple[WeightView, torch.Tensor, torch.Tensor]] = {}

    def values(item: Any) -> Any:
        if not isinstance(item, WeightView):
            return item
        if id(item) not in opened:
            whole = item._source.exact() if item._whole is None else item._whole
            opened[id(item)] = item, whole if item._part is None else item._part, whole
        return opened[id(item)][1]

    result = func(*tree_map(values, args), **tree_map(values, kwargs))
    for view in _changed(name, args, kwargs):
        view._source.store(opened[id(view)][2])

    def shown(item: Any) -> Any:
        return _as_view(item, list(opened.values()))

    return tree_map(shown, result)


def _changed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[WeightView]:
    """The views that an operator writes to, by torch's naming: `add_`, `__iadd__`, `__setitem__`, `out=`."""
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    targets = [*(args[:1] if in_place else ()), kwargs.get("out")]
    return [target for target in targets if isinstance(target, WeightView)]


def _as_view(item: Any, opened: list[tuple[WeightView, torch.Tensor, torch.Tensor]]) -> Any:
    """A result that shares memory with a weight's values, as a view that writes through."""
    if not isinstance(item, torch.Tensor) or isinstance(item, WeightView):
        return item
    for view, values, whole in opened:
        if item is values:
            return view
        if item.untyped_storage()._cdata == whole.untyped_storage()._cdata:
            return WeightView.of(view._source, item, item.dtype, item, whole)
    return item
