"""`MultiControlNetModel` and `FluxMultiControlNetModel`: several ControlNets that steer one model together."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from .base import Model
from .controlnet import ControlNetModel, ControlNetOutput
from .controlnet_flux import FluxControlNetModel, FluxControlNetOutput


class SeveralControlNets(Model):
    """ControlNets whose results are added up (Zhang et al. 2023, section 3.4, "composing multiple ControlNets").

    In a checkpoint each has a folder of its own: `controlnet`, `controlnet_1` and so on.
    """

    _kind: ClassVar[Any]

    nets: Any

    def __init__(self, controlnets: Sequence[Any]) -> None:
        super().__init__()
        if not controlnets or not all(isinstance(each, self._kind) for each in controlnets):
            raise ValueError(f"controlnets must be a list of {self._kind.__name__}, not {controlnets!r}")
        self.nets = nn.ModuleList(controlnets)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], **options: Any
    ) -> None:
        """Save each ControlNet: the first to `save_directory`, the others to folders of that name with a number.

        Args:
            save_directory: for the first.
            options: as for `save_pretrained` of one ControlNet.
        """
        for index, net in enumerate(self.nets):
            cast("Model", net).save_pretrained(_folder(save_directory, index), **options)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_path: str | os.PathLike[str], *, subfolder: str | None = None, **options: Any
    ) -> Self:
        """Load the ControlNets that `save_pretrained` has written.

        Args:
            pretrained_model_path: a local folder.
            subfolder: the folder of the first within it.
            options: as for `from_pretrained` of one ControlNet.

        Raises:
            CheckpointError: if there is none, or one cannot be loaded.
        """
        first = Path(pretrained_model_path, subfolder or "")
        nets = [cls._kind.from_pretrained(first, **options)]
        while _folder(first, len(nets)).is_dir():
            nets.append(cls._kind.from_pretrained(_folder(first, len(nets)), **options))
        return cls(nets)


class MultiControlNetModel(SeveralControlNets):
    """Several ControlNets for a UNet; see `SeveralControlNets`.

    Args:
        controlnets: one or more; any can be given as often as pictures steer by it.

    Raises:
        ValueError: if there is none, or something else among them.
    """

    _kind: ClassVar[Any] = ControlNetModel

    _repeated_blocks: ClassVar[list[str]] = ControlNetModel._repeated_blocks
    _no_split_modules: ClassVar[list[str] | None] = ControlNetModel._no_split_modules
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = (
        ControlNetModel._skip_layerwise_casting_patterns
    )

    def __init__(self, controlnets: Sequence[ControlNetModel]) -> None:
        super().__init__(controlnets)

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
        _check_counts(len(self.nets), controlnet_cond=controlnet_cond, conditioning_scale=conditioning_scale)
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


class FluxMultiControlNetModel(SeveralControlNets):
    """Several ControlNets for a transformer of FLUX.1; see `SeveralControlNets`.

    Args:
        controlnets: one or more; one that knows several kinds of pictures ("union") can stand alone for all of them.

    Raises:
        ValueError: if there is none, or something else among them.
    """

    _kind: ClassVar[Any] = FluxControlNetModel
    _repeated_blocks: ClassVar[list[str]] = FluxControlNetModel._repeated_blocks
    _no_split_modules: ClassVar[list[str] | None] = FluxControlNetModel._no_split_modules
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = (
        FluxControlNetModel._skip_layerwise_casting_patterns
    )

    def __init__(self, controlnets: Sequence[FluxControlNetModel]) -> None:
        super().__init__(controlnets)

    def forward(
        self,
        hidden_states: Tensor,
        controlnet_cond: Sequence[Tensor],
        controlnet_mode: Sequence[Tensor | None],
        conditioning_scale: Sequence[float],
        encoder_hidden_states: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        timestep: Tensor | float | None = None,
        img_ids: Tensor | None = None,
        txt_ids: Tensor | None = None,
        guidance: Tensor | None = None,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> FluxControlNetOutput | tuple[list[Tensor] | None, list[Tensor] | None]:
        """What to add after the transformer's blocks.

        Args:
            controlnet_cond: a picture for each ControlNet; for a single ControlNet any number of pictures.
            controlnet_mode: which kind each picture is of, (B,) or (B, 1); of no account to one that knows one kind.
            conditioning_scale: a strength for each picture; one of strength 0 is not looked at.
            hidden_states, encoder_hidden_states, pooled_projections, timestep, img_ids, txt_ids, guidance,
                joint_attention_kwargs, return_dict: as for `FluxControlNetModel`.

        Raises:
            ValueError: if there are not as many pictures, kinds and strengths as ControlNets.
        """
        nets = list(self.nets) * (len(controlnet_cond) if len(self.nets) == 1 else 1)
        given = {"controlnet_mode": controlnet_mode, "conditioning_scale": conditioning_scale}
        _check_counts(len(nets), controlnet_cond=controlnet_cond, **given)
        shared = {
            "encoder_hidden_states": encoder_hidden_states,
            "pooled_projections": pooled_projections,
            "timestep": timestep,
            "img_ids": img_ids,
            "txt_ids": txt_ids,
            "guidance": guidance,
            "joint_attention_kwargs": joint_attention_kwargs,
            "return_dict": False,
        }
        blocks: list[Tensor] | None = None
        singles: list[Tensor] | None = None
        for index in [index for index, scale in enumerate(conditioning_scale) if scale != 0] or [0]:
            net, mode = nets[index], controlnet_mode[index]
            mode = None if mode is None or net.num_mode is None else mode.reshape(len(mode), 1)
            found = net(hidden_states, controlnet_cond[index], mode, conditioning_scale[index], **shared)
            blocks, singles = _added(blocks, found[0]), _added(singles, found[1])
        return FluxControlNetOutput(blocks, singles) if return_dict else (blocks, singles)


def _added(total: list[Tensor] | None, found: list[Tensor] | None) -> list[Tensor] | None:
    if total is None or found is None:
        return found if total is None else total
    return [old + new for old, new in zip(total, found, strict=True)]


def _check_counts(count: int, **given: Sequence[Any]) -> None:
    for name, values in given.items():
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} ControlNets: pass one for each")


def _folder(first: str | os.PathLike[str], index: int) -> Path:
    path = Path(first)
    return path.with_name(f"{path.name}_{index}") if index else path
