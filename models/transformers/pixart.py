"""`PixArtTransformer2DModel`: the denoiser of PixArt-alpha and PixArt-Sigma."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base import Model
from ..layers.adaln_single import AdaLayerNormSingle
from ..layers.attention import Attention
from ..layers.embeddings import TextProjection, batched_timestep
from ..layers.modulation import gated, modulate, table_vectors
from ..layers.patches import PatchEmbed, from_patches, patch_grid
from ..layers.transformer import FeedForward
from ..unets.conditioning import token_mask
from .checks import check_attention_kwargs, check_given, check_latents, check_tokens
from .outputs import Transformer2DModelOutput


class PixArtTransformerBlock(nn.Module):
    """Self-attention, attention to the text, feed-forward (Chen et al. 2024, arXiv 2310.00426, figure 4).

    Args:
        dim: channels of the tokens.
        num_attention_heads, attention_head_dim: heads and the channels of each.
        cross_attention_dim: channels of the text tokens; None leaves the attention to them out.
        dropout: probability, in training.
        activation_fn: see `FeedForward`.
        attention_bias: whether the projections to query, key and value have biases.
        norm_elementwise_affine, norm_eps: of the norms before self-attention and feed-forward.
    """

    def __init__(
        self,
        dim: int,
        num_attention_heads: int,
        attention_head_dim: int,
        *,
        cross_attention_dim: int | None,
        dropout: float,
        activation_fn: str,
        attention_bias: bool,
        norm_elementwise_affine: bool,
        norm_eps: float,
    ) -> None:
        super().__init__()

        def attention(context_dim: int | None) -> Attention:
            return Attention(
                dim,
                cross_attention_dim=context_dim,
                heads=num_attention_heads,
                dim_head=attention_head_dim,
                bias=attention_bias,
                dropout=dropout,
            )

        self.scale_shift_table = nn.Parameter(torch.randn(6, dim) / dim**0.5)
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps, elementwise_affine=norm_elementwise_affine)
        self.attn1 = attention(None)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, elementwise_affine=norm_elementwise_affine)
        self.attn2 = None if cross_attention_dim is None else attention(cross_attention_dim)
        self.ff = FeedForward(dim, dropout=dropout, activation_fn=activation_fn)

    def forward(
        self,
        hidden_states: Tensor,
        modulation: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Transform tokens (B, S, dim), told `modulation` (B, 6 * dim) and the text (B, T, cross_attention_dim)."""
        shift, scale, gate, shift_ff, scale_ff, gate_ff = table_vectors(self.scale_shift_table, modulation)
        attended = self.attn1(modulate(self.norm1(hidden_states), shift, scale), None, attention_mask)
        hidden_states = hidden_states + gated(attended, gate)
        if self.attn2 is not None:
            hidden_states = hidden_states + self.attn2(hidden_states, encoder_hidden_states, encoder_attention_mask)
        return hidden_states + gated(self.ff(modulate(self.norm2(hidden_states), shift_ff, scale_ff)), gate_ff)


