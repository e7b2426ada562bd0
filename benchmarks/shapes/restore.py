"""Make training states from the embedded checkpoint: `python -m benchmarks.shapes.restore --work DIR`.

For going on where the states of a training are gone. Weights are those of the checkpoint, in float16 precision; the
optimizers start afresh, and so do the counts of steps.
"""

import argparse
from pathlib import Path

import torch

import diffusion_core
from diffusion_core.shapes import shapes_folder

from .parts import write_tokenizer
from .training import Average, save_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the states; existing ones are kept")
    work = parser.parse_args().work
    pipeline = diffusion_core.StableDiffusionPipeline.from_pretrained(shapes_folder())
    parts = torch.nn.ModuleDict({"unet": pipeline.unet, "text_encoder": pipeline.text_encoder})
    write_tokenizer(work / "tokenizer")
    for name, model, more in (("autoencoder", pipeline.vae, {}), ("denoiser", parts, {"average": Average(parts)})):
        if (work / f"{name}.pt").exists():
            print(f"{name}.pt is there already")
            continue
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.01)
        save_state(work / f"{name}.pt", 0, model=model, optimizer=optimizer, **more)
        print(f"wrote {name}.pt")


if __name__ == "__main__":
    main()
