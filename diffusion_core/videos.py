"""Films on their way in and out: frames as PIL images, arrays or tensors; files as .mp4, .gif and what ffmpeg knows.

    list of PIL images   one film
    numpy array          (F, H, W, C) one film, (N, F, H, W, C) several; floats from 0 to 1, or uint8
    tensor               (F, C, H, W) one film, (N, F, C, H, W) several; the same ranges
    for a model          tensor (N, C, F, H, W), floats from -1 to 1

`imageio` and its ffmpeg are imported only where a film is written or read.
"""

import importlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diffusion_core.images import VaeImageProcessor, check_output_type, download, numpy_to_pil
from diffusion_core.logging import get_logger

if TYPE_CHECKING:
    from PIL.Image import Image

logger = get_logger(__name__)


class VideoProcessor(VaeImageProcessor):
    """Brings films to an autoencoder's range and sizes, and back. Its settings are `VaeImageProcessor`'s."""

    def preprocess_video(
        self, video: Any, height: int | None = None, width: int | None = None, **options: Any
    ) -> torch.Tensor:
        """Bring one film or several to a tensor (N, C, F, height, width).

        Args:
            video: a list of PIL images, an array (F, H, W, C) or a tensor (F, C, H, W), or a list of such films, or an
                array or tensor with a first axis for the films. Values as for `preprocess`.
            height: in pixels, the first frame's by default; rounded down to a multiple of `vae_scale_factor`.
            width: likewise.
            options: as for `preprocess`.

        Raises:
            TypeError: if `video` holds anything else.
            ValueError: if films differ in their number of frames or size, or there are none.
        """
        films = [self.preprocess(frames, height, width, **options) for frames in _as_films(video)]
        shapes = {tuple(film.shape) for film in films}
        if len(shapes) > 1:
            raise ValueError(f"video holds films of different shapes {sorted(shapes)}: make them one first")
        return torch.stack(films).transpose(1, 2)

    def postprocess_video(self, video: torch.Tensor, output_type: str | None = "np", **options: Any) -> Any:
        """Bring an autoencoder's output to what was asked for.

        Args:
            video: (N, C, F, H, W) with values from -1 to 1.
            output_type: "pil" for N lists of PIL images, "np" for an array (N, F, H, W, C), "pt" for a tensor
                (N, F, C, H, W), both from 0 to 1; "latent" returns `video` as it is.
            options: as for `postprocess`.

        Raises:
            ValueError: if `output_type` is unknown, or `video` has another number of axes.
            NumericalError: if values are not finite.
        """
        check_output_type(output_type)
        if output_type == "latent":
            return video
        if not isinstance(video, torch.Tensor) or video.ndim != 5:
            raise ValueError("video must be a tensor of shape (N, C, F, H, W)")
        films = [self.postprocess(film.transpose(0, 1), output_type, **options) for film in video]
        if output_type == "np":
            return np.stack(films)
        return torch.stack(films) if output_type == "pt" else films


