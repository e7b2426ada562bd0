"""Every family of pipelines in tiny: one entry of data a family, which the battery and the parity tests go through."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

import diffusion_core

from . import cogvideo, flux, hunyuan, ltx, masked, qwen, sd, sd3, steered, tiny, wan, zimage

PROMPTS = ["a red cat", "a dog"]
NEGATIVES = ["ugly", "blue"]
# Class and config.
Scheduled = tuple[str, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Family:
    """One family.

    Attributes:
        name: for messages.
        parts: makes the components, from one library or the other; the same names, configs and sizes in both.
        tasks: the pipeline class by task: "text", "image" and "inpaint", and "video" for films. Tests about the family
            take the first.
        embed: encodes prompts and negative prompts, by a pipeline, to the arguments that take their place in a call.
        schedulers: class and config of two schedulers, for parity in all tasks.
        text_schedulers: more of them, which the reference takes for text to image only.
        settings: scalar settings of `__init__`, by task where they differ.
        arguments: of every call, besides those that all families take.
        guidance: the name of the scale, and values with and without a second prediction.
        negative: whether `negative_prompt` works with guidance.
        latents: the shape of one picture's latents as a call takes them, for 32 x 32 pixels.
        frames: of the films that the calls make; None for pictures.
        multiple: sizes are multiples of this.
        denoiser: the component that predicts.
        callback_tensors: what callbacks are offered by all tasks.
        task_arguments: of the calls of one task, besides.
        graphs: of the compiled denoiser for all steps of a call with guidance; 2 where both predictions are made apart.
        beside: more components that are called in each step.
        absent: arguments of the reference that are not in the signature, on purpose.
    """

    name: str
    parts: Callable[[ModuleType], dict[str, Any]]
    tasks: Mapping[str, str]
    embed: Callable[[Any, list[str], list[str]], dict[str, Any]]
    schedulers: tuple[Scheduled, Scheduled]
    text_schedulers: tuple[Scheduled, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    guidance: tuple[str, float, float] = ("guidance_scale", 4.0, 1.0)
    negative: bool = True
    latents: tuple[int, ...] = (4, 8, 8)
    frames: int | None = None
    multiple: int = 4
    denoiser: str = "unet"
    callback_tensors: tuple[str, ...] = ("latents", "prompt_embeds")
    graphs: int = 1
    beside: tuple[str, ...] = ()
    task_arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    absent: frozenset[str] = frozenset({"ip_adapter_image", "ip_adapter_image_embeds", "cross_attention_kwargs"})

    def __str__(self) -> str:
        return self.name

    @property
    def main(self) -> str:
        """The task of tests that are about the family."""
        return next(iter(self.tasks))

    @property
    def repeats(self) -> str:
        """The argument for several results of a prompt."""
        return "num_images_per_prompt" if self.frames is None else "num_videos_per_prompt"

    @property
    def starts_from(self) -> Mapping[str, str]:
        """The argument that a task starts from."""
        return {"image": "image", "inpaint": "image", "video": "video"}

    def takes_strength(self, task: str) -> bool:
        """Whether a task goes only a part of the way to noise. A film that starts with a picture goes all the way."""
        return task in ("inpaint", "video") or (task == "image" and self.frames is None)

    def shape(self, count: int = 1, height: int = 32, width: int = 32) -> tuple[int, ...]:
        """The shape of the result as a tensor."""
        return (count, *([] if self.frames is None else [self.frames]), 3, height, width)

    def scheduled(self, task: str) -> list[Scheduled]:
        """The schedulers of a task."""
        return [*self.schedulers, *(self.text_schedulers if task == "text" else ())]

    def call(self, task: str, count: int = 1, **changes: Any) -> dict[str, Any]:
        """The arguments of a short call for `count` prompts."""
        found: dict[str, Any] = {
            "prompt": PROMPTS[:count],
            "num_inference_steps": 2,
            "output_type": "pt",
            "generator": [sd.seeded(index) for index in range(count)],
            self.guidance[0]: self.guidance[1],
            **({"negative_prompt": NEGATIVES[:count]} if self.negative else {}),
            **self.arguments,
        }
        if self.frames is not None and task != "video":
            found["num_frames"] = self.frames
        if task in ("image", "inpaint"):
            found["image"] = sd.image(32, 32)
        if task == "image" and self.frames is not None:
            # The reference takes one for each prompt, and no other number.
            found["image"] = [sd.image(32, 32, seed=index) for index in range(count)]
        if task == "video":
            found["video"] = [sd.image(32, 32, seed=index) for index in range(self.frames or 0)]
        if self.takes_strength(task):
            found |= {"strength": 0.8, "num_inference_steps": 3}
        if task == "inpaint":
            found["mask_image"] = sd.mask(32, 32)
        found |= {**self.task_arguments.get(task, {}), **changes}
        if "max_area" in found:
            found["max_area"] = found["height"] * found["width"]
        return found


@cache
def _parts(family: Family, library: ModuleType) -> dict[str, Any]:
    return family.parts(library)


@cache
def _matched(family: Family) -> dict[str, Any]:
    """Our components with the reference's weights."""
    ours, theirs = dict(family.parts(diffusion_core)), _parts(family, diffusers)
    for name, part in ours.items():
        if isinstance(part, torch.nn.Module):
            part.load_state_dict(theirs[name].state_dict())
    return ours


