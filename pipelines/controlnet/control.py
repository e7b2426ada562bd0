"""Steering by pictures: what ControlNets add to a pipeline, whatever family it is of."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from diffusion_core.images import VaeImageProcessor

from ...models.controlnet import ControlNetModel
from ...models.multi_controlnet import MultiControlNetModel
from ..components import unwrap
from ..latents import spread
from ..loop import Steps, check_scale, check_share
from ..picture import Call, PicturePipeline, Tensors


@dataclass
class Control:
    """The arguments of one call that say how it is steered.

    Attributes:
        image: a picture for all prompts or one for each; for several ControlNets a list with such for each of them.
        scale: the strength, or one for each ControlNet.
        guess_mode: steer only the prediction with the prompt, the more the deeper the layer.
        start, end: from which share of the steps to which, from 0 to 1; lists for several ControlNets.
        pixels: the pictures as tensors, once `prepare` was called.
        steps: of the whole way, once they are planned.
    """

    image: Any
    scale: Any
    guess_mode: bool
    start: Any
    end: Any
    pixels: list[torch.Tensor] = field(default_factory=list)
    steps: int = 0

    def check(self, count: int, several: bool) -> None:
        """Refuse what does not go with `count` ControlNets, and bring all to lists with an entry for each.

        Args:
            count: how many there are.
            several: pictures come as a list with an entry for each, even if there is one only.
        """
        if self.image is None:
            raise ValueError("the control picture is missing: pass the one that is to steer, image or control_image")
        names = {
            "scale": "controlnet_conditioning_scale",
            "start": "control_guidance_start",
            "end": "control_guidance_end",
        }
        for key, name in names.items():
            value = getattr(self, key)
            values = list(value) if isinstance(value, list | tuple) else [value] * count
            if len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries for {count} ControlNets: pass one for each")
            for each in values:
                (check_scale if key == "scale" else check_share)(name, each)
            setattr(self, key, values)
        for start, end in zip(self.start, self.end, strict=True):
            if start >= end:
                raise ValueError(f"control_guidance_start={start} must be less than control_guidance_end={end}")
        if several:
            if not isinstance(self.image, list | tuple) or len(self.image) != count:
                raise ValueError(f"{count} ControlNets need a list of {count} control pictures, one for each")
            self.image = list(self.image)
        else:
            self.image = [self.image]

    def plan(self, steps: Steps) -> None:
        """Take note of the whole way, also where the rest of it is left to another model."""
        self.steps = len(steps) + steps.left

    def strengths(self, step: int) -> list[float]:
        """The strength of each ControlNet at a step; 0 outside of its part of the way."""
        begin, end = step / self.steps, (step + 1) / self.steps
        within = [begin >= first and end <= last for first, last in zip(self.start, self.end, strict=True)]
        return [scale if inside else 0.0 for scale, inside in zip(self.scale, within, strict=True)]


class ControlMixin(PicturePipeline):
    """Goes before the base of a family whose `_predict` asks `_residuals` what to add inside the UNet."""

    # What callbacks call the control picture.
    _control_name: ClassVar[str] = "image"

    @staticmethod
    def _net(controlnet: Any) -> Any:
        """One model, from a list of several if need be."""
        return MultiControlNetModel(controlnet) if isinstance(controlnet, list | tuple) else controlnet

    @property
    def control_image_processor(self) -> VaeImageProcessor:
        """Brings control pictures to their size, and to the range from 0 to 1."""
        return VaeImageProcessor(
            vae_scale_factor=self.size_multiple, vae_latent_channels=0, do_convert_rgb=True, do_normalize=False
        )

    def _control_size(self, image: Any, height: int | None, width: int | None) -> tuple[int | None, int | None]:
        """Height and width as asked for; what is not is the control picture's, in multiples that fit."""
        while isinstance(image, list | tuple) and image:
            image = image[0]
        first: Any = image
        if (height is None or width is None) and hasattr(first, "size"):
            found = self.control_image_processor.get_default_height_width(first)
            height, width = found[0] if height is None else height, found[1] if width is None else width
        return height, width

    def _check(self, call: Call) -> int:
        batch = super()._check(call)
        net = unwrap(self.controlnet)
        if not isinstance(net, ControlNetModel | MultiControlNetModel):
            raise ValueError(f"this call needs a ControlNetModel as controlnet, not {type(net).__name__}")
        several, control = isinstance(net, MultiControlNetModel), call.state["control"]
        nets = net.nets if several else [net]
        control.check(len(nets), several)
        control.guess_mode = bool(control.guess_mode or nets[0].global_pool_conditions)
        return batch

    def _prepare(self, call: Call, batch: int) -> None:
        super()._prepare(call, batch)
        control, task = call.state["control"], call.task
        size = (task.height, task.width)
        for picture in control.image:
            try:
                pixels = self.control_image_processor.preprocess(picture, *size, **task.frame).float()
                control.pixels.append(spread(pixels, task.count, batch, "the control picture"))
            except (TypeError, ValueError) as error:
                raise type(error)(f"the control picture cannot be used: {error}") from error

    def _plan(self, call: Call) -> Steps:
        steps = super()._plan(call)
        call.state["control"].plan(steps)
        return steps

    def _constants(self, call: Call, tensors: Tensors) -> Tensors:
        """The control pictures, as often as the UNet's input."""
        control, found = call.state["control"], super()._constants(call, tensors)
        twice = self.do_classifier_free_guidance and not control.guess_mode
        placed = [each.to(self._execution_device, self.controlnet.dtype) for each in control.pixels]
        pictures = [torch.cat([each, each]) if twice else each for each in placed]
        several = isinstance(unwrap(self.controlnet), MultiControlNetModel)
        return {**found, self._control_name: pictures if several else pictures[0]}

    def _residuals(
        self, index: int, timestep: torch.Tensor, sample: torch.Tensor, conditions: Tensors, tensors: Tensors
    ) -> Tensors:
        """What the ControlNets add to the UNet's features, as arguments for the UNet."""
        control = self.control
        strengths = control.strengths(index)
        if not any(strengths):
            return {}
        alone = control.guess_mode and self.do_classifier_free_guidance
        sample = sample[:, : self.latent_channels]
        given = {name: value for name, value in conditions.items() if name != "timestep_cond"}
        if alone:
            sample, given = sample.chunk(2)[1], _with_prompt(given)
        several = isinstance(unwrap(self.controlnet), MultiControlNetModel)
        pictures = tensors[self._control_name] if several else [tensors[self._control_name]]
        # A callback that ends guidance halves the batch; the pictures of both halves are the same.
        pictures = [each[-len(sample) :] for each in pictures]
        downs, mid = self.controlnet(
            sample,
            timestep,
            **given,
            controlnet_cond=pictures if several else pictures[0],
            conditioning_scale=strengths if several else strengths[0],
            guess_mode=control.guess_mode,
            return_dict=False,
        )
        if alone:
            downs, mid = [_behind_zeros(each) for each in downs], _behind_zeros(mid)
        return {"down_block_additional_residuals": downs, "mid_block_additional_residual": mid}


def _with_prompt(conditions: Tensors) -> Tensors:
    """The half of the conditions that belongs to the prediction with the prompt."""
    return {
        name: _with_prompt(value) if isinstance(value, dict) else value.chunk(2)[1]
        for name, value in conditions.items()
    }


def _behind_zeros(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(values), values])
