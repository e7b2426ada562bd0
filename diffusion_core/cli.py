"""The command line, `diffusion-core`: draw pictures and films, look into checkpoints, convert them."""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from PIL.Image import Image

EMBEDDED = "shapes"
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
FILMS = (".mp4", ".gif", ".mov", ".mkv", ".webm")
# Short names that people know from other programs.
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "deis": "DEISMultistepScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "dpm++-sde": "DPMSolverSDEScheduler",
    "dpm++-single": "DPMSolverSinglestepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "kdpm2": "KDPM2DiscreteScheduler",
    "kdpm2-a": "KDPM2AncestralDiscreteScheduler",
    "lcm": "LCMScheduler",
    "lms": "LMSDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "tcd": "TCDScheduler",
    "unipc": "UniPCMultistepScheduler",
}

app = typer.Typer(
    name="diffusion-core",
    help="Diffusion models on the machine you have: a prompt and a checkpoint folder become a picture or a film.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Folder or Hub repository in the Hub layout; `shapes` is the embedded model."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="File to write; its ending says the format. `picture.png` by default, `film.mp4` for films.",
        show_default=False,
    ),
]
Side = Annotated[int | None, typer.Option(min=1, help="Pixels; the model's own size when left out.")]
Sampler = Annotated[
    str | None, typer.Option(help=f"Sampler: {', '.join(SCHEDULERS)}, or a class name.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show results and errors only.")]


@app.command(
    epilog='Example: `diffusion-core generate "a small red circle above a large blue square on a yellow background" '
    "--seed 7 --output picture.png`"
)
def generate(
    prompt: Annotated[str, typer.Argument(help="What the picture or film shows.")],
    model: Model = EMBEDDED,
    output: Output = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to keep out of the picture.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; more is slower and finer.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="How closely to follow the prompt; 1 switches guidance off.")
    ] = None,
    scheduler: Sampler = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same picture. Drawn at random and printed when left out.")
    ] = None,
    num_images: Annotated[
        int, typer.Option(min=1, help="How many, of seeds SEED, SEED+1, ...; several pictures also make a grid.")
    ] = 1,
    height: Side = None,
    width: Side = None,
    num_frames: Annotated[
        int | None, typer.Option(min=1, help="Films: how many frames; the model's own number when left out.")
    ] = None,
    fps: Annotated[
        float | None, typer.Option(help="Films: frames a second; the model's own rate when left out.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Start from this picture (file or address); a film's first frame.")
    ] = None,
    mask: Annotated[str | None, typer.Option(help="With --image: redraw only where this picture is white.")] = None,
    video: Annotated[str | None, typer.Option(help="Films: start from this film (file or address).")] = None,
    strength: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="With --image or --video: 0 keeps it, 1 forgets it.")
    ] = None,
    upscale: Annotated[int, typer.Option(min=1, max=16, help="Enlarge the file by whole pixels, unsmoothed.")] = 1,
    tiling: Annotated[
        bool, typer.Option("--tiling", help="Decode in tiles: much less memory for large sizes.")
    ] = False,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, ...")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="`float32`, `bfloat16`, `float16` or `auto` (as the files are).")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Weights of this variant, such as `fp16`.")] = None,
    quiet: Quiet = False,
) -> None:
    """Draw a picture or a film from a PROMPT, and write the run's settings into the PNG."""
    settings = _given(
        negative_prompt=negative_prompt,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        height=height,
        width=width,
        num_frames=num_frames,
        strength=strength,
    )
    sources = _given(image=image, mask_image=mask, video=video)
    core, films, output = _opened(model, output, settings, sources, fps, quiet)
    # Pictures are read before the model, so that a wrong path fails in no time.
    inputs, fps = _read(core, sources, fps)
    task = _task(films, sources)
    pipeline = _loaded(
        core, task, model, scheduler=scheduler, tiling=tiling, device=device, dtype=dtype, variant=variant
    )
    pipeline.set_progress_bar_config(disable=quiet)
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    settings = {**_defaults(model), **settings}
    called = {**inputs, **_repeat(settings, num_images), "output_type": "pil"}
    result = pipeline(prompt=[prompt] * num_images, generator=_generators(seed, num_images), **called)
    shown = f"seed {seed}" if num_images == 1 else f"seeds {seed} to {seed + num_images - 1}"
    if films:
        rate = float(pipeline.fps if fps is None else fps)
        written = _write_films(core, result.frames, output, upscale, rate)
        shown = f"{len(result.frames[0])} frames, {rate:g} a second, {shown}"
    else:
        record = {"prompt": prompt, **settings, "model": model, **_made_with(core, pipeline)}
        written = _write(result.images, output, upscale, seed, record)
    typer.echo(f"{', '.join(str(path) for path in written)} ({shown})")


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Folder or downloaded Hub repository.")] = EMBEDDED,
    variant: Annotated[str | None, typer.Option(help="Weights of this variant, such as `fp16`.")] = None,
) -> None:
    """Show the components of a MODEL: classes, parameters, dtypes and sizes, from the headers of its files alone."""
    core = _core(quiet=True)
    typer.echo(str(core.describe(_folder(model), variant=variant)))


