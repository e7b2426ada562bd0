"""Rows 20 to 31 of the guide "Precision and compilation", as users write them; row 26 also on a simulated device."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.graphs import Counter, with_sizes_apart
from diffusion_core import (
    AutoencoderKL,
    DiffusionPipeline,
    FluxPipeline,
    StableDiffusionXLPipeline,
    TorchAoConfig,
    UNet2DConditionModel,
)
from diffusion_core.errors import DiffusionCoreError
from diffusion_core.models.layers.rotary import RotaryTable

from .repos import FLUX, SD, SDXL, draw, expected, repo, same

# Inductor writes C++, which takes minutes; what is written in the guide runs with it in the slow set.
backends = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- precision ----


def test_row_20_bfloat16_and_float16() -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(repo(SDXL), dtype=torch.bfloat16)
    assert {part.dtype for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder)} == {torch.bfloat16}
    image = draw(pipeline, SDXL)
    assert float((image - expected(SDXL)).abs().mean()) < 0.05
    assert StableDiffusionXLPipeline.from_pretrained(repo(SDXL), dtype=torch.float16).dtype == torch.float16
    assert StableDiffusionXLPipeline.from_pretrained(repo(SDXL)).dtype == torch.float32


def test_row_21_tensor_float_32() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        pipeline = StableDiffusionXLPipeline.from_pretrained(repo(SDXL), dtype=torch.float32)
        draw(pipeline, SDXL)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_row_22_sdpa_is_the_default_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fused = [0], F.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    pipeline = StableDiffusionXLPipeline.from_pretrained(repo(SDXL))
    draw(pipeline, SDXL)
    # The projections of text are computed once, the attention at every step.
    assert calls[0] >= 2 * len(pipeline.unet.attn_processors)


# ---- compilation ----


@backends
def test_row_23_compile_denoiser_and_decoder(backend: str, tmp_path) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(repo(SDXL), dtype=torch.float32)
    keys = pipeline.unet.state_dict().keys()
    pipeline.unet.to(memory_format=torch.channels_last)
    pipeline.vae.to(memory_format=torch.channels_last)
    pipeline.unet = torch.compile(pipeline.unet, mode="max-autotune", fullgraph=True, backend=backend)
    pipeline.vae.decode = torch.compile(pipeline.vae.decode, mode="max-autotune", fullgraph=True, backend=backend)
    for _ in range(2):
        assert same(draw(pipeline, SDXL), expected(SDXL), 1e-4)

    pipeline.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(again.unet) is UNet2DConditionModel and again.unet.state_dict().keys() == keys
    assert type(again.vae) is AutoencoderKL
    assert same(draw(again, SDXL), expected(SDXL), 1e-4)
    assert "UNet2DConditionModel" in repr(pipeline)
    assert pipeline.to(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_row_24_dynamic_shapes(backend: str) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(SDXL), dtype=torch.float32)
    plain = DiffusionPipeline.from_pretrained(repo(SDXL), dtype=torch.float32)
    counter = Counter(backend)
    with with_sizes_apart():  # torch.fx.experimental._config.use_duck_shape = False, and back
        pipeline.unet = torch.compile(pipeline.unet, fullgraph=True, dynamic=True, backend=counter)
        for height, width in ((32, 32), (48, 32), (64, 40)):
            sizes = {"height": height, "width": width}
            assert same(draw(pipeline, SDXL, **sizes), draw(plain, SDXL, **sizes), 1e-4)
    assert counter.graphs == 1


@backends
@pytest.mark.parametrize("family", [SDXL, FLUX], ids=str)
def test_row_25_regional_compilation(family: Any, backend: str) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(family), dtype=torch.float32)
    denoiser = getattr(pipeline, family.denoiser)
    assert denoiser._repeated_blocks
    denoiser.compile_repeated_blocks(fullgraph=True, backend=backend)
    for _ in range(2):
        assert same(draw(pipeline, family), expected(family), 1e-4)


@pytest.mark.parametrize("family", [SDXL, FLUX], ids=str)
def test_row_25_by_accelerate(family: Any, tmp_path) -> None:
    from accelerate.utils import compile_regions

    pipeline = DiffusionPipeline.from_pretrained(repo(family), dtype=torch.float32)
    keys = getattr(pipeline, family.denoiser).state_dict().keys()
    regions = compile_regions(getattr(pipeline, family.denoiser), fullgraph=True, backend="aot_eager")
    setattr(pipeline, family.denoiser, regions)
    assert same(draw(pipeline, family), expected(family), 1e-4)
    pipeline.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert getattr(again, family.denoiser).state_dict().keys() == keys
    assert same(draw(again, family), expected(family), 1e-4)


@pytest.mark.parametrize("family", [SD, SDXL, FLUX], ids=str)
def test_row_26_no_graph_breaks(family: Any) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(family), dtype=torch.float32)
    counter = Counter("eager")
    compiled = torch.compile(getattr(pipeline, family.denoiser), fullgraph=True, backend=counter)
    setattr(pipeline, family.denoiser, compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        draw(pipeline, family, num_inference_steps=3)
        draw(pipeline, family, num_inference_steps=4, prompt=["a blue dog"])
    assert counter.graphs == 1


# ---- kernels, quantisation, fused projections ----


def test_row_28_kernels_from_the_hub_are_opt_in() -> None:
    pipeline = FluxPipeline.from_pretrained(repo(FLUX))
    for name in ("flash_hub", "_flash_3_hub", "sage_hub"):
        with pytest.raises((ValueError, ImportError, DiffusionCoreError), match=r"kernels|cpu"):
            pipeline.transformer.set_attention_backend(name)
    assert same(draw(pipeline, FLUX), expected(FLUX))


def test_row_29_dynamic_quantisation() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(quantization.Int8DynamicActivationInt8WeightConfig())
    from diffusion_core import FluxTransformer2DModel

    transformer = FluxTransformer2DModel.from_pretrained(
        repo(FLUX), subfolder="transformer", quantization_config=config, dtype=torch.bfloat16
    )
    pipeline = FluxPipeline.from_pretrained(repo(FLUX), transformer=transformer, dtype=torch.bfloat16)
    assert float((draw(pipeline, FLUX) - expected(FLUX)).abs().mean()) < 0.05


def test_row_30_fused_projections(tmp_path) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(repo(SDXL))
    keys = pipeline.unet.state_dict().keys()
    pipeline.fuse_qkv_projections()
    assert any(hasattr(part, "to_qkv") for part in pipeline.unet.modules())
    assert same(draw(pipeline, SDXL), expected(SDXL))
    assert pipeline.unet.state_dict().keys() == keys
    pipeline.unfuse_qkv_projections()
    assert same(draw(pipeline, SDXL), expected(SDXL))


@backends
def test_row_31_everything_together(backend: str) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(repo(SDXL), dtype=torch.bfloat16)
    plain = StableDiffusionXLPipeline.from_pretrained(repo(SDXL), dtype=torch.bfloat16)
    pipeline.fuse_qkv_projections()
    pipeline.unet.to(memory_format=torch.channels_last)
    pipeline.vae.to(memory_format=torch.channels_last)
    pipeline.unet = torch.compile(pipeline.unet, mode="max-autotune", fullgraph=True, backend=backend)
    pipeline.vae.decode = torch.compile(pipeline.vae.decode, mode="max-autotune", fullgraph=True, backend=backend)
    # bfloat16 keeps 8 bits, and inductor leaves out roundings in between.
    assert float((draw(pipeline, SDXL) - draw(plain, SDXL)).abs().mean()) < 0.02


def traced_block(pipeline: Any) -> tuple[Any, Any]:
    """The first of the single blocks, and a call of it as the guide has it."""
    blocks, calls = pipeline.transformer.single_transformer_blocks, []
    handle = blocks[0].register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    draw(pipeline, FLUX)
    handle.remove()
    return blocks, calls[0]


def test_row_31_a_block_is_exported_saved_and_loaded(tmp_path) -> None:
    pipeline = FluxPipeline.from_pretrained(repo(FLUX))
    blocks, (args, kwargs) = traced_block(pipeline)
    with torch.no_grad():
        torch.export.save(torch.export.export(blocks[0], args, kwargs), tmp_path / "block.pt2")
        with torch.serialization.safe_globals([RotaryTable]):  # among the example's inputs
            program = torch.export.load(tmp_path / "block.pt2")
        assert torch.allclose(program.module()(*args, **kwargs), blocks[0](*args, **kwargs), atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_row_31_aot_inductor(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/compile.md: its code is exported, saved, and loaded for every block."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "compile.md").read_text(encoding="utf-8")
    (example,) = (code for code in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "aoti_load_package" in code)
    pipeline = FluxPipeline.from_pretrained(repo(FLUX))

    def pipe(prompt: str, num_inference_steps: int) -> None:
        draw(pipeline, FLUX, prompt=[prompt], num_inference_steps=num_inference_steps)

    pipe.transformer = pipeline.transformer  # type: ignore[attr-defined]
    exec(compile(example, "compile.md", "exec"), {"pipe": pipe, "torch": torch})
    assert (tmp_path / "block.pt2").stat().st_size > 10_000
    for block in pipeline.transformer.single_transformer_blocks:
        assert type(block.forward).__name__ == "AOTICompiledModel"
    assert same(draw(pipeline, FLUX), expected(FLUX), 1e-4)


def test_row_27_latency_and_memory_by_a_script(tmp_path) -> None:
    """The guide links to scripts that print tables; here it is one command."""
    command = [sys.executable, "-m", "benchmarks", "run", "import", "--rounds", "1", "--output", str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=True)
    table = next(tmp_path.glob("*.md")).read_text(encoding="utf-8")
    assert "python -m benchmarks run" in table and "| " in done.stdout + table
    assert re.search(r"\d\.\d+", table) and re.search(r"memory|MB", table)
