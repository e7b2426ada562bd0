"""What the dispatcher needs to know about an operator, read once from its schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Signature:
    """An operator's schema, digested.

    `writes` says of each argument whether it is written; `returned` of each result which argument it is, if any; `view`
    whether the operator only looks at the same memory in another way; `fills_out` whether it
    fills tensors given as `out=`; `reads` whether it looks at values at all.
    """

    name: str
    arguments: dict[str, int]
    writes: tuple[bool, ...]
    returned: tuple[int | None, ...]
    view: bool
    fills_out: bool
    reads: bool

    def pair(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """Every given argument with its position."""
        yield from enumerate(args)
        for name, value in kwargs.items():
            if name in self.arguments:
                yield self.arguments[name], value


_known: dict[Any, Signature] = {}


def describe(op: Any) -> Signature:
    """The signature of an operator overload."""
    if op not in _known:
        _known[op] = _read(op._schema)
    return _known[op]


def _read(schema: Any) -> Signature:
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    returned: list[int | None] = []
    looks = False
    for result in schema.returns:
        origin = None
        if result.alias_info is not None:
            looks = looks or not result.alias_info.is_write
            for position, argument in enumerate(schema.arguments):
                alias = argument.alias_info
                same = alias is not None and alias.before_set == result.alias_info.before_set
                if same and written[position] and result.alias_info.is_write:
                    origin = position
        returned.append(origin)
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    names = {argument.name: position for position, argument in enumerate(schema.arguments)}
    name = schema.name + overload
    view = looks and not any(written)
    base = schema.name.removeprefix("aten::")
    reads = not (view or base.endswith("_like") or base.startswith("new_") or base == "is_pinned")
    fills_out = schema.overload_name.endswith("out")
    return Signature(name, names, tuple(written), tuple(returned), view, fills_out, reads)
