"""A tiny Stable Diffusion pipeline, the memory modes that it can be put under, and what it draws on the CPU."""

import gc
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

import diffusion_core
from tests.pipelines import tiny

CAPACITY = 8_500_000  # bytes; all weights take 7.0 MB
GROUP = {"onload_device": "sim:0", "offload_type": "block_level"}
MODES = {
    "on the device": lambda pipe: pipe.to("sim:0"),
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "model on the second": lambda pipe: pipe.enable_model_cpu_offload(gpu_id=1),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "leaf": lambda pipe: pipe.enable_group_offload("sim:0", offload_type="leaf_level"),
    "leaf, streams": lambda pipe: pipe.enable_group_offload("sim:0", offload_type="leaf_level", use_stream=True),
    "block": lambda pipe: pipe.enable_group_offload(**GROUP),
    "three blocks": lambda pipe: pipe.enable_group_offload(**GROUP, num_blocks_per_group=3),
    "two blocks, streams": lambda pipe: pipe.enable_group_offload(**GROUP, num_blocks_per_group=2, use_stream=True),
    "recorded streams": lambda pipe: pipe.enable_group_offload(
        "sim:1", offload_type="leaf_level", use_stream=True, record_stream=True
    ),
    "buffers": lambda pipe: pipe.enable_group_offload("sim:0", use_stream=True, low_cpu_mem_usage=True),
    "disk": lambda pipe: pipe.enable_group_offload("sim:0", offload_to_disk_path=mkdtemp()),
    "all but the vae": lambda pipe: pipe.enable_group_offload("sim:0", exclude_modules="vae"),
}
UNDO = ("disable_model_cpu_offload", "disable_sequential_cpu_offload", "disable_group_offload")


@cache
def saved() -> Path:
    folder = Path(mkdtemp())
    parts = tiny.components(diffusion_core, folder)
    diffusion_core.StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(folder / "saved")
    return folder / "saved"


def load(**options):
    pipe = diffusion_core.StableDiffusionPipeline.from_pretrained(saved(), **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, batch: int = 1, height: int = 32, **options) -> torch.Tensor:
    latents = torch.randn(batch, 4, height // 4, 8, generator=torch.Generator().manual_seed(batch))
    call = {"num_inference_steps": 1, "output_type": "pt", **options}
    return pipe(["cat"] * batch, latents=latents, **call).images.cpu()


@cache
def expected(batch: int = 1, height: int = 32) -> torch.Tensor:
    return draw(load(), batch, height)


def undo(pipe) -> None:
    for name in UNDO:
        getattr(pipe, name)()


def allocated(sim) -> list[int]:
    gc.collect()
    return [sim.statistics(index).allocated for index in range(sim.device_count)]
