"""`describe`: what a checkpoint holds, without loading it."""

from pathlib import Path

import diffusers
import pytest

from diffusion_core.errors import ConfigError, CorruptFileError, MissingFileError
from diffusion_core.pipelines.description import describe

from . import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that the reference saved, the UNet in shards and in a second variant."""
    made = tmp_path_factory.mktemp("described")
    pipe = diffusers.StableDiffusionPipeline(**tiny.components(diffusers, made), requires_safety_checker=False)
    pipe.save_pretrained(made)
    pipe.unet.save_pretrained(made / "unet", max_shard_size="300KB")
    pipe.unet.half().save_pretrained(made / "unet", variant="fp16")
    (made / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    return made


def test_parameters_dtypes_and_sizes_agree_with_the_models(folder: Path) -> None:
    parts = tiny.components(diffusers, folder / "again")
    info = describe(folder)
    assert info.class_name == "StableDiffusionPipeline"
    assert info.settings == {"requires_safety_checker": False}
    found = {each.name: each for each in info.components}
    for name in ("unet", "vae", "text_encoder"):
        count = sum(parameter.numel() for parameter in parts[name].parameters())
        assert found[name].parameters == count
        assert found[name].dtypes == {"float32": count}
        assert 4 * count < found[name].weight_bytes < 4 * count + 200_000
        assert found[name].other_bytes > 0
    assert found["unet"].variants == (None, "fp16")
    assert found["safety_checker"].class_name is None
    assert found["tokenizer"].parameters == 0
    assert info.parameters == sum(found[name].parameters or 0 for name in found)


def test_a_variant(folder: Path) -> None:
    found = {each.name: each for each in describe(folder, variant="fp16").components}
    assert list(found["unet"].dtypes) == ["float16"]
    assert list(found["vae"].dtypes) == ["float32"]


def test_the_table(folder: Path) -> None:
    lines = str(describe(folder)).splitlines()
    assert lines[0] == f"StableDiffusionPipeline in {folder}"
    assert lines[1].split() == ["component", "class", "parameters", "dtype", "weights"]
    assert any(line.startswith("unet ") and "UNet2DConditionModel" in line and "float32" in line for line in lines)
    assert any(line.split() == ["safety_checker", "absent"] for line in lines)
    assert lines[-1].startswith("total")


def test_one_model(folder: Path) -> None:
    (unet,) = describe(folder / "unet").components
    assert (unet.library, unet.class_name) == ("diffusers", "UNet2DConditionModel")
    (encoder,) = describe(folder / "text_encoder").components
    assert (encoder.library, encoder.class_name) == ("transformers", "CLIPTextModel")


def test_pickles_are_not_opened(folder: Path, tmp_path: Path) -> None:
    tiny.unet(diffusers).save_pretrained(tmp_path, safe_serialization=False)
    (unet,) = describe(tmp_path).components
    assert unet.parameters is None
    assert unet.weight_bytes > 0
    assert "unknown" in str(describe(tmp_path))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no checkpoint"):
        describe(tmp_path)
    with pytest.raises(MissingFileError, match="no folder"):
        describe(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no class"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    (tmp_path / "diffusion_pytorch_model.safetensors").write_text("<html>")
    with pytest.raises(CorruptFileError, match="safetensors"):
        describe(tmp_path)
