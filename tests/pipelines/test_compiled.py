"""Pipelines whose components `torch.compile` has wrapped: they draw, are saved, and are known by their own classes."""

from pathlib import Path
from typing import Any

import pytest
import torch

import diffusion_core
from diffusion_core.offload.gates import unwatch, watch

from .families import CASES, FAMILIES, Family, loaded, pipe


@pytest.fixture(autouse=True)
def forget_graphs() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("family", "task"), CASES, ids=[f"{family}-{task}" for family, task in CASES])
def test_every_component_may_be_compiled(family: Family, task: str, tmp_path: Path) -> None:
    made = loaded(family, task)
    plain = draw(made, family, task)
    kinds = {name: type(part) for name, part in made.components.items()}
    for name, part in made.components.items():
        if isinstance(part, torch.nn.Module):
            setattr(made, name, torch.compile(part))
    # Everything goes through the wrappers; what graphs there are is for tests/models/test_compile.py.
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(draw(made, family, task), plain)
    made.save_pretrained(tmp_path)
    again = diffusion_core.Pipeline.from_pretrained(tmp_path)
    assert {name: type(part) for name, part in again.components.items()} == kinds


# ---- with memory modes and casting ----


@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[10]], ids=str)
def test_blocks_stay_whole_under_group_offload_and_casting(family: Family, compile_first: bool) -> None:
    """Weights come in, and are decoded, outside of each compiled block, whose graph stays whole: `fullgraph=True`."""
    made, plain = loaded(family), loaded(family)
    denoiser = made.denoiser
    plain.denoiser.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    wanted = draw(plain, family)

    def compile_blocks() -> None:
        denoiser.compile_repeated_blocks(fullgraph=True, backend="aot_eager")

    if compile_first:
        compile_blocks()
    denoiser.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    denoiser.enable_group_offload("cpu", offload_type="block_level")
    if not compile_first:
        compile_blocks()
    for _ in range(2):
        torch.testing.assert_close(draw(made, family), wanted, atol=1e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]
    denoiser.disable_group_offload()
    denoiser.disable_layerwise_casting()
    torch.testing.assert_close(draw(made, family), draw(pipe(family), family), atol=1e-5, rtol=0)


class Seen:
    """Counts the calls that pass a gate."""

    order = 5

    def __init__(self, entered: list[Any]) -> None:
        self.entered = entered

    def enter(self, args: Any, kwargs: Any) -> Any:
        self.entered.append(args)
        return args, kwargs

    def result(self, output: Any) -> Any:
        return output

    def leave(self) -> None:
        pass


@pytest.mark.parametrize("compile_first", [True, False])
def test_a_compiled_decoder_takes_part_in_offload(compile_first: bool) -> None:
    """The gate stands around its graph, whichever came first."""
    family = FAMILIES[0]
    made = loaded(family)
    wanted = draw(made, family)

    def compile_decoder() -> None:
        made.vae.decode = torch.compile(made.vae.decode, fullgraph=True, backend="aot_eager")

    if compile_first:
        compile_decoder()
    made.enable_model_cpu_offload(device="cpu")
    if not compile_first:
        compile_decoder()
    entered: list[Any] = []
    watch(made.vae, "decode", Seen(entered))
    for _ in range(2):
        torch.testing.assert_close(draw(made, family), wanted, atol=1e-5, rtol=0)
    assert len(entered) == 2
    unwatch(made.vae, "decode", lambda watcher: isinstance(watcher, Seen))
    made.disable_model_cpu_offload()
    assert hasattr(made.vae.decode, "_torchdynamo_orig_callable")
    torch.testing.assert_close(draw(made, family), wanted, atol=1e-5, rtol=0)


def draw(made: Any, family: Family, task: str = "text", **changes: Any) -> torch.Tensor:
    found = made(**family.call(task, **changes))
    return found.frames if family.frames else found.images