def pipe(family: Family, task: str | None = None, **changes: Any) -> Any:
    """Our pipeline, of components that all tests share; `changes` replace some."""
    return _made(diffusion_core, family, task or family.main, {**_parts(family, diffusion_core), **changes})


def pair(family: Family, task: str | None = None, scheduler: int = 0, **changes: Callable[[ModuleType], Any]) -> Any:
    """Our pipeline, and the reference's with the same weights; `changes` make components of a library."""
    found, task = [], task or family.main
    for library, parts in ((diffusion_core, _matched(family)), (diffusers, _parts(family, diffusers))):
        name, config = family.scheduled(task)[scheduler]
        replaced = {key: make(library) for key, make in changes.items()}
        scheduled = {"scheduler": getattr(library, name)(**config)}
        found.append(_made(library, family, task, {**parts, **scheduled, **replaced}))
    for key in changes:
        ours, theirs = (getattr(each, key) for each in found)
        if isinstance(ours, torch.nn.Module):
            ours.load_state_dict(theirs.state_dict())
    return tuple(found)


def _made(library: ModuleType, family: Family, task: str, parts: dict[str, Any]) -> Any:
    made = getattr(library, family.tasks[task])(**parts, **family.settings)
    made.set_progress_bar_config(disable=True)
    return made


@cache
def saved(family: Family, task: str | None = None) -> Path:
    """A folder with our pipeline."""
    folder = Path(mkdtemp(prefix=f"{family.name}-"))
    pipe(family, task).save_pretrained(folder)
    return folder


def loaded(family: Family, task: str | None = None) -> Any:
    """Our pipeline from that folder, with components of its own."""
    made = diffusion_core.Pipeline.from_pretrained(saved(family, task))
    made.set_progress_bar_config(disable=True)
    return made


# ---- Stable Diffusion 1 and 2 ----

VP = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def tokenizer() -> Any:
    return tiny.tokenizer(Path(mkdtemp(prefix="tokenizer-")))


def sd_parts(library: ModuleType) -> dict[str, Any]:
    return {
        "vae": tiny.vae(library),
        "text_encoder": tiny.text_encoder(),
        "tokenizer": tokenizer(),
        "unet": tiny.unet(library),
        "scheduler": tiny.scheduler(library),
        "safety_checker": None,
        "feature_extractor": None,
    }


def sd_embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    embeds = made.encode_prompt(prompts, None, 1, True, negative_prompt=negatives)
    return dict(zip(("prompt_embeds", "negative_prompt_embeds"), embeds, strict=True))


SD = Family(
    "stable-diffusion",
    sd_parts,
    {
        "text": "StableDiffusionPipeline",
        "image": "StableDiffusionImg2ImgPipeline",
        "inpaint": "StableDiffusionInpaintPipeline",
    },
    sd_embed,
    (("DDIMScheduler", {**VP, "clip_sample": False}), ("EulerDiscreteScheduler", VP)),
    settings={"requires_safety_checker": False},
)


def sd_inpaint_parts(library: ModuleType) -> dict[str, Any]:
    return {**sd_parts(library), "unet": tiny.unet(library, in_channels=9)}


# A UNet that sees the mask and what surrounds it.
SD_INPAINT = replace(
    SD,
    name="stable-diffusion-inpainting",
    parts=sd_inpaint_parts,
    tasks={"inpaint": "StableDiffusionInpaintPipeline"},
)


# ---- Stable Diffusion XL ----


def projecting_encoder(size: int = 32, seed: int = 1, **changes: Any) -> Any:
    """A CLIP text encoder with a projection, for the tokenizer of `tiny`."""
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=194,
        hidden_size=size,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=size,
        bos_token_id=192,
        eos_token_id=193,
        hidden_act="gelu",
        **changes,
    )
    return CLIPTextModelWithProjection(config).eval()


