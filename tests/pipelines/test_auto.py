"""Pipelines chosen by task."""

from pathlib import Path

import diffusers
import pytest

import diffusion_core
from diffusion_core import AutoPipelineForImage2Image, AutoPipelineForInpainting, AutoPipelineForText2Image, Pipeline
from diffusion_core.errors import ConfigError
from diffusion_core.pipelines.auto import FAMILIES, Family

from . import tiny

TASKS = [
    (AutoPipelineForText2Image, "StableDiffusionPipeline"),
    (AutoPipelineForImage2Image, "StableDiffusionImg2ImgPipeline"),
    (AutoPipelineForInpainting, "StableDiffusionInpaintPipeline"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saved")
    parts = tiny.components(diffusion_core, made)
    diffusion_core.StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(made)
    return made


@pytest.mark.parametrize(("auto", "name"), TASKS)
def test_the_task_decides_the_class(folder: Path, auto, name: str) -> None:
    pipe = auto.from_pretrained(folder, torch_dtype="bfloat16")
    assert type(pipe).__name__ == name == type(_reference(auto).from_pretrained(folder)).__name__
    assert str(pipe.dtype) == "torch.bfloat16"


@pytest.mark.parametrize(("auto", "name"), TASKS)
def test_from_pipe_shares_components(folder: Path, auto, name: str) -> None:
    for source, _ in TASKS:
        pipe = source.from_pretrained(folder, dtype="bfloat16")
        made = auto.from_pipe(pipe, requires_safety_checker=False)
        assert type(made).__name__ == name
        assert made.components == pipe.components
        assert str(made.dtype) == "torch.bfloat16"


def _reference(auto):
    return getattr(diffusers, auto.__name__)


def test_every_name_in_the_table_is_a_pipeline() -> None:
    for family in FAMILIES:
        for name in filter(None, family[1:]):
            assert issubclass(getattr(diffusion_core, name), Pipeline)


class Odd(Pipeline):
    pass


def test_what_is_not_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"knows no family with a Odd; it knows .*stable-diffusion"):
        AutoPipelineForText2Image.from_pipe(Odd())
    (tmp_path / "model_index.json").write_text('{"_class_name": "OddPipeline"}')
    with pytest.raises(ConfigError, match="no family with a OddPipeline"):
        AutoPipelineForInpainting.from_pretrained(tmp_path)
    monkeypatch.setattr("diffusion_core.pipelines.auto.FAMILIES", [*FAMILIES, Family("odd", text_to_image="Odd")])
    with pytest.raises(ConfigError, match=r"odd has no pipeline for inpainting; .*stable-diffusion"):
        AutoPipelineForInpainting.from_pipe(Odd())


@pytest.mark.parametrize(("auto", "name"), TASKS)
def test_the_chooser_itself_is_no_pipeline(auto, name: str) -> None:
    with pytest.raises(TypeError, match=r"call .*from_pretrained"):
        auto()
