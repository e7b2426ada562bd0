"""Rows 2 to 6 and 10 to 16 of the guide "Reduce memory usage", as users write them, with "sim" for "cuda"."""

import gc

import pytest
import torch

from diffusion_core import AutoModel, CogVideoXPipeline, DiffusionPipeline, FluxPipeline, apply_group_offloading
from diffusion_core.offload.simulator import simulator, unavailable
from diffusion_core.utils import export_to_video, load_video
from tests.guides.repos import COGVIDEOX, FLUX, PROMPT, SD, SDXL, call, draw, expected, repo, same

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
CAPACITY = 16_000_000  # bytes of each device


@pytest.fixture
def sim():
    for family in (SD, SDXL, FLUX, COGVIDEOX):
        expected(family)
    with simulator(devices=2, capacity=CAPACITY) as running:
        yield running


def allocated(sim) -> list[int]:
    gc.collect()
    return [sim.statistics(index).allocated for index in range(2)]


# ---- several devices ----


def test_row_02_spread_a_pipeline_over_devices(sim) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(SD), dtype=torch.float32, device_map="balanced")
    assert set(pipeline.hf_device_map) == {"unet", "vae", "text_encoder"}
    assert set(pipeline.hf_device_map.values()) == {0, 1}
    assert same(draw(pipeline, SD), expected(SD))


def test_row_03_spread_one_model(sim) -> None:
    transformer = AutoModel.from_pretrained(
        repo(FLUX),
        subfolder="transformer",
        device_map="auto",
        dtype=torch.bfloat16,
        max_memory={0: "150KB", 1: "150KB"},
    )
    assert set(transformer.hf_device_map.values()) == {0, 1}
    pipeline = DiffusionPipeline.from_pretrained(repo(FLUX), transformer=transformer, dtype=torch.bfloat16)
    pipeline.vae.to("sim")
    assert draw(pipeline, FLUX).isfinite().all()
    # With room for all of it there is nothing to spread.
    transformer = AutoModel.from_pretrained(repo(FLUX), subfolder="transformer", device_map="auto")
    assert transformer.hf_device_map == {"": torch.device("sim", 0)}


def test_row_04_an_own_map(sim) -> None:
    device_map = {
        "time_text_embed": 0,
        "context_embedder": 0,
        "x_embedder": 0,
        "transformer_blocks": 0,
        "single_transformer_blocks.0": 1,
        "single_transformer_blocks.1": "disk",
        "norm_out": 1,
        "proj_out": "cpu",
    }
    transformer = AutoModel.from_pretrained(repo(FLUX), subfolder="transformer", device_map=device_map)
    assert transformer.hf_device_map == device_map
    pipeline = DiffusionPipeline.from_pretrained(repo(FLUX), transformer=transformer)
    pipeline.vae.to("sim")
    assert same(draw(pipeline, FLUX), expected(FLUX))


def test_row_05_limits(sim, caplog) -> None:
    max_memory = {0: "3MB", 1: "3MB"}
    pipeline = DiffusionPipeline.from_pretrained(repo(SDXL), device_map="balanced", max_memory=max_memory)
    # 8.6 MB of weights: what has no room stays on the CPU, which is said.
    assert "cpu" in pipeline.hf_device_map.values()
    assert "stay on cpu" in caplog.text
    assert max(allocated(sim)) <= 3_010_000  # the simulator rounds up by 512 bytes a tensor
    assert same(draw(pipeline, SDXL), expected(SDXL))


def test_row_05_a_device_that_is_not_named_is_not_used(sim) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(SD), device_map="balanced", max_memory={1: "10MB"})
    assert set(pipeline.hf_device_map.values()) == {1}
    assert same(draw(pipeline, SD), expected(SD))
    assert sim.statistics(0).peak == 0


def test_row_06_undo_a_map(sim) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(SD), device_map="balanced")
    pipeline.reset_device_map()
    assert pipeline.hf_device_map is None and allocated(sim) == [0, 0]
    for enable in (pipeline.enable_model_cpu_offload, pipeline.enable_sequential_cpu_offload):
        enable()
        assert same(draw(pipeline, SD), expected(SD))
    pipeline.remove_all_hooks()
    pipeline.to("sim")
    assert same(draw(pipeline, SD), expected(SD))


# ---- offload ----


