"""`QwenImageTransformer2DModel`: the denoiser of Qwen-Image (Wu et al. 2025, arXiv 2508.02324)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...offload.runs import once
from ..base import Model
from ..layers.embeddings import TimestepEmbedding, Timesteps, batched_timestep
from ..layers.joint_attention import JointAttention
from ..layers.modulation import AdaLayerNormContinuous, Modulator, gated, modulate
from ..layers.rotary import RotaryTable, rotary_table
from ..layers.transformer import FeedForward
from .checks import check_attention_kwargs, check_given, check_tokens
from .flux import within_range
from .outputs import Transformer2DModelOutput

Shape = tuple[int, int, int]


class QwenTimestepEmbeddings(nn.Module):
    """The vector that modulates all blocks: (B,) shares of noise, from 0 to 1, to (B, embedding_dim)."""

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self.time_proj = Timesteps(256, scale=1000)
        self.timestep_embedder = TimestepEmbedding(256, embedding_dim)

    def forward(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        return self.timestep_embedder(self.time_proj(timestep).to(dtype))


class QwenImageTransformerBlock(nn.Module):
    """Image and text tokens, each with weights of its own, attend to each other (MM-DiT, Esser et al. 2024, figure 2b).

    Args:
        dim: channels of the tokens.
        num_attention_heads: number of heads.
        attention_head_dim: channels of a head.
        qk_norm: of queries and keys, see `JointAttention`.
        eps: of the norms.
    """

    def __init__(
        self,
        dim: int,
        num_attention_heads: int,
        attention_head_dim: int,
        qk_norm: str = "rms_norm",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return nn.LayerNorm(dim, eps=eps, elementwise_affine=False)

        self.img_mod = Modulator(dim, 6)
        self.img_norm1, self.img_norm2 = norm(), norm()
        self.attn = JointAttention(
            dim, heads=num_attention_heads, dim_head=attention_head_dim, context_dim=dim, qk_norm=qk_norm, eps=eps
        )
        self.img_mlp = FeedForward(dim, activation_fn="gelu-approximate")
        self.txt_mod = Modulator(dim, 6)
        self.txt_norm1, self.txt_norm2 = norm(), norm()
        self.txt_mlp = FeedForward(dim, activation_fn="gelu-approximate")

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary: RotaryTable,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Image tokens (B, S, dim) and text tokens (B, T, dim), modulated by `temb` (B, dim), in this order."""
        shift, scale, gate, *image_mlp = self.img_mod(temb)
        image = modulate(self.img_norm1(hidden_states), shift, scale)
        text_shift, text_scale, text_gate, *text_mlp = self.txt_mod(temb)
        text = modulate(self.txt_norm1(encoder_hidden_states), text_shift, text_scale)

        image, text = self.attn(image, text, rotary=rotary, attention_mask=attention_mask)
        hidden_states = hidden_states + gated(image, gate)
        encoder_hidden_states = encoder_hidden_states + gated(text, text_gate)
        shift, scale, gate = image_mlp
        fed = self.img_mlp(modulate(self.img_norm2(hidden_states), shift, scale))
        hidden_states = hidden_states + gated(fed, gate)
        shift, scale, gate = text_mlp
        fed = self.txt_mlp(modulate(self.txt_norm2(encoder_hidden_states), shift, scale))
        return within_range(hidden_states), within_range(encoder_hidden_states + gated(fed, gate))


