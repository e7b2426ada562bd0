"""Films in and out: written films are read back with their count, size and rate; the processor equals the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers.video_processor import VideoProcessor as Reference

from diffusion_core.errors import NumericalError
from diffusion_core.videos import VideoProcessor, export_to_gif, export_to_video, load_video


def film(count: int = 9, width: int = 64, height: int = 48) -> list[PIL.Image.Image]:
    """A white bar that moves over a plain colour, which codecs keep well."""
    frames = []
    for index in range(count):
        values = np.full((height, width, 3), (30, 90, 200), np.uint8)
        values[:, 4 * index : 4 * index + 8] = 255
        frames.append(PIL.Image.fromarray(values))
    return frames


def as_array(frames: list[PIL.Image.Image]) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(frame) for frame in frames])


@pytest.mark.parametrize(
    "kind", ["pil", "bytes", "floats", "array list", "tensor", "tensor list", "one film of several"]
)
def test_every_kind_of_frames_is_written_and_read_back(tmp_path: Path, kind: str) -> None:
    frames = film()
    values = as_array(frames)
    tensor = torch.from_numpy(values / 255.0).permute(0, 3, 1, 2)
    given = {
        "pil": frames,
        "bytes": values,
        "floats": values / 255.0,
        "array list": list(values / 255.0),
        "tensor": tensor,
        "tensor list": list(tensor),
        "one film of several": [frames],
    }[kind]
    path = export_to_video(given, tmp_path / "film.mp4", fps=12)
    found, fps = load_video(path, return_fps=True)
    assert (len(found), found[0].size, fps) == (9, (64, 48), 12)
    assert np.abs(as_array(found).astype(int) - values).mean() < 6
    assert sorted(each.name for each in tmp_path.iterdir()) == ["film.mp4"]


@pytest.mark.parametrize("size", [(64, 48), (50, 34), (33, 21)])
@pytest.mark.parametrize("count", [1, 2, 17])
@pytest.mark.parametrize("fps", [8, 23.976])
def test_count_size_and_rate_are_kept(tmp_path: Path, size: tuple[int, int], count: int, fps: float) -> None:
    found, rate = load_video(export_to_video(film(count, *size), tmp_path / "film.mp4", fps=fps), return_fps=True)
    assert (len(found), found[0].size) == (count, size)
    assert rate == pytest.approx(fps, abs=0.01)


def test_a_block_size_stretches_frames(tmp_path: Path) -> None:
    path = export_to_video(film(3, 50, 34), tmp_path / "film.mp4", macro_block_size=16)
    assert load_video(path)[0].size == (64, 48)


@pytest.mark.parametrize("fps", [7, 10, 24, 60])
def test_gif_keeps_frames_and_time(tmp_path: Path, fps: int) -> None:
    path = export_to_video(film(12), tmp_path / "film.gif", fps=fps)
    found, rate = load_video(path, return_fps=True)
    assert len(found) == 12 and found[0].size == (64, 48)
    assert 12 / rate == pytest.approx(12 / fps, abs=0.006)
    assert np.abs(as_array(found).astype(int) - as_array(film(12))).mean() < 3


def test_a_temporary_file_where_no_path_is_given() -> None:
    for path in (Path(export_to_video(film(2))), Path(export_to_gif(film(2)))):
        assert load_video(path)[0].size == (64, 48)
        path.unlink()


def test_frames_are_converted_on_request(tmp_path: Path) -> None:
    path = export_to_video(film(6), tmp_path / "film.mp4")
    assert len(load_video(path, convert_method=lambda frames: frames[::2])) == 3


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        ([], {}, ValueError, "no frames"),
        ("film", {}, TypeError, "video_frames"),
        (film(2) + film(2, 32, 32), {}, ValueError, "sizes"),
        ([film(2), film(2)], {}, ValueError, r"video_frames\[0\]"),
        (np.zeros((4, 4)), {}, ValueError, "axes"),
        (np.full((2, 8, 8, 3), 1.7), {}, ValueError, "0 to 1"),
        (torch.full((2, 3, 8, 8), float("nan")), {}, ValueError, "finite"),
        (torch.full((2, 5, 8, 8), 0.5), {}, ValueError, "channels"),
        (film(2), {"fps": 0}, ValueError, "fps"),
        (film(2), {"fps": float("nan")}, ValueError, "fps"),
        (film(2), {"quality": 11}, ValueError, "quality"),
    ],
)
def test_bad_films_are_refused(tmp_path: Path, given: Any, options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        export_to_video(given, tmp_path / "film.mp4", **options)
    assert not list(tmp_path.iterdir())


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ending"):
        export_to_video(film(2), tmp_path / "film.txt")
    with pytest.raises(ValueError, match="folder"):
        export_to_video(film(2), tmp_path / "absent" / "film.mp4")
    with pytest.raises(ValueError, match="100"):
        export_to_gif(film(2), tmp_path / "film.gif", fps=120)
    with pytest.raises(FileNotFoundError, match=r"absent\.mp4"):
        load_video(tmp_path / "absent.mp4")
    for ending in ("mp4", "gif"):
        text = tmp_path / f"text.{ending}"
        text.write_text("no film")
        with pytest.raises(ValueError, match="text"):
            load_video(text)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(export_to_video(film(2), tmp_path / "film.mp4"))
    before = path.read_bytes()
    monkeypatch.setattr("imageio.plugins.ffmpeg.FfmpegFormat.Writer._append_data", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_to_video(film(3), path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", ["pil", "pil films", "array", "array films", "tensor", "tensor films", "tensor list"])
def test_preprocess_equals_the_reference(kind: str) -> None:
    values = as_array(film(5)) / 255.0
    tensor = torch.from_numpy(values).permute(0, 3, 1, 2).float()
    given = {
        "pil": film(5),
        "pil films": [film(5), film(5)],
        "array": values,
        "array films": np.stack([values, values]),
        "tensor": tensor,
        "tensor films": torch.stack([tensor, tensor]),
        "tensor list": [tensor, tensor],
    }[kind]
    ours = VideoProcessor(vae_scale_factor=8).preprocess_video(given, height=32, width=40)
    theirs = Reference(vae_scale_factor=8).preprocess_video(given, height=32, width=40)
    assert ours.shape == theirs.shape
    assert torch.allclose(ours, theirs.to(ours.dtype), atol=1e-6)


@pytest.mark.parametrize("output_type", ["np", "pt", "pil"])
def test_postprocess_equals_the_reference(output_type: str) -> None:
    video = torch.rand(2, 3, 5, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    ours = VideoProcessor().postprocess_video(video, output_type)
    theirs = Reference().postprocess_video(video, output_type)
    if output_type == "pil":
        assert [as_array(each).tolist() for each in ours] == [as_array(each).tolist() for each in theirs]
    else:
        assert np.allclose(np.asarray(ours), np.asarray(theirs), atol=1e-6)
    assert VideoProcessor().postprocess_video(video, "latent") is video


def test_postprocess_refuses_what_makes_no_film() -> None:
    with pytest.raises(ValueError, match="shape"):
        VideoProcessor().postprocess_video(torch.zeros(3, 5, 8, 8))
    with pytest.raises(NumericalError):
        VideoProcessor().postprocess_video(torch.full((1, 3, 2, 8, 8), float("nan")))
    with pytest.raises(ValueError, match="different shapes"):
        VideoProcessor().preprocess_video([film(3), film(4)])
