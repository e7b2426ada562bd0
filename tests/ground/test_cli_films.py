"""The command line with a model that makes films: what is written is read back, and options that do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import diffusion_core
from diffusion_core import load_video
from diffusion_core.cli import main
from tests.pipelines import cogvideo, tiny

COMMON = ("--steps", 2, "--seed", 5, "-q")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("film-model")
    diffusion_core.CogVideoXPipeline(**cogvideo.parts(diffusion_core)).save_pretrained(folder)
    return folder


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `diffusion-core generate "a red cat" ARGS`: exit status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["diffusion-core", "generate", "a red cat", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize("ending", [".mp4", ".gif"])
def test_a_written_film_is_read_back(generate: Any, checkpoint: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / "new" / f"film{ending}"
    options = ("--num-frames", 17, "--fps", 12.5, "--width", 48)
    status, text, err = generate("--model", checkpoint, *COMMON, *options, "-o", out)
    assert status == 0, err
    assert str(out) in text and "17 frames, 12.5 a second, seed 5" in text
    frames, fps = load_video(out, return_fps=True)
    assert len(frames) == 17
    assert {frame.size for frame in frames} == {(48, 32)}
    assert fps == pytest.approx(12.5, rel=1e-3)
    assert [path.name for path in out.parent.iterdir()] == [f"film{ending}"], "nothing else is left behind"


def test_what_is_left_out_is_the_models_own(
    generate: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text, err = generate("--model", checkpoint, *COMMON, "--upscale", 2, "--tiling")
    assert status == 0, err
    assert "film.mp4 (9 frames, 8 a second" in text
    frames, fps = load_video("film.mp4", return_fps=True)
    assert (len(frames), frames[0].size, fps) == (9, (64, 64), 8)


def test_several_films_are_numbered_and_each_is_that_of_its_seed(
    generate: Any, checkpoint: Path, tmp_path: Path
) -> None:
    common = ("--model", checkpoint, "--steps", 2, "-q", "--negative-prompt", "ugly")
    assert generate(*common, "--seed", 3, "--num-images", 2, "-o", tmp_path / "film.gif")[0] == 0
    assert generate(*common, "--seed", 4, "-o", tmp_path / "alone.gif")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.gif", "film-1.gif", "film-2.gif"]
    among, alone = (
        np.stack([np.asarray(frame).astype(int) for frame in load_video(tmp_path / name)])
        for name in ("film-2.gif", "alone.gif")
    )
    assert np.abs(among - alone).mean() < 1


def test_a_film_starts_from_a_film_and_keeps_its_rate(generate: Any, checkpoint: Path, tmp_path: Path) -> None:
    source = [Image.new("RGB", (32, 32), (20 * index, 0, 0)) for index in range(9)]
    diffusion_core.export_to_video(source, tmp_path / "source.mp4", fps=15)
    out = tmp_path / "again.mp4"
    options = ("--video", tmp_path / "source.mp4", "--strength", 0.5)
    status, _, err = generate("--model", checkpoint, *COMMON, *options, "-o", out)
    assert status == 0, err
    frames, fps = load_video(out, return_fps=True)
    assert (len(frames), fps) == (9, 15)


def test_a_film_starts_from_a_picture(generate: Any, tmp_path: Path) -> None:
    parts = cogvideo.image_15_parts(diffusion_core)
    diffusion_core.CogVideoXImageToVideoPipeline(**parts).save_pretrained(tmp_path / "model")
    Image.new("RGB", (40, 40), "orange").save(tmp_path / "start.png")
    out = tmp_path / "film.mp4"
    options = ("--image", tmp_path / "start.png", "--num-frames", 8)
    status, text, err = generate("--model", tmp_path / "model", *COMMON, *options, "-o", out)
    assert status == 0, err
    assert "8 frames, 16 a second" in text
    assert len(load_video(out)) == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-o", "film.png"), "makes films, which are written as .mp4"),
        (("-o", "film.xyz"), "a .mp4 or .gif file for a film"),
        (("--fps", "0"), "--fps 0: a film has more than 0 frames"),
        (("--fps", "200", "-o", "film.gif"), "100 at most in a .gif"),
        (("--num-frames", "0"), "num-frames"),
        (("--image", "no-such-file.png"), "no-such-file.png"),
        (("--video", "no-such-film.mp4"), "no-such-film.mp4"),
        (("--video", "a.mp4", "--image", "b.png"), "exclude each other"),
        (("--video", "a.mp4", "--num-frames", "9"), "--num-frames: the film from --video"),
        (("--image", "a.png", "--mask", "b.png"), "--mask"),
        (("--image", "a.png", "--strength", "0.5"), "--strength needs --video"),
        (("--strength", "0.5"), "--strength needs"),
        (("--width", "36"), "width=36 must be a positive multiple of 8"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    generate: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = generate("--model", checkpoint, *COMMON, *arguments)
    assert status != 0
    assert says in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--num-frames", "--fps", "--video"])
def test_models_of_pictures_take_no_options_of_films(generate: Any, tmp_path: Path, option: str) -> None:
    parts = tiny.components(diffusion_core, tmp_path)
    pipeline = diffusion_core.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.save_pretrained(tmp_path / "model")
    status, _, err = generate("--model", tmp_path / "model", *COMMON, option, 9, "-o", tmp_path / "never.png")
    assert status != 0
    assert f"{option}: " in err and "draws pictures, not films" in err
    status, _, err = generate("--model", tmp_path / "model", *COMMON, "-o", tmp_path / "never.mp4")
    assert status != 0 and "draws pictures, which are written as .png" in err