class QwenImageTransformer2DModel(Model):
    """A rectified-flow transformer over packed latents and the tokens of a language model, in two streams.

    Positions are those of the paper's section 2.4 ("MSRoPE"): pictures have the origin in their middle, text goes on
    along the diagonal behind the picture's edge.

    Args:
        patch_size: height and width of the latents that are packed into a token.
        in_channels: channels of a token.
        out_channels: channels of the latents; the prediction has `patch_size` squared as many.
        num_layers: number of blocks.
        attention_head_dim: channels of a head.
        num_attention_heads: number of heads.
        joint_attention_dim: channels of the text tokens.
        guidance_embeds: must be False: no model with an embedding for guidance is published.
        axes_dims_rope: the channels of a head that turn with frame, row and column.
        zero_cond_t, use_additional_t_cond, use_layer3d_rope: must be False; later models for editing and layers set
            them.

    Raises:
        ValueError: if the axes do not make up a head, or for settings that must be False.
    """

    _repeated_blocks: ClassVar[list[str]] = ["QwenImageTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["QwenImageTransformerBlock"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["pos_embed", "norm"]
    _skip_quantization_patterns: ClassVar[tuple[str, ...]] = (
        *Model._skip_quantization_patterns,
        r"_mod\.",
        r"^(img|txt)_in$",
    )
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _modulated_by: ClassVar[tuple[str, ...]] = ("timestep",)

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 64,
        out_channels: int | None = 16,
        num_layers: int = 60,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 3584,
        guidance_embeds: bool = False,
        axes_dims_rope: tuple[int, int, int] = (16, 56, 56),
        zero_cond_t: bool = False,
        use_additional_t_cond: bool = False,
        use_layer3d_rope: bool = False,
    ) -> None:
        super().__init__()
        for name in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
            if self.config[name]:
                raise ValueError(f"{name}=True is not supported; Qwen-Image itself has False")
        if sum(axes_dims_rope) != attention_head_dim or any(dim % 2 for dim in axes_dims_rope):
            raise ValueError(
                f"axes_dims_rope={tuple(axes_dims_rope)} must be even numbers that add up to attention_head_dim="
                f"{attention_head_dim}"
            )
        dim = num_attention_heads * attention_head_dim
        self.out_channels = out_channels or in_channels
        self.time_text_embed = QwenTimestepEmbeddings(dim)
        self.txt_norm = nn.RMSNorm(joint_attention_dim, eps=1e-6)
        self.img_in = nn.Linear(in_channels, dim)
        self.txt_in = nn.Linear(joint_attention_dim, dim)
        self.transformer_blocks = nn.ModuleList(
            QwenImageTransformerBlock(dim, num_attention_heads, attention_head_dim) for _ in range(num_layers)
        )
        self.norm_out = AdaLayerNormContinuous(dim, dim)
        self.proj_out = nn.Linear(dim, patch_size * patch_size * self.out_channels)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        timestep: Tensor | float | None = None,
        img_shapes: Sequence[Any] | None = None,
        guidance: Tensor | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_block_samples: Sequence[Tensor] | None = None,
        additional_t_cond: Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the flow of packed latents.

        Args:
            hidden_states: tokens of latents (B, S, in_channels).
            encoder_hidden_states: text tokens (B, T, joint_attention_dim).
            encoder_hidden_states_mask: (B, T), 1 or True for text tokens that count.
            timestep: the share of noise, from 0 to 1: a number, a scalar tensor or one a sample. Give tensors to a
                compiled model.
            img_shapes: (frames, rows, columns) of the tokens, or a list with the same for each sample; where a
                sample's tokens are several pictures in a row, a list of theirs in place of each.
            guidance: must be None.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            controlnet_block_samples: (B, S, C) each, added to the image tokens after the blocks: the first after the
                first few blocks, and so on.
            additional_t_cond: must be None.
            return_dict: False gives a tuple.

        Returns:
            The flow, (B, S, patch_size squared times out_channels).

        Raises:
            ValueError: for inputs that are missing, not taken, or whose shapes do not fit.
        """
        check_attention_kwargs(attention_kwargs, "attention_kwargs")
        if guidance is not None or additional_t_cond is not None:
            raise ValueError("guidance and additional_t_cond must be None: this model takes neither")
        shapes = self._check(hidden_states, encoder_hidden_states, timestep, img_shapes)
        text, image = once(self._embed_text, encoder_hidden_states), self.img_in(hidden_states)
        mask = once(_joint_mask, encoder_hidden_states_mask, tuple(text.shape[:2]), image.shape[1])
        times = batched_timestep(timestep, hidden_states).to(hidden_states.dtype)  # type: ignore[arg-type]
        temb = self.time_text_embed(times, hidden_states.dtype)
        rotary = once(self._rotary, tuple(shapes), text.shape[1], hidden_states.device)

        for index, block in enumerate(self.transformer_blocks):
            image, text = block(image, text, temb, rotary, mask)
            if controlnet_block_samples:
                run = -(-self.num_layers // len(controlnet_block_samples))
                image = image + controlnet_block_samples[index // run]

        sample = self.proj_out(self.norm_out(image, temb))
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _embed_text(self, text: Tensor) -> Tensor:
        return self.txt_in(self.txt_norm(text))

    def _rotary(self, shapes: Sequence[Shape], words: int, device: torch.device) -> RotaryTable:
        return rotary_table(joint_positions(shapes, words, device), self.axes_dims_rope)

    def _check(self, sample: Tensor, text: Any, timestep: Any, img_shapes: Any) -> list[Shape]:
        """Refuse inputs that do not fit; the shape of each picture of a sample."""
        check_given("QwenImageTransformer2DModel", encoder_hidden_states=text, timestep=timestep, img_shapes=img_shapes)
        check_tokens("hidden_states", sample, sample.shape[0], self.in_channels)
        check_tokens("encoder_hidden_states", text, sample.shape[0], self.joint_attention_dim)
        shapes = _shapes_of_a_sample(img_shapes)
        if sum(frames * rows * columns for frames, rows, columns in shapes) != sample.shape[1]:
            raise ValueError(f"img_shapes={shapes} do not make up the {sample.shape[1]} tokens of hidden_states")
        return shapes


def _shapes_of_a_sample(img_shapes: Any) -> list[Shape]:
    """The shapes of one sample's pictures, out of any of the forms that `img_shapes` may have."""
    if isinstance(img_shapes[0], int):
        return [tuple(img_shapes)]
    if any(each != img_shapes[0] for each in img_shapes[1:]):
        raise ValueError(f"img_shapes={img_shapes} differ between samples; all must have the same pictures")
    first = img_shapes[0]
    return [tuple(first)] if isinstance(first[0], int) else [tuple(each) for each in first]


def joint_positions(shapes: Sequence[Shape], words: int, device: torch.device | None = None) -> Tensor:
    """Positions (words + tokens, 3) on frame, row and column: of the text, then of the pictures one after the other."""
    pictures: list[Tensor] = []
    for number, (frames, rows, columns) in enumerate(shapes):
        axes = [
            torch.arange(number, number + frames, device=device),
            torch.arange(rows, device=device) - (rows - rows // 2),
            torch.arange(columns, device=device) - (columns - columns // 2),
        ]
        pictures.append(torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3))
    edge = max(max(rows // 2, columns // 2) for _, rows, columns in shapes)
    text = torch.arange(edge, edge + words, device=device)[:, None].expand(-1, 3)
    return torch.cat([text, *pictures])


def _joint_mask(mask: Tensor | None, shape: tuple[int, int], tokens: int) -> Tensor | None:
    """Which of the text tokens (batch and tokens are the `shape`), and of the image tokens that follow, take part."""
    if mask is None:
        return None
    if mask.shape != shape:
        raise ValueError(f"encoder_hidden_states_mask has the shape {tuple(mask.shape)}, expected {shape}")
    return torch.cat([mask.bool(), mask.new_ones((len(mask), tokens), dtype=torch.bool)], dim=1)
