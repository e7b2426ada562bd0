"""Prints the lines that each family takes here and in the reference: text to image, all tasks, the denoiser.

Run as `python -m benchmarks.lines_of_code`. Lines are those of whole files, blank ones and comments included. Text to
image is counted twice: its own file alone, and with all files of the family that it imports. What families share
(`picture.py`, `tasks.py` and their kin) is counted once, in the last row; the reference's files hold all of this.
"""

import ast
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# family: our folder, their files, our denoiser, theirs. "{}" stands for a task, text to image first.
UNETS = ("models/unets/unet_2d_condition.py", "models/unets/unet_2d_condition.py")
FAMILIES = {
    "Stable Diffusion": ("stable_diffusion", "stable_diffusion/pipeline_stable_diffusion{}.py", *UNETS),
    "Stable Diffusion XL": ("stable_diffusion_xl", "stable_diffusion_xl/pipeline_stable_diffusion_xl{}.py", *UNETS),
    "ControlNet": (
        "controlnet",
        "controlnet/pipeline_controlnet{}.py",
        "models/controlnet.py",
        "models/controlnets/controlnet.py",
    ),
    "Stable Diffusion 3": (
        "stable_diffusion_3",
        "stable_diffusion_3/pipeline_stable_diffusion_3{}.py",
        "models/transformers/sd3.py",
        "models/transformers/transformer_sd3.py",
    ),
    "FLUX.1": (
        "flux",
        "flux/pipeline_flux{}.py",
        "models/transformers/flux.py",
        "models/transformers/transformer_flux.py",
    ),
    "PixArt": (
        "pixart",
        "pixart_alpha/pipeline_pixart_{}.py",
        "models/transformers/pixart.py",
        "models/transformers/pixart_transformer_2d.py",
    ),
    "AuraFlow": (
        "auraflow",
        "aura_flow/pipeline_aura_flow{}.py",
        "models/transformers/auraflow.py",
        "models/transformers/auraflow_transformer_2d.py",
    ),
    "Qwen-Image": (
        "qwenimage",
        "qwenimage/pipeline_qwenimage{}.py",
        "models/transformers/qwenimage.py",
        "models/transformers/transformer_qwenimage.py",
    ),
    "Z-Image": (
        "zimage",
        "z_image/pipeline_z_image{}.py",
        "models/transformers/zimage.py",
        "models/transformers/transformer_z_image.py",
    ),
}
# The reference's tasks that we have too, as they stand in the names of its files.
TASKS = {
    "ControlNet": ("", "_img2img", "_inpaint", "_sd_xl", "_sd_xl_img2img", "_inpaint_sd_xl"),
    "FLUX.1": ("", "_img2img", "_inpaint", "_fill", "_kontext"),
    "PixArt": ("alpha", "sigma"),
    "AuraFlow": ("",),
    "Qwen-Image": ("",),
    "Z-Image": ("",),
}
SHARED = [
    "picture.py",
    "prompts.py",
    "arguments.py",
    "packed.py",
    "text_masked.py",
    "flow.py",
    "tasks.py",
    "canvas.py",
    "unet.py",
    "text.py",
    "text_t5.py",
    "guidance.py",
    "latents.py",
    "loop.py",
]


def lines(path: Path) -> int:
    """The lines of a file; 0 if it is not there."""
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def used_by(path: Path, folder: Path) -> set[Path]:
    """A file and those of its folder that it imports when it is run, directly or by way of one another."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        one = waiting.pop()
        if one in found or not one.is_file():
            continue
        found.add(one)
        for node in ast.parse(one.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                waiting.append(folder / f"{node.module}.py")
    return found


def row(name: str, reference: Path) -> tuple[int, ...]:
    """For one family: our lines for text to image alone, with what it imports, and theirs; all tasks; the denoiser."""
    place, pattern, denoiser, their_denoiser = FAMILIES[name]
    folder = ROOT / "pipelines" / place
    tasks = TASKS.get(name, ("", "_img2img", "_inpaint"))
    theirs = [lines(reference / "pipelines" / pattern.format(task)) for task in tasks]
    text = folder / "pipeline.py"
    return (
        lines(text),
        sum(lines(path) for path in used_by(text, folder)),
        theirs[0],
        sum(lines(path) for path in folder.glob("*.py")),
        sum(theirs),
        lines(ROOT / denoiser),
        lines(reference / their_denoiser),
    )


def main() -> None:
    """Print the table."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise SystemExit("the reference is not installed: pip install diffusers==0.42.1")
    reference = Path(spec.origin).parent
    print("lines, ours / the reference's; text to image: its file + the family's files that it imports")
    print(f"{'family':<22}{'text to image':>20}{'all tasks':>16}{'denoiser':>16}")
    for name in FAMILIES:
        alone, text, their_text, tasks, their_tasks, denoiser, their_denoiser = row(name, reference)
        cells = [
            f"{alone} + {text - alone} / {their_text}",
            f"{tasks} / {their_tasks}",
            f"{denoiser} / {their_denoiser}",
        ]
        print(f"{name:<22}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, (20, 16, 16), strict=True)))
    print(f"{'shared by all':<22}{sum(lines(ROOT / 'pipelines' / file) for file in SHARED):>20}")


if __name__ == "__main__":
    main()
