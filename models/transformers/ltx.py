"""`LTXVideoTransformer3DModel`: the denoiser of LTX-Video (HaCohen et al. 2024, arXiv 2501.00103)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...offload.runs import once
from ..base import Model
from ..layers.adaln_single import AdaLayerNormSingle
from ..layers.embeddings import TextProjection, batched_timestep
from ..layers.rotary import RotaryTable
from ..layers.rotary_attention import RotaryAttention
from ..layers.transformer import FeedForward
from ..unets.conditioning import token_mask
from .checks import check_attention_kwargs, check_tokens
from .outputs import Transformer2DModelOutput

# Coordinates are fractions of this many frames, rows and columns of pixels.
_EXTENT = (20.0, 2048.0, 2048.0)
_THETA = 10000.0


def film_positions(
    frames: int,
    height: int,
    width: int,
    scale: Sequence[float] | Tensor | None,
    patch: Sequence[int],
    device: torch.device | None = None,
) -> Tensor:
    """Coordinates of the tokens of a film, (1, frames * height * width, 3), float32.

    Args:
        frames, height, width: of the film in tokens.
        scale: what a step along each axis is worth in frames, rows and columns; the coordinates are then fractions of
            the largest film. None numbers the tokens.
        patch: latents of a token along each axis.
    """
    axes = [torch.arange(size, dtype=torch.float32, device=device) for size in (frames, height, width)]
    if scale is not None:
        # In this order, as the reference rounds.
        parts = zip(axes, scale, patch, _EXTENT, strict=True)
        axes = [axis * step * latents / extent for axis, step, latents, extent in parts]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(1, -1, 3)


def film_rotary(positions: Tensor, heads: int, dim_head: int) -> RotaryTable:
    """The table for coordinates (B, S, 3): the axes take turns over the channels of all heads.

    Frequencies rise from pi / 2 to 10000 pi / 2 (HaCohen et al. 2024, section 3.1); coordinates from 0 to 1 count from
    the middle. Channels that are left over, at the start, do not turn.
    """
    count, left = divmod(heads * dim_head, 6)
    exponents = torch.linspace(0, 1, count, device=positions.device)
    angles = (2 * positions[..., None] - 1) * (_THETA**exponents * (math.pi / 2))
    angles = nn.functional.pad(angles.transpose(-1, -2).flatten(2), (left // 2, 0)).unflatten(-1, (heads, -1))
    return RotaryTable(angles.cos(), angles.sin())


class LTXVideoTransformerBlock(nn.Module):
    """Self-attention, attention to the text, feed-forward; modulated as PixArt's blocks, token by token.

    Args:
        dim: channels of the tokens.
        heads, dim_head: heads and the channels of each.
        cross_attention_dim: channels of the text tokens.
        activation_fn: see `FeedForward`.
        attention_bias, attention_out_bias: whether the projections before and after attention have biases.
        norm_elementwise_affine, norm_eps: of the norms before self-attention and feed-forward.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        dim_head: int,
        *,
        cross_attention_dim: int,
        activation_fn: str,
        attention_bias: bool,
        attention_out_bias: bool,
        norm_elementwise_affine: bool,
        norm_eps: float,
    ) -> None:
        super().__init__()

        def attention(context_dim: int | None) -> RotaryAttention:
            return RotaryAttention(
                dim,
                heads=heads,
                dim_head=dim_head,
                cross_attention_dim=context_dim,
                bias=attention_bias,
                out_bias=attention_out_bias,
            )

        self.norm1 = nn.RMSNorm(dim, eps=norm_eps, elementwise_affine=norm_elementwise_affine)
        self.attn1 = attention(None)
        self.norm2 = nn.RMSNorm(dim, eps=norm_eps, elementwise_affine=norm_elementwise_affine)
        self.attn2 = attention(cross_attention_dim)
        self.ff = FeedForward(dim, activation_fn=activation_fn)
        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        modulation: Tensor,
        rotary: RotaryTable,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Transform tokens (B, S, dim), told the text (B, T, cross_attention_dim).

        Args:
            modulation: (B, S or 1, 6 * dim), of all blocks.
            rotary: of the tokens.
            encoder_attention_mask: of the text, see `Attention`.
        """
        vectors = self.scale_shift_table + modulation.unflatten(-1, (6, -1))
        shift, scale, gate, shift_ff, scale_ff, gate_ff = vectors.unbind(2)
        attended = self.attn1(self.norm1(hidden_states) * (1 + scale) + shift, rotary=rotary)
        hidden_states = hidden_states + attended * gate
        hidden_states = hidden_states + self.attn2(hidden_states, encoder_hidden_states, encoder_attention_mask)
        return hidden_states + self.ff(self.norm2(hidden_states) * (1 + scale_ff) + shift_ff) * gate_ff


class LTXVideoTransformer3DModel(Model):
    """A diffusion transformer over the latents of films, which are strongly compressed (HaCohen et al. 2024).

    Args:
        in_channels: channels of a token of latents.
        out_channels: of the prediction; None takes `in_channels`.
        patch_size, patch_size_t: latents of a token along height and width, and along time; the pipeline packs them.
        num_attention_heads, attention_head_dim: heads and the channels of each; their product is a token's channels.
        cross_attention_dim: channels of the text in the blocks, which must be a token's.
        num_layers: number of blocks.
        activation_fn: of the feed-forward, see `FeedForward`.
        qk_norm: must be "rms_norm_across_heads".
        norm_elementwise_affine, norm_eps: of the norms within the blocks.
        caption_channels: channels of the text that goes in.
        attention_bias, attention_out_bias: whether the projections before and after attention have biases.

    Raises:
        ValueError: for a kind that is not supported, and for numbers that do not fit, naming both.
    """

    _repeated_blocks: ClassVar[list[str]] = ["LTXVideoTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["LTXVideoTransformerBlock"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]

    def __init__(
        self,
        in_channels: int = 128,
        out_channels: int | None = 128,
        patch_size: int = 1,
        patch_size_t: int = 1,
        num_attention_heads: int = 32,
        attention_head_dim: int = 64,
        cross_attention_dim: int = 2048,
        num_layers: int = 28,
        activation_fn: str = "gelu-approximate",
        qk_norm: str = "rms_norm_across_heads",
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        caption_channels: int = 4096,
        attention_bias: bool = True,
        attention_out_bias: bool = True,
    ) -> None:
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        if qk_norm != "rms_norm_across_heads":
            raise ValueError(f"qk_norm={qk_norm!r} is not supported; this model has 'rms_norm_across_heads'")
        if cross_attention_dim != dim:
            raise ValueError(
                f"cross_attention_dim={cross_attention_dim} must equal the {dim} channels of a token "
                "(num_attention_heads times attention_head_dim), to which the text is projected"
            )
        if attention_head_dim % 2:
            raise ValueError(f"attention_head_dim={attention_head_dim} must be even: channels turn in pairs")
        self.heads, self.dim_head = num_attention_heads, attention_head_dim
        self.patch = (patch_size_t, patch_size, patch_size)
        self.proj_in = nn.Linear(in_channels, dim)
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.time_embed = AdaLayerNormSingle(dim)
        self.caption_projection = TextProjection(caption_channels, dim)
        self.transformer_blocks = nn.ModuleList(
            LTXVideoTransformerBlock(
                dim,
                num_attention_heads,
                attention_head_dim,
                cross_attention_dim=cross_attention_dim,
                activation_fn=activation_fn,
                attention_bias=attention_bias,
                attention_out_bias=attention_out_bias,
                norm_elementwise_affine=norm_elementwise_affine,
                norm_eps=norm_eps,
            )
            for _ in range(num_layers)
        )
        self.norm_out = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.proj_out = nn.Linear(dim, in_channels if out_channels is None else out_channels)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        encoder_attention_mask: Tensor | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rope_interpolation_scale: tuple[float, float, float] | Tensor | None = None,
        video_coords: Tensor | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict from noisy latents.

        Args:
            hidden_states: noisy latents as tokens (B, num_frames * height * width, in_channels), frame by frame.
            encoder_hidden_states: text tokens (B, T, caption_channels).
            timestep: from 0 to 1000, a scalar, one a sample (B,), or one a token (B, S) where some are less noisy.
            encoder_attention_mask: (B, T), 1 for text tokens that count; or (B, 1, T), added to the scores.
            num_frames, height, width: of the film in tokens; not read where `video_coords` are given.
            rope_interpolation_scale: what a token is worth along time, in frames at the rate of training, and along
                height and width, in pixels.
            video_coords: where the tokens lie, (B, 3, S): frame, row and column, in place of the four above.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            return_dict: False gives a tuple.

        Returns:
            The velocity, (B, S, out_channels).

        Raises:
            ValueError: for shapes that do not fit and arguments that are not taken.
        """
        batch = len(hidden_states)
        check_tokens("hidden_states", hidden_states, batch, self.config["in_channels"])
        check_tokens("encoder_hidden_states", encoder_hidden_states, batch, self.config["caption_channels"])
        check_attention_kwargs(attention_kwargs, "attention_kwargs")
        scale = rope_interpolation_scale
        scale = tuple(scale) if isinstance(scale, list) else scale
        shape, sizes = tuple(hidden_states.shape[:2]), (num_frames, height, width)
        rotary = once(self._rotary, shape, hidden_states.device, sizes, scale, video_coords)
        mask = encoder_attention_mask
        if mask is None or mask.dim() == 2:
            mask = token_mask(mask, hidden_states)
        tokens = self.proj_in(hidden_states)
        times = _time_for_tokens(timestep, tokens)
        modulation, embedded = (
            each.unflatten(0, (batch, -1)) for each in self.time_embed(times.flatten(), tokens.dtype)
        )
        text = self.caption_projection(encoder_hidden_states)
        for block in self.transformer_blocks:
            tokens = block(tokens, text, modulation, rotary, mask)
        shift, scale = (self.scale_shift_table + embedded[:, :, None]).unbind(2)
        sample = self.proj_out(self.norm_out(tokens) * (1 + scale) + shift)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _rotary(
        self,
        shape: tuple[int, int],
        device: torch.device,
        sizes: tuple[int | None, ...],
        scale: Any,
        coords: Tensor | None,
    ) -> RotaryTable:
        batch, count = shape
        if coords is not None:
            if tuple(coords.shape) not in ((batch, 3, count), (1, 3, count)):
                raise ValueError(f"video_coords has the shape {tuple(coords.shape)}, expected ({batch}, 3, {count})")
            extent = torch.tensor(_EXTENT, device=coords.device)
            positions = coords.transpose(1, 2) / extent
        else:
            frames, height, width = sizes
            if frames is None or height is None or width is None or frames * height * width != count:
                raise ValueError(
                    f"num_frames={frames}, height={height} and width={width} must multiply to the {count} tokens of "
                    "hidden_states; or pass video_coords"
                )
            positions = film_positions(frames, height, width, scale, self.patch, device)
        return film_rotary(positions, self.heads, self.dim_head)


def _time_for_tokens(timestep: Tensor, tokens: Tensor) -> Tensor:
    """Times (B, 1) or, where each token has its own, (B, S)."""
    if timestep.dim() < 2:
        return batched_timestep(timestep, tokens)[:, None]
    batch, count = tokens.shape[:2]
    if timestep.shape[0] != batch or timestep.shape[1] not in (1, count):
        raise ValueError(
            f"timestep has the shape {tuple(timestep.shape)}; give one, one a sample ({batch},), or one a token "
            f"({batch}, {count})"
        )
    return timestep.to(tokens.device)
