"""`UNet2DModel`: the denoiser without text of DDPM, of score models and of unconditional latent diffusion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffusion_core.outputs import BaseOutput

from ..base import Model
from ..layers.activations import activation_function
from ..layers.embeddings import GaussianFourierProjection, TimestepEmbedding, Timesteps, batched_timestep
from .blocks import BlockSpec, UNetMidBlock2D
from .build import (
    DOWN_BLOCKS,
    UP_BLOCKS,
    build_class_embedding,
    build_down_blocks,
    build_up_blocks,
    check_block_types,
    check_floats,
    check_labels,
    per_block,
)

_SUPPORTED = {
    "down": [name for name in DOWN_BLOCKS if "Cross" not in name],
    "up": [name for name in UP_BLOCKS if "Cross" not in name],
}


@dataclass
class UNet2DOutput(BaseOutput):
    """What `UNet2DModel` returns.

    Attributes:
        sample: the prediction (noise, score or image, as trained), of the shape of the input.
    """

    sample: Tensor


class UNet2DModel(Model):
    """A UNet over pictures (Ho et al. 2020); with `Skip...` blocks, NCSN++ (Song et al. 2021).

    The arguments are the keys of a Hub config. Those that need a word:

    Args:
        time_embedding_type: "positional"; "fourier", whose timesteps are noise levels that also divide the output; or
            "learned", a table of `num_train_timesteps` rows.
        attention_head_dim: channels of a head; None makes one head.
        attn_norm_num_groups: groups of the norm before the attention in the middle; None takes `norm_num_groups`, or
            no norm where `resnet_time_scale_shift` is not "default".
        downsample_type, upsample_type: "conv" or "resnet", of the `Attn...` blocks.
        class_embed_type: "timestep", "identity" or None; with None, `num_class_embeds` makes a table of classes.
        add_attention: whether the middle attends.

    Raises:
        ValueError: for a kind that is not supported, and for numbers that do not fit, naming both.
    """

    _repeated_blocks: ClassVar[list[str]] = []
    _no_split_modules: ClassVar[list[str] | None] = ["ResnetBlock2D", "AttnUpBlock2D", "UpBlock2D", "SkipUpBlock2D"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _prefers_channels_last: ClassVar[bool] = True

    def __init__(
        self,
        sample_size: int | tuple[int, int] | None = None,
        in_channels: int = 3,
        out_channels: int = 3,
        center_input_sample: bool = False,
        time_embedding_type: str = "positional",
        time_embedding_dim: int | None = None,
        freq_shift: int = 0,
        flip_sin_to_cos: bool = True,
        down_block_types: tuple[str, ...] = ("DownBlock2D", *["AttnDownBlock2D"] * 3),
        mid_block_type: str | None = "UNetMidBlock2D",
        up_block_types: tuple[str, ...] = (*["AttnUpBlock2D"] * 3, "UpBlock2D"),
        block_out_channels: tuple[int, ...] = (224, 448, 672, 896),
        layers_per_block: int = 2,
        mid_block_scale_factor: float = 1,
        downsample_padding: int = 1,
        downsample_type: str = "conv",
        upsample_type: str = "conv",
        dropout: float = 0.0,
        act_fn: str = "silu",
        attention_head_dim: int | None = 8,
        norm_num_groups: int = 32,
        attn_norm_num_groups: int | None = None,
        norm_eps: float = 1e-5,
        resnet_time_scale_shift: str = "default",
        add_attention: bool = True,
        class_embed_type: str | None = None,
        num_class_embeds: int | None = None,
        num_train_timesteps: int | None = None,
    ) -> None:
        super().__init__()
        check_block_types(down_block_types, up_block_types, _SUPPORTED)
        for name, value in (("downsample_type", downsample_type), ("upsample_type", upsample_type)):
            if value not in ("conv", "resnet", None):
                raise ValueError(f"{name}={value!r} is not supported; choose 'conv' or 'resnet'")
        first = block_out_channels[0]
        self.in_channels, self.center_input_sample = in_channels, center_input_sample
        self.conv_in = nn.Conv2d(in_channels, first, 3, padding=1)
        time_dim = time_embedding_dim or 4 * first
        self.time_embedding_type = time_embedding_type
        self.time_proj, projected = self._time_projection(first)
        self.time_embedding = TimestepEmbedding(projected, time_dim)
        if class_embed_type not in (None, "timestep", "identity"):
            raise ValueError(
                f"class_embed_type={class_embed_type!r} is not supported; choose None, 'timestep', 'identity'"
            )
        self.class_embed_type = class_embed_type
        self.class_embedding = build_class_embedding(
            class_embed_type, num_class_embeds, None, projected, time_dim, "silu"
        )
        # Residual blocks begin with the activation of the time embedding: the same for all, so it is done once.
        self.activate_time = activation_function(act_fn)
        self._blocks(time_dim)
        groups_out = norm_num_groups if norm_num_groups is not None else min(first // 4, 32)
        self.conv_norm_out = nn.GroupNorm(groups_out, first, eps=norm_eps)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(first, out_channels, 3, padding=1)

    def _time_projection(self, channels: int) -> tuple[nn.Module, int]:
        settings = self.config
        kind, rows = settings["time_embedding_type"], settings["num_train_timesteps"]
        if kind == "positional":
            return Timesteps(channels, settings["flip_sin_to_cos"], settings["freq_shift"]), channels
        if kind == "fourier":
            return GaussianFourierProjection(channels, scale=16), 2 * channels
        if kind == "learned" and rows is not None:
            return nn.Embedding(rows, channels), channels
        if kind == "learned":
            raise ValueError("time_embedding_type='learned' needs num_train_timesteps, the rows of its table")
        raise ValueError(f"time_embedding_type={kind!r} is not supported; choose 'positional', 'fourier' or 'learned'")

    def _blocks(self, temb_channels: int) -> None:
        settings = self.config
        channels, kinds = settings["block_out_channels"], settings["down_block_types"]
        per_block("block_out_channels", channels, len(kinds))
        layers = per_block("layers_per_block", settings["layers_per_block"], len(kinds))
        common: dict[str, Any] = {
            "temb_channels": temb_channels,
            "time_is_activated": True,
            "groups": settings["norm_num_groups"],
            "attn_groups": settings["norm_num_groups"],
            "eps": settings["norm_eps"],
            "act_fn": settings["act_fn"],
            "dropout": settings["dropout"],
            "time_scale_shift": settings["resnet_time_scale_shift"],
            "head_dim": settings["attention_head_dim"],
        }
        down = {
            **common,
            "downsample_padding": settings["downsample_padding"],
            "resample_by": settings["downsample_type"] or "conv",
            "image_channels": settings["in_channels"],
        }
        self.down_blocks = build_down_blocks(kinds, channels, down, {"layers": layers})
        up = {**common, "resample_by": settings["upsample_type"] or "conv", "image_channels": settings["out_channels"]}
        self.up_blocks = build_up_blocks(settings["up_block_types"], channels[::-1], up, {"layers": layers[::-1]})
        self.skips_taken = [count + 1 for count in layers[::-1]]
        self.mid_block = self._mid_block(channels[-1], common)

    def _mid_block(self, channels: int, common: Mapping[str, Any]) -> UNetMidBlock2D | None:
        settings = self.config
        kind = settings["mid_block_type"]
        if kind is None:
            return None
        if kind != "UNetMidBlock2D":
            raise ValueError(f"mid_block_type={kind!r} is not supported; choose 'UNetMidBlock2D' or None")
        groups = settings["attn_norm_num_groups"]
        if groups is None and settings["resnet_time_scale_shift"] == "default":
            groups = settings["norm_num_groups"] or min(channels // 4, 32)
        spec = BlockSpec(
            in_channels=channels,
            out_channels=channels,
            out_scale=settings["mid_block_scale_factor"],
            **{**common, "attn_groups": groups},
        )
        return UNetMidBlock2D(spec, add_attention=settings["add_attention"])

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        class_labels: Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DOutput | tuple[Tensor]:
        """Predict from noisy pictures.

        Args:
            sample: noisy pictures (B, in_channels, H, W).
            timestep: a number, a scalar tensor or one a sample. Give tensors to a compiled model.
            class_labels: one a sample: numbers, or vectors where `class_embed_type` is "identity".
            return_dict: False gives a tuple.

        Raises:
            ValueError: for shapes that do not fit and labels that are missing or not taken.
        """
        check_floats("sample", sample)
        if sample.shape[1] != self.in_channels:
            raise ValueError(
                f"sample has {sample.shape[1]} channels, but this model takes in_channels={self.in_channels}"
            )
        timesteps = batched_timestep(timestep, sample)
        temb = self.activate_time(self._embed(timesteps, class_labels, sample.dtype))
        if self.center_input_sample:
            sample = 2 * sample - 1.0
        picture, drawn = sample, None
        sample = self.conv_in(sample)
        skips = [sample]
        for block in self.down_blocks:
            if hasattr(block, "skip_conv"):
                sample, more, picture = block(sample, temb, picture)
            else:
                sample, more = block(sample, temb)
            skips += more
        if self.mid_block is not None:
            sample = self.mid_block(sample, temb)
        for block, count in zip(self.up_blocks, self.skips_taken, strict=True):
            taken = skips[: -count - 1 : -1]
            del skips[-count:]
            if hasattr(block, "skip_conv"):
                sample, drawn = block(sample, taken, temb, drawn)
            else:
                sample = block(sample, taken, temb, skips[-1].shape[2:] if skips else None)
        sample = self.conv_out(self.conv_act(self.conv_norm_out(sample)))
        if drawn is not None:
            sample = sample + drawn
        if self.time_embedding_type == "fourier":
            sample = sample / timesteps.to(sample.dtype)[:, None, None, None]
        return UNet2DOutput(sample=sample) if return_dict else (sample,)

    def _embed(self, timesteps: Tensor, labels: Tensor | None, dtype: torch.dtype) -> Tensor:
        temb = self.time_embedding(self.time_proj(timesteps).to(dtype))
        if self.class_embedding is None:
            if labels is not None:
                raise ValueError("class_labels were given, but this model has no class_embed_type or num_class_embeds")
            return temb
        if labels is None:
            raise ValueError("this model is conditioned on classes: give class_labels, one a sample")
        check_labels(labels, len(timesteps), self.class_embedding)
        if self.class_embed_type == "timestep":
            labels = self.time_proj(labels).to(dtype)
        return temb + self.class_embedding(labels).to(dtype)
