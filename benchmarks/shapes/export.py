"""Write the embedded checkpoint from the states of both trainings: `python -m benchmarks.shapes.export --work DIR`.

Weights are stored in float16, 19.3 MB in all; loading gives float32 unless another dtype is asked for.
"""

import argparse
from pathlib import Path

import torch

from diffusion_core.pipelines import StableDiffusionPipeline
from diffusion_core.shapes import shapes_folder

from .denoiser import load_autoencoder
from .parts import load_tokenizer, make_scheduler, make_text_encoder, make_unet
from .training import Average, load_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the trainings")
    parser.add_argument("--output", type=Path, default=shapes_folder())
    arguments = parser.parse_args()
    assemble(arguments.work).to(torch.float16).save_pretrained(arguments.output)
    size = sum(file.stat().st_size for file in arguments.output.rglob("*") if file.is_file())
    print(f"{arguments.output}: {size / 1e6:.1f} MB")


def assemble(work: Path) -> StableDiffusionPipeline:
    """The pipeline of the averaged weights, in float32."""
    tokenizer = load_tokenizer(work / "tokenizer")
    vae = load_autoencoder(work)
    vae.register_to_config(scaling_factor=torch.load(work / "scale.pt", weights_only=True))
    parts = torch.nn.ModuleDict({"unet": make_unet(), "text_encoder": make_text_encoder(tokenizer)})
    average = Average(parts)
    load_state(work / "denoiser.pt", average=average)
    average.copy_to(parts)
    return StableDiffusionPipeline(
        vae,
        parts["text_encoder"].eval(),
        tokenizer,
        parts["unet"].eval(),
        make_scheduler(),
        None,
        None,
        requires_safety_checker=False,
    )


if __name__ == "__main__":
    main()
