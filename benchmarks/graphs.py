"""How many graphs `torch.compile` makes of each model class, all with `fullgraph=True`.

    python -m benchmarks.graphs [NAME ...] [--backend eager]

One graph is the least there can be for a whole model: over 4 steps of 2 prompts at one size as torch.compile works by
default, and over 4 steps of 2 prompts of 5 and 7 tokens at 3 sizes with `dynamic=True`. `compile_repeated_blocks` makes
a graph for each block that is built in another way, all of them at the first step. The models are tiny; how many
graphs there are does not depend on widths. The backend `aot_eager` goes as far as inductor does before it writes code.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch._dynamo import lookup_backend

from benchmarks.graph_models import SUBJECTS, Inputs, Subject


class Counter:
    """A backend that counts the graphs that are used.

    A trace that torch gives up and does again, as where it finds that a float is a constant, is not used.
    """

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs = 0
        self._backend: Any = lookup_backend(backend)

    def __call__(self, graph: Any, examples: Any) -> Any:
        traced = self._backend(graph, examples)
        self.graphs += 1
        return traced


def first_tensor(found: Any) -> torch.Tensor:
    """The first tensor of a model's output, of any kind."""
    while not isinstance(found, torch.Tensor):
        if hasattr(found, "parameters"):
            found = found.parameters  # a distribution of latents
        else:
            parts = found.to_tuple() if hasattr(found, "to_tuple") else found
            found = next(part for part in parts if part is not None)
    return found


@torch.no_grad()
def difference(compiled: Any, plain: Any, calls: list[Inputs]) -> float:
    """The largest difference between the compiled model's outputs and the plain one's."""
    pairs = [[first_tensor(each(**given)) for each in (compiled, plain)] for given in calls]
    return max(float((one - other).abs().max()) for one, other in pairs)


def whole(subject: Subject, calls: list[Inputs], backend: str, **options: Any) -> tuple[int, float]:
    """The graphs of these calls of a model, or of its method, and the largest difference that compilation makes."""
    torch._dynamo.reset()
    plain, counter = getattr(subject.model(), subject.method), Counter(backend)
    compiled = torch.compile(plain, backend=counter, fullgraph=True, **options)
    most = difference(compiled, plain, calls)
    return counter.graphs, most


def by_block(subject: Subject, calls: list[Inputs], backend: str, **options: Any) -> tuple[int, int, float]:
    """The graphs of the first call after `compile_repeated_blocks`, those of later calls, and the difference."""
    torch._dynamo.reset()
    plain, model, counter = subject.model(), subject.model(), Counter(backend)
    model.compile_repeated_blocks(backend=counter, fullgraph=True, **options)
    functions = getattr(model, subject.method), getattr(plain, subject.method)
    most = difference(*functions, calls[:1])
    first = counter.graphs
    return first, counter.graphs - first, max(most, difference(*functions, calls[1:]))


def with_sizes_apart() -> Any:
    """Sizes that happen to be equal at the first call are not taken to be one and the same, as `dynamic=True` would."""
    return torch.fx.experimental._config.patch(use_duck_shape=False)


def row(subject: Subject, backend: str) -> str:
    """The line of the table for a model."""
    static, most = whole(subject, subject.calls_of_one_size(), backend)
    with with_sizes_apart():
        dynamic, more = whole(subject, subject.calls(), backend, dynamic=True)
        blocks = "none"
        repeated = subject.kind._repeated_blocks if subject.method != "encode" else []
        if any(type(part).__name__ in repeated for part in subject.model().modules()):
            first, later, also = by_block(subject, subject.calls(), backend, dynamic=True)
            blocks, more = f"{first} + {later}", max(more, also)
    return f"| `{subject}` | {static} | {dynamic} | {blocks} | {max(most, more):.1g} |"


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of models")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    asked = parser.parse_args()
    print("| | one size | 3 sizes, `dynamic=True` | by block: first step + all others | difference |")
    print("|---|---|---|---|---|")
    for subject in SUBJECTS:
        if not asked.names or any(name in str(subject) for name in asked.names):
            print(row(subject, asked.backend), flush=True)


if __name__ == "__main__":
    main()
