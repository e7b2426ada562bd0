"""Every family: half precision, attention backends and fused projections."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from diffusion_core.offload import attention_masks
from diffusion_core.offload.attention import attention_backend
from diffusion_core.offload.speed import SpeedMixin
from tests.offload.fake_kernels import installed

from .families import FAMILIES, Family, pipe

every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def first_task(family: Family) -> str:
    return next(iter(family.tasks))


def copied(made: Any) -> Any:
    """With models of its own, since other tests use those of the family."""
    for name, part in made.components.items():
        if isinstance(part, torch.nn.Module):
            setattr(made, name, deepcopy(part))
    return made


@every_family
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_on_the_cpu(family: Family, dtype: str) -> None:
    task = first_task(family)
    exact = pipe(family, task)(**family.call(task))[0].float()
    made = copied(pipe(family, task))
    made.to(dtype)
    assert made.dtype == getattr(torch, dtype)
    drawn = made(**family.call(task))[0]
    assert drawn.isfinite().all() and drawn.shape == exact.shape
    assert (drawn.float() - exact).abs().mean() < (0.02 if dtype == "bfloat16" else 0.002)
    assert made.dtype == getattr(torch, dtype)


@every_family
def test_backends_and_fused_projections_draw_the_same(family: Family) -> None:
    """With masks of prompts packed where the family has them."""
    task = first_task(family)
    made, arguments = copied(pipe(family, task)), family.call(task, 2)
    whole = made(**arguments)[0]
    made.fuse_qkv_projections()
    with installed() as calls:
        for name in ("flash", "sage"):
            made.set_attention_backend(name)
            torch.testing.assert_close(made(**family.call(task, 2))[0], whole, atol=5e-5, rtol=0)
            assert calls.names
            calls.clear()
        made.reset_attention_backend()
        made.set_attention_backend("chunked")
        torch.testing.assert_close(made(**family.call(task, 2))[0], whole, atol=5e-5, rtol=0)
        assert calls == []
    made.reset_attention_backend()
    made.unfuse_qkv_projections()
    assert torch.equal(made(**family.call(task, 2))[0], whole)
    assert any(isinstance(part, SpeedMixin) for part in made.components.values())


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.name in ("pixart", "qwen-image", "ltx")], ids=str
)
def test_a_mask_of_prompts_is_read_once_a_run(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[torch.Tensor] = []
    count = attention_masks._counted
    monkeypatch.setattr(attention_masks, "_counted", lambda keep: reads.append(keep) or count(keep))
    made = pipe(family)
    with installed() as calls, attention_backend("flash"):
        made(**{**family.call(family.main, 2), "num_inference_steps": 4})
        assert calls.names.count("flash_attn_varlen_func") >= 4
    assert len(reads) == 1
