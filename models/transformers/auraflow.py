"""`AuraFlowTransformer2DModel`: the denoiser of AuraFlow."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...offload.runs import once
from ..base import Model
from ..layers.embeddings import TimestepEmbedding, Timesteps, batched_timestep
from ..layers.joint_attention import JointAttention
from ..layers.modulation import AdaLayerNormZero, Modulating, Vector, gated, modulate
from ..layers.patches import from_patches, patch_grid
from .checks import check_attention_kwargs, check_given, check_latents, check_tokens
from .outputs import Transformer2DModelOutput

# All layer norms of this model add so much to the variance and have no weights.
_EPS = 1e-5
_REGISTERS = 8


class AuraFlowFeedForward(nn.Module):
    """SwiGLU with the gates in a layer of their own (Shazeer 2020, "GLU variants", equation 6), without biases."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # Two thirds of four times the channels keep the size of a plain feed-forward; 256 suits the hardware.
        inner = 256 * math.ceil(int(8 * dim / 3) / 256)
        self.linear_1 = nn.Linear(dim, inner, bias=False)
        self.linear_2 = nn.Linear(dim, inner, bias=False)
        self.out_projection = nn.Linear(inner, dim, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.out_projection(F.silu(self.linear_1(hidden_states)) * self.linear_2(hidden_states))


class AuraFlowPatchEmbed(nn.Module):
    """Latents to tokens by a linear layer, plus learned positions from the middle of a square table."""

    def __init__(self, patch_size: int, in_channels: int, embed_dim: int, pos_embed_max_size: int) -> None:
        super().__init__()
        self.patch_size, self.side = patch_size, math.isqrt(pos_embed_max_size)
        self.pos_embed = nn.Parameter(torch.randn(1, pos_embed_max_size, embed_dim) * 0.1)
        self.proj = nn.Linear(patch_size**2 * in_channels, embed_dim)

    def forward(self, latent: Tensor) -> Tensor:
        rows, columns = patch_grid(latent, self.patch_size)
        limit = self.side * self.patch_size
        if max(rows, columns) > self.side:
            raise ValueError(
                f"latents of {latent.shape[2]} x {latent.shape[3]} (height x width) exceed the positions that this "
                f"model has: at most {limit} x {limit} (pos_embed_max_size={self.side**2})"
            )
        patches = F.unfold(latent, self.patch_size, stride=self.patch_size).transpose(1, 2)
        # Halves are rounded towards the start of the table for the middle, and towards zero for the count.
        top, left = self.side // 2 - rows // 2, self.side // 2 - columns // 2
        table = self.pos_embed.unflatten(1, (self.side, self.side))
        return self.proj(patches) + table[:, top : top + rows, left : left + columns].flatten(1, 2)


class AuraFlowPreFinalBlock(Modulating):
    """Scale and shift before the last layer, without a norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, hidden_states: Tensor, emb: Vector) -> Tensor:
        scale, shift = self.make(emb).chunk(2, dim=1)
        return modulate(hidden_states, shift, scale)


def _feed_forward(
    stream: Tensor, attended: Tensor, norm: nn.Module, feed_forward: nn.Module, vectors: tuple[Tensor, ...]
) -> Tensor:
    """The second half of a block. The attention's result goes through it alone: it is not added to the stream."""
    gate, shift, scale, gate_ff = vectors
    hidden = norm(stream + gated(attended, gate))
    return stream + gated(feed_forward(modulate(hidden, shift, scale)), gate_ff)


def _attention(dim: int, heads: int, dim_head: int, context_dim: int | None = None) -> JointAttention:
    return JointAttention(
        dim,
        heads=heads,
        dim_head=dim_head,
        context_dim=context_dim,
        bias=False,
        out_bias=False,
        qk_norm="layer_norm",
        qk_norm_affine=False,
        eps=_EPS,
    )


def _norm(dim: int) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=_EPS, elementwise_affine=False)


class AuraFlowJointTransformerBlock(nn.Module):
    """Text and image tokens with weights of their own meet in one attention (MM-DiT, Esser et al. 2024, figure 2b)."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNormZero(dim, bias=False, eps=_EPS)
        self.norm1_context = AdaLayerNormZero(dim, bias=False, eps=_EPS)
        self.attn = _attention(dim, heads, dim_head, context_dim=dim)
        self.norm2 = _norm(dim)
        self.ff = AuraFlowFeedForward(dim)
        self.norm2_context = _norm(dim)
        self.ff_context = AuraFlowFeedForward(dim)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        """Transform image tokens (B, S, dim) and text tokens (B, T, dim), told `temb` (B, dim)."""
        image, *vectors = self.norm1(hidden_states, temb)
        text, *text_vectors = self.norm1_context(encoder_hidden_states, temb)
        image, text = self.attn(image, text)
        return (
            _feed_forward(hidden_states, image, self.norm2, self.ff, tuple(vectors)),
            _feed_forward(encoder_hidden_states, text, self.norm2_context, self.ff_context, tuple(text_vectors)),
        )


class AuraFlowSingleTransformerBlock(nn.Module):
    """Text and image tokens in one sequence, with the same weights for both."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNormZero(dim, bias=False, eps=_EPS)
        self.attn = _attention(dim, heads, dim_head)
        self.norm2 = _norm(dim)
        self.ff = AuraFlowFeedForward(dim)

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        """Transform tokens (B, T + S, dim), told `temb` (B, dim)."""
        normed, *vectors = self.norm1(hidden_states, temb)
        attended, _ = self.attn(normed)
        return _feed_forward(hidden_states, attended, self.norm2, self.ff, tuple(vectors))


