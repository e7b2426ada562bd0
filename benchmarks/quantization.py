"""Quantised weights: what they cost in precision and save on disk, and what loading them takes.

python -m benchmarks.quantization pictures [PROMPTS]   the embedded model: picture score, errors, size on disk
python -m benchmarks.quantization memory               peak of a load that quantises, in a process of its own
python -m benchmarks.quantization sizes                large transformers in bfloat16 and in int8, without their weights
python -m benchmarks.quantization gguf                 bits and errors of block formats of GGUF, with the gguf package
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import diffusion_core
from diffusion_core import DiffusionPipeline, PipelineQuantizationConfig, TorchAoConfig
from diffusion_core.offload.loading import build_without_weights
from diffusion_core.progress import disable_progress_bar
from diffusion_core.shapes import shapes_folder

from .load_memory import MB, Ladder, Peak
from .shapes.evaluate import evaluate, held_out_scenes


def _configs() -> dict[str, Callable[[], TorchAoConfig] | None]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig as Dynamic
    from torchao.quantization import Int8WeightOnlyConfig as WeightOnly

    return {
        "float32": None,
        "bfloat16": None,
        "int8 weight-only": lambda: TorchAoConfig(WeightOnly()),
        "int8 weight-only, every linear layer": lambda: TorchAoConfig(WeightOnly(), []),
        "int8 dynamic": lambda: TorchAoConfig(Dynamic()),
        "int8 dynamic, every linear layer": lambda: TorchAoConfig(Dynamic(), []),
    }


def _load(name: str, config: Callable[[], TorchAoConfig] | None) -> Any:
    if config is None:
        return DiffusionPipeline.from_pretrained(shapes_folder(), dtype=getattr(torch, name))
    quantised = PipelineQuantizationConfig(quant_mapping={"unet": config()})
    return DiffusionPipeline.from_pretrained(shapes_folder(), dtype=torch.bfloat16, quantization_config=quantised)


def _size(model: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


@torch.no_grad()
def _prediction(unet: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(8, unet.config.in_channels, 16, 16, generator=generator).to(unet.dtype)
    text = torch.randn(8, 12, unet.config.cross_attention_dim, generator=generator).to(unet.dtype)
    times = torch.linspace(999, 1, 8)
    return unet(sample, times, text).sample.float()


def pictures(count: str = "200") -> None:
    """Print the table of docs/quantization.md about the embedded model."""
    scenes = held_out_scenes(int(count))
    exact: dict[str, Any] = {}
    print(f"| denoiser | quantised | file, MB | error of a prediction | pictures right, of {len(scenes)} | pixels |")
    print("|---|---|---|---|---|---|")
    for name, config in _configs().items():
        pipe = _load(name, config)
        unet = pipe.unet
        weights = {key: tensor for key, tensor in unet.state_dict().items() if tensor.dim() > 1}
        inside = sum(tensor.numel() for tensor in weights.values() if type(tensor) is not torch.Tensor)
        share = inside / unet.num_parameters()
        found = _prediction(unet)
        verdicts, images = evaluate(pipe, scenes)
        drawn = torch.stack([torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in images]) / 255
        exact = exact or {"prediction": found, "pictures": drawn}
        error = float((found - exact["prediction"]).norm() / exact["prediction"].norm())
        pixels = float((drawn - exact["pictures"]).square().mean().sqrt())
        print(
            f"| {name} | {share:.0%} | {_size(unet) / MB:.2f} | {error:.2%} | {verdicts['ok']} | {pixels:.2%} |",
            flush=True,
        )


def _one_load(folder: str, dtype: str) -> None:
    """Load once in this process, and print what it took in bytes."""
    from torchao.quantization import Int8WeightOnlyConfig

    disable_progress_bar()
    config = TorchAoConfig(Int8WeightOnlyConfig(), [])
    # What torch and torchao allocate on their first use is no part of the load.
    Ladder.from_pretrained(f"{folder}/warm", dtype=getattr(torch, dtype), quantization_config=config)
    with Peak() as peak:
        model = Ladder.from_pretrained(f"{folder}/plain", dtype=getattr(torch, dtype), quantization_config=config)
    print(json.dumps({"peak": peak.highest - peak.before, "model": model.get_memory_footprint()}))


def load_peaks(
    folder: str, layers: int = 20, dtypes: tuple[str, ...] = ("float32", "bfloat16")
) -> dict[str, dict[str, float]]:
    """For a file in float32, quantised as it is read: bytes of the result, of its largest tensor, and of the peak."""
    Ladder(1).save_pretrained(f"{folder}/warm")
    model = Ladder(layers)
    model.save_pretrained(f"{folder}/plain")
    largest = max(parameter.numel() for parameter in model.parameters())
    results: dict[str, dict[str, float]] = {}
    for dtype in dtypes:
        command = [sys.executable, "-m", "benchmarks.quantization", "one", folder, dtype]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[dtype] = {
            **json.loads(done.stdout.splitlines()[-1]),
            "largest": largest * getattr(torch, dtype).itemsize,
        }
    return results


def memory() -> None:
    """Print the table of docs/quantization.md about loading."""
    with tempfile.TemporaryDirectory() as folder:
        results = load_peaks(folder)
    print("| layers compute in | quantised model, MB | largest tensor, MB | peak of its load, MB |")
    print("|---|---|---|---|")
    for dtype, found in results.items():
        print(f"| {dtype} | {found['model'] / MB:.0f} | {found['largest'] / MB:.0f} | {found['peak'] / MB:.0f} |")


def sizes() -> None:
    """Print the table of docs/quantization.md about large transformers, each at the size of its defaults."""
    from torchao.quantization import Int8WeightOnlyConfig

    def plain(_: str, tensor: torch.Tensor) -> int:
        return tensor.numel() * 2

    print("| transformer | bfloat16, GB | int8, GB | int8, every linear layer, GB |")
    print("|---|---|---|---|")
    for name in ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"):
        model = build_without_weights(getattr(diffusion_core, name))
        tensors = dict(model.named_parameters())
        sized = [plain, *(TorchAoConfig(Int8WeightOnlyConfig(), skip).sizes(model, plain) for skip in (None, []))]
        found = [sum(size(key, tensor) for key, tensor in tensors.items()) / 1e9 for size in sized]
        print(f"| `{name}` | " + " | ".join(f"{total:.1f}" for total in found) + " |")


def gguf() -> None:
    """Print the bits and errors of the block formats that the gguf package can write."""
    from gguf import GGMLQuantizationType, quants

    from diffusion_core.offload.gguf_formats import FORMATS, dequantized

    torch.manual_seed(0)
    weight = torch.randn(512, 4096) * 0.02
    print("| format | bits a weight | error |")
    print("|---|---|---|")
    for number, form in FORMATS.items():
        try:
            raw = torch.from_numpy(quants.quantize(weight.numpy(), GGMLQuantizationType(number)))
        except NotImplementedError:
            continue
        error = (dequantized(raw, form, torch.float32) - weight).norm() / weight.norm()
        print(f"| {form.name} | {8 * form.size / form.numbers:.2f} | {float(error):.2%} |")


if __name__ == "__main__":
    {"pictures": pictures, "memory": memory, "sizes": sizes, "gguf": gguf, "one": _one_load}[sys.argv[1]](*sys.argv[2:])
