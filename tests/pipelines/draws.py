"""Random calls of pipelines, for both libraries alike: which pipeline, which scheduler, which arguments.

What the reference does wrong on purpose or by accident (docs/differences.md) is not drawn; each place says so.
"""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

from . import sd

PIPELINES = {
    "text": "StableDiffusionPipeline",
    "image": "StableDiffusionImg2ImgPipeline",
    "inpaint": "StableDiffusionInpaintPipeline",
    "inpaint with 9 channels": "StableDiffusionInpaintPipeline",
    "DDPM": "DDPMPipeline",
    "DDIM": "DDIMPipeline",
}
SCHEDULERS = [
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
]
WORDS = ["a", "cat,", "red;", "CAT", "on", "the", "mat", "123", "((dog))", "très", "joli", "été", "画", "émile"]
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@dataclass
class Draw:
    """One call.

    Attributes:
        kind: a key of `PIPELINES`.
        scheduler: its class.
        config: its arguments.
        arguments: those of the call, but the two below.
        seeds: of the generator, or of a list of generators.
        callback: a key of `CALLBACKS`.
    """

    kind: str
    scheduler: str
    config: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    seeds: int | list[int] = 0
    callback: str | None = None

    def __str__(self) -> str:
        shown = {key: tuple(value.shape) if torch.is_tensor(value) else value for key, value in self.arguments.items()}
        return f"{self.scheduler}({self.config}), seeds {self.seeds}, callback {self.callback!r}, {shown}"

    def made_for_call(self) -> dict[str, Any]:
        """The arguments, with tensors, lists and generators of their own: a call may change either."""
        arguments = {key: value.clone() if torch.is_tensor(value) else value for key, value in self.arguments.items()}
        arguments = {key: [*value] if isinstance(value, list) else value for key, value in arguments.items()}
        listed = isinstance(self.seeds, list)
        arguments["generator"] = [sd.seeded(seed) for seed in self.seeds] if listed else sd.seeded(self.seeds)
        return {**arguments, **(CALLBACKS[self.callback] if self.callback else {})}


def draw(kind: str, seed: int) -> Draw:
    """The call of number `seed`."""
    luck = random.Random(f"{kind}-{seed}")
    if kind in ("DDPM", "DDIM"):
        return _unconditional(kind, luck)
    scheduler, config = _scheduler(luck)
    made = Draw(kind, scheduler, config)
    total = _prompts(made, luck)
    _schedule(made, luck)
    if kind == "text":
        _size(made.arguments, luck, total)
        made.arguments["guidance_rescale"] = luck.choice([0.0, 0.0, 0.3, 0.7])
    else:
        _pictures(made, luck, total)
    return made


def _unconditional(kind: str, luck: random.Random) -> Draw:
    config = {"clip_sample": luck.random() < 0.5, "timestep_spacing": luck.choice(["leading", "linspace", "trailing"])}
    count = luck.choice([1, 2, 3])
    arguments = {"batch_size": count, "num_inference_steps": luck.choice([1, 2, 5]), "output_type": "np"}
    if kind == "DDIM":
        arguments |= {"eta": luck.choice([0.0, 0.4, 1.0]), "use_clipped_model_output": luck.choice([None, True, False])}
    seeds = luck.choice([luck.randrange(99), [luck.randrange(99) for _ in range(count)]])
    return Draw(kind, luck.choice(["DDPMScheduler", "DDIMScheduler"]), config, arguments, seeds)


def _scheduler(luck: random.Random) -> tuple[str, dict[str, Any]]:
    name = luck.choice(SCHEDULERS)
    known = inspect.signature(getattr(diffusers, name).__init__).parameters
    config: dict[str, Any] = dict(BETAS)
    if "steps_offset" in known:
        config["steps_offset"] = 1
    if "timestep_spacing" in known and name not in ("LCMScheduler", "TCDScheduler") and luck.random() < 0.5:
        config["timestep_spacing"] = luck.choice(["leading", "linspace", "trailing"])
    if "prediction_type" in known and luck.random() < 0.4:
        config["prediction_type"] = "v_prediction"
    # "The last step of a solver always does something"
    if "use_karras_sigmas" in known and name != "DEISMultistepScheduler" and luck.random() < 0.3:
        config["use_karras_sigmas"] = True
    if name in ("DDIMScheduler", "DDPMScheduler", "LCMScheduler"):
        config["clip_sample"] = False
    if name == "DDIMScheduler":
        config["set_alpha_to_one"] = luck.random() < 0.5
    if name == "PNDMScheduler":
        config["skip_prk_steps"] = True
    return name, config


def _text(luck: random.Random) -> str:
    return " ".join(luck.choice(WORDS) for _ in range(luck.choice([0, 1, 3, 8, 30])))


