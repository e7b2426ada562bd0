"""Pipelines by task: the checkpoint says which family it is of, the class called says what to do with it."""

import os
from typing import Any, ClassVar, NamedTuple

from diffusion_core.errors import ConfigError

from .base import Pipeline
from .components import public
from .loading import read_index


class Family(NamedTuple):
    """The pipeline classes of one family of checkpoints, by task; None where the family has none."""

    name: str
    text_to_image: str | None = None
    image_to_image: str | None = None
    inpainting: str | None = None
    text_to_video: str | None = None
    image_to_video: str | None = None
    video_to_video: str | None = None


# A new family is a line here.
FAMILIES = [
    Family(
        "stable-diffusion",
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
    ),
    Family(
        "controlnet",
        "StableDiffusionControlNetPipeline",
        "StableDiffusionControlNetImg2ImgPipeline",
        "StableDiffusionControlNetInpaintPipeline",
    ),
    Family(
        "stable-diffusion-xl",
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
    ),
    Family(
        "controlnet-xl",
        "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLControlNetImg2ImgPipeline",
        "StableDiffusionXLControlNetInpaintPipeline",
    ),
    Family(
        "stable-diffusion-3",
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    ),
    Family("flux", "FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"),
    Family("flux-control", "FluxControlPipeline"),
    Family("flux-controlnet", "FluxControlNetPipeline"),
    Family("flux-fill", inpainting="FluxFillPipeline"),
    Family("flux-kontext", "FluxKontextPipeline", "FluxKontextPipeline"),
    Family("pixart-alpha", "PixArtAlphaPipeline"),
    Family("pixart-sigma", "PixArtSigmaPipeline"),
    Family("auraflow", "AuraFlowPipeline"),
    Family("qwenimage", "QwenImagePipeline"),
    Family("z-image", "ZImagePipeline"),
    Family(
        "cogvideox",
        text_to_video="CogVideoXPipeline",
        image_to_video="CogVideoXImageToVideoPipeline",
        video_to_video="CogVideoXVideoToVideoPipeline",
    ),
    Family(
        "wan",
        text_to_video="WanPipeline",
        image_to_video="WanImageToVideoPipeline",
        video_to_video="WanVideoToVideoPipeline",
    ),
    Family("ltx", text_to_video="LTXPipeline", image_to_video="LTXImageToVideoPipeline"),
    Family("hunyuan-video", text_to_video="HunyuanVideoPipeline"),
]
# The family that takes over where a ControlNet is given.
STEERED = {"stable-diffusion": "controlnet", "stable-diffusion-xl": "controlnet-xl", "flux": "flux-controlnet"}


class _Auto:
    """Chooses the class of a family that does one task."""

    task: ClassVar[str]

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} is not a pipeline itself; call {name}.from_pretrained(...) or {name}.from_pipe(...)")

    @classmethod
    def from_pretrained(cls, pretrained_model_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Load the pipeline that does this task with a checkpoint; the arguments are `Pipeline.from_pretrained`'s.

        Raises:
            ConfigError: if the checkpoint's family is unknown or has no pipeline for this task.
        """
        source = os.fspath(pretrained_model_or_path)
        names = ("revision", "token", "cache_dir", "force_download", "local_files_only")
        index, hub = read_index(source, {name: kwargs[name] for name in names if name in kwargs})
        found = cls.class_for(index.get("_class_name"), kwargs.get("controlnet") is not None)
        return found.from_pretrained(source, **{**kwargs, **hub})

    @classmethod
    def from_pipe(cls, pipeline: Pipeline, **kwargs: Any) -> Any:
        """The pipeline that does this task with the components of another one, which stays as it is.

        Args:
            pipeline: any pipeline of a known family.
            kwargs: components and settings by name that replace its own.

        Raises:
            ConfigError: if the family is unknown or has no pipeline for this task.
        """
        found = cls.class_for(type(pipeline).__name__, kwargs.get("controlnet") is not None)
        return found.from_pipe(pipeline, **kwargs)

    @classmethod
    def knows(cls, pretrained_model_or_path: str | os.PathLike[str]) -> bool:
        """Whether there is a pipeline that does this task with a checkpoint, as its `model_index.json` says."""
        name = read_index(os.fspath(pretrained_model_or_path), {})[0].get("_class_name")
        family = next((each for each in FAMILIES if name in each[1:]), None)
        return name is not None and family is not None and getattr(family, cls.task) is not None

    @classmethod
    def class_for(cls, pipeline_name: Any, steered: bool = False) -> Any:
        """The class that does this task for the family of the pipeline class `pipeline_name`, steered or not."""
        family = next((each for each in FAMILIES if pipeline_name in each[1:]), None)
        if family is None:
            known = ", ".join(each.name for each in FAMILIES)
            raise ConfigError(f"{cls.__name__} knows no family with a {pipeline_name}; it knows {known}")
        if steered:
            name = STEERED.get(family.name, family.name)
            family = next(each for each in FAMILIES if each.name == name)
        name = getattr(family, cls.task)
        if name is None:
            task = cls.task.replace("_", " ")
            others = ", ".join(each.name for each in FAMILIES if getattr(each, cls.task))
            raise ConfigError(f"{family.name} has no pipeline for {task}; there are such for {others}")
        return public(name)


class AutoPipelineForText2Image(_Auto):
    """Draws a picture from a prompt, with a checkpoint of any known family."""

    task = "text_to_image"


class AutoPipelineForImage2Image(_Auto):
    """Redraws a picture after a prompt, with a checkpoint of any known family."""

    task = "image_to_image"


class AutoPipelineForInpainting(_Auto):
    """Redraws the masked part of a picture, with a checkpoint of any known family."""

    task = "inpainting"


class AutoPipelineForText2Video(_Auto):
    """Makes a film from a prompt, with a checkpoint of any known family."""

    task = "text_to_video"


class AutoPipelineForImage2Video(_Auto):
    """Makes a film that starts with a picture, with a checkpoint of any known family."""

    task = "image_to_video"


class AutoPipelineForVideo2Video(_Auto):
    """Makes a film after another film, with a checkpoint of any known family."""

    task = "video_to_video"
