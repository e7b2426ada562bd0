"""`FluxTransformer2DModel`: the denoiser of FLUX.1 (Black Forest Labs 2024)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ...offload.runs import once
from ..base import Model
from ..layers.embeddings import CombinedTimestepTextProjEmbeddings, one_a_sample
from ..layers.joint_attention import JointAttention
from ..layers.modulation import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    add_gated,
    normalize,
)
from ..layers.rotary import RotaryTable, rotary_table
from ..layers.transformer import FeedForward
from .checks import check_attention_kwargs, check_given, check_tokens
from .outputs import Transformer2DModelOutput

Tensor = torch.Tensor
Residuals = Sequence[Tensor] | None


class FluxTransformerBlock(nn.Module):
    """Image and text tokens, each with weights of its own, attend to each other (MM-DiT, Esser et al. 2024, figure 2b).

    Args:
        dim: channels of the tokens.
        num_attention_heads: number of heads.
        attention_head_dim: channels of a head.
        qk_norm: of queries and keys, see `JointAttention`.
        eps: of the norms.
        mlp_ratio: channels of the feed-forwards, as a multiple of `dim`.
    """

    def __init__(
        self,
        dim: int,
        num_attention_heads: int,
        attention_head_dim: int,
        qk_norm: str = "rms_norm",
        eps: float = 1e-6,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        self.norm1 = AdaLayerNormZero(dim)
        self.norm1_context = AdaLayerNormZero(dim)
        self.attn = JointAttention(
            dim, heads=num_attention_heads, dim_head=attention_head_dim, context_dim=dim, qk_norm=qk_norm, eps=eps
        )
        self.eps = eps
        inner = int(dim * mlp_ratio)
        self.ff = FeedForward(dim, activation_fn="gelu-approximate", inner_dim=inner)
        self.ff_context = FeedForward(dim, activation_fn="gelu-approximate", inner_dim=inner)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary: RotaryTable,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Image tokens (B, S, dim) and text tokens (B, T, dim), modulated by `temb` (B, dim), in this order.

        `rotary` and `attention_mask` have the text first, see `JointAttention`.
        """
        image, image_gate, *image_mlp = self.norm1(hidden_states, temb)
        text, text_gate, *text_mlp = self.norm1_context(encoder_hidden_states, temb)
        image, text = self.attn(image, text, rotary=rotary, attention_mask=attention_mask)
        hidden_states = add_gated(hidden_states, image, image_gate)
        encoder_hidden_states = add_gated(encoder_hidden_states, text, text_gate)
        shift, scale, image_gate = image_mlp
        image = self.ff(normalize(hidden_states, shift, scale, self.eps))
        shift, scale, text_gate = text_mlp
        text = self.ff_context(normalize(encoder_hidden_states, shift, scale, self.eps))
        encoder_hidden_states = add_gated(encoder_hidden_states, text, text_gate)
        if encoder_hidden_states.dtype == torch.float16:
            encoder_hidden_states = within_range(encoder_hidden_states)
        return add_gated(hidden_states, image, image_gate), encoder_hidden_states


