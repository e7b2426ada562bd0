"""`MultiControlNetModel`: several ControlNets that steer one UNet together."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from .base import Model
from .controlnet import ControlNetModel, ControlNetOutput


class MultiControlNetModel(Model):
    """ControlNets whose results are added up (Zhang et al. 2023, section 3.4, "composing multiple ControlNets").

    In a checkpoint each has a folder of its own: `controlnet`, `controlnet_1` and so on.

    Args:
        controlnets: one or more; any can be given as often as pictures steer by it.

    Raises:
        ValueError: if there is none, or something else among them.
    """

    _repeated_blocks: ClassVar[list[str]] = ControlNetModel._repeated_blocks
    _no_split_modules: ClassVar[list[str] | None] = ControlNetModel._no_split_modules
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = (
        ControlNetModel._skip_layerwise_casting_patterns
    )

    def __init__(self, controlnets: Sequence[ControlNetModel]) -> None:
        super().__init__()
        if not controlnets or not all(isinstance(each, ControlNetModel) for each in controlnets):
            raise ValueError(f"controlnets must be a list of ControlNetModel, not {controlnets!r}")
        self.nets = nn.ModuleList(controlnets)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor,
        controlnet_cond: Sequence[Tensor],
        conditioning_scale: Sequence[float],
        class_labels: Tensor | None = None,
        timestep_cond: Tensor | None = None,
        attention_mask: Tensor | None = None,
        added_cond_kwargs: Mapping[str, Tensor] | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        guess_mode: bool = False,
        return_dict: bool = True,
    ) -> ControlNetOutput | tuple[list[Tensor], Tensor]:
        """What to add to the UNet's skips and after its middle.

        Args:
            controlnet_cond: a picture for each ControlNet.
            conditioning_scale: a strength for each; one of strength 0 is not called.
            sample, timestep, encoder_hidden_states, class_labels, timestep_cond, attention_mask, added_cond_kwargs,
                cross_attention_kwargs, guess_mode, return_dict: as for `ControlNetModel`.

        Raises:
            ValueError: if there are not as many pictures and strengths as ControlNets.
        """
        for name, values in (("controlnet_cond", controlnet_cond), ("conditioning_scale", conditioning_scale)):
            if len(values) != len(self.nets):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(self.nets)} ControlNets: pass one for each"
                )
        total: list[Tensor] = []
        used = [index for index, scale in enumerate(conditioning_scale) if scale != 0] or [0]
        for index in used:
            downs, mid = self.nets[index](
                sample,
                timestep,
                encoder_hidden_states,
                controlnet_cond[index],
                conditioning_scale[index],
                class_labels,
                timestep_cond,
                attention_mask,
                added_cond_kwargs,
                cross_attention_kwargs,
                guess_mode,
                return_dict=False,
            )
            found = [*downs, mid]
            total = [old + new for old, new in zip(total, found, strict=True)] if total else found
        *downs, mid = total
        return ControlNetOutput(downs, mid) if return_dict else (downs, mid)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **options: Any
    ) -> None:
        """Save each ControlNet: the first to `save_directory`, the others to folders of that name with a number.

        Args:
            save_directory: for the first.
            options: as for `ControlNetModel.save_pretrained`.
        """
        for index, net in enumerate(self.nets):
            cast("Model", net).save_pretrained(_folder(save_directory, index), **options)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_path: str | os.PathLike[str], *, subfolder: str | None = None, **options: Any
    ) -> "MultiControlNetModel":
        """Load the ControlNets that `save_pretrained` has written.

        Args:
            pretrained_model_path: a local folder.
            subfolder: the folder of the first within it.
            options: as for `ControlNetModel.from_pretrained`.

        Raises:
            CheckpointError: if there is none, or one cannot be loaded.
        """
        first = Path(pretrained_model_path, subfolder or "")
        nets = [ControlNetModel.from_pretrained(first, **options)]
        while _folder(first, len(nets)).is_dir():
            nets.append(ControlNetModel.from_pretrained(_folder(first, len(nets)), **options))
        return cls(nets)


def _folder(first: str | os.PathLike[str], index: int) -> Path:
    path = Path(first)
    return path.with_name(f"{path.name}_{index}") if index else path
