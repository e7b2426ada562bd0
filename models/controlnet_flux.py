"""`FluxControlNetModel`: a small FLUX.1 transformer that steers a large one by a picture, such as edges or a pose."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion_core.outputs import BaseOutput

from ..offload.runs import once
from .controlnet import ControlNetConditioningEmbedding
from .layers.rotary import rotary_table
from .transformers.checks import check_attention_kwargs, check_tokens
from .transformers.flux import FluxBlocks


@dataclass
class FluxControlNetOutput(BaseOutput):
    """What `FluxControlNetModel` returns, as the transformer takes it.

    Attributes:
        controlnet_block_samples: (B, S, C) for each block with two streams; None without such blocks.
        controlnet_single_block_samples: the same for the blocks with one stream.
    """

    controlnet_block_samples: list[Tensor] | None
    controlnet_single_block_samples: list[Tensor] | None


class FluxControlNetModel(FluxBlocks):
    """Blocks as those of the transformer, joined to it by layers that begin at zero (Zhang et al. 2023).

    The arguments are the keys of a Hub config; those that `FluxTransformer2DModel` has too mean the same.

    Args:
        patch_size: height and width of the patches that pixels become tokens by, after the convolutions.
        num_mode: how many kinds of pictures it steers by ("union" models); None for a single one.
        conditioning_embedding_channels: channels of the convolutions that read control pictures as pixels, eight to a
            latent; None for models that read packed latents.

    Raises:
        ValueError: if the axes do not make up a head.
    """

    _skip_quantization_patterns: ClassVar[tuple[str, ...]] = (*FluxBlocks._skip_quantization_patterns, "^controlnet_")

    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        num_layers: int = 19,
        num_single_layers: int = 38,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        guidance_embeds: bool = False,
        axes_dims_rope: tuple[int, int, int] = (16, 56, 56),
        num_mode: int | None = None,
        conditioning_embedding_channels: int | None = None,
    ) -> None:
        super().__init__()
        dim = self._build(self.config)
        self.controlnet_blocks = nn.ModuleList(_silent(dim, dim) for _ in range(num_layers))
        self.controlnet_single_blocks = nn.ModuleList(_silent(dim, dim) for _ in range(num_single_layers))
        self.controlnet_mode_embedder = None if num_mode is None else nn.Embedding(num_mode, dim)
        channels = conditioning_embedding_channels
        self.input_hint_block = (
            None if channels is None else ControlNetConditioningEmbedding(channels, block_out_channels=(16,) * 4)
        )
        self.controlnet_x_embedder = _silent(in_channels, dim)

    def forward(
        self,
        hidden_states: Tensor,
        controlnet_cond: Tensor,
        controlnet_mode: Tensor | None = None,
        conditioning_scale: float = 1.0,
        encoder_hidden_states: Tensor | None = None,
        pooled_projections: Tensor | None = None,
        timestep: Tensor | float | None = None,
        img_ids: Tensor | None = None,
        txt_ids: Tensor | None = None,
        guidance: Tensor | None = None,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> FluxControlNetOutput | tuple[list[Tensor] | None, list[Tensor] | None]:
        """What to add after the transformer's blocks.

        Args:
            controlnet_cond: packed latents of the control picture (B, S, in_channels), or its pixels (B, 3, H, W) from
                -1 to 1 where the config has `conditioning_embedding_channels`.
            controlnet_mode: which kind of picture it is, (B, 1), where the config has `num_mode`.
            conditioning_scale: strength, a factor of what is returned.
            hidden_states, encoder_hidden_states, pooled_projections: as for `FluxTransformer2DModel`.
            timestep, img_ids, txt_ids, guidance, joint_attention_kwargs: likewise.
            return_dict: False gives a tuple.

        Raises:
            ValueError: for inputs that are missing or whose shapes do not fit.
        """
        ids = self._check(hidden_states, encoder_hidden_states, pooled_projections, timestep, txt_ids, img_ids)
        check_attention_kwargs(joint_attention_kwargs)
        if self.input_hint_block is not None:
            controlnet_cond = once(self._packed_hint, controlnet_cond)
        check_tokens("controlnet_cond", controlnet_cond, *hidden_states.shape[::2])
        temb = self._embed(hidden_states, timestep, guidance, pooled_projections)
        image = self.x_embedder(hidden_states) + once(self.controlnet_x_embedder, controlnet_cond)
        text = once(self.context_embedder, encoder_hidden_states)
        mode = self._mode(controlnet_mode)
        if mode is not None:
            # The mode goes before the text, at the position of its first token.
            text, ids = torch.cat([mode, text], dim=1), once(_with_mode, ids)
        rotary = once(rotary_table, ids, tuple(self.axes_dims_rope))

        samples: list[Tensor] = []
        for block, join in zip(self.transformer_blocks, self.controlnet_blocks, strict=True):
            image, text = block(image, text, temb, rotary)
            samples.append(join(image) * conditioning_scale)
        words, tokens = text.shape[1], torch.cat([text, image], dim=1)
        singles: list[Tensor] = []
        for block, join in zip(self.single_transformer_blocks, self.controlnet_single_blocks, strict=True):
            tokens = block(tokens, temb, rotary)
            singles.append(join(tokens[:, words:]) * conditioning_scale)
        found = (samples or None, singles or None)
        return FluxControlNetOutput(*found) if return_dict else found

    def _packed_hint(self, pixels: Tensor) -> Tensor:
        assert self.input_hint_block is not None
        return F.pixel_unshuffle(self.input_hint_block(pixels), self.patch_size).flatten(2).transpose(1, 2)

    def _mode(self, mode: Tensor | None) -> Tensor | None:
        """The mode as a token (B, 1, C)."""
        if (self.controlnet_mode_embedder is None) != (mode is None):
            count = self.num_mode
            raise ValueError(f"controlnet_mode must be {'None' if count is None else f'from 0 to {count - 1}'} here")
        return None if self.controlnet_mode_embedder is None else self.controlnet_mode_embedder(mode)


def _with_mode(ids: Tensor) -> Tensor:
    return torch.cat([ids[..., :1, :], ids], dim=-2)


def _silent(inputs: int, outputs: int) -> nn.Linear:
    """A layer that returns zero until it is trained."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
