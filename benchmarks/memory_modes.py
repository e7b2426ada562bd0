"""What each memory mode takes and costs, for whole pipelines at full size, in dry runs on a simulated card.

python -m benchmarks.memory_modes [FAMILY ...] [--modes WORDS] [--hub FOLDER] [--hardware NAME] [--markdown]

It needs the configs of public checkpoints in the Hub layout, without weights. Peaks and bytes are exact for what is
modelled: weights, activations as eager torch makes them, fused attention. Times are the simulated clock's predictions,
whose host works for nothing: compare them, and do not read them as a benchmark.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import diffusion_core
from diffusion_core.logging import set_verbosity_error
from diffusion_core.offload.casting import apply_layerwise_casting
from diffusion_core.offload.layout import read_request
from diffusion_core.offload.simulator import Simulator, simulator

HUB = Path(__file__).resolve().parents[2] / "shared" / "hub"
DEVICE = "sim:0"
STEPS = 2
PROMPT = "a small red circle above a large blue square"


@dataclass(frozen=True)
class Family:
    """A pipeline at full size.

    Attributes:
        repo: below the folder of configs.
        pipeline: the class's name.
        size: height and width of the picture, pixels; one number for both.
        frames: of a film; None for a picture.
        steps: how many a picture takes as a rule; `taken` are run, and the last one stands for the others.
        taken: see there; with half of them, every component is seen.
        denoiser: the component that does the steps; others whose names begin so do them with it.
        dtype: of the weights.
        vae_dtype: of the autoencoder's, if it is another one.
        borrowed: tokenizers that the folder lacks, and folders that have them.
        absent: components that are left out.
    """

    repo: str
    pipeline: str
    size: int | tuple[int, int] = 1024
    frames: int | None = None
    steps: int = 28
    taken: int = STEPS
    denoiser: str = "transformer"
    dtype: torch.dtype = torch.bfloat16
    vae_dtype: torch.dtype | None = None
    borrowed: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def shown(self) -> str:
        """The size in words."""
        height, width = self.sides
        return f"{width}x{height}" + ("" if self.frames is None else f", {self.frames} frames")


_T5 = "black-forest-labs/FLUX.1-dev/tokenizer_2"
_SD15_PARTS = ("safety_checker", "feature_extractor", "image_encoder")


def _wan(repo: str, taken: int = STEPS) -> Family:
    """Wan at 480p; its autoencoder computes in float32, as its makers run it."""
    return Family(
        repo,
        "WanPipeline",
        size=(480, 832),
        frames=81,
        steps=50,
        taken=taken,
        vae_dtype=torch.float32,
        borrowed={"tokenizer": _T5},
    )


FAMILIES = {
    "sd15": Family(
        "runwayml/stable-diffusion-v1-5",
        "StableDiffusionPipeline",
        size=512,
        steps=30,
        denoiser="unet",
        dtype=torch.float16,
        absent=_SD15_PARTS,
    ),
    "sdxl": Family(
        "stabilityai/stable-diffusion-xl-base-1.0",
        "StableDiffusionXLPipeline",
        steps=30,
        denoiser="unet",
        dtype=torch.float16,
    ),
    "pixart": Family(
        "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS", "PixArtSigmaPipeline", steps=20, borrowed={"tokenizer": _T5}
    ),
    "sd3": Family("stabilityai/stable-diffusion-3-medium-diffusers", "StableDiffusion3Pipeline"),
    "auraflow": Family("fal/AuraFlow", "AuraFlowPipeline", size=512, borrowed={"tokenizer": _T5}),
    "flux": Family("black-forest-labs/FLUX.1-dev", "FluxPipeline"),
    "cogvideox": Family(
        "THUDM/CogVideoX-5b",
        "CogVideoXPipeline",
        size=(480, 720),
        frames=49,
        steps=50,
        taken=3,  # the second step brings in once more what the first one made a table of
        borrowed={"tokenizer": _T5},
    ),
    "wan": _wan("Wan-AI/Wan2.1-T2V-14B-Diffusers"),
    # Its transformers share the steps: the last two of six, and the last of three, are the second's.
    "wan-a14b": _wan("Wan-AI/Wan2.2-T2V-A14B-Diffusers", taken=6),
    "ltx": Family(
        "Lightricks/LTX-Video", "LTXPipeline", size=(512, 704), frames=161, steps=50, borrowed={"tokenizer": _T5}
    ),
}


@dataclass(frozen=True)
class Mode:
    """A way to place a pipeline.

    Attributes:
        name: for the table.
        enable: does it.
        prepare: before that, with the pipeline on the device: casting, which then needs no memory here.
        devices: how many it uses.
    """

    name: str
    enable: Callable[[Any, Family], None]
    prepare: Callable[[Any, Family], None] | None = None
    devices: int = 1


def _group(tiling: bool = False, **options: Any) -> Callable[[Any, Family], None]:
    """Group offload as for weights that are mapped from files, which pass through a few pinned buffers."""

    def enable(pipe: Any, family: Family) -> None:
        low = {"low_cpu_mem_usage": True} if options.get("use_stream") else {}
        pipe.enable_group_offload(DEVICE, **options, **low)
        if tiling:
            _tile(pipe, family)

    return enable


def _tile(pipe: Any, family: Family) -> None:
    """Tiles of half the picture's size; those that the configs name are as large as the picture."""
    height, width = family.sides
    pipe.vae.enable_tiling(height // 2, width // 2)


def _resident(pipe: Any, family: Family) -> None:
    pipe.to(DEVICE)


def _model_offload(pipe: Any, family: Family) -> None:
    pipe.enable_model_cpu_offload(device=DEVICE)


def _model_offload_tiled(pipe: Any, family: Family) -> None:
    pipe.enable_model_cpu_offload(device=DEVICE)
    _tile(pipe, family)


def _sequential(pipe: Any, family: Family) -> None:
    pipe.enable_sequential_cpu_offload(device=DEVICE)


def _streamed_denoiser(pipe: Any, family: Family) -> None:
    pipe.enable_model_cpu_offload(device=DEVICE)
    for part in _denoisers(pipe, family):
        part.enable_group_offload(DEVICE, offload_type="block_level", use_stream=True, low_cpu_mem_usage=True)


def _balanced(pipe: Any, family: Family) -> None:
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    pipe.apply_layout(read_request("balanced", None, None, None).layout(modules))


def _cast(pipe: Any, family: Family) -> None:
    for part in _denoisers(pipe, family):
        part.enable_layerwise_casting(torch.float8_e4m3fn)


def _denoisers(pipe: Any, family: Family) -> list[Any]:
    return [part for name, part in pipe.components.items() if name.startswith(family.denoiser) and part is not None]


def _cast_all(pipe: Any, family: Family) -> None:
    _cast(pipe, family)
    for name, part in pipe.components.items():
        if name.startswith("text_encoder") and isinstance(part, nn.Module):
            apply_layerwise_casting(part, torch.float8_e4m3fn, skip_modules_classes=["norm"])


BLOCK, LEAF = {"offload_type": "block_level"}, {"offload_type": "leaf_level"}
STREAM = {"use_stream": True}
MODES = [
    Mode("all on the device", _resident),
    Mode("balanced over two devices", _balanced, devices=2),
    Mode("model offload", _model_offload),
    Mode("model offload, VAE tiling", _model_offload_tiled),
    Mode("model offload, denoiser by blocks, stream", _streamed_denoiser),
    Mode("group offload, 3 blocks", _group(num_blocks_per_group=3, **BLOCK)),
    Mode("group offload, 3 blocks, stream", _group(num_blocks_per_group=3, **BLOCK, **STREAM)),
    Mode("group offload, blocks", _group(**BLOCK)),
    Mode("group offload, blocks, stream", _group(**BLOCK, **STREAM)),
    Mode("group offload, leaves", _group(**LEAF)),
    Mode("group offload, leaves, stream", _group(**LEAF, **STREAM)),
    Mode("group offload, leaves, stream, VAE tiling", _group(tiling=True, **LEAF, **STREAM)),
    Mode("sequential offload", _sequential),
    Mode("fp8 denoiser, all on the device", _resident, _cast),
    Mode("fp8 denoiser and encoders, model offload", _model_offload, _cast_all),
    Mode("fp8 denoiser and encoders, blocks, stream", _group(**BLOCK, **STREAM), _cast_all),
    Mode("fp8, leaves, stream, VAE tiling", _group(tiling=True, **LEAF, **STREAM), _cast_all),
]


@dataclass(frozen=True)
class Result:
    """Of one run.

    Attributes:
        peaks: bytes on each device at most.
        weights: bytes of weights at home on the host; a mapped file's count, though the system can drop them.
        pinned: bytes of pinned host memory at most.
        step: predicted seconds of a step once the order of calls is known.
        total: predicted seconds of a picture.
        moved: bytes that a picture copies between host and devices, in both directions.
        moved_a_step: those of a step once the order of calls is known.
        took: seconds of processor time of this run.
        trace: predicted seconds and bytes in use on the first device, at each change.
        marks: predicted seconds at the end of each step.
    """

    peaks: tuple[int, ...]
    weights: int
    pinned: int
    step: float
    total: float
    moved: int
    moved_a_step: int
    took: float
    trace: list[tuple[float, int]]
    marks: list[float]


def build(family: Family, hub: Path) -> Any:
    """The pipeline from its configs, with memory for the weights that is promised and never touched."""
    folder = hub / family.repo
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    parts: dict[str, Any] = {}
    for name, entry in index.items():
        if isinstance(entry, list) and name not in family.absent:
            parts[name] = _component(folder / name, *entry, family, hub)
    absent = dict.fromkeys(family.absent)
    settings = {"requires_safety_checker": False} if "safety_checker" in absent else {}
    settings |= {name: index[name] for name in ("boundary_ratio", "expand_timesteps") if name in index}
    pipe = getattr(diffusion_core, family.pipeline)(**parts, **absent, **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _component(folder: Path, library: str, kind: str, family: Family, hub: Path) -> Any:
    import transformers

    if "tokenizer" in folder.name:
        source = hub / family.borrowed[folder.name] if folder.name in family.borrowed else folder
        return transformers.AutoTokenizer.from_pretrained(source)
    if folder.name == "scheduler":
        return getattr(diffusion_core, kind).from_pretrained(folder)
    if library == "transformers":
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = getattr(transformers, kind)(config)
    else:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with torch.device("meta"):
            model = getattr(diffusion_core, kind).from_config(config)
    dtype = family.vae_dtype if folder.name == "vae" and family.vae_dtype is not None else family.dtype
    model = model.to(dtype).to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel() <= 8192:  # small tensors are computed with, even in a dry run
            tensor.data.zero_()
    return model


def measure(family: Family, mode: Mode, hub: Path = HUB, hardware: str = "rtx-4090", cap: str = "400GB") -> Result:
    """Draw a picture in a mode, and read the books."""
    gc.collect()  # of the run before
    begun = time.process_time()
    with simulator(mode.devices, dry=True, hardware=hardware, capacity=cap) as sim, torch.inference_mode():
        pipe = build(family, hub)
        if mode.prepare is not None:
            pipe.to(DEVICE)
            mode.prepare(pipe, family)
            pipe.to("cpu")
        mode.enable(pipe, family)
        weights = sum(t.numel() * t.element_size() for t in _tensors(pipe) if t.device.type == "cpu")
        return _draw(sim, pipe, family, weights, begun)


def _tensors(pipe: Any) -> Iterator[torch.Tensor]:
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            yield from part.parameters()
            yield from part.buffers()


def _moved(sim: Simulator) -> int:
    books = [sim.statistics(device) for device in sim.devices]
    return sum(each.h2d + each.d2h + each.d2d for each in books)


def _draw(sim: Simulator, pipe: Any, family: Family, weights: int, begun: float) -> Result:
    """Two pictures: the first one shows the order of the calls, the second one counts."""
    marks: list[tuple[float, int]] = []

    def note(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        for device in sim.devices:
            sim.synchronize(device)
        marks.append((sim.elapsed, _moved(sim)))
        return {}

    height, width = family.sides
    more = {} if family.frames is None else {"num_frames": family.frames}

    def draw(steps: int) -> None:
        pipe(
            PROMPT,
            height=height,
            width=width,
            num_inference_steps=steps,
            output_type="np",
            callback_on_step_end=note,
            **more,
        )
        for device in sim.devices:
            sim.synchronize(device)

    draw(family.taken // 2)
    marks.clear()
    sim.reset()
    start = sim.elapsed
    draw(family.taken)
    step, moved = marks[-1][0] - marks[-2][0], marks[-1][1] - marks[-2][1]
    others = family.steps - len(marks)
    return Result(
        peaks=tuple(sim.statistics(device).peak for device in sim.devices),
        weights=weights,
        pinned=sim.pinned.peak,
        step=step,
        total=sim.elapsed - start + others * step,
        moved=_moved(sim) + others * moved,
        moved_a_step=moved,
        took=time.process_time() - begun,
        trace=[(when - start, size) for when, size in sim.memory_over_time(0)],
        marks=[when - start for when, _ in marks],
    )


COLUMNS = ("peak, GB", "weights on the host, GB", "pinned, GB", "a step, s", "a picture, s", "moved, GB", "run, CPU s")


def cells(result: Result) -> list[str]:
    """A result as text."""
    return [
        " + ".join(f"{peak / 1e9:.2f}" for peak in result.peaks),
        f"{result.weights / 1e9:.2f}",
        f"{result.pinned / 1e9:.2f}",
        f"{result.step:.3f}",
        f"{result.total:.1f}",
        f"{result.moved / 1e9:.1f}",
        f"{result.took:.0f}",
    ]


def main() -> None:
    """Print a table for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; all by default")
    parser.add_argument("--modes", default="", help="only modes whose names have these words")
    parser.add_argument("--hub", type=Path, default=HUB, help="the folder of configs, OWNER/NAME below it")
    parser.add_argument("--hardware", default="rtx-4090", help="of the simulated card")
    parser.add_argument("--markdown", action="store_true", help="print for a page of text")
    given = parser.parse_args()
    unknown = [name for name in given.families if name not in FAMILIES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(FAMILIES)}")
    set_verbosity_error()
    for name in given.families or FAMILIES:
        family = FAMILIES[name]
        title = f"{family.pipeline}, {family.repo}, {family.shown}, {family.steps} steps, {given.hardware}"
        tasks = [(name, mode.name, given.hub, given.hardware) for mode in MODES if given.modes in mode.name]
        found = rows(tasks)
        if given.markdown:
            print(f"\n{title}\n\n| | {' | '.join(COLUMNS[:-1])} |\n|{'---|' * len(COLUMNS)}")
            for mode, result in found:
                print(f"| {mode} | {' | '.join(cells(result)[:-1])} |", flush=True)
        else:
            _show(title, found)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(f"memory of the process of a run at most: {largest:.2f} GB")


def rows(tasks: list[tuple[str, str, Path, str]]) -> Iterator[tuple[str, Result]]:
    """The result of each mode, run in a process of its own: 17 runs in one process took 2.4 GB, each at most 0.9."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for task, result in zip(tasks, pool.imap(_measured, tasks, chunksize=1), strict=True):
            yield task[1], result
        pool.close()
        pool.join()


def _measured(task: tuple[str, str, Path, str]) -> Result:
    name, mode, hub, hardware = task
    set_verbosity_error()
    return measure(FAMILIES[name], next(each for each in MODES if each.name == mode), hub, hardware)


def _show(title: str, rows: Iterator[tuple[str, Result]]) -> None:
    table = Table("mode", *COLUMNS, title=title)
    for mode, result in rows:
        table.add_row(mode, *cells(result))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