def export_to_video(
    video_frames: Any,
    output_video_path: "str | os.PathLike[str] | None" = None,
    fps: float = 10,
    quality: float | None = 5.0,
    bitrate: int | None = None,
    macro_block_size: int | None = None,
) -> str:
    """Write one film as a video file, which is complete or absent.

    Args:
        video_frames: the frames of one film, see the top of this file.
        output_video_path: its ending says the format: .mp4, .mov, .mkv, .webm, or .gif; a temporary .mp4 if None.
        fps: frames a second, more than 0.
        quality: from 0 to 10, of a variable bitrate.
        bitrate: bits a second, in place of `quality`.
        macro_block_size: if given, frames are stretched to multiples of this. By default they keep their size; where
            that is odd, colours are kept at full resolution (4:4:4), as the usual format needs even sizes.

    Returns:
        The path of the file.

    Raises:
        TypeError: if the frames are none of the known kinds.
        ValueError: if there are no frames, they differ in size, or `fps`, `quality` or the file's ending make no sense.
    """
    frames = _bytes_of(video_frames, "video_frames")
    _check_rate(fps)
    if quality is not None and not 0 <= quality <= 10:
        raise ValueError(f"quality={quality} must lie between 0 and 10")
    path = Path(output_video_path if output_video_path is not None else _temporary(".mp4"))
    if path.suffix.lower() == ".gif":
        return export_to_gif(numpy_to_pil(frames), path, fps)
    if path.suffix.lower() not in (".mp4", ".mov", ".mkv", ".webm", ".avi"):
        raise ValueError(f"output_video_path={str(path)!r} has no known ending: use .mp4, .mov, .mkv, .webm or .gif")
    imageio: Any = importlib.import_module("imageio.v2")
    odd = macro_block_size is None and (frames.shape[1] % 2 or frames.shape[2] % 2)
    settings: dict[str, Any] = {"fps": fps, "macro_block_size": macro_block_size or 1}
    settings |= {"quality": quality} if bitrate is None else {"bitrate": bitrate}
    if odd:
        settings["pixelformat"] = "yuv444p"
        logger.info("frames of %dx%d pixels are odd: written as 4:4:4", frames.shape[2], frames.shape[1])
    with _beside(path) as part, imageio.get_writer(part, format="FFMPEG", **settings) as writer:
        for frame in frames:
            writer.append_data(frame)
    return str(path)


def export_to_gif(image: Any, output_gif_path: "str | os.PathLike[str] | None" = None, fps: float = 10) -> str:
    """Write one film as an endless GIF, which is complete or absent.

    Args:
        image: the frames of one film, see the top of this file.
        output_gif_path: where to; a temporary file if None.
        fps: frames a second, more than 0 and 100 at most. The format counts in hundredths of a second: frames get one
            more or less, so that the film lasts as long as it should. Equal frames in a row become one that lasts
            longer.

    Returns:
        The path of the file.

    Raises:
        TypeError: if the frames are none of the known kinds.
        ValueError: if there are no frames, they differ in size, or `fps` is out of its range.
    """
    frames = numpy_to_pil(_bytes_of(image, "image"))
    _check_rate(fps)
    if fps > 100:
        raise ValueError(f"fps={fps} is more than 100, the most that a GIF can say: write an .mp4")
    path = Path(output_gif_path if output_gif_path is not None else _temporary(".gif"))
    ends = [round(100 * (index + 1) / fps) for index in range(len(frames))]
    lasting = [10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    with _beside(path) as part:
        frames[0].save(part, save_all=True, append_images=frames[1:], duration=lasting, loop=0, optimize=False)
    return str(path)


def load_video(
    video: "str | os.PathLike[str]",
    convert_method: "Callable[[list[Image]], list[Image]] | None" = None,
    return_fps: bool = False,
) -> "list[Image] | tuple[list[Image], float]":
    """Read the frames of a film as RGB.

    Args:
        video: a path or an http(s) address of a .gif or of what ffmpeg can read.
        convert_method: what to apply to the list of frames.
        return_fps: return the frames a second as well.

    Returns:
        The frames, or (frames, frames a second).

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no film.
    """
    if not isinstance(video, str | os.PathLike):
        raise TypeError(f"video must be a path or an http(s) address, not {type(video).__name__}")
    name = os.fspath(video)
    address = name.startswith(("http://", "https://"))
    if not address and not Path(name).exists():
        raise FileNotFoundError(f"video={name!r} does not exist")
    ending = Path(name.split("?")[0] if address else name).suffix.lower()
    with _local(name, ending) as path:
        frames, fps = _read_gif(path) if ending == ".gif" else _read_film(path, name)
    if convert_method is not None:
        frames = convert_method(frames)
    return (frames, fps) if return_fps else frames


def _read_gif(path: str) -> "tuple[list[Image], float]":
    import PIL.Image
    import PIL.ImageSequence

    try:
        with PIL.Image.open(path) as opened:
            frames, lasting = [], 0.0
            for frame in PIL.ImageSequence.Iterator(opened):
                frames.append(frame.convert("RGB"))
                lasting += frame.info.get("duration", 100)
    except PIL.UnidentifiedImageError:
        raise ValueError(f"video={path!r} is not a GIF that PIL can read") from None
    return frames, 1000 * len(frames) / (lasting or 100 * len(frames))


def _read_film(path: str, name: str) -> "tuple[list[Image], float]":
    import PIL.Image

    imageio: Any = importlib.import_module("imageio.v2")
    try:
        with imageio.get_reader(path, format="FFMPEG") as reader:
            fps = float(reader.get_meta_data()["fps"])
            frames = [PIL.Image.fromarray(np.asarray(frame)) for frame in reader.iter_data()]
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"video={name!r} is not a film that ffmpeg can read: {error}") from None
    if not frames:
        raise ValueError(f"video={name!r} has no frames")
    return frames, fps


