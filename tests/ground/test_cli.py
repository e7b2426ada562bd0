"""The command line, on a tiny pipeline: pictures, what is written into them, and errors without tracebacks."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import diffusion_core
from diffusion_core.cli import SCHEDULERS, main
from tests.pipelines import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    parts = tiny.components(diffusion_core, folder)
    pipeline = diffusion_core.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `diffusion-core ARGS` and returns exit status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["diffusion-core", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


def test_generate_writes_a_picture_and_what_made_it(command, checkpoint: Path, tmp_path: Path):
    out = tmp_path / "new" / "cat.png"
    settings = ("--steps", 2, "--seed", 5, "--guidance-scale", 3, "--negative-prompt", "red", "-q")
    status, text, _ = command("generate", "a cat", "--model", checkpoint, "-o", out, *settings)
    assert status == 0
    assert str(out) in text and "seed 5" in text
    picture = Image.open(out)
    assert picture.size == (tiny.SIDE, tiny.SIDE)
    record = json.loads(picture.text["parameters"])
    assert record["prompt"] == "a cat" and record["seed"] == 5 and record["negative_prompt"] == "red"
    assert record["num_inference_steps"] == 2 and record["scheduler"] == "DDIMScheduler"
    assert [path.name for path in out.parent.iterdir()] == ["cat.png"], "nothing else is left behind"


def test_same_seed_same_picture_alone_or_in_a_grid(command, checkpoint: Path, tmp_path: Path):
    common = ("--model", checkpoint, "--steps", 2, "-q")
    assert command("generate", "cat", *common, "--seed", 4, "-o", tmp_path / "one.png")[0] == 0
    status, text, _ = command("generate", "cat", *common, "--seed", 3, "--num-images", 3, "-o", tmp_path / "grid.png")
    assert status == 0 and "seeds 3 to 5" in text
    assert Image.open(tmp_path / "grid.png").size == (2 * tiny.SIDE, 2 * tiny.SIDE)
    alone, among = (np.asarray(Image.open(tmp_path / name)).astype(int) for name in ("one.png", "grid-2.png"))
    assert np.abs(alone - among).max() <= 1
    assert json.loads(Image.open(tmp_path / "grid-2.png").text["parameters"])["seed"] == 4


@pytest.mark.parametrize("name", [*SCHEDULERS, "EulerDiscreteScheduler"])
def test_every_scheduler_name_is_known(name: str):
    assert SCHEDULERS.get(name, name) in diffusion_core.__all__


def test_scheduler_size_upscale_and_format(command, checkpoint: Path, tmp_path: Path):
    out = tmp_path / "wide.jpg"
    arguments = ("--scheduler", "euler", "--steps", 2, "--width", 48, "--height", 24, "--upscale", 2, "-q")
    status, _, err = command("generate", "cat", "--model", checkpoint, "-o", out, *arguments)
    assert status == 0, err
    assert Image.open(out).size == (96, 48)


def test_image_to_image_and_inpainting(command, checkpoint: Path, tmp_path: Path):
    start = Image.new("RGB", (tiny.SIDE, tiny.SIDE), "orange")
    start.save(tmp_path / "start.png")
    mask = np.zeros((tiny.SIDE, tiny.SIDE), np.uint8)
    mask[:, tiny.SIDE // 2 :] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    common = ("--model", checkpoint, "--image", tmp_path / "start.png", "--steps", 4, "--seed", 1, "-q")
    assert command("generate", "cat", *common, "--strength", 0.5, "-o", tmp_path / "near.png")[0] == 0
    assert command("generate", "cat", *common, "--mask", tmp_path / "mask.png", "-o", tmp_path / "part.png")[0] == 0
    near, part = (np.asarray(Image.open(tmp_path / name)) for name in ("near.png", "part.png"))
    assert near.shape == part.shape == (tiny.SIDE, tiny.SIDE, 3)
    assert not np.array_equal(near, part)


def test_convert_changes_dtype_shards_and_variant(command, checkpoint: Path, tmp_path: Path):
    out = tmp_path / "half"
    arguments = ("--dtype", "float16", "--variant", "fp16", "--max-shard-size", "300KB", "-q")
    status, text, err = command("convert", checkpoint, out, *arguments)
    assert status == 0, err
    assert "float16" in text
    assert len(list((out / "unet").glob("*.fp16-*.safetensors"))) > 1
    loaded = diffusion_core.Pipeline.from_pretrained(out, variant="fp16", dtype="auto")
    assert str(loaded.unet.dtype) == "torch.float16"


def test_info_reads_headers_alone(command, checkpoint: Path):
    status, text, _ = command("info", checkpoint)
    assert status == 0
    loaded = diffusion_core.Pipeline.from_pretrained(checkpoint)
    for name in ("unet", "vae"):
        assert f"{sum(p.numel() for p in getattr(loaded, name).parameters()):,}" in text
    assert "UNet2DConditionModel" in text and "float32" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "cat", "--mask", "m.png"), "--image"),
        (("generate", "cat", "--strength", "0.5"), "--image"),
        (("generate", "cat", "-o", "picture.xyz"), ".png"),
        (("generate", "cat", "--image", "no-such-file.png"), "no-such-file.png"),
        (("generate", "cat", "--model", "no-such-folder/at/all"), "no-such-folder"),
        (("info", "no-such-folder/at/all"), "no-such-folder"),
        (("generate", "cat", "--scheduler", "eulr"), "euler"),
        (("generate", "cat", "--width", "13"), "width"),
        (("generate", "cat", "--dtype", "float17"), "float17"),
    ],
)
def test_errors_are_one_line_that_names_the_argument(command, checkpoint: Path, arguments, says: str, tmp_path: Path):
    if "--model" not in arguments and arguments[0] == "generate":
        arguments = (*arguments, "--model", checkpoint, "--steps", 1, "-q")
    if "-o" not in arguments and arguments[0] == "generate":
        arguments = (*arguments, "-o", tmp_path / "never.png")
    status, _, err = command(*arguments)
    assert status != 0
    assert says in err and "Traceback" not in err
    assert not (tmp_path / "never.png").exists()


def test_help_teaches(command):
    status, text, _ = command("generate", "--help")
    assert status == 0
    for option in ("--seed", "--strength", "--negative-prompt", "--num-images", "Example"):
        assert option in text