@app.command(epilog="Example: `diffusion-core convert ./model ./model-fp16 --dtype float16 --variant fp16`")
def convert(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository to read.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; made if need be.")],
    dtype: Annotated[
        str, typer.Option(help="`float32`, `bfloat16`, `float16`, or `auto` to keep what it has.")
    ] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as `5GB` or `500MB`.")] = "5GB",
    variant: Annotated[str | None, typer.Option(help="Write weights under this variant, such as `fp16`.")] = None,
    from_variant: Annotated[str | None, typer.Option(help="Read weights of this variant.")] = None,
    quiet: Quiet = False,
) -> None:
    """Rewrite a MODEL in another dtype, with other shard sizes or as a variant."""
    core = _core(quiet)
    folder = _folder(model)
    if Path(folder).is_dir() and output.resolve() == Path(folder).resolve() and variant is None:
        _fail("OUTPUT is the folder of MODEL: write elsewhere, or beside it with --variant")
    found = core.describe(folder, variant=from_variant) if Path(folder).is_dir() else None
    single = found is not None and [component.name for component in found.components] == [""]
    loader = core.AutoModel if single else core.Pipeline
    loaded = loader.from_pretrained(folder, dtype=dtype, variant=from_variant)
    loaded.save_pretrained(output, max_shard_size=max_shard_size, variant=variant)
    typer.echo(str(core.describe(output, variant=variant)))


@app.command()
def version() -> None:
    """Print the versions that a report of a problem should name."""
    import torch

    from diffusion_core import __version__

    typer.echo(f"diffusion-core {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")


def main() -> None:
    """Run the command line; problems are one line on standard error, and exit status 1."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get("DIFFUSION_CORE_TRACEBACK"):
            raise
        _fail(f"{error}" if str(error) else type(error).__name__)


def _fail(message: str) -> NoReturn:
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)
    typer.echo("(DIFFUSION_CORE_TRACEBACK=1 shows where it came from)", err=True)
    raise SystemExit(1)


def _core(quiet: bool) -> Any:
    """The library, with nothing but results on the screen if `quiet`, and bars only where someone looks at them."""
    import diffusion_core
    from diffusion_core.logging import set_verbosity_error
    from diffusion_core.progress import disable_progress_bar

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if quiet:
        warnings.simplefilter("ignore")
        set_verbosity_error()
    if quiet or not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bar()
        disable_progress_bars()
    return diffusion_core


def _given(**options: Any) -> dict[str, Any]:
    """The options that were not left out."""
    return {name: value for name, value in options.items() if value is not None}


def _defaults(model: str) -> dict[str, Any]:
    """What the embedded model draws best with; other models have their pipelines' defaults."""
    if model != EMBEDDED:
        return {}
    from diffusion_core.shapes import GUIDANCE_SCALE, STEPS

    return {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE_SCALE}


def _loaded(
    core: Any,
    task: str,
    model: str,
    *,
    scheduler: str | None,
    tiling: bool,
    device: str,
    dtype: str | None,
    variant: str | None,
) -> Any:
    """The pipeline for a task, on its device."""
    device = _device(device)
    loader = getattr(core, f"AutoPipelineFor{task}")
    loaded = loader.from_pretrained(_folder(model), dtype=dtype or _default_dtype(device), variant=variant)
    pipeline = loaded.to(device)
    if scheduler:
        pipeline.scheduler = _scheduler(core, scheduler).from_config(pipeline.scheduler.config)
    if tiling:
        pipeline.enable_vae_tiling()
    return pipeline


def _made_with(core: Any, pipeline: Any) -> dict[str, str]:
    """What a picture's record says of the program."""
    return {
        "scheduler": type(pipeline.scheduler).__name__,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "diffusion_core": core.__version__,
    }


def _opened(
    model: str,
    output: Path | None,
    settings: dict[str, Any],
    sources: dict[str, str],
    fps: float | None,
    quiet: bool,
) -> tuple[Any, bool, Path]:
    """The library, whether the model makes films, and where to write; refuses options that do not go together."""
    if "mask_image" in sources and "image" not in sources:
        _fail("--mask needs --image: the mask says which part of that picture is redrawn")
    if "strength" in settings and not sources:
        _fail("--strength needs --image or --video: it says how far to leave that picture or film")
    if "video" in sources and len(sources) > 1:
        _fail("--video and --image exclude each other: a film starts from one of them")
    if "video" in sources and "num_frames" in settings:
        _fail("--num-frames: the film from --video has as many frames as that one")
    if output is not None and output.suffix.lower() not in PICTURES + FILMS:
        _fail(f"--output {output}: name a .png, .jpg or .webp file for a picture, a .mp4 or .gif file for a film")
    core = _core(quiet)
    makers = (core.AutoPipelineForText2Video, core.AutoPipelineForImage2Video, core.AutoPipelineForVideo2Video)
    films = any(maker.knows(_folder(model)) for maker in makers)
    output = output or Path("film.mp4" if films else "picture.png")
    if output.suffix.lower() not in (FILMS if films else PICTURES):
        kind, endings = ("makes films", FILMS) if films else ("draws pictures", PICTURES)
        _fail(f"--output {output}: {model} {kind}, which are written as {', '.join(endings)}")
    if films and "mask_image" in sources:
        _fail(f"--mask: {model} makes films, which start from no mask")
    if films and "strength" in settings and "video" not in sources:
        _fail("--strength needs --video: a film that starts with --image keeps it whole")
    options = {"--num-frames": settings.get("num_frames"), "--fps": fps, "--video": sources.get("video")}
    named = [name for name, value in options.items() if value is not None]
    if named and not films:
        _fail(f"{' and '.join(named)}: {model} draws pictures, not films")
    if fps is not None and not 0 < fps <= (100 if output.suffix.lower() == ".gif" else 1000):
        _fail(f"--fps {fps:g}: a film has more than 0 frames a second, and 100 at most in a .gif")
    return core, films, output