def test_row_10_sequential_offload(sim) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(SDXL), dtype=torch.float32)
    pipeline.enable_sequential_cpu_offload()
    assert same(draw(pipeline, SDXL), expected(SDXL))
    assert allocated(sim) == [0, 0]


def test_row_11_model_offload(sim) -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(SDXL), dtype=torch.float32)
    pipeline.enable_model_cpu_offload()
    assert same(draw(pipeline, SDXL), expected(SDXL))
    # An encoder that is called by itself comes in and goes again.
    embeds = pipeline.encode_prompt(PROMPT)
    assert embeds[0].device == torch.device("sim", 0)
    del embeds
    assert allocated(sim) == [0, 0]


def test_row_12_group_offload_of_a_pipeline(sim, tmp_path) -> None:
    onload_device = torch.device("sim")
    offload_device = torch.device("cpu")
    pipeline = CogVideoXPipeline.from_pretrained(repo(COGVIDEOX), dtype=torch.float32)
    pipeline.enable_group_offload(
        onload_device=onload_device, offload_device=offload_device, offload_type="leaf_level", use_stream=True
    )
    pipeline.set_progress_bar_config(disable=True)
    assert same(draw(pipeline, COGVIDEOX), expected(COGVIDEOX))
    video = pipeline(**call(COGVIDEOX, output_type="pil")).frames[0]
    path = export_to_video(video, str(tmp_path / "output.mp4"), fps=8)
    assert len(load_video(path)) == len(video) == COGVIDEOX.frames


def test_row_13_group_offload_of_one_model_and_of_any_module(sim) -> None:
    onload_device = torch.device("sim")
    offload_device = torch.device("cpu")
    pipeline = CogVideoXPipeline.from_pretrained(repo(COGVIDEOX), dtype=torch.float32)
    pipeline.transformer.enable_group_offload(
        onload_device=onload_device, offload_device=offload_device, offload_type="leaf_level"
    )
    pipeline.vae.enable_group_offload(onload_device=onload_device, offload_type="leaf_level")
    apply_group_offloading(
        pipeline.text_encoder, onload_device=onload_device, offload_type="block_level", num_blocks_per_group=2
    )
    for _ in range(2):
        assert same(draw(pipeline, COGVIDEOX), expected(COGVIDEOX))
    assert allocated(sim) == [0, 0]


@pytest.mark.parametrize("options", [{}, {"record_stream": True}, {"low_cpu_mem_usage": True}], ids=str)
def test_row_14_streams(sim, options) -> None:
    pipeline = CogVideoXPipeline.from_pretrained(repo(COGVIDEOX), dtype=torch.float32)
    # Tiling needs no dummy pass, and blocks with a stream may be in groups of any number.
    pipeline.vae.enable_tiling()
    tiled = draw(pipeline, COGVIDEOX)
    pipeline.enable_group_offload("sim", offload_type="block_level", num_blocks_per_group=2, use_stream=True, **options)
    for _ in range(2):
        assert same(draw(pipeline, COGVIDEOX), tiled)
    assert allocated(sim) == [0, 0] and not sim.races


def test_row_15_disk(sim, tmp_path) -> None:
    pipeline = CogVideoXPipeline.from_pretrained(repo(COGVIDEOX), dtype=torch.float32)
    pipeline.transformer.enable_group_offload(
        onload_device=torch.device("sim"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path / "one")
    )
    apply_group_offloading(
        pipeline.text_encoder,
        onload_device=torch.device("sim"),
        offload_type="block_level",
        num_blocks_per_group=2,
        offload_to_disk_path=str(tmp_path / "two"),
    )
    pipeline.vae.to("sim")
    assert same(draw(pipeline, COGVIDEOX), expected(COGVIDEOX))


def test_row_16_casting_with_group_offload(sim) -> None:
    pipeline = FluxPipeline.from_pretrained(repo(FLUX), dtype=torch.bfloat16)
    pipeline.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    alone = draw(pipeline, FLUX)
    pipeline.transformer.enable_group_offload(
        onload_device=torch.device("sim"), offload_type="leaf_level", use_stream=True
    )
    for part in (pipeline.text_encoder, pipeline.text_encoder_2):
        apply_group_offloading(part, onload_device=torch.device("sim"), offload_type="leaf_level")
    pipeline.vae.enable_group_offload(onload_device=torch.device("sim"), offload_type="leaf_level")
    assert torch.equal(draw(pipeline, FLUX), alone)