def xl_unet(library: ModuleType, numbers: int = 6, text: int = 64, **changes: Any) -> Any:
    """A UNet that is told sizes and a pooled prompt of width 32, and takes text of width `text`."""
    config = {
        "cross_attention_dim": text,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 8 * numbers,
        "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
        "attention_head_dim": (2, 4),
    }
    return tiny.unet(library, **{**config, **changes})


def xl_parts(library: ModuleType) -> dict[str, Any]:
    return {
        "vae": tiny.vae(library),
        "text_encoder": tiny.text_encoder(),
        "text_encoder_2": projecting_encoder(),
        "tokenizer": tokenizer(),
        "tokenizer_2": tokenizer(),
        "unet": xl_unet(library),
        "scheduler": library.EulerDiscreteScheduler(**VP),
    }


def xl_embed(made: Any, prompts: list[str], negatives: list[str]) -> dict[str, Any]:
    embeds = made.encode_prompt(prompts, negative_prompt=negatives)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return dict(zip(names, embeds, strict=True))


SDXL = Family(
    "stable-diffusion-xl",
    xl_parts,
    {
        "text": "StableDiffusionXLPipeline",
        "image": "StableDiffusionXLImg2ImgPipeline",
        "inpaint": "StableDiffusionXLInpaintPipeline",
    },
    xl_embed,
    (("EulerDiscreteScheduler", VP), ("DDIMScheduler", {**VP, "clip_sample": False})),
    callback_tensors=("latents", "prompt_embeds", "add_text_embeds", "add_time_ids"),
)


def refiner_parts(library: ModuleType) -> dict[str, Any]:
    unet = xl_unet(library, numbers=5, text=32)
    return {**xl_parts(library), "text_encoder": None, "tokenizer": None, "unet": unet}


REFINER = replace(
    SDXL,
    name="stable-diffusion-xl-refiner",
    parts=refiner_parts,
    tasks={"inpaint": "StableDiffusionXLInpaintPipeline", "image": "StableDiffusionXLImg2ImgPipeline"},
    settings={"requires_aesthetics_score": True},
)

PIXART = Family(
    "pixart",
    masked.pixart_parts,
    {"text": "PixArtSigmaPipeline"},
    masked.pixart_embed,
    (("DPMSolverMultistepScheduler", masked.BETAS), ("EulerDiscreteScheduler", masked.BETAS)),
    arguments=masked.PIXART_ARGUMENTS,
    absent=frozenset({"kwargs"}),
    multiple=8,
    denoiser="transformer",
    callback_tensors=("latents", "prompt_embeds", "prompt_attention_mask"),
)

# The same with sizes among the conditions, as the checkpoints for 1024 pixels have them.
PIXART_ALPHA = replace(
    PIXART,
    name="pixart-alpha",
    parts=masked.pixart_alpha_parts,
    tasks={"text": "PixArtAlphaPipeline"},
    arguments={**masked.PIXART_ARGUMENTS, "height": 32, "width": 32},
)

FLOW_SOLVER = ("DPMSolverMultistepScheduler", flux.SCHEDULERS["unipc"][1])

AURAFLOW = Family(
    "auraflow",
    masked.auraflow_parts,
    {"text": "AuraFlowPipeline"},
    masked.auraflow_embed,
    (("FlowMatchEulerDiscreteScheduler", {"shift": 1.73}), ("FlowMatchHeunDiscreteScheduler", {"shift": 1.73})),
    text_schedulers=(FLOW_SOLVER,),
    arguments=masked.AURAFLOW_ARGUMENTS,
    multiple=8,
    denoiser="transformer",
)

