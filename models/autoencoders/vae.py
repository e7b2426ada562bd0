"""The encoder and the decoder of latent diffusion's autoencoders (Esser et al. 2021; Rombach et al. 2022, appendix G).

Each level of the encoder is some residual blocks and a halving of the picture; the decoder mirrors it. Between them,
at the lowest resolution, lie two residual blocks with attention over all pixels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.attention import Attention
from ..layers.resnet import Downsample2D, ResnetBlock2D, Upsample2D

_EPS = 1e-6  # of every norm in these autoencoders
DOWN_BLOCK_TYPES = ("AttnDownEncoderBlock2D", "DownEncoderBlock2D")
UP_BLOCK_TYPES = ("AttnUpDecoderBlock2D", "UpDecoderBlock2D")


class MidBlock2D(nn.Module):
    """Residual block, attention over all pixels unless `add_attention` is False, residual block."""

    def __init__(self, channels: int, *, act_fn: str, groups: int, add_attention: bool = True) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_resnet(channels, channels, act_fn, groups) for _ in range(2))
        self.attentions = nn.ModuleList([_attention(channels, groups)] if add_attention else [])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        before, after = self.resnets
        hidden_states = before(hidden_states)
        for attend in self.attentions:
            hidden_states = attend(hidden_states)
        return after(hidden_states)


class _Level(nn.Module):
    """Residual blocks at one resolution, each with attention after it where the block's type says so."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        layers: int,
        act_fn: str,
        groups: int,
        add_attention: bool,
        overwrites_input: bool = False,
    ) -> None:
        super().__init__()
        first = _resnet(in_channels, out_channels, act_fn, groups, overwrites_input)
        others = (_resnet(out_channels, out_channels, act_fn, groups) for _ in range(layers - 1))
        self.resnets = nn.ModuleList([first, *others])
        attentions = [_attention(out_channels, groups) for _ in range(layers)] if add_attention else None
        self.attentions = None if attentions is None else nn.ModuleList(attentions)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for index, resnet in enumerate(self.resnets):
            hidden_states = resnet(hidden_states)
            if self.attentions is not None:
                hidden_states = self.attentions[index](hidden_states)
        return hidden_states


class DownEncoderBlock2D(_Level):
    """A level of the encoder; halves the picture at its end unless it is the last."""

    def __init__(self, in_channels: int, out_channels: int, *, downsample: bool, **level: object) -> None:
        super().__init__(in_channels, out_channels, **level)  # type: ignore[arg-type]
        self.downsamplers = nn.ModuleList([Downsample2D(out_channels, padding=0)]) if downsample else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = super().forward(hidden_states)
        return hidden_states if self.downsamplers is None else self.downsamplers[0](hidden_states)


class UpDecoderBlock2D(_Level):
    """A level of the decoder; doubles the picture at its end unless it is the last."""

    def __init__(self, in_channels: int, out_channels: int, *, upsample: bool, **level: object) -> None:
        super().__init__(in_channels, out_channels, **level)  # type: ignore[arg-type]
        self.upsamplers = nn.ModuleList([Upsample2D(out_channels, in_strips=True)]) if upsample else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = super().forward(hidden_states)
        return hidden_states if self.upsamplers is None else self.upsamplers[0](hidden_states)


