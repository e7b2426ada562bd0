"""Group offload of the UNet of Stable Diffusion 1.5 at full size, on a simulated card: memory, time and copies a call.

python -m benchmarks.group_offload [HARDWARE]
"""

import sys
from typing import Any

import torch

import diffusion_core
from diffusion_core.hooks import apply_group_offloading
from diffusion_core.offload.simulator import Simulator, simulator

MODES: dict[str, dict[str, Any] | None] = {
    "on the device": None,
    "block_level, 3 blocks": {"num_blocks_per_group": 3},
    "block_level, stream": {"use_stream": True},
    "block_level": {},
    "leaf_level, stream": {"offload_type": "leaf_level", "use_stream": True},
    "leaf_level": {"offload_type": "leaf_level"},
}


def unet() -> Any:
    """The model in float16, with memory that is promised and never touched."""
    with torch.device("meta"):
        model = diffusion_core.UNet2DConditionModel(cross_attention_dim=768).half()
    return model.to_empty(device="cpu").eval()


def measure(sim: Simulator, options: dict[str, Any] | None) -> tuple[float, float, float]:
    """GB at the peak, predicted milliseconds and GB copied to the device, of a call once the order is known."""
    model = unet()
    if options is None:
        model.to("sim:0")
    else:
        apply_group_offloading(model, "sim:0", low_cpu_mem_usage=True, **options)
    inputs = [torch.empty(size, dtype=torch.float16, device="sim:0") for size in ((2, 4, 64, 64), (2,), (2, 77, 768))]
    begin = before = 0
    for _ in range(3):
        sim.synchronize()
        sim.reset_peak()
        begin, before = sim.elapsed, sim.statistics().h2d
        model(*inputs)
        sim.synchronize()
    statistics = sim.statistics()
    return statistics.peak / 1e9, (sim.elapsed - begin) * 1e3, (statistics.h2d - before) / 1e9


def main(hardware: str = "rtx-4090") -> None:
    """Print a table."""
    print(f"| {hardware} | memory, GB | predicted time, ms | copied, GB |\n|---|---|---|---|")
    for name, options in MODES.items():
        with simulator(dry=True, hardware=hardware) as sim, torch.inference_mode():
            memory, time, copied = measure(sim, options)
        print(f"| {name} | {memory:.3f} | {time:.0f} | {copied:.2f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
