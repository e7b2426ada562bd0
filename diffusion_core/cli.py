"""The command line, `diffusion-core`: draw pictures, look into checkpoints, convert them."""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from PIL.Image import Image

EMBEDDED = "shapes"
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
    help="Diffusion models on the machine you have: a prompt and a checkpoint folder become a picture.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Folder or Hub repository in the Hub layout; `shapes` is the embedded model."),
]


@app.command(
    epilog='Example: `diffusion-core generate "a small red circle above a large blue square on a yellow background" '
    "--seed 7 --output picture.png`"
)
def generate(
    prompt: Annotated[str, typer.Argument(help="What the picture shows.")],
    model: Model = EMBEDDED,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; its ending says the format.")] = Path(
        "picture.png"
    ),
    negative_prompt: Annotated[str | None, typer.Option(help="What to keep out of the picture.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; more is slower and finer.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="How closely to follow the prompt; 1 switches guidance off.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help=f"Sampler: {', '.join(SCHEDULERS)}, or a class name.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same picture. Drawn at random and printed when left out.")
    ] = None,
    num_images: Annotated[
        int, typer.Option(min=1, help="How many pictures, of seeds SEED, SEED+1, ...; more than one also make a grid.")
    ] = 1,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels; the model's own size when left out.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels; the model's own size when left out.")] = None,
    image: Annotated[str | None, typer.Option(help="Start from this picture (file or address).")] = None,
    mask: Annotated[str | None, typer.Option(help="With --image: redraw only where this picture is white.")] = None,
    strength: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="With --image: 0 keeps it, 1 forgets it.")
    ] = None,
    upscale: Annotated[int, typer.Option(min=1, max=16, help="Enlarge the file by whole pixels, unsmoothed.")] = 1,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, ...")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="`float32`, `bfloat16`, `float16` or `auto` (as the files are).")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Weights of this variant, such as `fp16`.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show results and errors only.")] = False,
) -> None:
    """Draw a picture from a PROMPT, and write the run's settings into the PNG."""
    if mask and not image:
        _fail("--mask needs --image: the mask says which part of that picture is redrawn")
    if strength is not None and not image:
        _fail("--strength needs --image: it says how far to leave that picture")
    if output.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        _fail(f"--output {output}: name a .png, .jpg or .webp file")
    core = _core(quiet)
    folder = _folder(model)
    device = _device(device)
    task = "Inpainting" if mask else "Image2Image" if image else "Text2Image"
    # Pictures are read before the model, so that a wrong path fails in no time.
    pictures = {name: core.load_image(source) for name, source in (("image", image), ("mask_image", mask)) if source}
    loader = getattr(core, f"AutoPipelineFor{task}")
    pipeline = loader.from_pretrained(folder, dtype=dtype or _default_dtype(device), variant=variant).to(device)
    if scheduler:
        pipeline.scheduler = _scheduler(core, scheduler).from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=quiet)
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    if model == EMBEDDED:
        from diffusion_core.shapes import GUIDANCE_SCALE, STEPS

        steps, guidance_scale = steps or STEPS, GUIDANCE_SCALE if guidance_scale is None else guidance_scale
    settings: dict[str, Any] = {
        "negative_prompt": negative_prompt,
        "num_inference_steps": steps,
        "guidance_scale": guidance_scale,
        "height": height,
        "width": width,
        "strength": strength,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    result = pipeline(
        [prompt] * num_images, generator=_generators(seed, num_images), **pictures, **_repeat(settings, num_images)
    )
    record = {
        "prompt": prompt,
        **settings,
        "model": model,
        "scheduler": type(pipeline.scheduler).__name__,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "diffusion_core": core.__version__,
    }
    written = _write(result.images, output, upscale, seed, record)
    shown = f"seed {seed}" if num_images == 1 else f"seeds {seed} to {seed + num_images - 1}"
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show results and errors only.")] = False,
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
