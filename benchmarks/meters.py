"""What a benchmark reads: time, memory by kind, Python calls, tensor operations, floating point operations.

Nothing heavy is imported before it is used, so that a process can measure what an import costs.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MB = 1e6
FIELDS = {"RssAnon": "anonymous", "RssFile": "mapped"}


def memory() -> dict[str, int]:
    """Bytes of this process in RAM: `anonymous`, which only RAM can hold; `mapped`, pages of files; `all`, both."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in FIELDS:
            found[FIELDS[name]] = int(value.split()[0]) * 1024
    if len(found) < len(FIELDS):
        raise OSError("this system does not tell the anonymous and the mapped memory of a process")
    return {**found, "all": sum(found.values())}


class Peak:
    """Samples the memory of this process every millisecond while it is open.

    Attributes:
        before, after, highest: as `memory`, each kind for itself.
    """

    def __enter__(self) -> Peak:
        self.before = memory()
        self.highest = dict(self.before)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._note(memory())

    def _note(self, now: dict[str, int]) -> None:
        self.highest = {kind: max(size, now[kind]) for kind, size in self.highest.items()}

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = memory()
        self._note(self.after)

    def grown(self, kind: str) -> float:
        """MB of a kind at most, above what there was before."""
        return (self.highest[kind] - self.before[kind]) / MB


def timed(function: Callable[[], Any], repeats: int = 1, warm: bool = True) -> dict[str, float]:
    """Seconds of a call: `seconds` on the clock and `cpu_seconds` of all cores, medians of `repeats`."""
    if warm:
        function()
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(repeats):
        begun, busy = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - busy)
    return {"seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu)}


def python_calls(function: Callable[[], Any]) -> int:
    """How many Python functions run during a call."""
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def operations(function: Callable[[], Any]) -> int:
    """How many operations on tensors torch's dispatcher sees during a call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.total += 1
            return function(*args, **(kwargs or {}))

    with Count() as count:
        function()
    return count.total


def floating_point_operations(function: Callable[[], Any]) -> int:
    """Multiplications and additions of the products and convolutions in a call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def peak_activations(function: Callable[[], Any]) -> int:
    """Bytes of tensors at most that a call makes, on top of those that it was given.

    It counts storages from the operation that makes them until Python lets go of them. What kernels need inside for
    a moment is not seen.
    """
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Books(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.highest = 0
            self.known: dict[int, int] = {}

        def gone(self, key: int) -> None:
            self.now -= self.known.pop(key)

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {
                value.untyped_storage()._cdata
                for value in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(value, torch.Tensor)
            }
            result = function(*args, **(kwargs or {}))
            for value in torch.utils._pytree.tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    key = storage._cdata
                    if key not in given and key not in self.known:
                        self.known[key] = storage.nbytes()
                        self.now += storage.nbytes()
                        weakref.finalize(storage, self.gone, key)
            self.highest = max(self.highest, self.now)
            return result

    with Books() as books:
        function()
    return books.highest