class Encoder(nn.Module):
    """Picture (B, in_channels, H, W) to features (B, out_channels, H / r, W / r), r = 2 ** (levels - 1).

    Sizes that r does not divide are rounded down.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        down_block_types: Sequence[str],
        block_out_channels: Sequence[int],
        layers_per_block: int,
        act_fn: str,
        norm_num_groups: int,
        mid_block_add_attention: bool = True,
    ) -> None:
        super().__init__()
        check_levels("down_block_types", down_block_types, DOWN_BLOCK_TYPES, block_out_channels, norm_num_groups)
        self.conv_in = nn.Conv2d(in_channels, block_out_channels[0], 3, padding=1)
        before = (block_out_channels[0], *block_out_channels)
        self.down_blocks = nn.ModuleList(
            DownEncoderBlock2D(
                before[index],
                channels,
                downsample=index < len(block_out_channels) - 1,
                layers=layers_per_block,
                act_fn=act_fn,
                groups=norm_num_groups,
                add_attention=kind.startswith("Attn"),
            )
            for index, (kind, channels) in enumerate(zip(down_block_types, block_out_channels, strict=True))
        )
        last = block_out_channels[-1]
        self.mid_block = MidBlock2D(last, act_fn=act_fn, groups=norm_num_groups, add_attention=mid_block_add_attention)
        self.conv_norm_out = nn.GroupNorm(norm_num_groups, last, eps=_EPS)
        self.conv_out = nn.Conv2d(last, out_channels, 3, padding=1)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        sample = self.conv_in(sample)
        for block in self.down_blocks:
            sample = block(sample)
        sample = self.mid_block(sample)
        return self.conv_out(F.silu(self.conv_norm_out(sample), inplace=not torch.is_grad_enabled()))


class Decoder(nn.Module):
    """Latents (B, in_channels, h, w) to a picture (B, out_channels, h r, w r), r = 2 ** (levels - 1).

    `up_block_types` is in the order of the blocks, `block_out_channels` in the encoder's order, as in configs. A level
    has one residual block more than `layers_per_block`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        up_block_types: Sequence[str],
        block_out_channels: Sequence[int],
        layers_per_block: int,
        act_fn: str,
        norm_num_groups: int,
        mid_block_add_attention: bool = True,
    ) -> None:
        super().__init__()
        check_levels("up_block_types", up_block_types, UP_BLOCK_TYPES, block_out_channels, norm_num_groups)
        widths = tuple(reversed(block_out_channels))
        self.conv_in = nn.Conv2d(in_channels, widths[0], 3, padding=1)
        self.mid_block = MidBlock2D(
            widths[0], act_fn=act_fn, groups=norm_num_groups, add_attention=mid_block_add_attention
        )
        before = (widths[0], *widths)
        self.up_blocks = nn.ModuleList(
            UpDecoderBlock2D(
                before[index],
                channels,
                upsample=index < len(widths) - 1,
                layers=layers_per_block + 1,
                act_fn=act_fn,
                groups=norm_num_groups,
                add_attention=kind.startswith("Attn"),
                overwrites_input=index > 0,  # it comes from an upsampler, and goes nowhere else
            )
            for index, (kind, channels) in enumerate(zip(up_block_types, widths, strict=True))
        )
        self.conv_norm_out = nn.GroupNorm(norm_num_groups, widths[-1], eps=_EPS)
        self.conv_out = nn.Conv2d(widths[-1], out_channels, 3, padding=1)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        sample = self.mid_block(self.conv_in(sample))
        for block in self.up_blocks:
            sample = block(sample)
        return self._to_pixels(sample)

    def _to_pixels(self, sample: torch.Tensor) -> torch.Tensor:
        return self.conv_out(F.silu(self.conv_norm_out(sample), inplace=not torch.is_grad_enabled()))


def _resnet(
    in_channels: int, out_channels: int, act_fn: str, groups: int, overwrites_input: bool = False
) -> ResnetBlock2D:
    return ResnetBlock2D(
        in_channels,
        out_channels,
        temb_channels=None,
        groups=groups,
        eps=_EPS,
        non_linearity=act_fn,
        overwrites_input=overwrites_input,
    )


def _attention(channels: int, groups: int) -> Attention:
    """One head as wide as the features."""
    return Attention(
        channels, heads=1, dim_head=channels, bias=True, norm_num_groups=groups, eps=_EPS, residual_connection=True
    )


def check_levels(argument: str, types: Sequence[str], known: Sequence[str], widths: Sequence[int], groups: int) -> None:
    """Refuse levels that do not fit together, naming what does not.

    Raises:
        ValueError: if a type is unknown, there is not one width a type, or a width is no multiple of the groups.
    """
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise ValueError(f"{argument} has {unknown}; known are {list(known)}")
    if not types or len(types) != len(widths):
        raise ValueError(f"{argument} has {len(types)} entries and block_out_channels {len(widths)}; give one each")
    uneven = [width for width in widths if width % groups]
    if uneven:
        raise ValueError(f"block_out_channels has {uneven}, which norm_num_groups={groups} does not divide")


def check_batch(argument: str, tensor: torch.Tensor, channels: int, smallest: int = 1) -> None:
    """Refuse anything but a batch (B, channels, H, W) with sides of at least `smallest`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if tensor.dim() != 4:
        remedy = f"; add the batch with {argument}[None]" if tensor.dim() == 3 else ""
        raise ValueError(f"{argument} must be (batch, {channels}, height, width), not {tuple(tensor.shape)}{remedy}")
    if tensor.shape[1] != channels:
        raise ValueError(f"{argument} must have {channels} channels, not {tensor.shape[1]}: {tuple(tensor.shape)}")
    if min(tensor.shape[-2:]) < smallest:
        raise ValueError(f"{argument} must be at least {smallest} x {smallest}, not {tuple(tensor.shape[-2:])}")
