"""What each precision costs in quality, on the embedded model: `python -m benchmarks.precision [PROMPTS] [NAME ...]`.

Draws the same prompts with the same seeds in each precision, and prints for each how many pictures have every
attribute right, and how far they are from those of float32. Where the machine has no TensorFloat-32, it is computed:
the inputs of products and convolutions are rounded to its 11 bits, and summed in float32, as the hardware does.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from diffusion_core import DiffusionPipeline
from diffusion_core.shapes import shapes_folder

from .shapes.evaluate import evaluate, held_out_scenes

_PRODUCTS = {F.linear, F.conv2d, torch.conv2d, torch.matmul, F.scaled_dot_product_attention, torch.nn.functional.linear}
_LOST_BITS = 13  # of the 23 in the mantissa of float32


class Tf32(TorchFunctionMode):
    """Rounds what products and convolutions are given as TensorFloat-32 does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _PRODUCTS:
            args = tuple(_rounded(value) if isinstance(value, torch.Tensor) else value for value in args)
        return function(*args, **(kwargs or {}))


def _rounded(values: torch.Tensor) -> torch.Tensor:
    if values.dtype != torch.float32:
        return values
    with torch._C.DisableTorchFunction():
        bits = values.view(torch.int32) + (1 << (_LOST_BITS - 1))
        return (bits >> _LOST_BITS << _LOST_BITS).view(torch.float32)


@contextmanager
def _tf32() -> Iterator[None]:
    with Tf32():
        yield


@dataclass(frozen=True)
class Precision:
    """One row.

    Attributes:
        dtype: that the pipeline is loaded in.
        change: what is done to it then.
        around: what holds while it draws.
    """

    dtype: Any
    change: Callable[[Any], Any] = lambda pipe: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _cast(**options: Any) -> Callable[[Any], Any]:
    return lambda pipe: pipe.unet.enable_layerwise_casting(**options)


ROWS = {
    "float32": Precision(torch.float32),
    "float32 with TF32": Precision(torch.float32, around=_tf32),
    "bfloat16": Precision(torch.bfloat16),
    "float16": Precision(torch.float16),
    "float16, VAE in float32": Precision({"vae": torch.float32, "default": torch.float16}),
    "bfloat16, VAE in float32": Precision({"vae": torch.float32, "default": torch.bfloat16}),
    "bfloat16, UNet stored as int8": Precision(torch.bfloat16, _cast(storage="int8")),
    "bfloat16, UNet stored as fp8_scaled": Precision(torch.bfloat16, _cast(storage="fp8_scaled")),
    "bfloat16, UNet stored as float8_e4m3fn": Precision(torch.bfloat16, _cast(storage_dtype=torch.float8_e4m3fn)),
}


def main(count: int = 200, *names: str) -> None:
    scenes = held_out_scenes(count)
    exact: np.ndarray | None = None
    print("| precision | every attribute right | distance from float32 | seconds a picture |")
    print("|---|---|---|---|")
    for name, row in ROWS.items():
        if names and name not in ("float32", *names):
            continue
        pipe = DiffusionPipeline.from_pretrained(shapes_folder(), dtype=row.dtype)
        row.change(pipe)
        begin = time.perf_counter()
        with row.around():
            verdicts, images = evaluate(pipe, scenes)
        seconds = (time.perf_counter() - begin) / count
        drawn = np.stack([np.asarray(image, dtype=np.float64) / 255 for image in images])
        exact = drawn if exact is None else exact
        distance = float(np.sqrt(np.square(drawn - exact).mean()))
        print(f"| {name} | {verdicts['ok']} of {count} | {100 * distance:.2f} % | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, *sys.argv[2:])
