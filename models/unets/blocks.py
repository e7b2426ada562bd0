"""The blocks of two-dimensional UNets: down, middle and up, found by the names that configs use.

Every block is made from one `BlockSpec` and has one call: features, time embedding, then the text for those that
attend to it. Down blocks also return the features that the up blocks take as skips.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.attention import Attention
from ..layers.resnet import Downsample2D, ResnetBlock2D, Upsample2D
from ..layers.transformer import SpatialTransformer
from .freeu import FreeU


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """What a block is made from; each kind of block reads what concerns it.

    Attributes:
        in_channels: channels that come in from the block before.
        out_channels: channels inside and out.
        skip_channels: channels of the skips, one a layer, in the order of use (up blocks).
        layers: number of residual blocks.
        resample: whether the block ends by halving or doubling height and width.
        temb_channels: size of the time embedding.
        groups, eps, act_fn, dropout, time_scale_shift: of the residual blocks.
        time_is_activated: the time embedding has been through the activation, once for all residual blocks.
        skip_time_act, out_scale: of the residual blocks of the `Resnet...` kinds.
        downsample_padding: see `Downsample2D`.
        resample_by: "conv" or "resnet", of the `Attn...` kinds.
        head_dim: channels of a head of the attention over pixels; None makes one head.
        attn_groups: groups of the norm in the attention over pixels, None for no norm.
        heads: heads of the transformers over pixels and text.
        transformer_layers: depth of each of these transformers.
        cross_attention_dim: channels of the text tokens.
        linear_projection, only_cross_attention, upcast_attention: see `SpatialTransformer`.
        image_channels: channels of the picture that runs beside the features (the `Skip...` kinds).
    """

    in_channels: int
    out_channels: int
    skip_channels: tuple[int, ...] = ()
    layers: int = 1
    resample: bool = True
    temb_channels: int
    groups: int | None = 32
    eps: float = 1e-5
    act_fn: str = "silu"
    dropout: float = 0.0
    time_scale_shift: str = "default"
    time_is_activated: bool = False
    skip_time_act: bool = False
    out_scale: float = 1.0
    downsample_padding: int = 1
    resample_by: str = "conv"
    head_dim: int | None = 8
    attn_groups: int | None = 32
    heads: int = 8
    transformer_layers: tuple[int, ...] = (1,)
    cross_attention_dim: int | None = None
    linear_projection: bool = False
    only_cross_attention: bool = False
    upcast_attention: bool | None = False
    image_channels: int = 3

    @property
    def widths(self) -> list[int]:
        """Channels that go into each residual block, skips included."""
        before = [self.in_channels] + [self.out_channels] * (self.layers - 1)
        return [width + skip for width, skip in zip(before, self.skip_channels or (0,) * self.layers, strict=True)]

    def resnet(self, in_channels: int, **changes: Any) -> ResnetBlock2D:
        """A residual block from `in_channels` to `out_channels`."""
        settings: dict[str, Any] = {
            "temb_channels": self.temb_channels,
            "groups": self.groups,
            "eps": self.eps,
            "non_linearity": self.act_fn,
            "dropout": self.dropout,
            "time_embedding_norm": self.time_scale_shift,
            "skip_time_act": self.time_is_activated,
        }
        settings |= changes
        if settings["groups"] is None:
            raise ValueError("norm_num_groups=None works only with the Skip blocks, which choose their groups")
        return ResnetBlock2D(in_channels, self.out_channels, **settings)

    def attention(self, groups: int | None, scale: float = 1.0) -> Attention:
        """Self-attention over the pixels of the features."""
        head_dim = self.out_channels if self.head_dim is None else self.head_dim
        if self.out_channels % head_dim:
            raise ValueError(f"{self.out_channels} channels do not split into heads of attention_head_dim={head_dim}")
        return Attention(
            self.out_channels,
            heads=self.out_channels // head_dim,
            dim_head=head_dim,
            bias=True,
            norm_num_groups=groups,
            eps=self.eps,
            residual_connection=True,
            rescale_output_factor=scale,
        )

    def transformer(self, depth: int) -> SpatialTransformer:
        """A transformer over the pixels of the features that attends to the text."""
        if self.cross_attention_dim is None:
            raise ValueError("cross_attention_dim is needed by blocks that attend to text")
        if self.groups is None:
            raise ValueError("norm_num_groups=None does not work with blocks that attend to text")
        return SpatialTransformer(
            self.out_channels,
            self.heads,
            num_layers=depth,
            cross_attention_dim=self.cross_attention_dim,
            groups=self.groups,
            linear_projection=self.linear_projection,
            only_cross_attention=self.only_cross_attention,
            upcast_attention=self.upcast_attention,
        )

    def transformers(self) -> list[SpatialTransformer]:
        """A transformer for each residual block."""
        depths = self.transformer_layers
        depths = depths * self.layers if len(depths) == 1 else depths
        if len(depths) != self.layers:
            raise ValueError(
                f"transformer_layers_per_block gives {len(depths)} depths to a block of {self.layers} layers"
            )
        return [self.transformer(depth) for depth in depths]


class _Block(nn.Module):
    """What blocks share: residual blocks in a row."""

    has_cross_attention = False
    freeu: FreeU | None = None

    def __init__(self, resnets: Iterable[nn.Module], attentions: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        # The order of registration is the order of the state dict, which the reference fixes.
        if attentions is not None:
            self.attentions = nn.ModuleList(attentions)
        self.resnets = nn.ModuleList(resnets)

    def _end_by_halving(self, spec: BlockSpec, by: str, **changes: Any) -> None:
        """Add what halves height and width, a convolution or a residual block, if the spec says so."""
        self.resample_by, self.downsamplers = by, None
        if spec.resample and by == "resnet":
            self.downsamplers = nn.ModuleList([spec.resnet(spec.out_channels, down=True, **changes)])
        elif spec.resample:
            self.downsamplers = nn.ModuleList([Downsample2D(spec.out_channels, padding=spec.downsample_padding)])

    def _halve(self, hidden_states: Tensor, temb: Tensor, skips: list[Tensor]) -> Tensor:
        """Halve height and width where this block does, and append the result to the skips."""
        if self.downsamplers is not None:
            (downsample,) = self.downsamplers
            by_resnet = self.resample_by == "resnet"
            hidden_states = downsample(hidden_states, temb) if by_resnet else downsample(hidden_states)
            skips.append(hidden_states)
        return hidden_states

    def _end_by_doubling(self, spec: BlockSpec, by: str, **changes: Any) -> None:
        """Add what doubles height and width, a convolution or a residual block, if the spec says so."""
        self.resample_by, self.upsamplers = by, None
        if spec.resample and by == "resnet":
            self.upsamplers = nn.ModuleList([spec.resnet(spec.out_channels, up=True, **changes)])
        elif spec.resample:
            self.upsamplers = nn.ModuleList([Upsample2D(spec.out_channels)])

    def _double(self, hidden_states: Tensor, temb: Tensor, size: Sequence[int] | None) -> Tensor:
        """Double height and width where this block does, or resample to `size`."""
        if self.upsamplers is None:
            return hidden_states
        (upsample,) = self.upsamplers
        return upsample(hidden_states, temb if self.resample_by == "resnet" else size)


class DownBlock2D(_Block):
    """Residual blocks, then a strided convolution."""

    def __init__(self, spec: BlockSpec, resample_by: str = "conv", **changes: Any) -> None:
        super().__init__(spec.resnet(width, **changes) for width in spec.widths)
        self._end_by_halving(spec, resample_by, **changes)

    def forward(self, hidden_states: Tensor, temb: Tensor, *_: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Features (B, in_channels, H, W) to (B, out_channels, H/2, W/2), and the features after each layer."""
        skips = []
        for resnet in self.resnets:
            hidden_states = resnet(hidden_states, temb)
            skips.append(hidden_states)
        return self._halve(hidden_states, temb, skips), skips