SD3 = Family(
    "stable-diffusion-3",
    sd3.parts,
    {
        "text": "StableDiffusion3Pipeline",
        "image": "StableDiffusion3Img2ImgPipeline",
        "inpaint": "StableDiffusion3InpaintPipeline",
    },
    sd3.embed,
    (
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
    ),
    text_schedulers=(("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}), FLOW_SOLVER),
    arguments={"max_sequence_length": 20},
    # Two steps of three. Pictures are brought to the size of the call, whatever theirs is.
    task_arguments={"image": {"strength": 0.6, "height": 32, "width": 32}, "inpaint": {"strength": 0.6}},
    latents=(16, 8, 8),
    multiple=8,
    denoiser="transformer",
    absent=frozenset(),
)

FLUX = Family(
    "flux",
    flux.parts,
    {"text": "FluxPipeline", "image": "FluxImg2ImgPipeline", "inpaint": "FluxInpaintPipeline"},
    flux.embed,
    # Those of dev and of schnell. The reference takes no other class but for text.
    (flux.SCHEDULERS["dynamic"], flux.SCHEDULERS["static"]),
    text_schedulers=(flux.SCHEDULERS["unipc"],),
    arguments={"max_sequence_length": 20, "height": 32, "width": 32},
    guidance=("true_cfg_scale", 3.0, 1.0),
    latents=(64, 16),
    denoiser="transformer",
    # Two of three steps, as this family rounds up.
    task_arguments={"image": {"strength": 0.6}, "inpaint": {"strength": 0.6}},
    absent=frozenset(),
)

# What the other models of the family are shown beside noise.
FLUX_FILL = replace(
    FLUX,
    name="flux-fill",
    parts=flux.fill_parts,
    tasks={"inpaint": "FluxFillPipeline"},
    guidance=("guidance_scale", 30.0, 1.0),
    negative=False,
)
FLUX_KONTEXT = replace(
    FLUX,
    name="flux-kontext",
    tasks={"text": "FluxKontextPipeline"},
    text_schedulers=(),
    arguments={**FLUX.arguments, "image": sd.image(32, 32), "_auto_resize": False, "max_area": 32 * 32},
)
FLUX_CONTROL = replace(
    FLUX,
    name="flux-control",
    parts=flux.control_parts,
    tasks={"text": "FluxControlPipeline"},
    text_schedulers=(),
    arguments={**FLUX.arguments, "control_image": sd.image(32, 32, seed=9)},
    guidance=("guidance_scale", 10.0, 1.0),
    negative=False,
)
FLUX_CONTROLNET = replace(
    FLUX_CONTROL,
    name="flux-controlnet",
    parts=flux.controlnet_parts,
    tasks={"text": "FluxControlNetPipeline"},
    guidance=FLUX.guidance,
    negative=True,
    beside=("controlnet",),
)

QWEN = Family(
    "qwen-image",
    qwen.parts,
    {"text": "QwenImagePipeline"},
    qwen.embed,
    (("FlowMatchEulerDiscreteScheduler", qwen.SCHEDULER), flux.SCHEDULERS["unipc"]),
    arguments={"height": 32, "width": 32},
    guidance=("true_cfg_scale", 3.0, 1.0),
    latents=(16, 16),
    multiple=8,
    denoiser="transformer",
    # The prompt and the negative prompt have lengths of their own, and are predicted apart.
    graphs=2,
)

ZIMAGE = Family(
    "z-image",
    zimage.parts,
    {"text": "ZImagePipeline"},
    zimage.embed,
    (
        ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    ),
    arguments={"height": 32, "width": 32},
    guidance=("guidance_scale", 4.0, 0.0),
    multiple=8,
    denoiser="transformer",
    # Those of the prompts are lists.
    callback_tensors=("latents",),
)

# ---- ControlNet ----


def sd_steered_parts(library: ModuleType) -> dict[str, Any]:
    parts = sd_parts(library)
    return {**parts, "controlnet": steered.controlnet(library, parts["unet"])}


def xl_steered_parts(library: ModuleType) -> dict[str, Any]:
    parts = xl_parts(library)
    return {**parts, "controlnet": steered.controlnet(library, parts["unet"])}


CONTROLNET = replace(
    SD,
    name="controlnet",
    parts=sd_steered_parts,
    tasks={
        "text": "StableDiffusionControlNetPipeline",
        "image": "StableDiffusionControlNetImg2ImgPipeline",
        "inpaint": "StableDiffusionControlNetInpaintPipeline",
    },
    task_arguments=steered.pictures(),
    beside=("controlnet",),
)

CONTROLNET_XL = replace(
    SDXL,
    name="controlnet-xl",
    parts=xl_steered_parts,
    tasks={
        "text": "StableDiffusionXLControlNetPipeline",
        "image": "StableDiffusionXLControlNetImg2ImgPipeline",
        "inpaint": "StableDiffusionXLControlNetInpaintPipeline",
    },
    task_arguments=steered.pictures(),
    beside=("controlnet",),
)

# ---- Films ----

COGVIDEOX = Family(
    "cogvideox",
    cogvideo.parts,
    {"text": "CogVideoXPipeline", "video": "CogVideoXVideoToVideoPipeline"},
    cogvideo.embed,
    cogvideo.SCHEDULERS,
    arguments={"max_sequence_length": cogvideo.LENGTH, "height": 32, "width": 32},
    latents=(3, 4, 8, 8),
    frames=9,
    multiple=8,
    denoiser="transformer",
    callback_tensors=("latents", "prompt_embeds", "negative_prompt_embeds"),
    absent=frozenset(),
)
# Version 1.5, whose patches have two latents along time: one more than 9 frames need comes before them.
COGVIDEOX_IMAGE = replace(
    COGVIDEOX,
    name="cogvideox-image",
    parts=cogvideo.image_15_parts,
    tasks={"image": "CogVideoXImageToVideoPipeline"},
    latents=(4, 4, 8, 8),
)

LTX = Family(
    "ltx",
    ltx.parts,
    {"text": "LTXPipeline", "image": "LTXImageToVideoPipeline"},
    ltx.embed,
    ltx.SCHEDULERS,
    text_schedulers=(flux.SCHEDULERS["unipc"],),
    arguments={"max_sequence_length": ltx.LENGTH, "height": 32, "width": 32},
    latents=(48, 8),
    frames=9,
    multiple=8,
    denoiser="transformer",
    callback_tensors=("latents", "prompt_embeds", "negative_prompt_embeds"),
    absent=frozenset(),
)
# With a decoder that takes the last step.
LTX_TIMED = replace(
    LTX,
    name="ltx-timed",
    parts=ltx.timed_parts,
    text_schedulers=(),
    arguments={**LTX.arguments, "decode_timestep": 0.05, "decode_noise_scale": 0.025},
)

WAN = Family(
    "wan",
    wan.parts,
    {"text": "WanPipeline", "video": "WanVideoToVideoPipeline"},
    wan.embed,
    wan.SCHEDULERS,
    arguments={"max_sequence_length": wan.LENGTH, "height": 32, "width": 32},
    latents=(4, 3, 8, 8),
    frames=9,
    multiple=8,
    denoiser="transformer",
    callback_tensors=("latents", "prompt_embeds", "negative_prompt_embeds"),
    absent=frozenset(),
)
# Two transformers, of which the first takes the first step.
WAN_TWO = replace(
    WAN,
    name="wan-two",
    parts=wan.two_parts,
    tasks={"text": "WanPipeline"},
    settings={"boundary_ratio": 0.9},
)
# Pictures seen through CLIP, which the reference tells from 512 tokens of text.
WAN_IMAGE = replace(
    WAN,
    name="wan-image",
    parts=wan.image_parts,
    tasks={"image": "WanImageToVideoPipeline"},
    embed=wan.embed_long,
    arguments={**WAN.arguments, "max_sequence_length": 512},
    # The reference takes a single picture.
    task_arguments={"image": {"image": sd.image(32, 32)}},
)
# A first frame that is a part of the film, and an autoencoder with patches of pixels.
WAN_TIMED = replace(
    WAN,
    name="wan-timed",
    parts=wan.timed_parts,
    tasks={"image": "WanImageToVideoPipeline"},
    settings={"expand_timesteps": True},
    task_arguments={"image": {"image": sd.image(32, 32)}},
    latents=(4, 3, 4, 4),
    multiple=16,
)

HUNYUAN_VIDEO = Family(
    "hunyuan-video",
    hunyuan.parts,
    {"text": "HunyuanVideoPipeline"},
    hunyuan.embed,
    hunyuan.SCHEDULERS,
    text_schedulers=(flux.SCHEDULERS["unipc"],),
    arguments={
        "height": 32,
        "width": 32,
        "max_sequence_length": hunyuan.LENGTH,
        "prompt_template": hunyuan.TEMPLATE,
    },
    guidance=("true_cfg_scale", 3.0, 1.0),
    latents=(4, 3, 8, 8),
    frames=9,
    multiple=8,
    denoiser="transformer",
    absent=frozenset(),
)

# A new family is an entry here.
FAMILIES = [
    SD,
    SD_INPAINT,
    SDXL,
    REFINER,
    CONTROLNET,
    CONTROLNET_XL,
    PIXART,
    PIXART_ALPHA,
    AURAFLOW,
    SD3,
    FLUX,
    FLUX_FILL,
    FLUX_KONTEXT,
    FLUX_CONTROL,
    FLUX_CONTROLNET,
    QWEN,
    ZIMAGE,
    COGVIDEOX,
    COGVIDEOX_IMAGE,
    LTX,
    LTX_TIMED,
    WAN,
    WAN_TWO,
    WAN_IMAGE,
    WAN_TIMED,
    HUNYUAN_VIDEO,
]
CASES = [(family, task) for family in FAMILIES for task in family.tasks]
