"""`ControlNetModel`: a copy of a UNet's down half that steers the UNet by a picture, such as edges or a pose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_core.outputs import BaseOutput

from ..offload.runs import once
from .unets.build import check_block_types
from .unets.conditioning import ConditionedModel, token_mask
from .unets.unet_2d_condition import SUPPORTED, UNet2DConditionModel


@dataclass
class ControlNetOutput(BaseOutput):
    """What `ControlNetModel` returns, as the UNet takes it.

    Attributes:
        down_block_res_samples: one tensor for each skip of the UNet.
        mid_block_res_sample: what is added after the UNet's middle.
    """

    down_block_res_samples: list[Tensor]
    mid_block_res_sample: Tensor


class ControlNetConditioningEmbedding(nn.Module):
    """Convolutions that bring the control picture to the size and channels of the latents' features.

    Args:
        conditioning_embedding_channels: channels of the result.
        conditioning_channels: channels of the picture.
        block_out_channels: channels between; each but the last is followed by a halving of height and width.
    """

    def __init__(
        self,
        conditioning_embedding_channels: int,
        conditioning_channels: int = 3,
        block_out_channels: Sequence[int] = (16, 32, 96, 256),
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(conditioning_channels, block_out_channels[0], 3, padding=1)
        self.blocks = nn.ModuleList()
        for channels, wider in pairwise(block_out_channels):
            self.blocks.append(nn.Conv2d(channels, channels, 3, padding=1))
            self.blocks.append(nn.Conv2d(channels, wider, 3, padding=1, stride=2))
        self.conv_out = _silent(nn.Conv2d(block_out_channels[-1], conditioning_embedding_channels, 3, padding=1))

    def forward(self, conditioning: Tensor) -> Tensor:
        features = F.silu(self.conv_in(conditioning))
        for convolution in self.blocks:
            features = F.silu(convolution(features))
        return self.conv_out(features)


class ControlNetModel(ConditionedModel):
    """A trainable copy of a UNet's down half and middle, joined by convolutions that begin at zero (Zhang et al. 2023).

    The arguments are the keys of a Hub config; those that the UNet has too mean the same, see `UNet2DConditionModel`.

    Args:
        conditioning_channels: channels of the control picture.
        controlnet_conditioning_channel_order: "rgb" or "bgr", the order that the weights were trained with.
        conditioning_embedding_out_channels: channels of the convolutions that read the control picture.
        global_pool_conditions: average what is returned over pixels, as "shuffle" models do.
        encoder_hid_dim: makes a projection of text tokens that is loaded and saved; `forward` takes tokens after it.

    Raises:
        ValueError: for a kind that is not supported, and for numbers that do not fit, naming both.
    """

    _repeated_blocks: ClassVar[list[str]] = ["BasicTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["BasicTransformerBlock", "ResnetBlock2D"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _prefers_channels_last: ClassVar[bool] = True

    def __init__(
        self,
        in_channels: int = 4,
        conditioning_channels: int = 3,
        flip_sin_to_cos: bool = True,
        freq_shift: int = 0,
        down_block_types: tuple[str, ...] = (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
        mid_block_type: str | None = "UNetMidBlock2DCrossAttn",
        only_cross_attention: bool | tuple[bool, ...] = False,
        block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280),
        layers_per_block: int | tuple[int, ...] = 2,
        downsample_padding: int = 1,
        mid_block_scale_factor: float = 1,
        act_fn: str = "silu",
        norm_num_groups: int | None = 32,
        norm_eps: float = 1e-5,
        cross_attention_dim: int | tuple[int, ...] = 1280,
        transformer_layers_per_block: int | tuple[int, ...] = 1,
        encoder_hid_dim: int | None = None,
        encoder_hid_dim_type: str | None = None,
        attention_head_dim: int | tuple[int, ...] = 8,
        num_attention_heads: int | tuple[int, ...] | None = None,
        use_linear_projection: bool = False,
        class_embed_type: str | None = None,
        addition_embed_type: str | None = None,
        addition_time_embed_dim: int | None = None,
        num_class_embeds: int | None = None,
        upcast_attention: bool | None = False,
        resnet_time_scale_shift: str = "default",
        projection_class_embeddings_input_dim: int | None = None,
        controlnet_conditioning_channel_order: str = "rgb",
        conditioning_embedding_out_channels: tuple[int, ...] | None = (16, 32, 96, 256),
        global_pool_conditions: bool = False,
        addition_embed_type_num_heads: int = 64,
    ) -> None:
        super().__init__()
        check_block_types(down_block_types, None, SUPPORTED)
        order = controlnet_conditioning_channel_order
        if order not in ("rgb", "bgr"):
            raise ValueError(f"controlnet_conditioning_channel_order={order!r} is not supported; choose 'rgb' or 'bgr'")
        if mid_block_type is None:
            raise ValueError("mid_block_type=None is not supported: a ControlNet steers the middle of the UNet too")
        if not conditioning_embedding_out_channels:
            raise ValueError("conditioning_embedding_out_channels needs one entry or more")
        self.in_channels, self.global_pool_conditions = in_channels, global_pool_conditions
        self.conditioning_channels, self.flip_channels = conditioning_channels, order == "bgr"
        self.reduction = 2 ** (len(conditioning_embedding_out_channels) - 1)
        first = block_out_channels[0]
        self.conv_in = nn.Conv2d(in_channels, first, 3, padding=1)
        temb_channels = self._embeddings(self.config)
        self.controlnet_cond_embedding = ControlNetConditioningEmbedding(
            first, conditioning_channels, conditioning_embedding_out_channels
        )
        self.down_blocks, mid_block, _, varying = self._down_and_mid(self.config, temb_channels)
        self._joints(block_out_channels, varying["layers"])
        assert mid_block is not None
        self.mid_block = mid_block
        self._note_text_channels([*self.down_blocks, mid_block], varying["cross_attention_dim"])
        if self.text_channels is not None:
            self.text_channels = set(varying["cross_attention_dim"])

    def _joints(self, channels: Sequence[int], layers: Sequence[int]) -> None:
        """A 1x1 convolution for each skip, one for each size change among them, and one for the middle."""
        widths = [channels[0]]
        for index, (width, count) in enumerate(zip(channels, layers, strict=True)):
            widths += [width] * (count + (index < len(channels) - 1))
        self.controlnet_down_blocks = nn.ModuleList(_silent(nn.Conv2d(width, width, 1)) for width in widths)
        self.controlnet_mid_block = _silent(nn.Conv2d(channels[-1], channels[-1], 1))

    @classmethod
    def from_unet(
        cls,
        unet: UNet2DConditionModel,
        controlnet_conditioning_channel_order: str = "rgb",
        conditioning_embedding_out_channels: tuple[int, ...] | None = (16, 32, 96, 256),
        load_weights_from_unet: bool = True,
        conditioning_channels: int = 3,
    ) -> "ControlNetModel":
        """A ControlNet for a UNet, to train: the shared layers are copied, the others steer nothing yet.

        Args:
            unet: the model to steer.
            controlnet_conditioning_channel_order: "rgb" or "bgr".
            conditioning_embedding_out_channels: see the class.
            load_weights_from_unet: False leaves the shared layers at their random start.
            conditioning_channels: channels of the control picture.
        """
        shared = {key: unet.config[key] for key in cls.config_arguments() if key in unet.config}
        model = cls(
            **shared,
            controlnet_conditioning_channel_order=controlnet_conditioning_channel_order,
            conditioning_embedding_out_channels=conditioning_embedding_out_channels,
            conditioning_channels=conditioning_channels,
        )
        if load_weights_from_unet:
            own = model.state_dict()
            copied = {name: tensor for name, tensor in unet.state_dict().items() if name in own}
            model.load_state_dict(copied, strict=False)
        return model

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor,
        controlnet_cond: Tensor,
        conditioning_scale: float = 1.0,
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
            sample, timestep, encoder_hidden_states, class_labels, attention_mask, added_cond_kwargs: as the UNet's.
            controlnet_cond: the control picture (B, conditioning_channels, H, W), 0 to 1, as large as the picture
                that is drawn: 8 times the latents' height and width for the usual config.
            conditioning_scale: strength of the control.
            timestep_cond: not taken by any config; refused.
            cross_attention_kwargs: see the UNet.
            guess_mode: weaken the outer skips to a tenth, rising to full strength in the middle, for use without a
                prompt (Zhang et al. 2023, section 3.4).
            return_dict: False gives a tuple.

        Raises:
            ValueError: for shapes that do not fit and conditions that are missing or not taken.
        """
        self._check(sample, encoder_hidden_states, cross_attention_kwargs)
        self._check_control(sample, controlnet_cond)
        temb = self._embed(sample, timestep, encoder_hidden_states, class_labels, timestep_cond, added_cond_kwargs)
        context = (encoder_hidden_states, token_mask(attention_mask, sample))
        if self.flip_channels:
            controlnet_cond = controlnet_cond.flip(1)

        sample = self.conv_in(sample) + once(self.controlnet_cond_embedding, controlnet_cond)
        skips = [sample]
        for block in self.down_blocks:
            sample, more = block(sample, temb, *context)
            skips += more
        sample = self.mid_block(sample, temb, *context)

        joints = [*self.controlnet_down_blocks, self.controlnet_mid_block]
        steered = [join(features) for join, features in zip(joints, [*skips, sample], strict=True)]
        scales = [conditioning_scale] * len(steered)
        if guess_mode and not self.global_pool_conditions:
            scales = [scale * weight for scale, weight in zip(scales, guess_weights(len(scales)), strict=True)]
        steered = [features * scale for features, scale in zip(steered, scales, strict=True)]
        if self.global_pool_conditions:
            steered = [features.mean(dim=(2, 3), keepdim=True) for features in steered]
        *downs, mid = steered
        return ControlNetOutput(downs, mid) if return_dict else (downs, mid)

    def _check_control(self, sample: Tensor, control: Tensor) -> None:
        height, width = (size * self.reduction for size in sample.shape[2:])
        expected = (self.conditioning_channels, height, width)
        if control.dim() != 4 or control.shape[1:] != expected or control.shape[0] not in (1, sample.shape[0]):
            raise ValueError(
                f"controlnet_cond has the shape {tuple(control.shape)}; for latents of the shape {tuple(sample.shape)} "
                f"this model takes {(sample.shape[0], *expected)}"
            )


def guess_weights(count: int) -> list[float]:
    """Factors from a tenth to one, evenly spaced in their logarithm."""
    return [10 ** (index / (count - 1) - 1) for index in range(count)]


def _silent(layer: nn.Conv2d) -> nn.Conv2d:
    """A convolution that returns zero until it is trained."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
