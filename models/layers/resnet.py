"""Residual blocks and resampling of feature maps (B, C, H, W), shared by the UNets and the autoencoders."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from .activations import activation_function


class Downsample2D(nn.Module):
    """Halve height and width, by a strided 3x3 convolution or by averaging 2x2 pixels.

    Args:
        channels: channels of the input.
        use_conv: learn the reduction; False averages.
        out_channels: channels of the output, `channels` by default. Averaging cannot change them.
        padding: of the convolution. 0 pads one row below and one column to the right instead of all around, as the
            latent diffusion autoencoders (Rombach et al. 2022) do.
    """

    def __init__(
        self, channels: int, *, use_conv: bool = True, out_channels: int | None = None, padding: int = 1
    ) -> None:
        super().__init__()
        self.channels = channels
        self.out_channels = out_channels or channels
        self.padding = padding
        if use_conv:
            self.conv: nn.Module = nn.Conv2d(channels, self.out_channels, 3, stride=2, padding=padding)
        elif self.out_channels != channels:
            raise ValueError(f"out_channels={out_channels} needs use_conv=True: averaging keeps {channels} channels")
        else:
            self.conv = nn.AvgPool2d(2, 2)
        self._pad_end = use_conv and padding == 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._pad_end:
            hidden_states = F.pad(hidden_states, (0, 1, 0, 1))
        return self.conv(hidden_states)


class DoublingConv2d(nn.Conv2d):
    """A 3x3 convolution of maps whose pixels are repeated twice each way, in strips where these would be large.

    The repeated maps of a decoder's widest place never exist as a whole, which takes a third less memory there, for
    under 1% more arithmetic. Results are those of the two steps.
    """

    STRIPS = 8
    LARGE = 1 << 24  # values of repeated maps; smaller ones are not what memory goes to

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        height = input.shape[-2]
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or 4 * input.numel() < self.LARGE:
            return super().forward(F.interpolate(input, scale_factor=2.0, mode="nearest"))
        output, rows = None, -(-height // self.STRIPS)
        for top in range(0, height, rows):
            # A row of neighbours above and below, whose own results lack neighbours and are left out.
            first, bottom = max(top - 1, 0), min(top + rows, height)
            doubled = F.interpolate(input[..., first : bottom + 1, :], scale_factor=2.0, mode="nearest")
            strip = super().forward(doubled)[..., 2 * (top - first) : 2 * (bottom - first), :]
            del doubled
            if output is None:
                layout = torch.channels_last if strip.stride(1) == 1 else torch.contiguous_format
                shape = (*strip.shape[:2], 2 * height, strip.shape[-1])
                output = torch.empty(shape, dtype=strip.dtype, device=strip.device, memory_format=layout)
            output[..., 2 * top : 2 * bottom, :] = strip
        assert output is not None
        return output


class Upsample2D(nn.Module):
    """Double height and width by repeating pixels, then, unless `use_conv` is False, a 3x3 convolution.

    Args:
        channels: channels of the input.
        use_conv: whether there is a convolution.
        out_channels: channels of its output, `channels` by default.
        in_strips: take less memory for large maps, see `DoublingConv2d`.
    """

    def __init__(
        self, channels: int, *, use_conv: bool = True, out_channels: int | None = None, in_strips: bool = False
    ) -> None:
        super().__init__()
        self.channels = channels
        self.out_channels = out_channels or channels
        if not use_conv and self.out_channels != channels:
            raise ValueError(f"out_channels={out_channels} needs use_conv=True: repeating keeps {channels} channels")
        self.in_strips = in_strips
        conv = DoublingConv2d if in_strips else nn.Conv2d
        self.conv = conv(channels, self.out_channels, 3, padding=1) if use_conv else None

    def forward(self, hidden_states: torch.Tensor, output_size: tuple[int, int] | None = None) -> torch.Tensor:
        """Resample to twice the size, or to `output_size` (height, width), as where an odd size was halved before.

        With `in_strips`, it is twice the size always.
        """
        if self.in_strips and self.conv is not None:
            return self.conv(hidden_states)
        if output_size is None:
            hidden_states = F.interpolate(hidden_states, scale_factor=2.0, mode="nearest")
        else:
            hidden_states = F.interpolate(hidden_states, size=output_size, mode="nearest")
        return hidden_states if self.conv is None else self.conv(hidden_states)


class OverwritingGroupNorm(nn.GroupNorm):
    """A group norm that writes over its input, some groups at a time, unless gradients are recorded or it is compiled.

    The numbers are those of `nn.GroupNorm`, bit for bit, and little memory is needed besides.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        parts = math.gcd(8, self.num_groups)
        channels, groups = self.num_channels // parts, self.num_groups // parts
        weights, biases = self.weight.split(channels), self.bias.split(channels)
        for part, weight, bias in zip(input.split(channels, dim=1), weights, biases, strict=True):
            part.copy_(F.group_norm(part, groups, weight, bias, self.eps))
        return input


