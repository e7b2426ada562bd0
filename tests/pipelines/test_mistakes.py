"""What newcomers do wrong: each mistake is an early error that names the argument and the way out."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import diffusion_core
from diffusion_core import StableDiffusionPipeline
from diffusion_core.errors import MissingFileError

from . import sd, tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    parts = tiny.components(diffusion_core, folder / "parts")
    StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (["tokenizer"], "has no files for tokenizer"),
        (
            ["tokenizer/vocab.json", "tokenizer/merges.txt", "tokenizer/tokenizer.json"],
            "the tokenizer in .* lacks vocab",
        ),
        (["unet/*.safetensors"], r"no weights in .*unet: looked for diffusion_pytorch_model"),
        (["unet/config.json"], r"no file named config\.json in .*unet"),
        (["scheduler/*"], "has no files for scheduler"),
    ],
)
def test_a_folder_that_lacks_files(saved: Path, tmp_path: Path, lost: list[str], message: str) -> None:
    shutil.copytree(saved, tmp_path / "model")
    for path in [path for pattern in lost for path in (tmp_path / "model").glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(MissingFileError, match=message):
        StableDiffusionPipeline.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("source", [None, 3, ["a"]])
def test_a_source_that_is_no_name(source: Any) -> None:
    for load in (StableDiffusionPipeline.from_pretrained, diffusion_core.UNet2DConditionModel.from_pretrained):
        with pytest.raises(TypeError, match=r"pretrained_model_name_or_path must be a folder or a repo id, not"):
            load(source)


def test_a_single_file_is_no_repo(tmp_path: Path) -> None:
    """Without the check, `model.safetensors` would be looked for on the Hub."""
    with pytest.raises(MissingFileError, match=r"model\.safetensors reads like a file of weights.*from_single_file"):
        StableDiffusionPipeline.from_pretrained("model.safetensors")
    (tmp_path / "v1.ckpt").touch()
    with pytest.raises(MissingFileError, match=r"v1\.ckpt is a file of weights; name the folder"):
        StableDiffusionPipeline.from_pretrained(tmp_path / "v1.ckpt")


def test_a_component_of_another_kind(saved: Path) -> None:
    with pytest.raises(TypeError, match="vae: UNet2DConditionModel cannot take the place of AutoencoderKL"):
        StableDiffusionPipeline.from_pretrained(saved, vae=tiny.unet(diffusion_core))
    tiny_vae = diffusion_core.AutoencoderTiny()
    assert StableDiffusionPipeline.from_pretrained(saved, vae=tiny_vae).vae is tiny_vae


@pytest.mark.parametrize("scheduler", [None, "euler", diffusion_core.EulerDiscreteScheduler])
def test_a_scheduler_that_is_none(scheduler: Any) -> None:
    made = sd.pipe()
    made.scheduler = scheduler
    with pytest.raises(TypeError, match=r"the pipeline's scheduler is .*pipe\.scheduler = "):
        made("a cat", num_inference_steps=2)


@pytest.mark.parametrize("image", [torch.rand(32, 32, 3), torch.rand(3, 32, 32).numpy(), sd.image(3, 3)])
def test_pictures_with_axes_in_another_order_or_too_small(image: Any) -> None:
    made = sd.pipe("StableDiffusionImg2ImgPipeline")
    with pytest.raises(
        ValueError, match=r"image has height \d+ and width \d+, but 4 pixels are the least.*\(N, C, H, W\)"
    ):
        made("a cat", image=image, num_inference_steps=2)


@pytest.mark.parametrize("mode", ["1", "L", "RGBA", "P", "I;16"])
def test_pictures_of_every_mode_are_taken(mode: str) -> None:
    import PIL.Image

    image = PIL.Image.new("I;16", (32, 32)) if mode == "I;16" else sd.image(32, 32).convert(mode)
    made = sd.pipe("StableDiffusionImg2ImgPipeline")
    assert made("a cat", image=image, num_inference_steps=2).images[0].size == (32, 32)


def test_packages_are_reached_by_name() -> None:
    """As in `diffusers.utils.load_image`."""
    assert diffusion_core.utils.load_image is diffusion_core.load_image
    assert diffusion_core.schedulers.DDIMScheduler is diffusion_core.DDIMScheduler
    assert diffusion_core.models.AutoencoderKL is diffusion_core.AutoencoderKL
