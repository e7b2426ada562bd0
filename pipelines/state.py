"""The state of calls: what a pipeline knows while it runs, kept apart for every thread."""

import threading
from typing import Any


class Run:
    """One call of a pipeline. Its attributes are the state that the call was started with, and `interrupt`."""

    interrupt: bool
    current_timestep: Any

    def __init__(self, **state: Any) -> None:
        self.__dict__.update({"interrupt": False, **state})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this run has no {name!r}; it has {sorted(self.__dict__)}")


class Runs(threading.local):
    """The runs of one pipeline. What is read and written belongs to the calling thread; `active` is seen by all."""

    def __init__(self, active: list[Run], lock: Any) -> None:
        self.active = active
        self.lock = lock
        self.stack: list[Run] = []
        self.last: Run | None = None

    @classmethod
    def make(cls) -> "Runs":
        """An empty record. Each thread that meets it starts with its own stack and the shared list."""
        return cls([], threading.Lock())

    def start(self, run: Run) -> None:
        """Make `run` the current one of this thread."""
        self.stack.append(run)
        with self.lock:
            self.active.append(run)

    def finish(self, run: Run) -> bool:
        """Forget `run`; true if no run of any thread is left."""
        self.stack.remove(run)
        self.last = run
        if "current_timestep" in vars(run):
            # A tensor, which would stay on its device.
            run.current_timestep = None
        with self.lock:
            self.active.remove(run)
            return not self.active

    def current(self) -> Run | None:
        """The run of this thread: the one under way, else its last, else the newest under way in another thread."""
        if self.stack:
            return self.stack[-1]
        if self.last is not None:
            return self.last
        with self.lock:
            return self.active[-1] if self.active else None

    def interrupt(self, value: bool) -> None:
        """Ask this thread's run to stop; from a thread that has none, ask all of them."""
        if self.stack:
            self.stack[-1].interrupt = value
            return
        with self.lock:
            for run in self.active:
                run.interrupt = value
