"""Prints the lines that each family takes here and in the reference: text to image, all tasks, the denoiser.

Run as `python -m benchmarks.lines_of_code`. Lines are those of whole files, blank ones and comments included. What a
family shares with others (`picture.py`, `tasks.py` and their kin) is counted once, in the last row.
"""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# family: our pipeline files, the reference's, our denoiser's, the reference's. The first of the files draws from text;
# "*" stands for all files of the folder.
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
}
# The reference's tasks that we have too, as they stand in the names of its files.
TASKS = {
    "ControlNet": ("", "_img2img", "_inpaint", "_sd_xl", "_sd_xl_img2img", "_inpaint_sd_xl"),
    "FLUX.1": ("", "_img2img", "_inpaint", "_fill", "_kontext"),
    "PixArt": ("alpha", "sigma"),
    "AuraFlow": ("",),
}
SHARED = [
    "picture.py",
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


def row(name: str, reference: Path) -> tuple[int, ...]:
    """For one family: ours and theirs for text to image, for all tasks, and for the denoiser."""
    folder, pattern, denoiser, their_denoiser = FAMILIES[name]
    ours = {path.name: lines(path) for path in (ROOT / "pipelines" / folder).glob("*.py")}
    theirs = [
        lines(reference / "pipelines" / pattern.format(task)) for task in TASKS.get(name, ("", "_img2img", "_inpaint"))
    ]
    other_tasks = ("img2img", "inpaint", "fill", "kontext", "control", "redux")
    text = sum(count for file, count in ours.items() if not file.startswith(other_tasks) and file != "safety.py")
    if name == "ControlNet":
        text = sum(ours[file] for file in ("base.py", "control.py", "pipeline.py"))
    return text, theirs[0], sum(ours.values()), sum(theirs), lines(ROOT / denoiser), lines(reference / their_denoiser)


def main() -> None:
    """Print the table."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise SystemExit("the reference is not installed: pip install diffusers==0.42.1")
    reference = Path(spec.origin).parent
    print("lines, ours / the reference's")
    print(f"{'family':<22}{'text to image':>16}{'all tasks':>16}{'denoiser':>16}")
    for name in FAMILIES:
        counts = row(name, reference)
        cells = [f"{ours} / {theirs}" for ours, theirs in zip(counts[::2], counts[1::2], strict=True)]
        print(f"{name:<22}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"{'shared by all':<22}{sum(lines(ROOT / 'pipelines' / file) for file in SHARED):>16}")


if __name__ == "__main__":
    main()
