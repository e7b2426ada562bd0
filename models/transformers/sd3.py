"""`SD3Transformer2DModel`: the denoiser of Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv 2403.03206)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from ...offload.runs import once
from ..base import Model
from ..layers.embeddings import CombinedTimestepTextProjEmbeddings, batched_timestep
from ..layers.joint_attention import JointAttention
from ..layers.modulation import AdaLayerNormContinuous, AdaLayerNormZero, AdaLayerNormZeroX, gated, modulate
from ..layers.patches import PatchEmbed, from_patches, patch_grid
from ..layers.transformer import FeedForward
from .checks import check_attention_kwargs, check_given, check_latents, check_tokens
from .outputs import Transformer2DModelOutput


class JointTransformerBlock(nn.Module):
    """Image and text tokens, each with weights of its own, attend to each other (MM-DiT, Esser et al. 2024, figure 2b).

    Args:
        dim: channels of the tokens.
        num_attention_heads: number of heads.
        attention_head_dim: channels of a head.
        context_pre_only: the text is read but not updated, as in the last block, after which it is not needed.
        qk_norm: of queries and keys, see `JointAttention`.
        use_dual_attention: the image tokens also attend to themselves alone (MMDiT-X, Stable Diffusion 3.5 medium).
    """

    def __init__(
        self,
        dim: int,
        num_attention_heads: int,
        attention_head_dim: int,
        context_pre_only: bool = False,
        qk_norm: str | None = None,
        use_dual_attention: bool = False,
    ) -> None:
        super().__init__()
        self.context_pre_only, self.use_dual_attention = context_pre_only, use_dual_attention
        heads: dict[str, Any] = {"heads": num_attention_heads, "dim_head": attention_head_dim, "qk_norm": qk_norm}
        self.norm1 = AdaLayerNormZeroX(dim) if use_dual_attention else AdaLayerNormZero(dim)
        self.norm1_context = AdaLayerNormContinuous(dim, dim) if context_pre_only else AdaLayerNormZero(dim)
        self.attn = JointAttention(dim, context_dim=dim, context_pre_only=context_pre_only, **heads)
        self.attn2 = JointAttention(dim, **heads) if use_dual_attention else None
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.ff = FeedForward(dim, activation_fn="gelu-approximate")
        if not context_pre_only:
            self.norm2_context = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
            self.ff_context = FeedForward(dim, activation_fn="gelu-approximate")

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Transform image tokens (B, S, dim) and text tokens (B, T, dim), modulated by `temb` (B, dim).

        Returns:
            Both, in this order; None for text that is not updated.
        """
        image, gate, shift, scale, gate_mlp, *second = self.norm1(hidden_states, temb)
        text, text_vectors = self.norm1_context(encoder_hidden_states, temb), ()
        if not self.context_pre_only:
            text, *text_vectors = text

        image, text = self.attn(image, text)
        hidden_states = hidden_states + gated(image, gate)
        if self.attn2 is not None:
            tokens, gate_2 = second
            hidden_states = hidden_states + gated(self.attn2(tokens)[0], gate_2)
        fed = self.ff(modulate(self.norm2(hidden_states), shift, scale))
        hidden_states = hidden_states + gated(fed, gate_mlp)
        if not text_vectors:
            return hidden_states, None

        gate, shift, scale, gate_mlp = text_vectors
        encoder_hidden_states = encoder_hidden_states + gated(text, gate)
        fed = self.ff_context(modulate(self.norm2_context(encoder_hidden_states), shift, scale))
        return hidden_states, encoder_hidden_states + gated(fed, gate_mlp)


