"""What attention takes by each backend.

python -m benchmarks.attention                     without a fused kernel: time and memory; and what padding costs
python -m benchmarks.attention backends [DEVICE]   every backend that is installed and runs there, with its error
"""

import sys

import torch

from diffusion_core.offload.attention import BACKENDS, AttentionSettings, attention

from .meters import peak_activations, timed


def blocks(tokens: int = 4096, heads: int = 8, size: int = 64) -> None:
    """The same attention by each backend that runs on any device."""
    parts = [torch.randn(1, tokens, heads, size) for _ in range(3)]
    print(f"attention of {tokens} tokens, {heads} heads of {size}, float32")
    print("| backend | seconds | MB besides the result |")
    print("|---|---|---|")
    for name, settings in {
        "`_native_math`": AttentionSettings("_native_math"),
        "`_native_math`, slices of 1 head": AttentionSettings("_native_math", 1),
        "`chunked`, 256 MB": AttentionSettings("chunked"),
        "`chunked`, 16 MB": AttentionSettings("chunked", max_bytes=2**24),
        "`native`": AttentionSettings("native"),
    }.items():
        seconds = timed(lambda: attention(*parts, settings=settings), 3)["seconds"]  # noqa: B023
        made = peak_activations(lambda: attention(*parts, settings=settings))  # noqa: B023
        print(f"| {name} | {seconds:.2f} | {(made - parts[0].nbytes) / 1e6:.0f} |")


def padding(queries: int = 1024, keys: int = 1024, heads: int = 8, size: int = 64) -> None:
    """Torch's kernel with a mask, and its calls for the samples of each length."""
    query, key, value = (torch.randn(2, tokens, heads, size) for tokens in (queries, keys, keys))
    print(f"\n{queries} queries on 2 prompts of {keys} and {keys // 4} tokens, padded to {keys}, float32")
    mask = (torch.arange(keys) < torch.tensor([[keys], [keys // 4]]))[:, None, None]
    print("| padding | seconds |")
    print("|---|---|")
    for name, settings in {
        "masked, `native`": AttentionSettings("native"),
        "left out, `_native_flash`": AttentionSettings("_native_flash", strict=True),
    }.items():
        seconds = timed(lambda: attention(query, key, value, attn_mask=mask, settings=settings), 9)["seconds"]  # noqa: B023
        print(f"| {name} | {seconds:.4f} |")


def backends(device: str = "cpu", tokens: int = 4608, heads: int = 24, size: int = 128) -> None:
    """Attention as in a block of FLUX.1 at 1024 pixels, in bfloat16: time, and the error against float32."""
    exact = [torch.randn(1, tokens, heads, size, device=device) for _ in range(3)]
    parts = [part.bfloat16() for part in exact]
    wanted = attention(*[part.float() for part in parts])
    print(f"{tokens} tokens, {heads} heads of {size}, bfloat16 on {device}")
    print("| backend | milliseconds | error |")
    print("|---|---|---|")
    for name, backend in BACKENDS.items():
        try:
            backend.require_package()
            settings = AttentionSettings(name, strict=True)
            found = attention(*parts, settings=settings)
        except (ImportError, ValueError) as error:
            print(f"| `{name}` | - | {str(error).split(': ', 1)[-1].split(';')[0]} |")
            continue

        def run(settings: AttentionSettings = settings) -> None:
            attention(*parts, settings=settings)
            if device != "cpu":
                torch.get_device_module(device).synchronize()

        error = float((found.float() - wanted).norm() / wanted.norm())
        print(f"| `{name}` | {1e3 * timed(run, 5)['seconds']:.2f} | {100 * error:.3f} % |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        if sys.argv[1:2] == ["backends"]:
            backends(*sys.argv[2:3])
        else:
            blocks()
            padding()
