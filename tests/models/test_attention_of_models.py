"""Every model class: all its attention goes through `attention`, and its projections can be fused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diffusion_core.models as models
from benchmarks.graph_models import SUBJECTS, Subject
from diffusion_core.models.layers.fusing import Fusing
from diffusion_core.offload.attention import DEFAULT
from diffusion_core.outputs import BaseOutput
from tests.offload.fake_kernels import installed

SUBJECTS_BY_NAME = {str(subject): subject for subject in SUBJECTS}


class Attending(TorchDispatchMode):
    """The operations that attention is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "scaled_dot_product" in name or "softmax" in name:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def run(subject: Subject, model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return flat(getattr(model, subject.method)(**subject.calls()[0]))


def flat(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    if hasattr(out, "mean") and hasattr(out, "std"):
        return [out.mean]
    if isinstance(out, BaseOutput):
        out = out.to_tuple()
    return [tensor for part in out for tensor in flat(part)]


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], atol: float = 1e-5) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=atol, rtol=1e-4), (one - other).abs().max()


def test_no_model_calls_torch_s_attention_by_itself() -> None:
    files = list(Path(models.__path__[0]).rglob("*.py"))
    assert len(files) > 40
    assert [str(file) for file in files if re.search("scaled_dot_product|flex_attention", file.read_text())] == []


@pytest.mark.parametrize("name", SUBJECTS_BY_NAME)
def test_all_attention_goes_through_the_dispatch(name: str) -> None:
    subject = SUBJECTS_BY_NAME[name]
    model = subject.model()
    with Attending() as plain:
        whole = run(subject, model)
    assert (plain.found == []) == (not model._attending())
    model.set_attention_backend("chunked", strict=True)
    with Attending() as chunked:
        assert_close(run(subject, model), whole)
    assert chunked.found == []
    model.reset_attention_backend()
    assert set(model.attn_processors.values()) <= {DEFAULT}


@pytest.mark.parametrize("name", SUBJECTS_BY_NAME)
def test_every_layer_says_its_heads(name: str) -> None:
    model = SUBJECTS_BY_NAME[name].model()
    assert all(type(layer.dim_head) is int for layer in model._attending().values())
    with installed():
        model.set_attention_backend("flash")
        run(SUBJECTS_BY_NAME[name], model)


def fusing(model: torch.nn.Module) -> list[Fusing]:
    return [layer for layer in model.modules() if isinstance(layer, Fusing)]


@pytest.mark.parametrize("name", SUBJECTS_BY_NAME)
def test_projections_are_fused_and_parted_again(name: str) -> None:
    subject = SUBJECTS_BY_NAME[name]
    model = subject.model()
    if not fusing(model):  # without attention, or with one product for all three already
        with pytest.raises(ValueError, match="no attention layers whose projections can be fused"):
            model.fuse_qkv_projections()
        return
    whole, before = run(subject, model), {key: value.clone() for key, value in model.state_dict().items()}
    count = sum(1 for part in model.modules() if isinstance(part, torch.nn.Linear))
    model.fuse_qkv_projections()
    assert sum(1 for part in model.modules() if isinstance(part, torch.nn.Linear)) < count
    assert_close(run(subject, model), whole)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.unfuse_qkv_projections()
    assert dict(model.named_parameters()).keys() == before.keys() - dict(model.named_buffers()).keys()
    assert all(torch.equal(one, other) for one, other in zip(run(subject, model), whole, strict=True))


MODES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "group offload": (
        lambda model: model.enable_group_offload("cpu", offload_type="leaf_level"),
        lambda model: model.disable_group_offload(),
    ),
    "casting": (
        lambda model: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        lambda model: model.disable_layerwise_casting(),
    ),
    "int8": (
        lambda model: model.enable_layerwise_casting(storage="int8"),
        lambda model: model.disable_layerwise_casting(),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["UNet2DConditionModel", "FluxTransformer2DModel (dev)", "WanTransformer3DModel (image)"]
)
def test_fused_projections_go_with_every_mode(name: str, mode: str, tmp_path: Any) -> None:
    """Rows are stored by themselves, so fused weights are cast to what the parts would be."""
    subject = SUBJECTS_BY_NAME[name]
    enable, disable = MODES[mode]
    alone = subject.model()
    enable(alone)
    whole, names = run(subject, alone), alone.state_dict().keys()
    model = subject.model()
    model.fuse_qkv_projections()
    enable(model)
    stored = {key: value.dtype for key, value in model.named_parameters()}
    assert_close(run(subject, model), whole, atol=1e-4)
    assert model.state_dict().keys() == names
    if mode != "group offload":
        assert any("to_qkv.weight" in key and dtype.itemsize == 1 for key, dtype in stored.items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    disable(model)
    assert again.state_dict().keys() == names
    assert_close(run(subject, again), run(subject, model), atol=2e-2)


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "SD3Transformer2DModel", "LTXVideoTransformer3DModel"])
def test_fused_projections_and_backends_are_one_graph(name: str) -> None:
    torch._dynamo.reset()
    subject = SUBJECTS_BY_NAME[name]
    model = subject.model()
    whole = run(subject, model)
    model.fuse_qkv_projections()
    model.set_attention_backend("chunked")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(run(subject, compiled), whole)
    torch._dynamo.reset()
