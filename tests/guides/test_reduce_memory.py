"""Rows 1, 7, 8 and 16 to 19 of the guide "Reduce memory usage", as users write them."""

import pytest
import torch

from diffusion_core import (
    AutoModel,
    AutoPipelineForImage2Image,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusion_core.errors import DiffusionCoreError
from diffusion_core.hooks import apply_group_offloading, apply_layerwise_casting
from diffusion_core.utils import load_image

from .repos import COGVIDEOX, FLUX, PROMPT, SD, SDXL, draw, expected, picture, repo, same


def test_row_01_split_a_checkpoint_into_shards(tmp_path) -> None:
    unet = AutoModel.from_pretrained(repo(SDXL), subfolder="unet")
    unet.save_pretrained(tmp_path / "sdxl-unet-sharded", max_shard_size="2MB")
    assert len(list((tmp_path / "sdxl-unet-sharded").glob("*-of-00003.safetensors"))) == 3

    unet = AutoModel.from_pretrained(tmp_path / "sdxl-unet-sharded", dtype=torch.float16)
    assert unet.dtype == torch.float16
    unet = AutoModel.from_pretrained(tmp_path / "sdxl-unet-sharded", dtype=torch.float32)
    pipeline = StableDiffusionXLPipeline.from_pretrained(repo(SDXL), unet=unet, dtype=torch.float32).to("cpu")
    assert pipeline.unet is unet
    assert same(draw(pipeline, SDXL), expected(SDXL))


def test_row_01_one_file_is_what_5_gb_give(tmp_path) -> None:
    AutoModel.from_pretrained(repo(SDXL), subfolder="unet").save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["diffusion_pytorch_model.safetensors"]


def test_row_07_slice_a_batch() -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(repo(SD), dtype=torch.float32).to("cpu")
    pipeline.set_progress_bar_config(disable=True)
    prompt = [PROMPT] * 32
    latents = torch.randn(32, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    options = {"num_inference_steps": 1, "output_type": "pt", "latents": latents}
    whole = pipeline(prompt, **options).images

    pipeline.vae.enable_slicing()
    seen: list[int] = []
    handle = pipeline.vae.decoder.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    images = pipeline(prompt, **options).images
    handle.remove()
    assert seen == [1] * 32 and same(images, whole)
    pipeline.vae.disable_slicing()


def test_row_08_tile_an_image() -> None:
    pipeline = AutoPipelineForImage2Image.from_pretrained(repo(SDXL), dtype=torch.float32).to("cpu")
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_tiling()

    init_image = load_image(picture(64))
    seen: list[int] = []
    handle = pipeline.vae.decoder.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-1]))
    options = {"image": init_image, "strength": 0.5, "num_inference_steps": 2}
    image = pipeline(PROMPT, **options).images[0]
    assert image.size == (64, 64) and len(seen) > 1
    # Off below a size that can be set.
    seen.clear()
    pipeline.vae.tile_sample_min_size = 64
    pipeline(PROMPT, **options)
    assert seen == [16]
    handle.remove()


def test_row_16_layerwise_casting() -> None:
    transformer = AutoModel.from_pretrained(repo(COGVIDEOX), subfolder="transformer", dtype=torch.bfloat16)
    before = transformer.get_memory_footprint()
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    pipeline = DiffusionPipeline.from_pretrained(repo(COGVIDEOX), transformer=transformer, dtype=torch.bfloat16)

    assert transformer.dtype == torch.bfloat16
    assert transformer.get_memory_footprint() < 0.7 * before
    frames = draw(pipeline, COGVIDEOX)
    assert frames.isfinite().all() and float((frames - expected(COGVIDEOX)).abs().mean()) < 0.2
    # Norms stay as they are, and group offload goes on top.
    assert {block.norm1.norm.weight.dtype for block in transformer.transformer_blocks} == {torch.bfloat16}
    transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert torch.equal(draw(pipeline, COGVIDEOX), frames)


@pytest.mark.parametrize("classes", [["norm"], (torch.nn.LayerNorm,), ["LayerNorm"]])
def test_row_17_finer_casting(classes) -> None:
    transformer = AutoModel.from_pretrained(repo(COGVIDEOX), subfolder="transformer", dtype=torch.bfloat16)
    apply_layerwise_casting(
        transformer,
        storage_dtype=torch.float8_e4m3fn,
        compute_dtype=torch.bfloat16,
        skip_modules_classes=classes,
        non_blocking=True,
    )
    apply_group_offloading(transformer, "cpu", offload_type="leaf_level")
    pipeline = DiffusionPipeline.from_pretrained(repo(COGVIDEOX), transformer=transformer, dtype=torch.bfloat16)
    assert draw(pipeline, COGVIDEOX).isfinite().all()
    assert transformer.transformer_blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


def test_row_17_by_pattern() -> None:
    transformer = AutoModel.from_pretrained(repo(FLUX), subfolder="transformer")
    size = transformer.get_memory_footprint()
    apply_layerwise_casting(
        transformer, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=["transformer_blocks"]
    )
    some = transformer.get_memory_footprint()
    apply_layerwise_casting(transformer, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=None)
    assert transformer.get_memory_footprint() < some < size


def test_row_18_channels_last() -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(repo(SD), dtype=torch.float32)
    assert pipeline.unet.conv_out.weight.stride() == (288, 9, 3, 1)
    pipeline.unet.to(memory_format=torch.channels_last)
    assert pipeline.unet.conv_out.weight.stride() == (288, 1, 96, 32)
    assert same(draw(pipeline, SD), expected(SD))


def test_row_19_attention_backends() -> None:
    pipeline = DiffusionPipeline.from_pretrained(repo(FLUX), dtype=torch.float32)
    # The packages and the device of these are not here, which is said when they are set.
    for name in ("flash", "_flash_3", "sage", "xformers", "flash_varlen"):
        with pytest.raises((ValueError, ImportError, DiffusionCoreError), match=name.strip("_").split("_")[0]):
            pipeline.transformer.set_attention_backend(name)
    for name in ("native", "_native_math", "flex"):
        pipeline.transformer.set_attention_backend(name)
        assert same(draw(pipeline, FLUX), expected(FLUX))
    pipeline.transformer.reset_attention_backend()
    assert same(draw(pipeline, FLUX), expected(FLUX))