def _task(films: bool, sources: dict[str, str]) -> str:
    """The end of the name of the class that does what is asked for."""
    if films:
        return "Video2Video" if "video" in sources else "Image2Video" if "image" in sources else "Text2Video"
    return "Inpainting" if "mask_image" in sources else "Image2Image" if sources else "Text2Image"


def _read(core: Any, sources: dict[str, str], fps: float | None) -> tuple[dict[str, Any], float | None]:
    """The pictures and films to start from, and the rate of the new film: that of the old one unless said."""
    if "video" not in sources:
        return {name: core.load_image(source) for name, source in sources.items()}, fps
    frames, rate = core.load_video(sources["video"], return_fps=True)
    return {"video": frames}, rate if fps is None else fps


def _folder(model: str) -> str:
    """The folder of the embedded model, or what the user named."""
    from diffusion_core.shapes import shapes_folder

    return str(shapes_folder()) if model == EMBEDDED else model


def _device(device: str) -> str:
    import torch

    if device != "auto":
        return device
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return str(found or "cpu")


def _default_dtype(device: str) -> str:
    """Full precision on a CPU, where half precision is no faster in general; bfloat16 elsewhere."""
    return "float32" if device == "cpu" else "bfloat16"


def _scheduler(core: Any, name: str) -> Any:
    from difflib import get_close_matches

    known = SCHEDULERS.get(name.lower(), name)
    if known.endswith("Scheduler") and known in core.__all__:
        return getattr(core, known)
    close = get_close_matches(name.lower(), SCHEDULERS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    _fail(f"--scheduler {name}: {hint}known are {', '.join(SCHEDULERS)}")


def _generators(seed: int, count: int) -> list[Any]:
    """One generator a picture, on the CPU: the same picture on every device, alone or among others."""
    import torch

    return [torch.Generator().manual_seed(seed + index) for index in range(count)]


def _repeat(settings: dict[str, Any], count: int) -> dict[str, Any]:
    negative = settings.get("negative_prompt")
    return settings if negative is None else {**settings, "negative_prompt": [negative] * count}


def _write(images: "list[Image]", output: Path, upscale: int, seed: int, record: dict[str, Any]) -> list[Path]:
    """Write one picture to `output`; several to `output` as a grid, and each beside it with its number."""
    from diffusion_core.images import make_image_grid

    output.parent.mkdir(parents=True, exist_ok=True)
    large = [each.resize((each.width * upscale, each.height * upscale), resample=0) for each in images]
    if len(large) == 1:
        return [_save(large[0], output, {**record, "seed": seed})]
    columns = next(count for count in range(1, len(large) + 1) if count * count >= len(large))
    rows = -(-len(large) // columns)
    blank = large[0].copy()
    blank.paste("white", (0, 0, *blank.size))
    filled = [*large, *[blank] * (rows * columns - len(large))]
    written = [
        _save(make_image_grid(filled, rows, columns), output, {**record, "seed": seed, "num_images": len(large)})
    ]
    for index, each in enumerate(large):
        path = output.with_stem(f"{output.stem}-{index + 1}")
        written.append(_save(each, path, {**record, "seed": seed + index}))
    return written


def _write_films(core: Any, films: "list[list[Image]]", output: Path, upscale: int, fps: float) -> list[Path]:
    """Write one film to `output`; several each beside it with its number."""
    output.parent.mkdir(parents=True, exist_ok=True)
    paths = (
        [output] if len(films) == 1 else [output.with_stem(f"{output.stem}-{index + 1}") for index in range(len(films))]
    )
    for frames, path in zip(films, paths, strict=True):
        large = [each.resize((each.width * upscale, each.height * upscale), resample=0) for each in frames]
        core.export_to_video(large, path, fps=fps)
    return paths


def _save(image: "Image", path: Path, record: dict[str, Any]) -> Path:
    """Write beside `path` and rename; a PNG also holds what made it, under `parameters`."""
    import json

    from PIL.PngImagePlugin import PngInfo

    options: dict[str, Any] = {}
    if path.suffix.lower() == ".png":
        options["pnginfo"] = PngInfo()
        options["pnginfo"].add_text("parameters", json.dumps(record, ensure_ascii=False), zip=False)
    beside = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        image.save(beside, **options)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


if __name__ == "__main__":
    main()
