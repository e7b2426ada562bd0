"""Random calls of the pipelines of `families.py`, for both libraries alike.

What the reference does wrong on purpose or by accident (docs/differences.md) is not drawn; each place says so.
"""

import inspect
import random
from typing import Any

import diffusers
import torch

import diffusion_core

from .draws import Draw
from .families import Family

# Of the call's arguments that more families than one have.
CHOICES: dict[str, list[Any]] = {
    "prompt_2": [None, "a blue dog"],
    "prompt_3": [None, "on the mat"],
    "clip_skip": [None, None, 0, 1],
    "guidance_rescale": [0.0, 0.0, 0.4],
    "eta": [0.0, 0.0, 0.6],
    "max_sequence_length": [8, 16, 20],
    "clean_caption": [False],  # "`clean_caption` keeps what may say what to draw"
    "original_size": [None, (64, 48)],
    "crops_coords_top_left": [(0, 0), (3, 5)],
    "target_size": [None, (40, 32)],
    "aesthetic_score": [6.0, 2.0],
    "negative_aesthetic_score": [2.5, 7.0],
    "controlnet_conditioning_scale": [1.0, 0.4],
    "guess_mode": [False, False, True],
    "control_guidance_start": [0.0, 0.3],
    "control_guidance_end": [1.0, 0.8],
    "skip_guidance_layers": [None, [1]],
    "skip_layer_guidance_stop": [0.2, 0.9],
}
WORDS = ["a", "cat,", "red;", "CAT", "on", "the", "mat", "123", "((dog))", "joli"]


def takes_pictures(family: Family, task: str) -> bool:
    """Whether the pipeline draws pictures, rather than films."""
    call = getattr(diffusion_core, family.tasks[task]).__call__
    return "num_images_per_prompt" in inspect.signature(call).parameters


def draw(family: Family, task: str, seed: int) -> Draw:
    """The call of number `seed`."""
    luck = random.Random(f"{family}-{task}-{seed}")
    taken = inspect.signature(getattr(diffusion_core, family.tasks[task]).__call__).parameters
    scheduler, config = luck.choice(family.scheduled(task))
    made = Draw(task, scheduler, config)
    base = family.call(task)
    made.arguments = {name: value for name, value in base.items() if name not in ("generator", "prompt")}
    total = _prompts(made, family, luck)
    arguments = made.arguments
    for name, values in CHOICES.items():
        if name in taken:
            arguments[name] = luck.choice(values)
    _fitting(made, family, luck, taken)
    _sizes(made, family, task, luck, taken, total)
    arguments["output_type"] = luck.choice(["pt", "np", "latent", "pil"])
    arguments["return_dict"] = luck.random() < 0.5
    if "callback_on_step_end" in inspect.signature(getattr(diffusers, family.tasks[task]).__call__).parameters:
        # That of AuraFlow cannot be stopped.
        stops = [] if family.name == "auraflow" else ["the call stops"]
        made.callback = luck.choice([None, None, "latents change", *stops])
    return made


def _text(luck: random.Random) -> str:
    return " ".join(luck.choice(WORDS) for _ in range(luck.choice([1, 2, 4, 8])))


def _prompts(made: Draw, family: Family, luck: random.Random) -> int:
    count, images = luck.choice([1, 1, 2]), luck.choice([1, 1, 2])
    texts, others = ([_text(luck) for _ in range(count)] for _ in range(2))
    alone = count == 1 and luck.random() < 0.5
    name, on, off = family.guidance
    made.arguments |= {
        "prompt": texts[0] if alone else texts,
        "num_images_per_prompt": images,
        "num_inference_steps": luck.choice([1, 2, 3, 5]),
        name: luck.choice([off, on, on / 2, 1.5]),
    }
    if family.negative:
        # PixArt takes no None there.
        nothing = "" if family.name.startswith("pixart") else None
        made.arguments["negative_prompt"] = luck.choice([nothing, others[0] if alone else others])
    total = count * images
    made.seeds = luck.choice([luck.randrange(99), [luck.randrange(99) for _ in range(total)]])
    return total


def _fitting(made: Draw, family: Family, luck: random.Random, taken: Any) -> None:
    """What goes with several prompts, with this scheduler and with the other arguments."""
    arguments = made.arguments
    prompt = arguments["prompt"]
    for name in ("prompt_2", "prompt_3"):
        if arguments.get(name) is not None and isinstance(prompt, list):
            arguments[name] = [f"{arguments[name]} {index}" for index in range(len(prompt))]
    several = (len(prompt) if isinstance(prompt, list) else 1) * arguments["num_images_per_prompt"] > 1
    if "negative_original_size" in taken and luck.random() < 0.4 and not several:
        # Each alone counts here, also in a batch: "Stable Diffusion XL's negative conditions each count".
        arguments |= {"negative_original_size": (20, 30), "negative_target_size": (30, 40)}
    if made.kind == "text" and "denoising_end" in taken and luck.random() < 0.3:
        arguments |= {"denoising_end": 0.7, "num_inference_steps": 5}
    if family.name.endswith("refiner"):
        arguments["prompt_2"] = None  # the same entry
    if made.kind != "text" and isinstance(made.seeds, list):
        made.seeds = made.seeds[0]  # "Inpainting with a list of generators draws each picture as if alone"
    if made.config.get("shift_terminal"):
        arguments["num_inference_steps"] += 1  # "A single step with `shift_terminal`"
    if "sigmas" in taken and made.scheduler == "FlowMatchEulerDiscreteScheduler" and luck.random() < 0.25:
        arguments["sigmas"] = luck.choice([[1.0, 0.6, 0.2], [0.9, 0.5]])


def _sizes(made: Draw, family: Family, task: str, luck: random.Random, taken: Any, total: int) -> None:
    arguments = made.arguments
    if "strength" in arguments:
        arguments["strength"] = luck.choice([0.4, 0.6, 0.8, 1.0])
        while int(arguments["num_inference_steps"] * arguments["strength"]) < 1:
            arguments["num_inference_steps"] += 1
        if arguments.get("sigmas"):
            arguments["strength"] = 1.0
    if task == "image" or "height" not in taken:
        return
    if luck.random() < 0.6:
        side = max(family.multiple, 8)
        arguments["height"], arguments["width"] = (32 + side * luck.choice([-1, 0, 1]) for _ in range(2))
    if "max_area" in arguments:
        arguments["height"], arguments["width"] = 32, 32
    plain = "height" not in arguments or (arguments["height"], arguments["width"]) == (32, 32)
    if task == "text" and plain and "latents" in taken and luck.random() < 0.25:
        source = torch.Generator().manual_seed(luck.randrange(99))
        arguments["latents"] = torch.randn(total, *family.latents, generator=source)
