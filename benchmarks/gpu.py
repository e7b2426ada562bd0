"""What models and memory modes take on a CUDA device, in 8 minutes at most: `python -m benchmarks.gpu [--output FILE]`.

Times are those of CUDA events, medians of some calls after a warm-up; peaks are those of torch's allocator. Each case
is skipped, and said to be, once the time is up. `--small` takes tiny models, to try the script itself on any device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .cases import OURS, THEIRS
from .cases.forwards import DECODER, UNET, _flux_call, _model, _unet_call
from .meters import MB


@dataclass
class Report:
    """What was measured so far.

    Attributes:
        device: where.
        deadline: when to stop, on the clock of `time.monotonic`.
        rows: a dict of figures for each case.
    """

    device: torch.device
    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, name: str, call: Callable[[], Any], repeats: int = 5, **more: Any) -> None:
        """Time a call and note the device memory that it needs at most; the first call is not counted."""
        if time.monotonic() > self.deadline:
            self.rows.append({"case": name, "skipped": "the time was up"})
            return
        cuda = self.device.type == "cuda"
        try:
            call()
            if cuda:
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            times = [_timed(call, cuda) for _ in range(repeats)]
        except (RuntimeError, ValueError) as error:  # one case less, and the others still run
            self.rows.append({"case": name, "failed": str(error).splitlines()[0]})
            return
        row = {"case": name, "milliseconds": statistics.median(times), "least": min(times), "most": max(times)}
        if cuda:
            row["peak_mb"] = torch.cuda.max_memory_allocated(self.device) / MB
        self.rows.append({**row, **more})
        print(json.dumps(self.rows[-1]), flush=True)


def _timed(call: Callable[[], Any], cuda: bool) -> float:
    if not cuda:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@dataclass(frozen=True)
class Sizes:
    """How large the models are."""

    unet: dict[str, Any]
    decoder: dict[str, Any]
    flux: dict[str, Any]
    latents: int
    tokens: tuple[int, int]
    words: int = 4096
    pooled: int = 768
    text: int = 768


REAL = Sizes(UNET, DECODER, {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True}, 64, (4096, 512))
SMALL = Sizes(
    {**UNET, "block_out_channels": (8, 16, 32, 32), "norm_num_groups": 4, "attention_head_dim": 2},
    {**DECODER, "block_out_channels": (8, 16, 16, 16), "norm_num_groups": 4},
    {
        "num_layers": 1,
        "num_single_layers": 1,
        "guidance_embeds": True,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "axes_dims_rope": (4, 6, 6),
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
    },
    8,
    (64, 16),
    words=32,
    pooled=16,
)


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Inputs are made on the device, without gradients."""
    with torch.inference_mode(), torch.device(device):
        yield


def models(report: Report, sizes: Sizes) -> None:
    """Forwards on the device: both libraries, half precision, the reference also as its guide tunes it."""
    dtype = torch.bfloat16
    for side in (OURS, THEIRS, f"{THEIRS}, tuned"):
        with contextlib.suppress(ImportError), _on(report.device):
            model = _model(side, "UNet2DConditionModel", sizes.unet, dtype).to(report.device)
            call = _unet_call(side, model, dtype, sizes.latents)
            report.measure(f"SD 1.5's UNet, {side}", call)
            model = _model(side, "AutoencoderKL", sizes.decoder, dtype).to(report.device)
            latents = torch.randn(1, 4, sizes.latents, sizes.latents).to(dtype)
            report.measure(f"decode, {side}", lambda model=model, latents=latents: model.decode(latents), repeats=3)
            model = _model(side, "FluxTransformer2DModel", sizes.flux, dtype).to(report.device)
            report.measure(f"FLUX.1 cut down, {side}", _flux(model, sizes))
        _free(report)


def modes(report: Report, sizes: Sizes) -> None:
    """FLUX.1 cut down in the memory modes: time, and the memory that is left to it."""
    device = report.device
    ways: dict[str, Callable[[Any], Any]] = {
        "all on the device": lambda model: model.to(device),
        "blocks": lambda model: model.enable_group_offload(device, offload_type="block_level"),
        "blocks, stream": lambda model: model.enable_group_offload(device, offload_type="block_level", use_stream=True),
        "leaves, stream": lambda model: model.enable_group_offload(device, offload_type="leaf_level", use_stream=True),
        "fp8 weights": lambda model: (model.to(device), model.enable_layerwise_casting(torch.float8_e4m3fn)),
    }
    for name, enable in ways.items():
        with torch.inference_mode():
            model = _model(OURS, "FluxTransformer2DModel", sizes.flux, torch.bfloat16)
            try:
                enable(model)
            except (RuntimeError, ValueError) as error:
                report.rows.append({"case": f"mode: {name}", "failed": str(error).splitlines()[0]})
                continue
        with _on(device):
            report.measure(f"mode: {name}", _flux(model, sizes), repeats=3)
        _free(report)


def backends(report: Report, sizes: Sizes) -> None:
    """Kernels of attention, as far as they are installed."""
    with _on(report.device):
        model = _model(OURS, "FluxTransformer2DModel", sizes.flux, torch.bfloat16).to(report.device)
        call = _flux(model, sizes)
        for name in ("native", "_native_flash", "_native_efficient", "_native_cudnn", "flash", "sage", "xformers"):
            try:
                model.set_attention_backend(name)
            except (ImportError, RuntimeError, ValueError) as error:
                report.rows.append({"case": f"attention: {name}", "failed": str(error).splitlines()[0]})
                continue
            report.measure(f"attention: {name}", call, repeats=3)


def compiled(report: Report, sizes: Sizes) -> None:
    """Blocks compiled, and what the first call takes for it."""
    with torch.inference_mode():
        model = _model(OURS, "FluxTransformer2DModel", sizes.flux, torch.bfloat16).to(report.device)
    model.compile_repeated_blocks(fullgraph=True)
    with _on(report.device):
        call = _flux(model, sizes)
        begun = time.perf_counter()
        if begun and time.monotonic() < report.deadline:
            call()
        report.measure("blocks compiled", call, first_call_s=time.perf_counter() - begun)


def _flux(model: Any, sizes: Sizes) -> Callable[[], Any]:
    return _flux_call(model, torch.bfloat16, *sizes.tokens, sizes.words, sizes.pooled)


def _free(report: Report) -> None:
    if report.device.type == "cuda":
        torch.cuda.empty_cache()


def run(device: torch.device, sizes: Sizes, seconds: float) -> Report:
    """All cases, one after the other, until the time is up."""
    report = Report(device, time.monotonic() + seconds)
    for part in (models, modes, backends, compiled):
        part(report, sizes)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="of torch")
    parser.add_argument("--seconds", type=float, default=420.0, help="when no further case is begun")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --device cpu --small tries the script")
    device = torch.device(given.device)
    report = run(device, SMALL if given.small else REAL, given.seconds)
    about = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    content = {"device": about, "torch": torch.__version__, "rows": report.rows}
    if given.output:
        given.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    failed = [row for row in report.rows if "milliseconds" not in row]
    print(f"{about}: {len(report.rows) - len(failed)} cases measured, {len(failed)} not")
    for row in failed:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