class ResnetDownsampleBlock2D(DownBlock2D):
    """Residual blocks, the last of which halves height and width."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(
            spec,
            "resnet",
            skip_time_act=spec.skip_time_act or spec.time_is_activated,
            output_scale_factor=spec.out_scale,
        )


class AttnDownBlock2D(_Block):
    """Residual blocks, each followed by self-attention over pixels, then a convolution or a residual block halves."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(
            [spec.resnet(width) for width in spec.widths],
            [spec.attention(spec.attn_groups) for _ in range(spec.layers)],
        )
        self._end_by_halving(spec, spec.resample_by)

    def forward(self, hidden_states: Tensor, temb: Tensor, *_: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """As `DownBlock2D`."""
        skips = []
        for resnet, attention in zip(self.resnets, self.attentions, strict=True):
            hidden_states = attention(resnet(hidden_states, temb))
            skips.append(hidden_states)
        return self._halve(hidden_states, temb, skips), skips


class CrossAttnDownBlock2D(_Block):
    """Residual blocks, each followed by a transformer that attends to the text, then a strided convolution."""

    has_cross_attention = True

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__([spec.resnet(width) for width in spec.widths], spec.transformers())
        self._end_by_halving(spec, "conv")

    def forward(
        self,
        hidden_states: Tensor,
        temb: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        additional_residuals: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """As `DownBlock2D`; `additional_residuals` are added to the features after the last layer (T2I-Adapter)."""
        skips = []
        for resnet, transformer in zip(self.resnets, self.attentions, strict=True):
            hidden_states = resnet(hidden_states, temb)
            hidden_states = transformer(hidden_states, encoder_hidden_states, attention_mask, encoder_attention_mask)
            skips.append(hidden_states)
        if additional_residuals is not None:
            hidden_states = skips[-1] = hidden_states + additional_residuals
        return self._halve(hidden_states, temb, skips), skips


class UNetMidBlock2D(_Block):
    """A residual block, then pairs of self-attention over pixels and a residual block.

    The scale of the `BlockSpec` divides every residual sum. `add_attention=False` leaves the attention out.
    """

    def __init__(self, spec: BlockSpec, add_attention: bool = True) -> None:
        scale = spec.out_scale
        groups = spec.groups or min(spec.in_channels // 4, 32)
        attentions = [spec.attention(spec.attn_groups, scale) for _ in range(spec.layers)] if add_attention else []
        resnets = [
            spec.resnet(spec.in_channels, groups=groups, output_scale_factor=scale) for _ in range(spec.layers + 1)
        ]
        super().__init__(resnets, attentions)

    def forward(self, hidden_states: Tensor, temb: Tensor, *_: Tensor | None) -> Tensor:
        """Features (B, in_channels, H, W) to the same shape."""
        first, *others = self.resnets
        hidden_states = first(hidden_states, temb)
        attentions = self.attentions or [None] * len(others)
        for attention, resnet in zip(attentions, others, strict=True):
            if attention is not None:
                hidden_states = attention(hidden_states)
            hidden_states = resnet(hidden_states, temb)
        return hidden_states


class UNetMidBlock2DCrossAttn(_Block):
    """A residual block, then pairs of a transformer that attends to the text and a residual block."""

    has_cross_attention = True

    def __init__(self, spec: BlockSpec) -> None:
        changes = {"output_scale_factor": spec.out_scale}
        resnets = [spec.resnet(spec.in_channels, **changes) for _ in range(spec.layers + 1)]
        super().__init__(resnets, spec.transformers())

    def forward(
        self,
        hidden_states: Tensor,
        temb: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Features (B, in_channels, H, W) to the same shape."""
        first, *others = self.resnets
        hidden_states = first(hidden_states, temb)
        for transformer, resnet in zip(self.attentions, others, strict=True):
            hidden_states = transformer(hidden_states, encoder_hidden_states, attention_mask, encoder_attention_mask)
            hidden_states = resnet(hidden_states, temb)
        return hidden_states


def joined(hidden_states: Tensor, skip: Tensor) -> Tensor:
    """Features and a skip of the same size, channels behind one another."""
    if hidden_states.shape[2:] != skip.shape[2:]:
        raise ValueError(
            f"features of {tuple(hidden_states.shape[2:])} pixels meet a skip of {tuple(skip.shape[2:])}: some blocks "
            f"of this model only double, so give a sample whose sides can be halved as often as it has levels"
        )
    return torch.cat([hidden_states, skip], dim=1)


class UpBlock2D(_Block):
    """Residual blocks, each told a skip, then pixels are repeated and convolved."""

    def __init__(self, spec: BlockSpec, resample_by: str = "conv", **changes: Any) -> None:
        super().__init__(spec.resnet(width, **changes) for width in spec.widths)
        self._end_by_doubling(spec, resample_by, **changes)

    def forward(
        self,
        hidden_states: Tensor,
        skips: Sequence[Tensor],
        temb: Tensor,
        size: Sequence[int] | None = None,
        *_: Tensor | None,
    ) -> Tensor:
        """Features to twice the height and width, or to `size`; `skips` has one for each layer, in order of use."""
        for resnet, skip in zip(self.resnets, skips, strict=True):
            if self.freeu is not None:
                hidden_states, skip = self.freeu(hidden_states, skip)
            hidden_states = resnet(joined(hidden_states, skip), temb)
        return self._double(hidden_states, temb, size)


class ResnetUpsampleBlock2D(UpBlock2D):
    """Residual blocks, each told a skip, the last of which doubles height and width: it has no choice of the size."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(
            spec,
            "resnet",
            skip_time_act=spec.skip_time_act or spec.time_is_activated,
            output_scale_factor=spec.out_scale,
        )


class AttnUpBlock2D(_Block):
    """Residual blocks, each told a skip and followed by self-attention over pixels, then height and width double."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(
            [spec.resnet(width) for width in spec.widths],
            [spec.attention(spec.attn_groups) for _ in range(spec.layers)],
        )
        self._end_by_doubling(spec, spec.resample_by)

    def forward(
        self,
        hidden_states: Tensor,
        skips: Sequence[Tensor],
        temb: Tensor,
        size: Sequence[int] | None = None,
        *_: Tensor | None,
    ) -> Tensor:
        """As `UpBlock2D`; a residual block that doubles has no choice of the size."""
        for resnet, attention, skip in zip(self.resnets, self.attentions, skips, strict=True):
            hidden_states = attention(resnet(joined(hidden_states, skip), temb))
        return self._double(hidden_states, temb, size)


class CrossAttnUpBlock2D(_Block):
    """Residual blocks, each told a skip and followed by a transformer that attends to the text, then as `UpBlock2D`."""

    has_cross_attention = True

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__([spec.resnet(width) for width in spec.widths], spec.transformers())
        self._end_by_doubling(spec, "conv")

    def forward(
        self,
        hidden_states: Tensor,
        skips: Sequence[Tensor],
        temb: Tensor,
        size: Sequence[int] | None = None,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """As `UpBlock2D`."""
        for resnet, transformer, skip in zip(self.resnets, self.attentions, skips, strict=True):
            if self.freeu is not None:
                hidden_states, skip = self.freeu(hidden_states, skip)
            hidden_states = resnet(joined(hidden_states, skip), temb)
            hidden_states = transformer(hidden_states, encoder_hidden_states, attention_mask, encoder_attention_mask)
        return self._double(hidden_states, temb, size)