class AuraFlowTransformer2DModel(Model):
    """A rectified flow transformer with few two-stream blocks and many of one stream (AuraFlow, fal.ai 2024).

    Args:
        sample_size: height and width of the latents it was trained for; pipelines read it.
        patch_size: height and width of a patch of latents, which is a token.
        in_channels: channels of the latents.
        num_mmdit_layers: number of blocks with two streams.
        num_single_dit_layers: number of blocks with one.
        attention_head_dim, num_attention_heads: channels of a head, and heads; their product is a token's channels.
        joint_attention_dim: channels of the text that goes in.
        caption_projection_dim: channels it is projected to, which must be a token's.
        out_channels: of the prediction; None takes `in_channels`.
        pos_embed_max_size: number of learned positions, a square number; the middle ones are used.

    Raises:
        ValueError: for numbers that do not fit, naming both.
    """

    _repeated_blocks: ClassVar[list[str]] = ["AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = [
        "AuraFlowJointTransformerBlock",
        "AuraFlowSingleTransformerBlock",
        "AuraFlowPatchEmbed",
    ]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["pos_embed", "norm"]
    _skip_quantization_patterns: ClassVar[tuple[str, ...]] = (*Model._skip_quantization_patterns, "time_step_proj")
    _modulated_by: ClassVar[tuple[str, ...]] = ("timestep",)

    def __init__(
        self,
        sample_size: int = 64,
        patch_size: int = 2,
        in_channels: int = 4,
        num_mmdit_layers: int = 4,
        num_single_dit_layers: int = 32,
        attention_head_dim: int = 256,
        num_attention_heads: int = 12,
        joint_attention_dim: int = 2048,
        caption_projection_dim: int = 3072,
        out_channels: int | None = 4,
        pos_embed_max_size: int = 1024,
    ) -> None:
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        if caption_projection_dim != dim:
            raise ValueError(
                f"caption_projection_dim={caption_projection_dim} must equal the {dim} channels of a token "
                "(num_attention_heads times attention_head_dim)"
            )
        if math.isqrt(pos_embed_max_size) ** 2 != pos_embed_max_size:
            raise ValueError(f"pos_embed_max_size={pos_embed_max_size} must be a square number: rows times columns")
        self.inner_dim, self.patch_size = dim, patch_size
        self.out_channels = in_channels if out_channels is None else out_channels
        self.pos_embed = AuraFlowPatchEmbed(patch_size, in_channels, dim, pos_embed_max_size)
        self.context_embedder = nn.Linear(joint_attention_dim, dim, bias=False)
        # Flow times run from 0 to 1; the sinusoids want the range of timesteps.
        self.time_step_embed = Timesteps(256, scale=1000)
        self.time_step_proj = TimestepEmbedding(256, dim)
        size = (dim, num_attention_heads, attention_head_dim)
        self.joint_transformer_blocks = nn.ModuleList(
            AuraFlowJointTransformerBlock(*size) for _ in range(num_mmdit_layers)
        )
        self.single_transformer_blocks = nn.ModuleList(
            AuraFlowSingleTransformerBlock(*size) for _ in range(num_single_dit_layers)
        )
        self.norm_out = AuraFlowPreFinalBlock(dim)
        self.proj_out = nn.Linear(dim, patch_size**2 * self.out_channels, bias=False)
        # Tokens before the text that hold nothing: a place for attention to go (Darcet et al. 2024).
        self.register_tokens = nn.Parameter(torch.randn(1, _REGISTERS, dim) * 0.02)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep: Tensor | float | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict from noisy latents.

        Args:
            hidden_states: noisy latents (B, in_channels, H, W); the patches must divide them.
            encoder_hidden_states: text tokens (B, T, joint_attention_dim).
            timestep: the flow's time, from 0 (data) to 1 (noise): a number, a scalar tensor or one a sample. Give
                tensors to a compiled model.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            return_dict: False gives a tuple.

        Returns:
            The velocity, (B, out_channels, H, W).

        Raises:
            ValueError: for shapes that do not fit and arguments that are missing or not taken.
        """
        check_latents(hidden_states, self.config["in_channels"])
        check_given("AuraFlow", encoder_hidden_states=encoder_hidden_states, timestep=timestep)
        assert encoder_hidden_states is not None and timestep is not None
        batch, size = len(hidden_states), self.config["joint_attention_dim"]
        check_tokens("encoder_hidden_states", encoder_hidden_states, batch, size)
        check_attention_kwargs(attention_kwargs, "attention_kwargs")
        rows, columns = patch_grid(hidden_states, self.patch_size)
        time = self.time_step_embed(batched_timestep(timestep, hidden_states))
        temb = self.time_step_proj(time.to(hidden_states.dtype))
        image = self.pos_embed(hidden_states)
        text = once(self._embed_text, encoder_hidden_states)
        for block in self.joint_transformer_blocks:
            image, text = block(image, text, temb)
        tokens = torch.cat([text, image], dim=1)
        for block in self.single_transformer_blocks:
            tokens = block(tokens, temb)
        tokens = self.proj_out(self.norm_out(tokens[:, text.shape[1] :], temb))
        sample = from_patches(tokens, rows, columns, self.patch_size)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _embed_text(self, text: Tensor) -> Tensor:
        text = self.context_embedder(text)
        return torch.cat([self.register_tokens.expand(len(text), -1, -1), text], dim=1)