class PixArtTransformer2DModel(Model):
    """A diffusion transformer over latents that attends to T5's text.

    PixArt-alpha (Chen et al. 2024, arXiv 2310.00426) and PixArt-Sigma (Chen et al. 2024, arXiv 2403.04692).

    Args:
        num_attention_heads, attention_head_dim: heads and the channels of each; their product is a token's channels.
        in_channels: channels of the latents.
        out_channels: of the prediction; twice `in_channels` where the variance is learned. None takes `in_channels`.
        num_layers: number of blocks.
        dropout: probability, in training.
        cross_attention_dim: channels of the text tokens in the blocks, or None for blocks without text.
        attention_bias: whether the projections to query, key and value have biases.
        sample_size: height and width of the latents it was trained for.
        patch_size: height and width of a patch of latents, which is a token.
        activation_fn: of the feed-forward, see `FeedForward`.
        norm_type: must be "ada_norm_single".
        norm_elementwise_affine, norm_eps: of the norms within the blocks.
        interpolation_scale: positions are divided by it; None takes `sample_size // 64`, 1 at least.
        use_additional_conditions: embed the picture's size and aspect ratio. None does so for a sample_size of 128,
            as PixArt-alpha at 1024 pixels was trained.
        caption_channels: channels of the text that goes in, which is projected to a token's; None for no projection.
        norm_num_groups, num_embeds_ada_norm, upcast_attention, attention_type: kept for configs that have them.

    Raises:
        ValueError: for a kind that is not supported, and for numbers that do not fit, naming both.
    """

    # What configs of PixArt-alpha hold besides, from a time when one class had many kinds (see `legacy`).
    derived_config = ("double_self_attention", "num_vector_embeds", "only_cross_attention", "use_linear_projection")
    _repeated_blocks: ClassVar[list[str]] = ["PixArtTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["PixArtTransformerBlock", "PatchEmbed"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = [
        "pos_embed",
        "norm",
        "adaln_single",
    ]
    _skip_quantization_patterns: ClassVar[tuple[str, ...]] = (*Model._skip_quantization_patterns, "adaln_single")

    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        in_channels: int = 4,
        out_channels: int | None = 8,
        num_layers: int = 28,
        dropout: float = 0.0,
        norm_num_groups: int = 32,
        cross_attention_dim: int | None = 1152,
        attention_bias: bool = True,
        sample_size: int = 128,
        patch_size: int = 2,
        activation_fn: str = "gelu-approximate",
        num_embeds_ada_norm: int | None = 1000,
        upcast_attention: bool = False,
        norm_type: str = "ada_norm_single",
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        interpolation_scale: float | None = None,
        use_additional_conditions: bool | None = None,
        caption_channels: int | None = None,
        attention_type: str | None = "default",
    ) -> None:
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        _check_config(dim, norm_type, patch_size, cross_attention_dim, caption_channels)
        self.inner_dim, self.patch_size = dim, patch_size
        self.text_channels = cross_attention_dim if caption_channels is None else caption_channels
        self.out_channels = in_channels if out_channels is None else out_channels
        self.takes_sizes = sample_size == 128 if use_additional_conditions is None else use_additional_conditions
        scale = max(sample_size // 64, 1) if interpolation_scale is None else interpolation_scale
        self.pos_embed = PatchEmbed(sample_size, patch_size, in_channels, dim, interpolation_scale=scale)
        self.transformer_blocks = nn.ModuleList(
            PixArtTransformerBlock(
                dim,
                num_attention_heads,
                attention_head_dim,
                cross_attention_dim=cross_attention_dim,
                dropout=dropout,
                activation_fn=activation_fn,
                attention_bias=attention_bias,
                norm_elementwise_affine=norm_elementwise_affine,
                norm_eps=norm_eps,
            )
            for _ in range(num_layers)
        )
        self.norm_out = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.randn(2, dim) / dim**0.5)
        self.proj_out = nn.Linear(dim, patch_size**2 * self.out_channels)
        self.adaln_single = AdaLayerNormSingle(dim, self.takes_sizes)
        self.caption_projection = None if caption_channels is None else TextProjection(caption_channels, dim)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep: Tensor | float | int | None = None,
        added_cond_kwargs: Mapping[str, Tensor | None] | None = None,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict from noisy latents.

        Args:
            hidden_states: noisy latents (B, in_channels, H, W); the patches must divide them.
            encoder_hidden_states: text tokens (B, T, caption_channels).
            timestep: from 0 to 1000: a number, a scalar tensor or one a sample. Give tensors to a compiled model.
            added_cond_kwargs: "resolution" (B, 2), height and width in pixels, and "aspect_ratio" (B, 1), height
                divided by width, where the model takes sizes (`takes_sizes`); else it is not read.
            cross_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            attention_mask: (B, tokens), 1 for patches that count; or (B, 1, tokens), added to the scores.
            encoder_attention_mask: the same for text tokens.
            return_dict: False gives a tuple.

        Returns:
            The prediction (B, out_channels, H, W): noise, then its variance where that is learned.

        Raises:
            ValueError: for shapes that do not fit and conditions that are missing or not taken.
        """
        check_latents(hidden_states, self.config["in_channels"])
        check_given("PixArt", timestep=timestep)
        assert timestep is not None
        if self.text_channels is not None:
            check_given("PixArt", encoder_hidden_states=encoder_hidden_states)
            assert encoder_hidden_states is not None
            batch = len(hidden_states)
            check_tokens("encoder_hidden_states", encoder_hidden_states, batch, self.text_channels)
        check_attention_kwargs(cross_attention_kwargs, "cross_attention_kwargs")
        rows, columns = patch_grid(hidden_states, self.patch_size)
        masks = [_as_mask(mask, hidden_states) for mask in (attention_mask, encoder_attention_mask)]
        tokens = self.pos_embed(hidden_states)
        sizes = added_cond_kwargs or {}
        modulation, embedded = self.adaln_single(
            batched_timestep(timestep, hidden_states),
            tokens.dtype,
            sizes.get("resolution"),
            sizes.get("aspect_ratio"),
        )
        text = encoder_hidden_states
        if self.caption_projection is not None:
            text = self.caption_projection(text)
        for block in self.transformer_blocks:
            tokens = block(tokens, modulation, masks[0], text, masks[1])
        shift, scale = table_vectors(self.scale_shift_table, embedded)
        tokens = self.proj_out(modulate(self.norm_out(tokens), shift, scale))
        sample = from_patches(tokens, rows, columns, self.patch_size)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


def _as_mask(mask: Tensor | None, sample: Tensor) -> Tensor | None:
    """A mask (B, T) as bool; one of three axes is added to the scores as it is."""
    return mask if mask is not None and mask.dim() == 3 else token_mask(mask, sample)


def _check_config(dim: int, norm_type: str, patch_size: Any, cross_attention_dim: Any, caption_channels: Any) -> None:
    if norm_type != "ada_norm_single":
        raise ValueError(f"norm_type={norm_type!r} is not supported; this model is built with 'ada_norm_single'")
    if not isinstance(patch_size, int) or patch_size < 1:
        raise ValueError(f"patch_size={patch_size!r} must be a whole number of 1 at least")
    if caption_channels is not None and cross_attention_dim not in (None, dim):
        raise ValueError(
            f"cross_attention_dim={cross_attention_dim} differs from the {dim} channels (num_attention_heads times "
            "attention_head_dim) that caption_channels are projected to"
        )
