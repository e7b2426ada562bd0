"""From the lists of a config to the blocks of a UNet, with everything checked that could not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..layers.embeddings import TimestepEmbedding
from .blocks import (
    AttnDownBlock2D,
    AttnUpBlock2D,
    BlockSpec,
    CrossAttnDownBlock2D,
    CrossAttnUpBlock2D,
    DownBlock2D,
    ResnetDownsampleBlock2D,
    ResnetUpsampleBlock2D,
    UNetMidBlock2D,
    UNetMidBlock2DCrossAttn,
    UpBlock2D,
)
from .skip_blocks import AttnSkipDownBlock2D, AttnSkipUpBlock2D, SkipDownBlock2D, SkipUpBlock2D

DOWN_BLOCKS: dict[str, type[nn.Module]] = {
    block.__name__: block
    for block in (
        DownBlock2D,
        AttnDownBlock2D,
        CrossAttnDownBlock2D,
        ResnetDownsampleBlock2D,
        SkipDownBlock2D,
        AttnSkipDownBlock2D,
    )
}
UP_BLOCKS: dict[str, type[nn.Module]] = {
    block.__name__: block
    for block in (
        UpBlock2D,
        AttnUpBlock2D,
        CrossAttnUpBlock2D,
        ResnetUpsampleBlock2D,
        SkipUpBlock2D,
        AttnSkipUpBlock2D,
    )
}


def per_block(name: str, value: Any, count: int) -> list[Any]:
    """One value for each of `count` blocks: a list must have that many, anything else is repeated.

    Raises:
        ValueError: if the list has another length. The message names both.
    """
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}={value!r} has {len(value)} entries, but there are {count} down_block_types")
    return list(value)


def check_block_types(
    down: Sequence[str], up: Sequence[str] | None, supported: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Refuse unknown block types, and lists of unequal length.

    Args:
        down: `down_block_types`.
        up: `up_block_types`; None for a model without.
        supported: the names that this model takes, as {"down": ..., "up": ...}; all by default.
    """
    tables = supported or {"down": list(DOWN_BLOCKS), "up": list(UP_BLOCKS)}
    for side, kinds in (("down", down), ("up", up or ())):
        for kind in kinds:
            if kind not in tables[side]:
                raise ValueError(f"{side}_block_types has {kind!r}, which is not supported; choose {tables[side]}")
    if up is not None and len(up) != len(down):
        raise ValueError(f"down_block_types has {len(down)} entries and up_block_types has {len(up)}; they must match")


def build_down_blocks(
    kinds: Sequence[str], channels: Sequence[int], common: Mapping[str, Any], varying: Mapping[str, Sequence[Any]]
) -> nn.ModuleList:
    """The down blocks: all but the last halve height and width.

    Args:
        kinds: their types.
        channels: their channels.
        common: entries of `BlockSpec` that are the same for all.
        varying: entries with one value a block.
    """
    blocks = nn.ModuleList()
    for index, kind in enumerate(kinds):
        spec = BlockSpec(
            in_channels=channels[max(index - 1, 0)],
            out_channels=channels[index],
            resample=index < len(kinds) - 1,
            **common,
            **{name: values[index] for name, values in varying.items()},
        )
        blocks.append(DOWN_BLOCKS[kind](spec))
    return blocks


def build_up_blocks(
    kinds: Sequence[str], channels: Sequence[int], common: Mapping[str, Any], varying: Mapping[str, Sequence[Any]]
) -> nn.ModuleList:
    """The up blocks: all but the last double height and width, and each has a layer more than its down block.

    `channels` and `varying` are in the order of the up blocks. Each layer takes one skip, the last one of a block
    from the down block outside its own.
    """
    blocks = nn.ModuleList()
    for index, kind in enumerate(kinds):
        out_channels, outside = channels[index], channels[min(index + 1, len(kinds) - 1)]
        entries = {name: values[index] for name, values in varying.items()}
        layers = entries.pop("layers") + 1
        spec = BlockSpec(
            in_channels=channels[max(index - 1, 0)],
            out_channels=out_channels,
            skip_channels=(out_channels,) * (layers - 1) + (outside,),
            layers=layers,
            resample=index < len(kinds) - 1,
            **common,
            **entries,
        )
        blocks.append(UP_BLOCKS[kind](spec))
    return blocks