class FluxSingleTransformerBlock(nn.Module):
    """All tokens in one stream; attention and feed-forward run side by side (Dehghani et al. 2023, section 2).

    Args:
        dim: channels of the tokens.
        num_attention_heads: number of heads.
        attention_head_dim: channels of a head.
        mlp_ratio: channels of the feed-forward, as a multiple of `dim`.
    """

    def __init__(self, dim: int, num_attention_heads: int, attention_head_dim: int, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        inner = int(dim * mlp_ratio)
        self.norm = AdaLayerNormZeroSingle(dim)
        self.proj_mlp = nn.Linear(dim, inner)
        self.proj_out = nn.Linear(dim + inner, dim)
        self.attn = JointAttention(
            dim, heads=num_attention_heads, dim_head=attention_head_dim, qk_norm="rms_norm", pre_only=True
        )

    def forward(
        self, hidden_states: Tensor, temb: Tensor, rotary: RotaryTable, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, T + S, dim), the text's first, modulated by `temb` (B, dim)."""
        normed, gate = self.norm(hidden_states, temb)
        attended, _ = self.attn(normed, rotary=rotary, attention_mask=attention_mask)
        fed = F.gelu(self.proj_mlp(normed), approximate="tanh")
        hidden_states = add_gated(hidden_states, self.proj_out(torch.cat([attended, fed], dim=2)), gate)
        return within_range(hidden_states) if hidden_states.dtype == torch.float16 else hidden_states


class FluxBlocks(Model):
    """What `FluxTransformer2DModel` and `FluxControlNetModel` share: embedders and blocks, and checks of the input."""

    _repeated_blocks: ClassVar[list[str]] = ["FluxTransformerBlock", "FluxSingleTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["FluxTransformerBlock", "FluxSingleTransformerBlock"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _modulated_by: ClassVar[tuple[str, ...]] = ("timestep", "pooled_projections", "guidance")

    def _build(self, settings: Mapping[str, Any]) -> int:
        """Make embedders and blocks from a config; returns the channels of the tokens in between."""
        axes, head = settings["axes_dims_rope"], settings["attention_head_dim"]
        if sum(axes) != head or any(dim % 2 for dim in axes):
            raise ValueError(
                f"axes_dims_rope={tuple(axes)} must be even numbers that add up to attention_head_dim={head}"
            )
        heads = (settings["num_attention_heads"], head)
        dim = heads[0] * head
        self.time_text_embed = CombinedTimestepTextProjEmbeddings(
            dim, settings["pooled_projection_dim"], settings["guidance_embeds"]
        )
        self.context_embedder = nn.Linear(settings["joint_attention_dim"], dim)
        self.x_embedder = nn.Linear(settings["in_channels"], dim)
        self.transformer_blocks = nn.ModuleList(
            FluxTransformerBlock(dim, *heads) for _ in range(settings["num_layers"])
        )
        self.single_transformer_blocks = nn.ModuleList(
            FluxSingleTransformerBlock(dim, *heads) for _ in range(settings["num_single_layers"])
        )
        return dim

    def _embed(self, sample: Tensor, timestep: Any, guidance: Tensor | None, pooled: Any) -> Tensor:
        """The vector that modulates all blocks. Times and scales count in thousandths, as in training."""
        like = (sample.shape[0], sample.device, sample.dtype)
        scales = None if guidance is None else once(_thousandths, guidance, *like)
        return self.time_text_embed(_thousandths(timestep, *like), pooled, scales)

    def _check(self, sample: Tensor, text: Any, pooled: Any, timestep: Any, txt_ids: Any, img_ids: Any) -> Tensor:
        """Refuse inputs that do not fit; the ids of all tokens, the text's first."""
        check_given(
            type(self).__name__,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=timestep,
            img_ids=img_ids,
            txt_ids=txt_ids,
        )
        batch = sample.shape[0]
        check_tokens("hidden_states", sample, batch, self.in_channels)
        check_tokens("encoder_hidden_states", text, batch, self.joint_attention_dim)
        if pooled.shape != (batch, self.pooled_projection_dim):
            expected = (batch, self.pooled_projection_dim)
            raise ValueError(f"pooled_projections has the shape {tuple(pooled.shape)}, expected {expected}")
        axes = len(self.axes_dims_rope)
        for name, ids, tokens in (("txt_ids", txt_ids, text), ("img_ids", img_ids, sample)):
            if ids.shape[-2:] != (tokens.shape[1], axes) or ids.ndim != txt_ids.ndim:
                raise ValueError(
                    f"{name} has the shape {tuple(ids.shape)}, expected {(tokens.shape[1], axes)}: a position for each "
                    f"token, for both kinds with a batch axis or without"
                )
        return once(_text_first, txt_ids, img_ids)


class FluxTransformer2DModel(FluxBlocks):
    """A rectified-flow transformer over packed latents and text: blocks with two streams, then blocks with one.

    Black Forest Labs 2024, "FLUX.1"; the flow is that of Esser et al. 2024 (arXiv 2403.03206).

    Args:
        patch_size: part of the configs, where it is 1: pipelines pack 2 x 2 latents into a token.
        in_channels: channels of a token: 64 for text to image, more where conditions go in beside the latents.
        out_channels: channels of the prediction; `in_channels` if None.
        num_layers: number of blocks with two streams.
        num_single_layers: number of blocks with one stream.
        attention_head_dim: channels of a head.
        num_attention_heads: number of heads.
        joint_attention_dim: channels of the text tokens (T5).
        pooled_projection_dim: channels of the pooled text (CLIP).
        guidance_embeds: the guidance scale is an input, as in FLUX.1-dev, which was distilled with guidance.
        axes_dims_rope: the channels of a head that turn with each axis of the token ids.

    Raises:
        ValueError: if the axes do not make up a head.
    """

    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        out_channels: int | None = None,
        num_layers: int = 19,
        num_single_layers: int = 38,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        guidance_embeds: bool = False,
        axes_dims_rope: tuple[int, int, int] = (16, 56, 56),
    ) -> None:
        super().__init__()
        dim = self._build(self.config)
        self.out_channels = out_channels or in_channels
        self.norm_out = AdaLayerNormContinuous(dim, dim)
        self.proj_out = nn.Linear(dim, patch_size * patch_size * self.out_channels)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        timestep: Tensor | float | None = None,
        img_ids: Tensor | None = None,
        txt_ids: Tensor | None = None,
        guidance: Tensor | None = None,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_block_samples: Residuals = None,
        controlnet_single_block_samples: Residuals = None,
        return_dict: bool = True,
        controlnet_blocks_repeat: bool = False,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the flow of packed latents.

        Args:
            hidden_states: tokens of latents (B, S, in_channels).
            encoder_hidden_states: text tokens (B, T, joint_attention_dim).
            pooled_projections: pooled text (B, pooled_projection_dim).
            timestep: the share of noise, from 0 to 1: a number, a scalar tensor or one a sample. Give tensors to a
                compiled model.
            img_ids: the position of each image token on the three axes, (S, 3) or (B, S, 3): picture, row, column.
            txt_ids: the same for the text tokens, (T, 3) or (B, T, 3); zeros in the published models.
            guidance: guidance scales (B,), where `guidance_embeds` is set, and only there.
            joint_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            controlnet_block_samples: (B, S, C) each, added after the blocks with two streams: the first to the first
                few blocks, and so on.
            controlnet_single_block_samples: the same for the blocks with one stream, added to the image tokens.
            return_dict: False gives a tuple.
            controlnet_blocks_repeat: go through `controlnet_block_samples` block by block, over and over.

        Returns:
            The flow, (B, S, out_channels).

        Raises:
            ValueError: for inputs that are missing or whose shapes do not fit.
        """
        ids = self._check(hidden_states, encoder_hidden_states, pooled_projections, timestep, txt_ids, img_ids)
        check_attention_kwargs(joint_attention_kwargs)
        temb = self._embed(hidden_states, timestep, guidance, pooled_projections)
        rotary = once(rotary_table, ids, tuple(self.axes_dims_rope))
        image, text = self.x_embedder(hidden_states), once(self.context_embedder, encoder_hidden_states)

        for index, block in enumerate(self.transformer_blocks):
            image, text = block(image, text, temb, rotary)
            if controlnet_block_samples:
                image = image + _share(
                    controlnet_block_samples, index, len(self.transformer_blocks), controlnet_blocks_repeat
                )

        words, tokens = text.shape[1], torch.cat([text, image], dim=1)
        for index, block in enumerate(self.single_transformer_blocks):
            tokens = block(tokens, temb, rotary)
            if controlnet_single_block_samples:
                more = _share(controlnet_single_block_samples, index, self.num_single_layers)
                tokens = torch.cat([tokens[:, :words], tokens[:, words:] + more], dim=1)

        sample = self.proj_out(self.norm_out(tokens[:, words:], temb))
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


def _thousandths(values: Any, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return one_a_sample(values, batch, device).to(dtype) * 1000


def _text_first(txt_ids: Tensor, img_ids: Tensor) -> Tensor:
    return torch.cat([txt_ids, img_ids], dim=-2)


def _share(samples: Sequence[Tensor], index: int, blocks: int, repeat: bool = False) -> Tensor:
    """Which of fewer samples goes to block `index`: each serves a run of blocks of equal length, or they take turns."""
    return samples[index % len(samples) if repeat else index // -(-blocks // len(samples))]


def within_range(tokens: Tensor) -> Tensor:
    """Float16 tokens kept from infinity; others as they are."""
    return tokens.clamp(-65504, 65504) if tokens.dtype == torch.float16 else tokens