class ResnetBlock2D(nn.Module):
    """Two rounds of norm, activation and 3x3 convolution, around which the input is added back.

    The pre-activation residual block of He et al. 2016, with group norm and a time embedding that shifts, or scales
    and shifts, the features between the convolutions (Ho et al. 2020; Dhariwal and Nichol 2021, "adaptive group norm").

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, `in_channels` by default.
        temb_channels: size of the time embedding; None for a block without one.
        groups: groups of the first norm.
        groups_out: groups of the second norm, `groups` by default.
        eps: of both norms.
        non_linearity: name of the activation.
        dropout: probability, before the second convolution.
        time_embedding_norm: "default" adds the embedding before the second norm, "scale_shift" applies it after.
        skip_time_act: the embedding has been through the activation already.
        output_scale_factor: the sum is divided by this.
        up, down: resample by 2 between the first activation and the first convolution, and on the shortcut.
        use_in_shortcut: whether a 1x1 convolution is on the shortcut; by default where the channels change.
        conv_shortcut_bias: whether that convolution has a bias.
        overwrites_input: nobody reads the input after this block, which then works in its memory and empties it, unless
            gradients are recorded or the block is compiled. Callers still hold it; it is the decoder's largest tensor.

    Raises:
        ValueError: if `time_embedding_norm` is neither of the two, `up` and `down` are both set, or the groups do not
            divide the channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        temb_channels: int | None = 512,
        groups: int = 32,
        groups_out: int | None = None,
        eps: float = 1e-6,
        non_linearity: str = "swish",
        dropout: float = 0.0,
        time_embedding_norm: Literal["default", "scale_shift"] = "default",
        skip_time_act: bool = False,
        output_scale_factor: float = 1.0,
        up: bool = False,
        down: bool = False,
        use_in_shortcut: bool | None = None,
        conv_shortcut_bias: bool = True,
        overwrites_input: bool = False,
    ) -> None:
        super().__init__()
        if time_embedding_norm not in ("default", "scale_shift"):
            raise ValueError(f"time_embedding_norm={time_embedding_norm!r}; choose 'default' or 'scale_shift'")
        if up and down:
            raise ValueError("up=True and down=True exclude each other")
        out_channels = out_channels or in_channels
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.time_embedding_norm = time_embedding_norm
        self.skip_time_act = skip_time_act
        self.output_scale_factor = output_scale_factor

        if use_in_shortcut is None:
            use_in_shortcut = in_channels != out_channels
        self.overwrites_input = overwrites_input and use_in_shortcut
        norm = OverwritingGroupNorm if self.overwrites_input else nn.GroupNorm
        self.norm1 = norm(groups, in_channels, eps=eps)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.told_time = temb_channels is not None
        if temb_channels is not None:
            width = 2 * out_channels if time_embedding_norm == "scale_shift" else out_channels
            self.time_emb_proj = nn.Linear(temb_channels, width)
        self.norm2 = nn.GroupNorm(groups_out or groups, out_channels, eps=eps)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nonlinearity = activation_function(non_linearity)

        self.resample: nn.Module | None = None
        if up:
            self.resample = Upsample2D(in_channels, use_conv=False)
        elif down:
            self.resample = Downsample2D(in_channels, use_conv=False)
        self.conv_shortcut = (
            nn.Conv2d(in_channels, out_channels, 1, bias=conv_shortcut_bias) if use_in_shortcut else None
        )

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
        """Transform features (B, C, H, W), told the time by `temb` (B, temb_channels) where the block takes one."""
        # What a norm or a convolution gives is read by the next step alone, which can write over it unless gradients
        # are recorded: new memory costs more time than the arithmetic.
        inplace = not torch.is_grad_enabled()
        early = self.overwrites_input and inplace and not torch.compiler.is_compiling()
        shortcut = hidden_states
        given: Any = hidden_states
        if early:
            assert self.conv_shortcut is not None
            shortcut = self.conv_shortcut(hidden_states)
        hidden_states = self.nonlinearity(self.norm1(hidden_states), inplace=inplace)
        if self.resample is not None:
            shortcut = self.resample(shortcut)
            hidden_states = self.resample(hidden_states)
        hidden_states = self.conv1(hidden_states)
        if early:
            given.set_()

        shift = self._time_embedding(temb) if self.told_time else None
        if shift is None:
            hidden_states = self.norm2(hidden_states)
        elif self.time_embedding_norm == "default":
            hidden_states = self.norm2(hidden_states.add_(shift) if inplace else hidden_states + shift)
        else:
            scale, shift = shift.chunk(2, dim=1)
            hidden_states = self.norm2(hidden_states) * (1 + scale) + shift
        hidden_states = self.nonlinearity(hidden_states, inplace=inplace)
        if self.dropout is not None:
            hidden_states = self.dropout(hidden_states)
        hidden_states = self.conv2(hidden_states)

        if self.conv_shortcut is not None and not early:
            shortcut = self.conv_shortcut(shortcut)
        hidden_states = hidden_states.add_(shortcut) if inplace else shortcut + hidden_states
        return hidden_states if self.output_scale_factor == 1.0 else hidden_states / self.output_scale_factor

    def _time_embedding(self, temb: torch.Tensor | None) -> torch.Tensor:
        if temb is None:
            raise ValueError("this block needs `temb`: it was made with temb_channels, pass None there to do without")
        temb = temb if self.skip_time_act else self.nonlinearity(temb)
        return self.time_emb_proj(temb)[:, :, None, None]