def build_mid_block(kind: str | None, channels: int, scale: float, entries: Mapping[str, Any]) -> nn.Module | None:
    """The middle of a UNet that attends to text, or None.

    Raises:
        ValueError: for a `kind` that is not supported.
    """
    if kind is None:
        return None
    spec: dict[str, Any] = {**entries, "in_channels": channels, "out_channels": channels, "out_scale": scale}
    if kind == "UNetMidBlock2DCrossAttn":
        return UNetMidBlock2DCrossAttn(BlockSpec(**spec))
    if kind == "UNetMidBlock2D":
        return UNetMidBlock2D(BlockSpec(**{**spec, "layers": 0}), add_attention=False)
    raise ValueError(
        f"mid_block_type={kind!r} is not supported; choose 'UNetMidBlock2DCrossAttn', 'UNetMidBlock2D' or None"
    )


def build_class_embedding(
    kind: str | None, num_classes: int | None, input_dim: int | None, timestep_dim: int, time_dim: int, act_fn: str
) -> nn.Module | None:
    """What makes a vector of `class_labels`, or None where the model takes no labels.

    Args:
        kind: `class_embed_type`: None, "timestep", "identity", "projection" or "simple_projection".
        num_classes: `num_class_embeds`; a table with so many rows if `kind` is None.
        input_dim: `projection_class_embeddings_input_dim`.
        timestep_dim: channels of the projected timestep.
        time_dim: length of the vector.
        act_fn: activation of the timestep embedding.

    Raises:
        ValueError: for another `kind`, or a projection without `input_dim`.
    """
    if kind is None:
        return None if num_classes is None else nn.Embedding(num_classes, time_dim)
    if kind == "timestep":
        return TimestepEmbedding(timestep_dim, time_dim, act_fn=act_fn)
    if kind == "identity":
        return nn.Identity()
    if kind in ("projection", "simple_projection"):
        if input_dim is None:
            raise ValueError(f"class_embed_type={kind!r} needs projection_class_embeddings_input_dim")
        simple = kind == "simple_projection"
        return nn.Linear(input_dim, time_dim) if simple else TimestepEmbedding(input_dim, time_dim)
    raise ValueError(
        f"class_embed_type={kind!r} is not supported; choose None, 'timestep', 'identity', 'projection' or "
        "'simple_projection'"
    )


def check_floats(name: str, value: Tensor) -> None:
    """Refuse what is no batch of pictures or latents.

    Raises:
        TypeError: if `value` is no tensor.
        ValueError: if it has not four axes, or holds no floating-point numbers.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.dim() != 4 or not value.is_floating_point():
        raise ValueError(
            f"{name} must hold floating-point numbers, (batch, channels, height, width); it holds {value.dtype} of the "
            f"shape {tuple(value.shape)}"
        )


def check_labels(labels: Tensor, samples: int, embedding: nn.Module | None) -> None:
    """Refuse class labels that the class embedding cannot take, or whose count is neither 1 nor the batch size."""
    fits = labels.dim() == 0 or len(labels) in (1, samples)
    if isinstance(embedding, nn.Embedding):
        if not fits or labels.dim() > 1 or labels.is_floating_point():
            raise ValueError(
                f"class_labels must be whole numbers, one a sample ({samples}), not {labels.dtype} of the shape "
                f"{tuple(labels.shape)}"
            )
    elif not fits:
        raise ValueError(f"class_labels has {len(labels)} entries for {samples} samples")
    elif isinstance(embedding, nn.Linear) and labels.shape[-1:] != (embedding.in_features,):
        raise ValueError(
            f"class_labels has the shape {tuple(labels.shape)}; this model takes (batch, {embedding.in_features})"
        )