class SD3Transformer2DModel(Model):
    """A rectified-flow transformer over patches of latents and text, in two streams that attend to each other.

    Args:
        sample_size: height and width of the latents it was trained for; pipelines read it.
        patch_size: height and width of the patch of latents that makes a token.
        in_channels: channels of the latents.
        num_layers: number of blocks.
        attention_head_dim: channels of a head.
        num_attention_heads: number of heads.
        joint_attention_dim: channels of the text tokens.
        caption_projection_dim: channels that these are projected to; those of the image tokens.
        pooled_projection_dim: channels of the pooled text.
        out_channels: channels of the prediction; `in_channels` if None.
        pos_embed_max_size: rows and columns of the table of positions, which limit the size of pictures.
        dual_attention_layers: numbers of the blocks whose image tokens also attend to themselves (3.5 medium).
        qk_norm: "rms_norm" over queries and keys (3.5), or None (3).

    Raises:
        ValueError: for numbers that do not fit, and an unknown norm.
    """

    _repeated_blocks: ClassVar[list[str]] = ["JointTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["JointTransformerBlock"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["pos_embed", "norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _modulated_by: ClassVar[tuple[str, ...]] = ("timestep", "pooled_projections")

    def __init__(
        self,
        sample_size: int = 128,
        patch_size: int = 2,
        in_channels: int = 16,
        num_layers: int = 18,
        attention_head_dim: int = 64,
        num_attention_heads: int = 18,
        joint_attention_dim: int = 4096,
        caption_projection_dim: int = 1152,
        pooled_projection_dim: int = 2048,
        out_channels: int = 16,
        pos_embed_max_size: int = 96,
        dual_attention_layers: tuple[int, ...] = (),
        qk_norm: str | None = None,
    ) -> None:
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        if caption_projection_dim != dim:
            raise ValueError(
                f"caption_projection_dim={caption_projection_dim} must be num_attention_heads={num_attention_heads} "
                f"times attention_head_dim={attention_head_dim}, which is {dim}: text and image attend to each other"
            )
        self.out_channels = out_channels or in_channels
        self.pos_embed = PatchEmbed(sample_size, patch_size, in_channels, dim, pos_embed_max_size=pos_embed_max_size)
        self.time_text_embed = CombinedTimestepTextProjEmbeddings(dim, pooled_projection_dim)
        self.context_embedder = nn.Linear(joint_attention_dim, dim)
        self.transformer_blocks = nn.ModuleList(
            JointTransformerBlock(
                dim,
                num_attention_heads,
                attention_head_dim,
                context_pre_only=index == num_layers - 1,
                qk_norm=qk_norm,
                use_dual_attention=index in dual_attention_layers,
            )
            for index in range(num_layers)
        )
        self.norm_out = AdaLayerNormContinuous(dim, dim)
        self.proj_out = nn.Linear(dim, patch_size * patch_size * self.out_channels)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        timestep: Tensor | float | None = None,
        block_controlnet_hidden_states: Sequence[Tensor] | None = None,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
        skip_layers: Sequence[int] | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the flow of noisy latents.

        Args:
            hidden_states: latents (B, in_channels, H, W), of sizes that patches divide.
            encoder_hidden_states: text tokens (B, T, joint_attention_dim).
            pooled_projections: pooled text (B, pooled_projection_dim).
            timestep: 1000 times the share of noise: a number, a scalar tensor or one a sample. Give tensors to a
                compiled model.
            block_controlnet_hidden_states: (B, S, C) each, added to the image tokens after the blocks: the first
                after the first few blocks, and so on. After the last block none is added.
            joint_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            return_dict: False gives a tuple.
            skip_layers: numbers of blocks to leave out.

        Returns:
            The flow, (B, out_channels, H, W).

        Raises:
            ValueError: for inputs that are missing or whose shapes do not fit.
        """
        times = self._check(hidden_states, encoder_hidden_states, pooled_projections, timestep, skip_layers)
        check_attention_kwargs(joint_attention_kwargs)
        rows, columns = patch_grid(hidden_states, self.patch_size)
        image = self.pos_embed(hidden_states)
        temb = self.time_text_embed(times, pooled_projections)
        text = once(self.context_embedder, encoder_hidden_states)

        for index, block in enumerate(self.transformer_blocks):
            if skip_layers is None or index not in skip_layers:
                image, text = block(image, text, temb)
            if block_controlnet_hidden_states and index < self.num_layers - 1:
                image = image + self._residual(block_controlnet_hidden_states, index)

        tokens = self.proj_out(self.norm_out(image, temb))
        sample = from_patches(tokens, rows, columns, self.patch_size)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _residual(self, residuals: Sequence[Tensor], index: int) -> Tensor:
        """Which of the ControlNet's residuals, of which there may be fewer than blocks, goes to block `index`."""
        return residuals[index * len(residuals) // self.num_layers]

    def _check(
        self, sample: Tensor, text: Any, pooled: Any, timestep: Any, skip_layers: Sequence[int] | None
    ) -> Tensor:
        """Refuse inputs that do not fit; the timestep of each sample."""
        check_given("SD3Transformer2DModel", encoder_hidden_states=text, pooled_projections=pooled, timestep=timestep)
        check_latents(sample, self.in_channels)
        batch = sample.shape[0]
        check_tokens("encoder_hidden_states", text, batch, self.joint_attention_dim)
        if pooled.shape != (batch, self.pooled_projection_dim):
            expected = (batch, self.pooled_projection_dim)
            raise ValueError(f"pooled_projections has the shape {tuple(pooled.shape)}, expected {expected}")
        unknown = [index for index in skip_layers or () if not 0 <= index < self.num_layers]
        if unknown:
            raise ValueError(f"skip_layers={unknown} name no block: this model has {self.num_layers}, from 0")
        return batched_timestep(timestep, sample)
