"""The order in which calls follow each other, learned while they happen."""

from __future__ import annotations

from collections.abc import Iterator

END = -1
"""Follows the last call of a run."""


class Order:
    """What came after each pair of calls, the last time that this pair was seen.

    Two calls of context tell most repetitions apart: tiles of a picture, layers that are used twice. A branch that is
    taken anew is forgotten as soon as the other one is seen. Calls are numbers; None stands before the first.
    """

    def __init__(self) -> None:
        self._after: dict[tuple[int | None, int], int] = {}

    def note(self, before: int | None, call: int | None, following: int) -> None:
        """`following` came after `call`, which came after `before`."""
        if call is not None:
            self._after[before, call] = following

    def after(self, before: int | None, call: int) -> int | None:
        """The call that is expected next, `END`, or None where nothing is known."""
        return self._after.get((before, call))

    def chain(self, before: int | None, call: int, most: int) -> Iterator[int]:
        """The calls that are expected next, in order, up to the end of the run."""
        for _ in range(most):
            following = self.after(before, call)
            if following is None or following == END:
                return
            yield following
            before, call = call, following
