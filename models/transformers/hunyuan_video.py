"""`HunyuanVideoTransformer3DModel`: the denoiser of HunyuanVideo (Kong et al. 2024, arXiv 2412.03603)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...offload.runs import once
from ..base import Model
from ..layers.attention import Attention
from ..layers.embeddings import CombinedTimestepTextProjEmbeddings, one_a_sample
from ..layers.modulation import AdaLayerNormContinuous
from ..layers.rotary import RotaryTable, rotary_table
from ..layers.transformer import FeedForward
from ..unets.conditioning import token_mask
from .checks import check_attention_kwargs, check_tokens
from .flux import FluxSingleTransformerBlock, FluxTransformerBlock
from .outputs import Transformer2DModelOutput


class HunyuanVideoTransformerBlock(FluxTransformerBlock):
    """Film and text tokens, each with weights of its own, attend to each other (section 4.2 of the paper)."""


class HunyuanVideoSingleTransformerBlock(FluxSingleTransformerBlock):
    """All tokens in one stream (section 4.2 of the paper)."""


class HunyuanVideoPatchEmbed(nn.Module):
    """Latents (B, C, f, h, w) to tokens (B, S, dim), frame by frame, row by row."""

    def __init__(self, channels: int, dim: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.proj = nn.Conv3d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, latents: Tensor) -> Tensor:
        return self.proj(latents).flatten(2).mT


class _Gates(nn.Module):
    """The gates of a refiner's block: of its attention and of its feed-forward, each (B, 1, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, vector: Tensor) -> list[Tensor]:
        return list(self.linear(F.silu(vector))[:, None].chunk(2, dim=-1))


