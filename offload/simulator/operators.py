"""Every operator on a simulated device comes through here: check, run on the host's memory, put the result back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from . import bindings, dry, state
from .clock import count_flops
from .races import check_access
from .signatures import Signature, describe

if TYPE_CHECKING:
    from .session import Simulator

_FLOAT8 = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
_MOVES_FLOAT8 = frozenset(
    {
        "_scaled_mm",
        "_to_copy",
        "cat",
        "clone",
        "copy_",
        "fill_",
        "gather",
        "index",
        "index_select",
        "ones_like",
        "stack",
        "zero_",
        "zeros_like",
    }
)
_HOST_INDICES = frozenset(
    {
        "aten::_index_put_impl_",
        "aten::_unsafe_index.Tensor",
        "aten::index.Tensor",
        "aten::index.Tensor_out",
        "aten::index_put",
        "aten::index_put_",
    }
)
_PICKS = frozenset({"embedding", "gather", "index", "index_select"})
_WAITS = frozenset({"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "equal"})


def execute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The one kernel for all operators without a kernel of their own.

    Raises:
        RuntimeError: tensors on different devices, or a generator of another device.
        Float8ArithmeticError: arithmetic on an 8-bit float dtype.
        torch.OutOfMemoryError: the result does not fit.
    """
    if op._schema.name.startswith("aten::bitwise_"):
        # torch hands on a number where these want a tensor, and takes one back for arithmetic only.
        args = tuple(torch.tensor(value) if type(value) is int else value for value in args)
    return _Call(state.running(), op, args, kwargs).run()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from _tensors(item)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        items = [change(item) for item in cast("list[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return change(value)


class Float8ArithmeticError(NotImplementedError):
    """A simulated device was asked to compute with 8-bit floats, which devices store and do not compute with.

    Its base is what torch raises for this on CUDA, so that code which catches that works alike here.
    """


class _Call:
    """One operator call on its way through the simulator."""

    def __init__(self, simulator: Simulator, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.simulator, self.op, self.args, self.kwargs = simulator, op, args, kwargs
        self.info: Signature = describe(op)
        self.base = self.info.name.removeprefix("aten::").partition(".")[0]
        self.tensors = list(_tensors((*args, *kwargs.values())))
        self.index = self._common_device()
        self.lowered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.dry = simulator.dry and not self.info.view and dry.is_large(self.tensors)

    def run(self) -> Any:
        self._refuse()
        if self.simulator.dry and not self.tensors:
            probe = self.op(*self.args, **self._host_arguments({**self.kwargs, "device": torch.device("meta")}))
            self.dry = dry.is_large(_tensors(probe))
        args = tuple(_map(value, self._lower) for value in self.args)
        kwargs = self._host_arguments({name: _map(value, self._lower) for name, value in self.kwargs.items()})
        if not self.info.view:
            self._launch()
        out = self.simulator.shapes.run(self.op, self.info, args, kwargs) if self.dry else self.op(*args, **kwargs)
        if self.dry and self.base == "all":
            self._all_true()
        if not self.info.view:
            self._spend(args, kwargs, out)
        self._follow_resizes()
        return self._lift(out)

    def _common_device(self) -> int:
        named = self.kwargs.get("device")
        found: torch.device | None = None
        strangers: list[torch.device] = []
        for tensor in self.tensors:
            if tensor.device.type == bindings.NAME:
                if found is not None and tensor.device != found:
                    self._mismatch(found, tensor.device)
                found = tensor.device
            elif tensor.device.type != "cpu" or (tensor.dim() and self.info.name not in _HOST_INDICES):
                strangers.append(tensor.device)
        if found is None:
            return self.simulator.device_index(named)
        if strangers:
            self._mismatch(found, strangers[0])
        for position, value in self.info.pair(self.args, self.kwargs):
            if self.info.writes[position]:
                for tensor in _tensors(value):
                    if tensor.device != found:
                        self._mismatch(found, tensor.device)
        return self.simulator.device_index(found)

    def _mismatch(self, first: torch.device, second: torch.device) -> None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{first} and {second}! (in {self.info.name})"
        )

    def _refuse(self) -> None:
        generator = self.kwargs.get("generator")
        if generator is not None and generator.device.type != bindings.NAME:
            raise RuntimeError(
                f"Expected a '{bindings.NAME}' device type for generator but found '{generator.device.type}'. "
                "Draw on the generator's device and move the result."
            )
        if self.info.view or self.base in _MOVES_FLOAT8:
            return
        for tensor in self.tensors:
            if tensor.dtype in _FLOAT8:
                raise Float8ArithmeticError(
                    f'"{self.base}" is not implemented for {tensor.dtype} on {tensor.device}; '
                    "cast to a wider dtype first, as devices store 8-bit floats but do not compute with them."
                )

    def _host_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        return kwargs

    def _lower(self, value: Any) -> Any:
        """The host's, or in a dry run the meta device's, stand-in of an argument."""
        if isinstance(value, torch.device):
            return torch.device("meta" if self.dry else "cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != bindings.NAME:
            return dry.to_meta(value) if self.dry and value.dim() else value
        if id(value) not in self.lowered:
            if value.numel() == 0 and self.info.fills_out:
                stand_in = torch.empty(0, dtype=value.dtype, device="meta" if self.dry else "cpu")
            else:
                stand_in = dry.to_meta(value) if self.dry else bindings.to_host(value)
            self.lowered[id(value)] = value, stand_in
        return self.lowered[id(value)][1]

    def _launch(self) -> None:
        simulator = self.simulator
        with simulator.ledger.lock:
            self.stream = simulator.current_stream(self.index)
            self.stream.launch()
            simulator.ledger.devices[self.index].operators += 1
            for position, value in self.info.pair(self.args, self.kwargs):
                for tensor in _tensors(value):
                    if tensor.device.type == bindings.NAME:
                        check_access(simulator, tensor, self.stream, self.info.writes[position], self.info.name)

    def _written(self) -> list[torch.Tensor]:
        pairs = self.info.pair(self.args, self.kwargs)
        return [t for position, value in pairs if self.info.writes[position] for t in _tensors(value)]

    def _all_true(self) -> None:
        for tensor in self._written():
            if not dry.is_large((tensor,)):
                bindings.to_host(tensor).fill_(True)

    def _spend(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        timeline = self.simulator.timeline
        results = list(_tensors(out))
        written = sum(t.numel() * t.element_size() for t in results)
        filled = [t for t in self.tensors if self.info.fills_out and any(t is o for o in self._written())]
        sources = [t for t in self.tensors if all(t is not o for o in filled)]
        read = written if self.base in _PICKS else sum(t.numel() * t.element_size() for t in sources)
        flops = count_flops(self.op, args, kwargs, results[0]) if results else 0.0
        half = any(t.is_floating_point() and t.element_size() <= 2 for t in self.tensors)
        seconds = timeline.compute_seconds(flops, read + written, half)
        timeline.spend(self.info.name, "compute", (self.stream,), seconds, read + written)
        if not results or self.base in _WAITS:
            self.simulator.host_joins(self.stream.clock, self.stream.time)

    def _follow_resizes(self) -> None:
        """A host kernel may have given an `out=` argument another shape or other memory."""
        for tensor, stand_in in self.lowered.values():
            if self.info.view or (stand_in.shape == tensor.shape and stand_in.stride() == tensor.stride()):
                continue
            host = dry.realise(self.info, stand_in) if self.dry else stand_in
            if self.dry or host.data_ptr() != tensor.data_ptr():
                tensor.data = self.simulator.ledger.adopt(host, self.index, self.info.name, written=True)
            else:
                tensor.as_strided_(host.shape, host.stride(), tensor.storage_offset())

    def _lift(self, out: Any) -> Any:
        if not isinstance(out, (list, tuple)):
            return self._lift_one(out, self.info.returned[0] if self.info.returned else None)
        results = list(cast("list[Any]", out))
        if len(self.info.returned) == 1:  # one result that is a list of tensors
            return [self._lift_one(item, None) for item in results]
        return tuple(self._lift_one(item, origin) for item, origin in zip(results, self.info.returned, strict=True))

    def _lift_one(self, result: Any, origin: int | None) -> Any:
        if origin is not None:
            for position, value in self.info.pair(self.args, self.kwargs):
                if position == origin:
                    return value
        if isinstance(result, (list, tuple)):
            return [self._lift_one(item, None) for item in cast("list[Any]", result)]
        if not isinstance(result, torch.Tensor) or result.device.type not in ("cpu", "meta"):
            return result
        if not self.dry and result.numel():
            address = result.untyped_storage().data_ptr()
            for tensor, stand_in in self.lowered.values():
                if stand_in.untyped_storage().data_ptr() == address:
                    return self._view(tensor, result)
        host = dry.realise(self.info, result) if self.dry else result
        return self.simulator.ledger.adopt(host, self.index, self.info.name, written=not self.info.view)

    def _view(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """A result that looks at an argument's memory; the same storage object where the dtype is the same."""
        if result.dtype == tensor.dtype:
            view = tensor.detach()
            view.as_strided_(result.shape, result.stride(), tensor.storage_offset() + result.storage_offset())
            return view
        return self.simulator.ledger.alias(bindings.to_device(result, self.index), of=tensor)
