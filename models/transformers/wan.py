"""`WanTransformer3DModel`: the transformer of Wan 2.1 and 2.2 (Wan Team 2025, arXiv 2503.20314, section 4.2)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...offload.attention import attention
from ...offload.runs import once
from ..base import Model
from ..layers.embeddings import TextProjection, TimestepEmbedding, Timesteps, batched_timestep
from ..layers.rotary import RotaryTable, rotary_table
from ..layers.rotary_attention import RotaryAttention
from ..layers.transformer import FeedForward
from .checks import check_attention_kwargs, check_tokens
from .outputs import Transformer2DModelOutput


class PreciseLayerNorm(nn.LayerNorm):
    """A layer norm in float32, whatever the dtype of what comes in; the result is float32."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight, bias = (None if each is None else each.float() for each in (self.weight, self.bias))
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)


class WanImageEmbedding(nn.Module):
    """Tokens of CLIP's vision model to the channels of the blocks.

    Args:
        image_dim: channels of the tokens.
        dim: channels of the blocks.
        length: tokens of the pictures of a film, which get learned positions: 514 where a film has a first and a last
            picture; None without positions.
    """

    def __init__(self, image_dim: int, dim: int, length: int | None) -> None:
        super().__init__()
        self.norm1 = PreciseLayerNorm(image_dim)
        self.ff = FeedForward(image_dim, dim, mult=1, activation_fn="gelu")
        self.norm2 = PreciseLayerNorm(dim)
        self.pos_embed = None if length is None else nn.Parameter(torch.zeros(1, length, image_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T, image_dim) to (B, T, dim); with positions, the pictures of a film may lie along the batch."""
        if self.pos_embed is not None:
            tokens = tokens.reshape(-1, *self.pos_embed.shape[1:]) + self.pos_embed
        return self.norm2(self.ff(self.norm1(tokens).to(tokens.dtype))).to(tokens.dtype)


class WanTimeTextImageEmbedding(nn.Module):
    """What the blocks are told: the time, as vectors that modulate them, and the text and pictures as tokens."""

    def __init__(self, dim: int, freq_dim: int, text_dim: int, image_dim: int | None, length: int | None) -> None:
        super().__init__()
        self.timesteps_proj = Timesteps(freq_dim)
        self.time_embedder = TimestepEmbedding(freq_dim, dim)
        self.time_proj = nn.Linear(dim, 6 * dim)
        self.text_embedder = TextProjection(text_dim, dim)
        self.image_embedder = None if image_dim is None else WanImageEmbedding(image_dim, dim, length)

    def forward(
        self, times: Tensor, text: Tensor, pictures: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Times (B, N), text tokens and those of pictures to what the model is told.

        Returns:
            What modulates the last layer, (B, N, dim), and the blocks, (B, N, 6, dim), as float32; text (B, T, dim) and
            pictures (B, P, dim).
        """
        waves = self.timesteps_proj(times.flatten()).to(self.time_embedder.linear_1.weight.dtype)
        embedded = self.time_embedder(waves).to(dtype).unflatten(0, times.shape)
        modulation = self.time_proj(F.silu(embedded)).unflatten(-1, (6, -1))
        pictures = None if self.image_embedder is None else once(self.image_embedder, pictures)
        return embedded.float(), modulation.float(), self.text_embedder(text), pictures


class WanCrossAttention(RotaryAttention):
    """Attention to text and, added to it, to pictures through keys and values of their own.

    Args:
        dim: channels of the tokens, of the text and of the pictures.
        heads, dim_head: heads and the channels of each.
        eps: of the norms of queries and keys.
        sees_pictures: whether there are such keys and values.
    """

    def __init__(self, dim: int, heads: int, dim_head: int, eps: float, sees_pictures: bool) -> None:
        super().__init__(dim, heads=heads, dim_head=dim_head, cross_attention_dim=dim, eps=eps)
        self.sees_pictures = sees_pictures
        if sees_pictures:
            self.add_k_proj = nn.Linear(dim, dim)
            self.add_v_proj = nn.Linear(dim, dim)
            self.norm_added_k = nn.RMSNorm(dim, eps=eps)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, text: Tensor, pictures: Tensor | None
    ) -> Tensor:
        """Tokens (B, S, dim), text (B, T, dim), pictures (B, P, dim)."""
        split = (-1, (self.heads, self.dim_head))
        query, key, value = self._project(hidden_states, text)
        query = self.norm_q(query).unflatten(*split)

        def attend(key: Tensor, value: Tensor) -> Tensor:
            parts = (query, key.unflatten(*split), value.unflatten(*split))
            return attention(*parts, settings=self.attention_settings).flatten(2)

        attended = attend(self.norm_k(key), value)
        if self.sees_pictures and pictures is not None:
            attended = attended + attend(*once(self._keys_and_values_of_pictures, pictures))
        return self.to_out[0](attended)

    def _keys_and_values_of_pictures(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm_added_k(self.add_k_proj(pictures)), self.add_v_proj(pictures)


class WanTransformerBlock(nn.Module):
    """Self-attention and feed-forward that time modulates, and between them attention to text and pictures.

    Args:
        dim: channels of the tokens.
        heads, dim_head: heads and the channels of each.
        ffn_dim: channels within the feed-forward.
        cross_attn_norm: whether a norm precedes the attention to text.
        eps: of all norms.
        sees_pictures: see `WanCrossAttention`.
    """

    def __init__(
        self, dim: int, heads: int, dim_head: int, ffn_dim: int, cross_attn_norm: bool, eps: float, sees_pictures: bool
    ) -> None:
        super().__init__()
        self.norm1 = PreciseLayerNorm(dim, eps=eps, elementwise_affine=False)
        self.attn1 = RotaryAttention(dim, heads=heads, dim_head=dim_head, eps=eps)
        self.attn2 = WanCrossAttention(dim, heads, dim_head, eps, sees_pictures)
        self.norm2 = PreciseLayerNorm(dim, eps=eps) if cross_attn_norm else nn.Identity()
        self.ffn = FeedForward(dim, inner_dim=ffn_dim, activation_fn="gelu-approximate")
        self.norm3 = PreciseLayerNorm(dim, eps=eps, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self, hidden_states: Tensor, text: Tensor, pictures: Tensor | None, modulation: Tensor, rotary: RotaryTable
    ) -> Tensor:
        """Transform tokens (B, S, dim), told the text (B, T, dim) and pictures (B, P, dim).

        Args:
            modulation: (B, S or 1, 6, dim), of all blocks, float32.
            rotary: of the tokens.
        """
        dtype = hidden_states.dtype
        shift, scale, gate, shift_ff, scale_ff, gate_ff = (self.scale_shift_table.float() + modulation).unbind(2)
        attended = self.attn1(_modulated(self.norm1(hidden_states), shift, scale).to(dtype), rotary=rotary)
        hidden_states = (hidden_states.float() + attended * gate).to(dtype)
        hidden_states = hidden_states + self.attn2(self.norm2(hidden_states).to(dtype), text, pictures)
        fed = self.ffn(_modulated(self.norm3(hidden_states), shift_ff, scale_ff).to(dtype))
        return (hidden_states.float() + fed.float() * gate_ff).to(dtype)


def _modulated(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return tokens * (1 + scale) + shift


class WanTransformer3DModel(Model):
    """A diffusion transformer over patches of a film's latents (Wan 2.1; each of the two experts of Wan 2.2).

    Args:
        patch_size: frames, rows and columns of latents that make a token.
        num_attention_heads, attention_head_dim: heads and the channels of each; their product is a token's channels.
        in_channels: channels of the latents; 36 with a picture to start from.
        out_channels: channels of the prediction.
        text_dim: channels of the text tokens.
        freq_dim: length of the sinusoids of the timestep.
        ffn_dim: channels within the feed-forwards.
        num_layers: number of blocks.
        cross_attn_norm: whether a norm precedes the attention to text.
        qk_norm: must be "rms_norm_across_heads".
        eps: of the norms.
        image_dim: channels of the tokens of pictures; None takes no pictures.
        added_kv_proj_dim: channels of their keys and values, a token's; with `image_dim` only.
        rope_max_seq_len: kept for the configs; positions are made for films of any size.
        pos_embed_seq_len: tokens of pictures that have learned positions, where a film has a first and a last one.

    Raises:
        ValueError: for a kind that is not supported, and for numbers that do not fit, naming both.
    """

    _repeated_blocks: ClassVar[list[str]] = ["WanTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["WanTransformerBlock"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = [
        *("rope", "time_embedder", "scale_shift_table"),
        *("norm1", "norm2", "norm3"),
    ]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str] | None] = ["norm_added_q"]
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = [
        "patch_embedding",
        "condition_embedder",
        "norm",
    ]

    def __init__(
        self,
        patch_size: Sequence[int] = (1, 2, 2),
        num_attention_heads: int = 40,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 13824,
        num_layers: int = 40,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
    ) -> None:
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        if qk_norm != "rms_norm_across_heads":
            raise ValueError(f"qk_norm={qk_norm!r} is not supported; this model has 'rms_norm_across_heads'")
        if attention_head_dim % 2:
            raise ValueError(f"attention_head_dim={attention_head_dim} must be even: channels turn in pairs")
        if added_kv_proj_dim != (None if image_dim is None else dim):
            raise ValueError(
                f"image_dim={image_dim} and added_kv_proj_dim={added_kv_proj_dim} do not fit: both are None, or the "
                f"second is the {dim} channels of a token (num_attention_heads times attention_head_dim)"
            )
        # A third of the pairs each for rows and columns, and what is left for the frames.
        side = 2 * (attention_head_dim // 6)
        self.axes_dim = (attention_head_dim - 2 * side, side, side)
        self.patch: tuple[int, int, int] = (patch_size[0], patch_size[1], patch_size[2])
        self.patch_embedding = nn.Conv3d(in_channels, dim, self.patch, stride=self.patch)
        self.condition_embedder = WanTimeTextImageEmbedding(dim, freq_dim, text_dim, image_dim, pos_embed_seq_len)
        block = (dim, num_attention_heads, attention_head_dim, ffn_dim, cross_attn_norm, eps, image_dim is not None)
        self.blocks = nn.ModuleList(WanTransformerBlock(*block) for _ in range(num_layers))
        self.norm_out = PreciseLayerNorm(dim, eps=eps, elementwise_affine=False)
        self.proj_out = nn.Linear(dim, out_channels * self.patch[0] * self.patch[1] * self.patch[2])
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the velocity from a film's noisy latents.

        Args:
            hidden_states: latents (B, in_channels, F, H, W), of sizes that patches divide.
            timestep: from 0 to 1000: a number, a scalar tensor, one a sample (B,), or one a token (B, S) where some are
                less noisy (Wan 2.2 5B), frame by frame, row by row.
            encoder_hidden_states: text tokens (B, T, text_dim).
            encoder_hidden_states_image: tokens of pictures (B, P, image_dim), for models that take them. With
                `pos_embed_seq_len`, the pictures of a film may follow one another along the batch.
            return_dict: False gives a tuple.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.

        Returns:
            The prediction, (B, out_channels, F, H, W).

        Raises:
            ValueError: for inputs that are missing or whose shapes do not fit.
        """
        grid = self._check(hidden_states, encoder_hidden_states, encoder_hidden_states_image)
        check_attention_kwargs(attention_kwargs, "attention_kwargs")
        tokens = self.patch_embedding(hidden_states).flatten(2).mT
        times = _time_for_tokens(timestep, tokens)
        rotary = once(self._rotary, grid, tokens.device)
        embedded, modulation, text, pictures = self.condition_embedder(
            times, encoder_hidden_states, encoder_hidden_states_image, tokens.dtype
        )

        for block in self.blocks:
            tokens = block(tokens, text, pictures, modulation, rotary)

        shift, scale = (self.scale_shift_table.float() + embedded[:, :, None]).unbind(2)
        tokens = self.proj_out(_modulated(self.norm_out(tokens), shift, scale).to(tokens.dtype))
        sample = self._from_patches(tokens, grid)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _rotary(self, grid: tuple[int, int, int], device: torch.device) -> RotaryTable:
        axes = (torch.arange(size, device=device) for size in grid)
        positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
        return rotary_table(positions.flatten(0, 2), self.axes_dim)

    def _from_patches(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        patches = tokens.unflatten(2, (*self.patch, -1)).unflatten(1, grid)
        return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def _check(self, latents: Tensor, text: Tensor, pictures: Tensor | None) -> tuple[int, int, int]:
        """Refuse inputs that do not fit; returns the frames, rows and columns of tokens."""
        if latents.ndim != 5 or latents.shape[1] != self.config["in_channels"]:
            expected = f"(batch, {self.config['in_channels']}, frames, height, width)"
            raise ValueError(f"hidden_states has the shape {tuple(latents.shape)}, expected {expected}")
        batch, _, frames, height, width = latents.shape
        p_t, p_h, p_w = self.patch
        if frames % p_t or height % p_h or width % p_w:
            raise ValueError(f"{frames} frames of {height} x {width} do not part into patches of {p_t} x {p_h} x {p_w}")
        check_tokens("encoder_hidden_states", text, batch, self.config["text_dim"])
        self._check_pictures(pictures, batch)
        return frames // p_t, height // p_h, width // p_w

    def _check_pictures(self, pictures: Tensor | None, batch: int) -> None:
        channels, length = self.config["image_dim"], self.config["pos_embed_seq_len"]
        if (channels is None) != (pictures is None):
            wanted = "needs" if pictures is None else "does not take"
            raise ValueError(f"this model {wanted} encoder_hidden_states_image (image_dim={channels})")
        if pictures is None:
            return
        if length is None:
            check_tokens("encoder_hidden_states_image", pictures, batch, channels)
        elif pictures.ndim != 3 or pictures.shape[2] != channels or pictures[..., 0].numel() != batch * length:
            raise ValueError(
                f"encoder_hidden_states_image has the shape {tuple(pictures.shape)}, expected ({batch}, {length}, "
                f"{channels}), or as many tokens in several pictures for each of the {batch} films"
            )


def _time_for_tokens(timestep: Tensor | float, tokens: Tensor) -> Tensor:
    """Times (B, 1) or, where each token has its own, (B, S)."""
    if not isinstance(timestep, Tensor) or timestep.dim() < 2:
        return batched_timestep(timestep, tokens)[:, None]
    batch, count = tokens.shape[:2]
    if tuple(timestep.shape) != (batch, count):
        raise ValueError(
            f"timestep has the shape {tuple(timestep.shape)}; give one, one a sample ({batch},), or one a token "
            f"({batch}, {count})"
        )
    return timestep.to(tokens.device)
