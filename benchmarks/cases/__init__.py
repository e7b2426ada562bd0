"""The benchmarks by name. Importing this imports neither torch nor a library that is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

OURS, THEIRS, TUNED = "diffusion_core", "diffusers", "diffusers, tuned"


@dataclass(frozen=True)
class Case:
    """A benchmark that runs in fresh processes, for each side in turn.

    Attributes:
        name: for the command line.
        about: what is measured, for the table.
        function: "module:function" below this package, called as `function(side, folder)` in a fresh process; it
            returns figures by name. `folder` holds what `prepare` made.
        sides: what is compared; the first one is ours.
        goals: for some figures, how much of the second side's (or of the side named) ours may be.
        shown: figures of the table, in order; all are in the JSON.
        rounds: of each side.
        threads: of each process; 0 for all cores.
        prepare: "module:function", called once as `function(folder)` before the rounds.
        short: part of `make bench`.
    """

    name: str
    about: str
    function: str
    sides: tuple[str, ...] = (OURS, THEIRS)
    goals: Mapping[str, float | tuple[float, str]] = field(default_factory=dict)
    shown: tuple[str, ...] = ("seconds",)
    rounds: int = 3
    threads: int = 0
    prepare: str | None = None
    short: bool = False

    def measure(self, side: str, folder: Path) -> dict[str, float]:
        return _found(self.function)(side, folder)

    def make(self, folder: Path) -> None:
        if self.prepare is not None:
            _found(self.prepare)(folder)

    def goal(self, figure: str) -> tuple[float, str] | None:
        """The ratio that is asked for, and against whom."""
        goal = self.goals.get(figure)
        return (goal, self.sides[1]) if isinstance(goal, float) else goal


def _found(path: str) -> Callable[..., dict[str, float]]:
    module, _, name = path.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


_ALL = [
    Case(
        "import",
        "import of StableDiffusionPipeline, after torch",
        "starting:import_pipeline",
        goals={"cpu_seconds": 0.15, "memory_mb": 0.25},
        shown=("cpu_seconds", "memory_mb"),
        threads=1,
        short=True,
    ),
    Case(
        "first-picture",
        "a fresh process to its first picture, tiny weights",
        "starting:first_picture",
        shown=("seconds", "cpu_seconds", "memory_mb"),
        prepare="starting:save_tiny",
        threads=1,
        short=True,
    ),
    *(
        Case(
            f"load-{kind}",
            f"load a UNet of 1 GB, {about}",
            f"loading:load_{kind.replace('-', '_')}",
            goals=goals,
            shown=("seconds", "peak_of_model", "all_of_model"),
            prepare="loading:save_unet",
            threads=1,
            short=kind == "cast",
        )
        for kind, about, goals in (
            ("same", "same dtype", {}),
            ("sharded", "same dtype, five shards", {}),
            ("cast", "float32 to bfloat16", {"all_of_model": 0.35}),  # ours 1.05 times the model, theirs 3
            ("cold", "same dtype, and one forward, file not in RAM", {}),
        )
    ),
    Case("save", "save that UNet", "loading:save", shown=("seconds", "peak_of_model"), prepare="loading:save_unet"),
    Case(
        "scheduler-step",
        "a step of eight schedulers, 4 x 64 x 64",
        "steps:scheduler_steps",
        goals={"operations": 0.35},
        shown=("operations", "microseconds"),
        threads=1,
        short=True,
    ),
    *(
        Case(
            f"depth-{name}",
            f"forward of {title} at full depth and tiny width",
            f"forwards:depth_{name}",
            goals={"python_calls": 0.5},
            shown=("seconds", "python_calls", "operations"),
            threads=1,
            short=True,
        )
        for name, title in (("sd15", "SD 1.5's UNet"), ("sdxl", "SDXL's UNet"), ("flux", "FLUX.1's transformer"))
    ),
    *(
        Case(
            f"{name}-{dtype}",
            f"{title}, {dtype}",
            f"forwards:{name.replace('-', '_')}_{dtype}",
            sides=(OURS, THEIRS, TUNED),
            goals=goals,
            shown=("seconds", "cpu_seconds", "of_peak"),
            rounds=2,
            short=short,
        )
        for name, title in (
            ("unet", "SD 1.5's UNet at real size, 64 x 64 latents"),
            ("flux", "FLUX.1 cut down to 2 + 4 blocks, 1,024 and 128 tokens"),
        )
        for dtype, goals, short in (
            ("bfloat16", {"seconds": (0.95, TUNED)}, True),
            ("float32", {"seconds": 1.0}, False),
        )
    ),
    *(
        Case(
            f"decode-{latents}-{dtype}",
            f"SD 1.5's decoder, {latents} x {latents} latents, {dtype}",
            f"forwards:decode_{latents}_{dtype}",
            sides=(OURS, THEIRS, TUNED),
            goals=goals,
            shown=("seconds", "cpu_seconds", "of_peak", "anonymous_mb"),
            rounds=2,
            short=(latents, dtype) == (64, "bfloat16"),
        )
        for latents in (64, 128)
        for dtype, goals in (("bfloat16", {"seconds": 0.3}), ("float32", {}))
    ),
    Case(
        "decode-activations",
        "tensors at most in SD 1.5's decoder, 64 x 64 latents, bfloat16",
        "forwards:decode_activations",
        goals={"activations_mb": 0.75},
        shown=("activations_mb",),
        rounds=1,
        threads=1,
        short=True,
    ),
    Case(
        "casting",
        "FLUX.1 cut down, fp8 weights and bfloat16 arithmetic",
        "forwards:flux_cast",
        shown=("seconds", "cpu_seconds"),
        rounds=2,
    ),
    *(
        Case(
            f"simulated-{mode}",
            f"SD 1.5's UNet on a simulated card, {about}",
            f"simulated:{mode.replace('-', '_')}",
            shown=("peak_mb", "modelled_seconds"),
            rounds=1,
            threads=1,
        )
        for mode, about in (
            ("resident", "all on the device"),
            ("blocks", "group offload by blocks"),
            ("leaves", "group offload by leaves"),
            ("leaves-stream", "group offload by leaves, stream"),
            ("casting", "fp8 weights"),
        )
    ),
]
CASES = {case.name: case for case in _ALL}