class HunyuanVideoRefinerBlock(nn.Module):
    """Attention and feed-forward over text tokens, gated by a vector."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads=heads, dim_head=dim_head, bias=True)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.ff = FeedForward(dim, activation_fn="linear-silu")
        self.norm_out = _Gates(dim)

    def forward(self, text: Tensor, vector: Tensor, mask: Tensor | None) -> Tensor:
        """Text (B, T, dim) to text; `vector` (B, dim), mask (B, T, T)."""
        gate, gate_ff = self.norm_out(vector)
        text = text + self.attn(self.norm1(text), attention_mask=mask) * gate
        return text + self.ff(self.norm2(text)) * gate_ff


class _Refiner(nn.Module):
    """The blocks, under the name that they have in checkpoints."""

    def __init__(self, blocks: int, *block: Any) -> None:
        super().__init__()
        self.refiner_blocks = nn.ModuleList(HunyuanVideoRefinerBlock(*block) for _ in range(blocks))


class HunyuanVideoTokenRefiner(nn.Module):
    """Lets the tokens of a causal language model see each other, told the time (section 4.2 of the paper).

    Args:
        in_channels: of the text.
        dim: channels of the result, `heads` times `dim_head`.
        heads, dim_head: heads and the channels of each.
        blocks: how many.
    """

    def __init__(self, in_channels: int, dim: int, heads: int, dim_head: int, blocks: int) -> None:
        super().__init__()
        self.time_text_embed = CombinedTimestepTextProjEmbeddings(dim, in_channels)
        self.proj_in = nn.Linear(in_channels, dim)
        self.token_refiner = _Refiner(blocks, dim, heads, dim_head)

    def forward(self, text: Tensor, timestep: Tensor, mask: Tensor | None) -> Tensor:
        """Text (B, T, in_channels) and times (B,) to (B, T, dim); `mask` (B, T) is True for tokens that count."""
        both = None
        if mask is None:
            pooled = text.mean(dim=1)
        else:
            counts = mask[..., None].float()
            pooled = ((text * counts).sum(dim=1) / counts.sum(dim=1)).to(text.dtype)
            both = mask[:, :, None] & mask[:, None, :]
            # What does not count needs something to look at; what it becomes is not seen by anything.
            both = both | (torch.arange(text.shape[1], device=text.device) == 0)
        vector = self.time_text_embed(timestep, pooled)
        text = self.proj_in(text)
        for block in self.token_refiner.refiner_blocks:
            text = block(text, vector, both)
        return text


class HunyuanVideoTransformer3DModel(Model):
    """A rectified-flow transformer over films and text: blocks with two streams, then blocks with one.

    Args:
        in_channels, out_channels: of the latents and of the prediction.
        num_attention_heads, attention_head_dim: heads and the channels of each; their product is a token's channels.
        num_layers, num_single_layers: blocks with two streams, and with one.
        num_refiner_layers: blocks that the text passes first.
        mlp_ratio: channels of the feed-forwards of all other blocks, as a multiple of a token's.
        patch_size, patch_size_t: latents of a token along height and width, and along time.
        qk_norm: of queries and keys, which must be "rms_norm".
        guidance_embeds: the guidance scale is an input, as in the published model, which was distilled with guidance.
        text_embed_dim: channels of the text tokens (Llama).
        pooled_projection_dim: channels of the pooled text (CLIP).
        rope_theta: base of the frequencies of rotary positions.
        rope_axes_dim: the channels of a head that turn with frame, row and column.
        image_condition_type: None, or "latent_concat", where a picture joins the channels of the latents.
            "token_replace" is not taken.

    Raises:
        ValueError: for a kind that is not supported, and for numbers that do not fit, naming both.
    """

    _repeated_blocks: ClassVar[list[str]] = [
        "HunyuanVideoTransformerBlock",
        "HunyuanVideoSingleTransformerBlock",
        "HunyuanVideoPatchEmbed",
        "HunyuanVideoTokenRefiner",
    ]
    _no_split_modules: ClassVar[list[str] | None] = [*_repeated_blocks]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = [
        "x_embedder",
        "context_embedder",
        "norm",
    ]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _modulated_by: ClassVar[tuple[str, ...]] = ("timestep", "pooled_projections", "guidance")

    def __init__(
        self,
        in_channels: int = 16,
        out_channels: int = 16,
        num_attention_heads: int = 24,
        attention_head_dim: int = 128,
        num_layers: int = 20,
        num_single_layers: int = 40,
        num_refiner_layers: int = 2,
        mlp_ratio: float = 4.0,
        patch_size: int = 2,
        patch_size_t: int = 1,
        qk_norm: str = "rms_norm",
        guidance_embeds: bool = True,
        text_embed_dim: int = 4096,
        pooled_projection_dim: int = 768,
        rope_theta: float = 256.0,
        rope_axes_dim: tuple[int, ...] = (16, 56, 56),
        image_condition_type: str | None = None,
    ) -> None:
        super().__init__()
        if sum(rope_axes_dim) != attention_head_dim or len(rope_axes_dim) != 3 or any(dim % 2 for dim in rope_axes_dim):
            raise ValueError(
                f"rope_axes_dim={tuple(rope_axes_dim)} must be three even numbers that add up to "
                f"attention_head_dim={attention_head_dim}"
            )
        if image_condition_type not in (None, "latent_concat"):
            raise ValueError(f"image_condition_type={image_condition_type!r} is not supported; 'latent_concat' is")
        if qk_norm != "rms_norm":
            raise ValueError(f"qk_norm={qk_norm!r} is not supported; this model has 'rms_norm'")
        heads = (num_attention_heads, attention_head_dim)
        dim = num_attention_heads * attention_head_dim
        self.patch = (patch_size_t, patch_size, patch_size)
        self.x_embedder = HunyuanVideoPatchEmbed(in_channels, dim, self.patch)
        self.context_embedder = HunyuanVideoTokenRefiner(text_embed_dim, dim, *heads, num_refiner_layers)
        self.time_text_embed = CombinedTimestepTextProjEmbeddings(dim, pooled_projection_dim, guidance_embeds)
        self.transformer_blocks = nn.ModuleList(
            HunyuanVideoTransformerBlock(dim, *heads, mlp_ratio=mlp_ratio) for _ in range(num_layers)
        )
        self.single_transformer_blocks = nn.ModuleList(
            HunyuanVideoSingleTransformerBlock(dim, *heads, mlp_ratio) for _ in range(num_single_layers)
        )
        self.norm_out = AdaLayerNormContinuous(dim, dim)
        self.proj_out = nn.Linear(dim, patch_size_t * patch_size * patch_size * out_channels)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
        pooled_projections: Tensor,
        guidance: Tensor | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the flow of latents.

        Args:
            hidden_states: latents (B, in_channels, f, h, w), with sides that are multiples of the patches.
            timestep: from 0 to 1000, a number, a scalar tensor or one a sample. Give tensors to a compiled model.
            encoder_hidden_states: text tokens (B, T, text_embed_dim).
            encoder_attention_mask: (B, T), 1 or True for text tokens that count; None if all do.
            pooled_projections: pooled text (B, pooled_projection_dim).
            guidance: guidance scales (B,) times 1000, where `guidance_embeds` is set, and only there.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            return_dict: False gives a tuple.

        Returns:
            The flow, (B, out_channels, f, h, w).

        Raises:
            ValueError: for shapes that do not fit and arguments that are not taken.
        """
        grid = self._check(hidden_states, encoder_hidden_states, pooled_projections, encoder_attention_mask)
        check_attention_kwargs(attention_kwargs, "attention_kwargs")
        times = one_a_sample(timestep, hidden_states.shape[0], hidden_states.device)
        mask = token_mask(encoder_attention_mask, hidden_states)
        temb = self.time_text_embed(times, pooled_projections, guidance)
        film = self.x_embedder(hidden_states)
        text = self.context_embedder(encoder_hidden_states, times, mask)
        words = text.shape[1]
        rotary = once(self._rotary, grid, words, film.device)
        if mask is not None:
            mask = once(_with_film, mask, film.shape[1])
        for block in self.transformer_blocks:
            film, text = block(film, text, temb, rotary, mask)
        tokens = torch.cat([text, film], dim=1)
        for block in self.single_transformer_blocks:
            tokens = block(tokens, temb, rotary, mask)
        sample = self._unpack(self.proj_out(self.norm_out(tokens[:, words:], temb)), grid)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _check(self, latents: Tensor, text: Tensor, pooled: Tensor, mask: Tensor | None) -> tuple[int, int, int]:
        """Refuse inputs that do not fit; how many tokens there are along each axis."""
        batch, channels = latents.shape[0], self.config["in_channels"]
        if latents.ndim != 5 or latents.shape[1] != channels:
            expected = f"(batch, {channels}, frames, height, width)"
            raise ValueError(f"hidden_states has the shape {tuple(latents.shape)}, expected {expected}")
        if any(side % step for side, step in zip(latents.shape[2:], self.patch, strict=True)):
            raise ValueError(
                f"hidden_states has the sides {tuple(latents.shape[2:])}, which must be multiples of {self.patch}"
            )
        check_tokens("encoder_hidden_states", text, batch, self.config["text_embed_dim"])
        size = self.config["pooled_projection_dim"]
        if pooled.shape != (batch, size):
            raise ValueError(f"pooled_projections has the shape {tuple(pooled.shape)}, expected {(batch, size)}")
        if mask is not None and mask.shape != text.shape[:2]:
            raise ValueError(
                f"encoder_attention_mask has the shape {tuple(mask.shape)}, expected {tuple(text.shape[:2])}"
            )
        frames, rows, columns = (side // step for side, step in zip(latents.shape[2:], self.patch, strict=True))
        return frames, rows, columns

    def _rotary(self, grid: tuple[int, int, int], words: int, device: torch.device) -> RotaryTable:
        """Positions of the film's tokens. The text comes first, and does not turn: its positions are 0."""
        axes = [torch.arange(size, device=device) for size in grid]
        film = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
        positions = torch.cat([film.new_zeros(words, 3), film])
        return rotary_table(positions, self.config["rope_axes_dim"], self.config["rope_theta"])

    def _unpack(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Tokens (B, S, C * patch) to latents (B, C, f, h, w)."""
        parts = tokens.unflatten(2, (-1, *self.patch)).unflatten(1, grid)
        return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)


def _with_film(mask: Tensor, tokens: int) -> Tensor:
    """A mask of the text, with tokens of the film after it, which all count."""
    return torch.cat([mask, mask.new_ones(len(mask), tokens)], dim=1)
