"""Layerwise casting: what each storage costs in precision and time, next to diffusers in the same run.

python -m benchmarks.casting error [FILE.safetensors ...]   the table of docs/memory.md; files add trained weights
python -m benchmarks.casting shapes [PROMPTS]               the same of the embedded model: its weights and pictures
python -m benchmarks.casting speed                          milliseconds a call of a UNet, ours and diffusers'
"""

import statistics
import sys
import time
from typing import Any

import torch

from diffusion_core import DiffusionPipeline, UNet2DConditionModel
from diffusion_core.offload.checkpoint import TensorFile
from diffusion_core.offload.encodings import parse_encoding
from diffusion_core.shapes import STEPS, shapes_folder

FORMS: dict[str, dict[str, Any]] = {
    "plain, e4m3": {"storage_dtype": torch.float8_e4m3fn},
    "plain, e5m2": {"storage_dtype": torch.float8_e5m2},
    "fp8_scaled, e4m3": {"storage": "fp8_scaled"},
    "int8": {"storage": "int8"},
}
UNET = {
    "sample_size": 32,
    "block_out_channels": (128, 256),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 256,
    "attention_head_dim": 8,
}


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root of the mean squared error, in parts of the root mean square of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def _inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 4, 8, 8, generator=generator), torch.tensor(5), torch.randn(1, 8, 256, generator=generator)


def _stored_again(weights: list[torch.Tensor], options: dict[str, Any]) -> tuple[float, float]:
    """Bits a weight, and the error of weights that are stored and decoded."""
    encoding = parse_encoding(options.get("storage", "plain"), options.get("storage_dtype"))
    bits, stored, values = 0, list[torch.Tensor](), list[torch.Tensor]()
    for weight in weights:
        form, scale = encoding.encode(weight)
        bits += 8 * (form.nbytes + (0 if scale is None else scale.nbytes))
        stored.append(encoding.decode(form, scale, torch.float32).flatten())
        values.append(weight.flatten())
    return bits / sum(value.numel() for value in values), _distance(torch.cat(stored), torch.cat(values))


def errors(*files: str) -> None:
    """Print bits a weight, and errors of weights and of a prediction."""
    torch.manual_seed(0)
    normal = [torch.randn(2048, 2048) * 0.02]
    trained = [tensor.float() for file in files for tensor in TensorFile(file).values() if tensor.dim() > 1]
    unet = UNet2DConditionModel(**UNET).eval()
    weights, inputs = unet.state_dict(), _inputs()
    with torch.no_grad():
        prediction = unet(*inputs).sample
    print("| storage | bits a weight | normal weights, 0.02 | trained convolutions | a UNet's prediction |")
    print("|---|---|---|---|---|")
    for name, options in FORMS.items():
        bits, error = _stored_again(normal, options)
        of_trained = f"{100 * _stored_again(trained, options)[1]:.2f} %" if trained else "-"
        cast = UNet2DConditionModel(**UNET).eval()
        cast.load_state_dict(weights)
        cast.enable_layerwise_casting(**options)
        with torch.no_grad():
            of_prediction = _distance(cast(*inputs).sample, prediction)
        print(f"| {name} | {bits:.2f} | {100 * error:.2f} % | {of_trained} | {100 * of_prediction:.2f} % |")


PROMPTS = (
    "a small red circle above a large blue square on a yellow background",
    "a green triangle",
    "a large white square left of a small black circle",
    "a yellow circle below a purple triangle on a gray background",
)


def _drawn(pipe: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first prediction of the denoiser, and the pictures, with values from 0 to 1."""
    predictions: list[torch.Tensor] = []
    hook = pipe.unet.register_forward_hook(lambda *given: predictions.append(given[-1][0]))
    generator = [torch.Generator().manual_seed(index) for index in range(len(prompts))]
    pictures = pipe(prompts, num_inference_steps=STEPS, generator=generator, output_type="pt").images
    hook.remove()
    return predictions[0], pictures


def shapes(count: str = "4") -> None:
    """Print the errors of the embedded model with a cast denoiser, each loaded anew from its files."""

    def load() -> Any:
        pipe = DiffusionPipeline.from_pretrained(shapes_folder())
        pipe.set_progress_bar_config(disable=True)
        return pipe

    exact, prompts = load(), [*PROMPTS][: int(count)]
    weights = [tensor for tensor in exact.unet.state_dict().values() if tensor.dim() > 1]
    prediction, pictures = _drawn(exact, prompts)
    print("| storage | bits a weight | weights | first prediction | pictures, of the range of a pixel |")
    print("|---|---|---|---|---|")
    for name, options in FORMS.items():
        bits, error = _stored_again(weights, options)
        cast = load()
        cast.unet.enable_layerwise_casting(**options)
        found, drawn = _drawn(cast, prompts)
        of_pixels = float((drawn - pictures).double().square().mean().sqrt())
        of_prediction = _distance(found, prediction)
        print(f"| {name} | {bits:.2f} | {100 * error:.2f} % | {100 * of_prediction:.2f} % | {100 * of_pixels:.2f} % |")


def speed(rounds: int = 15) -> None:
    """Print the time that casting adds to a call of a UNet, ours and diffusers', in turns on the same machine."""
    import diffusers

    torch.manual_seed(0)
    inputs = _inputs()
    models: dict[str, Any] = {}
    for library, cls in {"ours": UNet2DConditionModel, "diffusers": diffusers.UNet2DConditionModel}.items():
        models[library] = cls(**UNET).eval()
        models[f"{library}, cast"] = cls(**UNET).eval()
        models[f"{library}, cast"].enable_layerwise_casting()
    with torch.no_grad():
        for model in models.values():
            model(*inputs)
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                begin = time.perf_counter()
                model(*inputs)
                times[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in median.items():
        print(f"{name:20} {1e3 * seconds:8.2f} ms")
    added = {library: median[f"{library}, cast"] - median[library] for library in ("ours", "diffusers")}
    print(f"added by casting: ours {1e3 * added['ours']:.2f} ms, diffusers {1e3 * added['diffusers']:.2f} ms")
    print(f"ours / diffusers: {added['ours'] / added['diffusers']:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"error": errors, "shapes": shapes, "speed": speed}[sys.argv[1]](*sys.argv[2:])
