"""Attention without a fused kernel: time and memory of plain torch and of blocks, `python -m benchmarks.attention`.

Also what leaving padding out saves: a batch of two prompts of unlike lengths with a mask, and without what it hides.
"""

import sys

import torch

from diffusion_core.offload.attention import AttentionSettings, attention

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
        run = lambda: attention(query, key, value, attn_mask=mask, settings=settings)  # noqa: B023, E731
        print(f"| {name} | {timed(run, 9)['seconds']:.4f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        blocks(*map(int, sys.argv[1:2]))
        padding()