@contextmanager
def _local(name: str, ending: str) -> Iterator[str]:
    """The path of a file, downloaded if the name is an address."""
    if not name.startswith(("http://", "https://")):
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video{ending or '.mp4'}"
        path.write_bytes(download(name).read())
        yield str(path)


@contextmanager
def _beside(path: Path) -> Iterator[str]:
    """A name for a file that takes the place of `path` when the block ends without an error."""
    if not path.parent.is_dir():
        raise ValueError(f"the folder of {str(path)!r} does not exist: make it first")
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield str(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _temporary(suffix: str) -> str:
    handle, name = tempfile.mkstemp(suffix=suffix)
    os.close(handle)
    return name


def _check_rate(fps: float) -> None:
    if not isinstance(fps, int | float) or not math.isfinite(fps) or fps <= 0:
        raise ValueError(f"fps={fps!r} must be a number above 0")


def _bytes_of(frames: Any, name: str) -> "np.ndarray[Any, Any]":
    """The frames of one film as bytes (F, H, W, 3)."""
    films = _as_films(frames, name)
    if len(films) != 1:
        raise ValueError(f"{name} holds {len(films)} films: pass one of them, such as {name}[0]")
    pixels = VaeImageProcessor(
        do_resize=False, do_convert_rgb=True, do_normalize=False, vae_latent_channels=0
    ).preprocess(films[0])
    if not torch.isfinite(pixels).all():
        raise ValueError(f"{name} holds values that are not finite (NaN or infinity)")
    low, high = (float(bound) for bound in pixels.aminmax())
    if low < -0.01 or high > 1.01:
        raise ValueError(f"{name} has values from {low:g} to {high:g}: floats must run from 0 to 1, bytes be uint8")
    if pixels.shape[1] not in (1, 3, 4):
        raise ValueError(f"{name} has frames of {pixels.shape[1]} channels: 1, 3 or 4 can be written")
    pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels[:, :3]
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def _as_films(video: Any, name: str = "video") -> list[Any]:
    """The films of an argument, each a list of PIL images, an array (F, H, W, C) or a tensor (F, C, H, W)."""
    if isinstance(video, np.ndarray | torch.Tensor):
        if video.ndim not in (4, 5):
            raise ValueError(f"{name} has {video.ndim} axes: 4 are one film, 5 several")
        return [video] if video.ndim == 4 else list(video)
    if not isinstance(video, Sequence) or isinstance(video, str | bytes):
        raise TypeError(f"{name} must be frames as PIL images, arrays or tensors, not {type(video).__name__}")
    if not video:
        raise ValueError(f"{name} has no frames")
    first = video[0]
    if isinstance(first, list | tuple) or getattr(first, "ndim", 0) == 4:
        return [film for part in video for film in _as_films(part, name)]
    if isinstance(first, np.ndarray | torch.Tensor) and first.ndim == 5:
        return [film for part in video for film in part]
    if isinstance(first, np.ndarray):
        return [np.stack([frame[..., None] if frame.ndim == 2 else frame for frame in video])]
    return [torch.stack(list(video))] if isinstance(first, torch.Tensor) else [list(video)]