def _prompts(made: Draw, luck: random.Random) -> int:
    """Prompts and what goes with them; returns how many pictures are drawn."""
    count, images = luck.choice([1, 1, 2, 3]), luck.choice([1, 1, 2])
    alone = count == 1 and luck.random() < 0.6
    texts = [_text(luck) for _ in range(count)]
    others = [_text(luck) for _ in range(count)]
    made.arguments |= {
        "prompt": texts[0] if alone else texts,
        "negative_prompt": luck.choice([None, others[0] if alone else others]),
        "num_images_per_prompt": images,
        "guidance_scale": luck.choice([0.0, 0.5, 1.0, 3.0, 7.5, 12]),
        "eta": luck.choice([0.0, 0.0, 0.5, 1.0]),
        "clip_skip": luck.choice([None, None, None, 0, 1]),
        "output_type": luck.choice(["pt", "np", "latent", "pil"]),
        "return_dict": luck.random() < 0.5,
    }
    if luck.random() < 0.2:
        tokens, source = luck.choice([77, 20]), torch.Generator().manual_seed(luck.randrange(99))
        embeds = {name: torch.randn(count, tokens, 32, generator=source) for name in ("positive", "negative")}
        made.arguments |= {"prompt": None, "prompt_embeds": embeds["positive"], "negative_prompt": None}
        made.arguments["negative_prompt_embeds"] = embeds["negative"]
    total = count * images
    made.seeds = luck.choice([luck.randrange(99), [luck.randrange(99) for _ in range(total)]])
    made.callback = luck.choice([None, None, *CALLBACKS])
    if made.arguments["guidance_scale"] <= 1 and made.callback == "guidance ends":
        made.callback = None
    return total


def _schedule(made: Draw, luck: random.Random) -> None:
    """How many steps, or which; only some classes of the reference take a list."""
    made.arguments["num_inference_steps"] = luck.choice([1, 2, 3, 5, 7])
    takes = inspect.signature(getattr(diffusers, made.scheduler).set_timesteps).parameters
    plain = not made.config.get("use_karras_sigmas")
    if "timesteps" in takes and plain and luck.random() < 0.2:
        made.arguments["timesteps"] = sorted(luck.sample(range(1, 999), luck.randint(2, 5)), reverse=True)
    elif made.scheduler == "EulerDiscreteScheduler" and plain and luck.random() < 0.3:
        made.arguments["sigmas"] = [9.0, 4.0, 1.5, 0.4, 0.0]


def _size(arguments: dict[str, Any], luck: random.Random, total: int) -> None:
    """Sizes and latents; the reference takes only multiples of 8 pixels, so an odd number of latents comes with
    pictures alone."""
    height, width = 32, 32
    if luck.random() < 0.6:
        height, width = (8 * luck.choice([3, 4, 5]) for _ in range(2))
        arguments |= {"height": height, "width": width}
    if luck.random() < 0.25:
        source = torch.Generator().manual_seed(luck.randrange(99))
        arguments["latents"] = torch.randn(total, 4, height // 4, width // 4, generator=source)


def _pictures(made: Draw, luck: random.Random, total: int) -> None:
    """Pictures, masks and strength."""
    arguments, seed = made.arguments, luck.randrange(99)
    width, height = luck.choice([(36, 40), (32, 32), (50, 44), (33, 27)])
    count = total // arguments["num_images_per_prompt"]
    arguments["strength"] = luck.choice([0.3, 0.5, 0.8, 0.99, 1.0])
    while int(arguments["num_inference_steps"] * arguments["strength"]) < 1:
        arguments["num_inference_steps"] += 1
    if made.scheduler == "LMSDiscreteScheduler":
        arguments["strength"] = 1.0  # "LMS starts right in the middle of a schedule"
    pictures = [sd.image(width, height, seed + index) for index in range(count)]
    # Several pictures and several for each prompt are paired wrongly there.
    several = arguments["num_images_per_prompt"] == 1 and luck.random() < 0.4
    arguments["image"] = pictures if several else pictures[0]
    if not several and luck.random() < 0.3:
        source = torch.Generator().manual_seed(seed)
        arguments["image"] = torch.rand(1, 3, height // 4 * 4, width // 4 * 4, generator=source)
    if made.kind == "image":
        if not several and luck.random() < 0.2:
            arguments["image"] = torch.randn(1, 4, 7, 9, generator=torch.Generator().manual_seed(seed))
        return
    boxes = [(4, 8, 20, 24), (8, 4, 30, 26), (0, 0, width, height)]
    masks = [sd.mask(width, height, luck.choice(boxes)) for _ in range(count)]
    if made.kind == "inpaint":
        if made.scheduler == "KDPM2DiscreteScheduler":
            made.scheduler = "HeunDiscreteScheduler"  # "KDPM2 puts surroundings back at the level of its midpoints"
    else:
        for mask in masks:
            # Something is left of the picture: an even one is all rounding errors to the norms of the tiny autoencoder.
            mask.paste(0, (10, 12, 16, 20))
    arguments["mask_image"] = masks if several and luck.random() < 0.7 else masks[0]
    _size(arguments, luck, total)
    if arguments["strength"] < 1:
        arguments.pop("latents", None)  # "Inpainting with `latents` and `strength` below 1"
    if not several and total > 1 and isinstance(made.seeds, list):
        made.seeds = made.seeds[0]  # "Inpainting with a list of generators draws each picture as if alone"
    if not several and luck.random() < 0.3:
        arguments |= {"image": pictures[0], "output_type": "pil", "padding_mask_crop": luck.choice([0, 2, 8])}


# ---- callbacks ----

Callback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


def _dim(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"latents": tensors["latents"] * 0.9 if step == 1 else tensors["latents"]}


def _end_guidance(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 1:
        pipe._guidance_scale = 0.0
        tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
    return tensors


def _raise_guidance(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    pipe._guidance_scale = pipe.guidance_scale * 1.05
    return tensors


def _stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 1:
        pipe._interrupt = True
    return tensors


CALLBACKS: dict[str, dict[str, Any]] = {
    "latents change": {"callback_on_step_end": _dim, "callback_on_step_end_tensor_inputs": ["latents"]},
    "guidance ends": {
        "callback_on_step_end": _end_guidance,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
    },
    "guidance rises": {"callback_on_step_end": _raise_guidance},
    "the call stops": {"callback_on_step_end": _stop},
}
