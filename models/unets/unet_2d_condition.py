"""`UNet2DConditionModel`: the denoiser of Stable Diffusion 1 and 2 and of SDXL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from diffusion_core.outputs import BaseOutput

from ...offload.runs import once
from ..layers.activations import get_activation
from .build import (
    DOWN_BLOCKS,
    UP_BLOCKS,
    build_up_blocks,
    check_block_types,
    per_block,
)
from .conditioning import (
    ConditionedModel,
    add_each,
    as_tuple,
    token_mask,
)
from .freeu import FreeU

SUPPORTED = {
    "down": [name for name in DOWN_BLOCKS if "Skip" not in name],
    "up": [name for name in UP_BLOCKS if "Skip" not in name],
}


@dataclass
class UNet2DConditionOutput(BaseOutput):
    """What `UNet2DConditionModel` returns.

    Attributes:
        sample: the prediction (noise, velocity or image, as trained), of the shape of the input.
    """

    sample: Tensor


class UNet2DConditionModel(ConditionedModel):
    """A UNet over latents that attends to text (Rombach et al. 2022; SDXL: Podell et al. 2023).

    The arguments are the keys of a Hub config. Those that need a word:

    Args:
        sample_size: height and width of the latents it was trained for; pipelines read it.
        attention_head_dim: the number of heads (sic) of blocks that attend to text, one for all or one a block; the
            channels of a head of blocks that attend to pixels alone.
        layers_per_block: one for all or one a down block.
        cross_attention_dim: channels of the text tokens, one for all or one a down block.
        transformer_layers_per_block: depth of the transformers: one for all, one a down block, or lists of one a
            layer; with lists, `reverse_transformer_layers_per_block` says the same for the up blocks.
        encoder_hid_dim: channels of the text tokens before a projection to `cross_attention_dim`; None for none.
        addition_embed_type: "text_time" adds pooled text and sizes to the time embedding, "text" the pooled tokens.
        time_cond_proj_dim: size of `timestep_cond` (a guidance embedding, as LCM has), None for none.
        upcast_attention: met by every kernel, see `Attention`.
        resnet_skip_time_act, resnet_out_scale_factor: of the `Resnet...` blocks.
        mid_block_only_cross_attention, cross_attention_norm: read by no supported block.

    Raises:
        ValueError: for a kind that is not supported, and for numbers that do not fit, naming both.
    """

    _repeated_blocks: ClassVar[list[str]] = ["BasicTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = [
        "BasicTransformerBlock",
        "ResnetBlock2D",
        "CrossAttnUpBlock2D",
        "UpBlock2D",
    ]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _prefers_channels_last: ClassVar[bool] = True

    def __init__(
        self,
        sample_size: int | tuple[int, int] | None = None,
        in_channels: int = 4,
        out_channels: int = 4,
        center_input_sample: bool = False,
        flip_sin_to_cos: bool = True,
        freq_shift: int = 0,
        down_block_types: tuple[str, ...] = (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
        mid_block_type: str | None = "UNetMidBlock2DCrossAttn",
        up_block_types: tuple[str, ...] = ("UpBlock2D", *["CrossAttnUpBlock2D"] * 3),
        only_cross_attention: bool | tuple[bool, ...] = False,
        block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280),
        layers_per_block: int | tuple[int, ...] = 2,
        downsample_padding: int = 1,
        mid_block_scale_factor: float = 1,
        dropout: float = 0.0,
        act_fn: str = "silu",
        norm_num_groups: int | None = 32,
        norm_eps: float = 1e-5,
        cross_attention_dim: int | tuple[int, ...] = 1280,
        transformer_layers_per_block: int | tuple[int | tuple[int, ...], ...] = 1,
        reverse_transformer_layers_per_block: tuple[int | tuple[int, ...], ...] | None = None,
        encoder_hid_dim: int | None = None,
        encoder_hid_dim_type: str | None = None,
        attention_head_dim: int | tuple[int, ...] = 8,
        num_attention_heads: int | tuple[int, ...] | None = None,
        dual_cross_attention: bool = False,
        use_linear_projection: bool = False,
        class_embed_type: str | None = None,
        addition_embed_type: str | None = None,
        addition_time_embed_dim: int | None = None,
        num_class_embeds: int | None = None,
        upcast_attention: bool | None = False,
        resnet_time_scale_shift: str = "default",
        resnet_skip_time_act: bool = False,
        resnet_out_scale_factor: float = 1.0,
        time_embedding_type: str = "positional",
        time_embedding_dim: int | None = None,
        time_embedding_act_fn: str | None = None,
        timestep_post_act: str | None = None,
        time_cond_proj_dim: int | None = None,
        conv_in_kernel: int = 3,
        conv_out_kernel: int = 3,
        projection_class_embeddings_input_dim: int | None = None,
        attention_type: str = "default",
        class_embeddings_concat: bool = False,
        mid_block_only_cross_attention: bool | None = None,
        cross_attention_norm: str | None = None,
        addition_embed_type_num_heads: int = 64,
    ) -> None:
        super().__init__()
        check_block_types(down_block_types, up_block_types, SUPPORTED)
        if dual_cross_attention:
            raise ValueError("dual_cross_attention=True is not supported")
        if norm_num_groups is None:
            raise ValueError("norm_num_groups=None is not supported: no block of this model works without norms")
        if attention_type != "default":
            raise ValueError(f"attention_type={attention_type!r} is not supported; choose 'default'")
        self.in_channels, self.center_input_sample = in_channels, center_input_sample
        self.conv_in = nn.Conv2d(in_channels, block_out_channels[0], conv_in_kernel, padding=(conv_in_kernel - 1) // 2)
        temb_channels = self._embeddings(self.config)
        self._blocks(temb_channels)
        self.conv_norm_out = nn.GroupNorm(norm_num_groups, block_out_channels[0], eps=norm_eps)
        self.conv_act = get_activation(act_fn)
        padding = (conv_out_kernel - 1) // 2
        self.conv_out = nn.Conv2d(block_out_channels[0], out_channels, conv_out_kernel, padding=padding)

    def _blocks(self, temb_channels: int) -> None:
        settings = self.config
        self.down_blocks, mid_block, common, varying = self._down_and_mid(settings, temb_channels)
        inward = {name: values[::-1] for name, values in varying.items()}
        self.skips_taken = [count + 1 for count in inward["layers"]]
        inward["transformer_layers"] = self._up_depths(varying["transformer_layers"])
        kinds, channels = settings["up_block_types"], settings["block_out_channels"][::-1]
        self.up_blocks = build_up_blocks(kinds, channels, common, inward)
        # Last, as in the reference's state dict.
        self.mid_block = mid_block
        self._note_text_channels([*self.down_blocks, *self.up_blocks, mid_block], varying["cross_attention_dim"])

    def _up_depths(self, depths: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Depths of the transformers of the up blocks: those of the down blocks, reversed, unless stated."""
        stated = self.config["reverse_transformer_layers_per_block"]
        if stated is not None:
            return [as_tuple(depth) for depth in per_block("reverse_transformer_layers_per_block", stated, len(depths))]
        if any(isinstance(depth, list | tuple) for depth in as_tuple(self.config["transformer_layers_per_block"])):
            raise ValueError(
                "transformer_layers_per_block gives depths by layer; give reverse_transformer_layers_per_block too, "
                "since up blocks have one layer more"
            )
        return list(depths[::-1])

    def enable_freeu(self, s1: float, s2: float, b1: float, b2: float) -> None:
        """Weigh features and skips in the two innermost up blocks, see `FreeU`.

        Args:
            s1, s2: factors of the low frequencies of the skips, in the first and second up block.
            b1, b2: factors of half of the features.
        """
        blocks: list[Any] = list(self.up_blocks)
        for block, backbone, skip in zip(blocks, (b1, b2), (s1, s2), strict=False):
            block.freeu = FreeU(backbone, skip)

    def disable_freeu(self) -> None:
        """Undo `enable_freeu`."""
        blocks: list[Any] = list(self.up_blocks)
        for block in blocks:
            block.freeu = None

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor,
        class_labels: Tensor | None = None,
        timestep_cond: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        added_cond_kwargs: Mapping[str, Tensor] | None = None,
        down_block_additional_residuals: Sequence[Tensor] | None = None,
        mid_block_additional_residual: Tensor | None = None,
        down_intrablock_additional_residuals: Sequence[Tensor] | None = None,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DConditionOutput | tuple[Tensor]:
        """Predict from noisy latents.

        Args:
            sample: noisy latents (B, in_channels, H, W); any size that the innermost block can still halve.
            timestep: a number, a scalar tensor or one a sample; fractions are fine. Give tensors to a compiled model.
            encoder_hidden_states: text tokens (B, T, cross_attention_dim), or encoder_hid_dim where the config has it.
            class_labels: one a sample: numbers, or vectors, as `class_embed_type` says.
            timestep_cond: (B, time_cond_proj_dim), as LCM's guidance embedding.
            attention_mask: (B, tokens), 1 to keep, of the self-attention; blocks at all sizes must have so many pixels.
            cross_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            added_cond_kwargs: "text_embeds" (B, n) and "time_ids" (B, m) of SDXL.
            down_block_additional_residuals: a tensor for each skip, added to it (ControlNet).
            mid_block_additional_residual: added after the middle (ControlNet).
            down_intrablock_additional_residuals: a tensor for each down block, added inside (T2I-Adapter).
            encoder_attention_mask: (B, T), 1 for text tokens that count.
            return_dict: False gives a tuple.

        Raises:
            ValueError: for shapes that do not fit and conditions that are missing or not taken.
        """
        self._check(sample, encoder_hidden_states, cross_attention_kwargs)
        temb = self._embed(sample, timestep, encoder_hidden_states, class_labels, timestep_cond, added_cond_kwargs)
        if self.encoder_hid_proj is not None:
            encoder_hidden_states = once(self.encoder_hid_proj, encoder_hidden_states)
        context = (
            encoder_hidden_states,
            token_mask(attention_mask, sample),
            token_mask(encoder_attention_mask, sample),
        )
        if self.center_input_sample:
            sample = 2 * sample - 1.0

        sample = self.conv_in(sample)
        adapters = list(down_intrablock_additional_residuals or ())
        sample, skips = self._down(sample, temb, context, adapters)
        if self.mid_block is not None:
            sample = self.mid_block(sample, temb, *context)
            if adapters and adapters[0].shape == sample.shape:
                sample = sample + adapters.pop(0)
        if adapters:
            raise ValueError(f"down_intrablock_additional_residuals has {len(adapters)} entries more than are used")
        if down_block_additional_residuals is not None or mid_block_additional_residual is not None:
            sample, skips = self._add_control(
                sample, skips, down_block_additional_residuals, mid_block_additional_residual
            )
        sample = self._up(sample, skips, temb, context)
        sample = self.conv_out(self.conv_act(self.conv_norm_out(sample)))
        return UNet2DConditionOutput(sample=sample) if return_dict else (sample,)

    def _down(
        self, sample: Tensor, temb: Tensor, context: tuple[Tensor | None, ...], adapters: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        skips = [sample]
        for block in self.down_blocks:
            if not adapters:
                sample, more = block(sample, temb, *context)
            elif block.has_cross_attention:
                sample, more = block(sample, temb, *context, adapters.pop(0))
            else:
                sample, more = block(sample, temb)
                sample = more[-1] = sample + adapters.pop(0)
            skips += more
        return sample, skips

    def _up(self, sample: Tensor, skips: list[Tensor], temb: Tensor, context: tuple[Tensor | None, ...]) -> Tensor:
        for block, count in zip(self.up_blocks, self.skips_taken, strict=True):
            taken = skips[: -count - 1 : -1]
            del skips[-count:]
            # The next skip has the size before halving, which doubling misses where it was odd.
            size = skips[-1].shape[2:] if skips else None
            sample = block(sample, taken, temb, size, *context)
        return sample

    def _add_control(
        self, sample: Tensor, skips: list[Tensor], downs: Sequence[Tensor] | None, mid: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        if downs is None or mid is None:
            raise ValueError(
                "down_block_additional_residuals and mid_block_additional_residual come together, from a ControlNet; "
                "features of a T2I-Adapter go to down_intrablock_additional_residuals"
            )
        return sample + mid, add_each(skips, downs)
