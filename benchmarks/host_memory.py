"""What memory modes take on the host: anonymous memory added over 20 calls of a model that is mapped from its file.

python -m benchmarks.host_memory [MEGABYTES]

The device is simulated, with real copies; its memory is given back before the host's is counted.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from diffusion_core.hooks import apply_group_offloading
from diffusion_core.offload.checkpoint import TensorFile
from diffusion_core.offload.engine import Placement, apply_plan
from diffusion_core.offload.simulator import simulator
from diffusion_core.offload.strategies import Settings, whole

WIDTH = 4096  # a layer takes 64 MB, which malloc gives back to the system at once
CALLS = 20
Place = Callable[[nn.Module], Placement]


def _grouped(**options: Any) -> Place:
    return lambda model: apply_group_offloading(model, "sim:0", **options)


MODES: dict[str, Place] = {
    "model": lambda model: apply_plan(model, whole(Settings(torch.device("sim:0")))),
    "block": _grouped(),
    "leaf, streams": _grouped(offload_type="leaf_level", use_stream=True),
}


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def mapped_model(folder: str, megabytes: int) -> nn.Module:
    """Linear layers of 64 MB, whose weights are views of a mapped safetensors file."""
    layers = max(1, megabytes // (WIDTH * WIDTH * 4 >> 20))
    path = Path(folder) / "model.safetensors"
    weight = torch.rand(WIDTH, WIDTH)
    save_file({f"{index}.weight": weight + index for index in range(layers)}, path)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    file = TensorFile(path)
    model.load_state_dict({f"{index}.weight": file[f"{index}.weight"] for index in range(layers)}, assign=True)
    return model


def measure(megabytes: int = 1024) -> dict[str, int]:
    """Bytes added by each mode."""
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, simulator(capacity="8GB"), torch.inference_mode():
        model, x = mapped_model(folder, megabytes), torch.ones(1, WIDTH)
        model(x)
        for name, place in MODES.items():
            before = anonymous()
            placement = place(model)
            for _ in range(CALLS):
                model(x)
            placement.free()
            found[name] = anonymous() - before
            placement.remove()
    return found


def main(megabytes: str = "1024") -> None:
    """Print a table."""
    print(f"| mode, {megabytes} MB mapped, {CALLS} calls | anonymous memory added, MB |\n|---|---|")
    for name, size in measure(int(megabytes)).items():
        print(f"| {name} | {size / 1e6:.1f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
