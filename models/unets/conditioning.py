"""What the UNet and the ControlNet of text-to-image models share: how time, labels, sizes and text condition them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...offload.runs import once
from ..base import Model
from ..layers.activations import activation_function, get_activation
from ..layers.embeddings import (
    GaussianFourierProjection,
    TextTimeEmbedding,
    TimestepEmbedding,
    Timesteps,
    batched_timestep,
)
from .build import (
    build_class_embedding,
    build_down_blocks,
    build_mid_block,
    check_floats,
    check_labels,
    per_block,
)


class ConditionedModel(Model):
    """Base of models whose blocks are told a time embedding and text tokens."""

    time_proj: nn.Module
    time_embedding: TimestepEmbedding
    class_embedding: nn.Module | None
    add_embedding: nn.Module | None
    encoder_hid_proj: nn.Module | None
    in_channels: int

    def _embeddings(self, settings: Mapping[str, Any]) -> int:
        """Make the embeddings that a config asks for.

        Returns:
            The length of the vector that the blocks are told.

        Raises:
            ValueError: for kinds that are not supported, or whose sizes are missing.
        """
        channels, act_fn = settings["block_out_channels"][0], settings["act_fn"]
        timestep_dim, time_dim = self._time_projection(channels, settings)
        self.time_embedding = TimestepEmbedding(
            timestep_dim,
            time_dim,
            act_fn=act_fn,
            post_act_fn=settings.get("timestep_post_act"),
            cond_proj_dim=settings.get("time_cond_proj_dim"),
        )
        self.encoder_hid_proj = self._text_projection(settings)
        self.class_embed_type = settings["class_embed_type"]
        self.class_embedding = build_class_embedding(
            self.class_embed_type,
            settings["num_class_embeds"],
            settings["projection_class_embeddings_input_dim"],
            timestep_dim,
            time_dim,
            act_fn,
        )
        self._additional_embedding(settings, time_dim)
        # Residual blocks begin with the activation of the time embedding. It is the same for all, so it is done once,
        # unless some blocks take the embedding without.
        self.activate_time = None if settings.get("resnet_skip_time_act") else activation_function(act_fn)
        time_act = settings.get("time_embedding_act_fn")
        self.time_embed_act = None if time_act is None else get_activation(time_act)
        self.concat_classes = bool(settings.get("class_embeddings_concat"))
        self._check_concatenation()
        return 2 * time_dim if self.concat_classes else time_dim

    def _check_concatenation(self) -> None:
        if self.concat_classes and self.class_embedding is None:
            raise ValueError("class_embeddings_concat=True needs class_embed_type or num_class_embeds")
        if self.concat_classes and self.add_embedding is not None:
            raise ValueError(
                f"class_embeddings_concat=True makes a longer vector than addition_embed_type="
                f"{self.addition_embed_type!r} can be added to: use one of them"
            )

    def _time_projection(self, channels: int, settings: Mapping[str, Any]) -> tuple[int, int]:
        kind = settings.get("time_embedding_type", "positional")
        flip = settings["flip_sin_to_cos"]
        if kind == "positional":
            self.time_proj = Timesteps(channels, flip, settings["freq_shift"])
            return channels, settings.get("time_embedding_dim") or 4 * channels
        if kind == "fourier":
            time_dim = settings.get("time_embedding_dim") or 2 * channels
            if time_dim % 2:
                raise ValueError(f"time_embedding_dim={time_dim} must be even for time_embedding_type='fourier'")
            self.time_proj = GaussianFourierProjection(time_dim // 2, log=False, flip_sin_to_cos=flip)
            return time_dim, time_dim
        raise ValueError(f"time_embedding_type={kind!r} is not supported; choose 'positional' or 'fourier'")

    def _text_projection(self, settings: Mapping[str, Any]) -> nn.Module | None:
        kind, size = settings["encoder_hid_dim_type"], settings["encoder_hid_dim"]
        if kind is None and size is not None:
            kind = "text_proj"
            self.register_to_config(encoder_hid_dim_type=kind)
        if kind is None:
            return None
        if kind != "text_proj":
            raise ValueError(f"encoder_hid_dim_type={kind!r} is not supported; choose 'text_proj' or None")
        if size is None:
            raise ValueError("encoder_hid_dim_type='text_proj' needs encoder_hid_dim")
        if not isinstance(settings["cross_attention_dim"], int):
            raise ValueError("encoder_hid_dim needs one cross_attention_dim for all blocks")
        return nn.Linear(size, settings["cross_attention_dim"])

    def _additional_embedding(self, settings: Mapping[str, Any], time_dim: int) -> None:
        kind = self.addition_embed_type = settings["addition_embed_type"]
        self.add_embedding = None
        if kind == "text":
            size = settings["encoder_hid_dim"] or settings["cross_attention_dim"]
            self.add_embedding = TextTimeEmbedding(size, time_dim, settings["addition_embed_type_num_heads"])
        elif kind == "text_time":
            size, input_dim = settings["addition_time_embed_dim"], settings["projection_class_embeddings_input_dim"]
            if size is None or input_dim is None:
                raise ValueError(
                    "addition_embed_type='text_time' needs addition_time_embed_dim and "
                    "projection_class_embeddings_input_dim"
                )
            self.add_time_proj = Timesteps(size, settings["flip_sin_to_cos"], settings["freq_shift"])
            self.add_embedding = TimestepEmbedding(input_dim, time_dim)
        elif kind is not None:
            raise ValueError(f"addition_embed_type={kind!r} is not supported; choose 'text_time', 'text' or None")

    def _embed(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor,
        class_labels: Tensor | None,
        timestep_cond: Tensor | None,
        added_cond_kwargs: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """The vector that the blocks are told: time, plus (or beside it) labels, plus sizes and pooled text."""
        projected = self.time_proj(batched_timestep(timestep, sample)).to(sample.dtype)
        if timestep_cond is not None and len(timestep_cond) not in (1, len(sample)):
            raise ValueError(f"timestep_cond has {len(timestep_cond)} rows for {len(sample)} samples")
        temb = self.time_embedding(projected, timestep_cond)
        if self.class_embedding is not None:
            labels = self._embed_labels(class_labels, sample)
            temb = torch.cat([temb, labels], dim=-1) if self.concat_classes else temb + labels
        elif class_labels is not None:
            raise ValueError("class_labels were given, but this model has no class_embed_type or num_class_embeds")
        if self.addition_embed_type == "text_time":
            temb = temb + self._embed_sizes(temb, added_cond_kwargs)
        elif self.add_embedding is not None:
            temb = temb + once(self.add_embedding, encoder_hidden_states)
        if self.time_embed_act is not None:
            temb = self.time_embed_act(temb)
        return temb if self.activate_time is None else self.activate_time(temb)

    def _embed_labels(self, labels: Tensor | None, sample: Tensor) -> Tensor:
        if labels is None:
            raise ValueError("this model is conditioned on classes: give class_labels, one a sample")
        check_labels(labels, len(sample), self.class_embedding)
        if self.class_embed_type == "timestep":
            labels = self.time_proj(labels).to(sample.dtype)
        assert self.class_embedding is not None
        return self.class_embedding(labels).to(sample.dtype)

    def _embed_sizes(self, temb: Tensor, added: Mapping[str, Tensor] | None) -> Tensor:
        """Pooled text and image sizes as a vector (Podell et al. 2023, section 2.2)."""
        missing = [name for name in ("text_embeds", "time_ids") if added is None or added.get(name) is None]
        if missing or added is None:
            raise ValueError(f"this model needs {missing} in added_cond_kwargs: pooled text and sizes of each sample")
        text, sizes = added["text_embeds"], added["time_ids"]
        if text.dim() != 2 or sizes.dim() != 2 or len(text) != len(sizes) or len(text) not in (1, len(temb)):
            raise ValueError(
                f"added_cond_kwargs has text_embeds of the shape {tuple(text.shape)} and time_ids of the shape "
                f"{tuple(sizes.shape)}; both need one row a sample ({len(temb)})"
            )
        return once(self._sizes_and_text, text, sizes, temb.dtype)

    def _sizes_and_text(self, text: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
        sizes = self.add_time_proj(sizes.flatten()).reshape(sizes.shape[0], -1)
        embeds = torch.cat([text, sizes.to(text.dtype)], dim=-1).to(dtype)
        add_embedding = cast("TimestepEmbedding", self.add_embedding)  # or what a compiler has put around it
        expected = add_embedding.linear_1.in_features
        if embeds.shape[-1] != expected:
            raise ValueError(
                f"added_cond_kwargs give {text.shape[-1]} values of text_embeds and {sizes.shape[-1]} of time_ids, "
                f"together {embeds.shape[-1]}; this model needs {expected}"
            )
        return add_embedding(embeds)

    def _down_and_mid(
        self, settings: Mapping[str, Any], temb_channels: int
    ) -> tuple[nn.ModuleList, nn.Module | None, dict[str, Any], dict[str, list[Any]]]:
        """The down blocks and the middle of a config, and the entries of `BlockSpec` that up blocks share with them."""
        channels = settings["block_out_channels"]
        common, varying = _common_entries(settings, temb_channels), _varying_entries(settings)
        outer = {
            "skip_time_act": settings.get("resnet_skip_time_act", False),
            "out_scale": settings.get("resnet_out_scale_factor", 1.0),
        }
        padding = settings["downsample_padding"]
        down = {**common, **outer, "downsample_padding": padding}
        down_blocks = build_down_blocks(settings["down_block_types"], channels, down, varying)
        last = {name: values[-1] for name, values in varying.items() if name not in ("layers", "only_cross_attention")}
        last["transformer_layers"] = last["transformer_layers"][:1]
        scale = settings["mid_block_scale_factor"]
        mid_block = build_mid_block(settings["mid_block_type"], channels[-1], scale, {**common, **last})
        return down_blocks, mid_block, {**common, **outer}, varying

    def _note_text_channels(self, blocks: Sequence[Any], dims: Sequence[int]) -> None:
        """Remember how many channels text tokens may have; None where no block attends to text."""
        attends = any(block is not None and block.has_cross_attention for block in blocks)
        self.text_channels = set(dims) if attends else None
        if self.encoder_hid_proj is not None:
            self.text_channels = {self.config["encoder_hid_dim"]}

    def _check(self, sample: Tensor, tokens: Tensor | None, cross_attention_kwargs: Mapping[str, Any] | None) -> None:
        check_floats("sample", sample)
        if sample.shape[1] != self.in_channels:
            raise ValueError(f"sample has {sample.shape[1]} channels, but this model's in_channels={self.in_channels}")
        if cross_attention_kwargs:
            unknown = sorted(set(cross_attention_kwargs) - {"scale"})
            if unknown:
                raise ValueError(f"cross_attention_kwargs has {unknown}, which are not supported; 'scale' is")
        if self.text_channels is None:
            return
        if tokens is None:
            raise ValueError("this model attends to text: give encoder_hidden_states, (batch, tokens, channels)")
        if tokens.dim() != 3 or tokens.shape[0] != sample.shape[0] or tokens.shape[2] not in self.text_channels:
            raise ValueError(
                f"encoder_hidden_states has the shape {tuple(tokens.shape)}; this model takes (batch, tokens, "
                f"channels) with a batch of {sample.shape[0]} and {sorted(self.text_channels)} channels"
            )


def _varying_entries(settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The entries of `BlockSpec` that have one value a down block, from the config of a model that attends to text.

    `attention_head_dim` holds the number of heads of blocks that attend to text, and the channels of a head of those
    that attend to pixels alone: a slip of the first public configs that all later ones keep.

    Raises:
        ValueError: if a list has not one entry a block, or `num_attention_heads` is given.
    """
    if settings["num_attention_heads"] is not None:
        raise ValueError("num_attention_heads is not taken: give the number of heads as attention_head_dim")
    count = len(settings["down_block_types"])
    if len(settings["block_out_channels"]) != count:
        raise ValueError(
            f"block_out_channels={settings['block_out_channels']!r} has {len(settings['block_out_channels'])} entries, "
            f"but there are {count} down_block_types"
        )
    heads = per_block("attention_head_dim", settings["attention_head_dim"], count)
    depths = per_block("transformer_layers_per_block", settings["transformer_layers_per_block"], count)
    return {
        "heads": heads,
        "head_dim": heads,
        "layers": per_block("layers_per_block", settings["layers_per_block"], count),
        "cross_attention_dim": per_block("cross_attention_dim", settings["cross_attention_dim"], count),
        "only_cross_attention": per_block("only_cross_attention", settings["only_cross_attention"], count),
        "transformer_layers": [as_tuple(depth) for depth in depths],
    }


def _common_entries(settings: Mapping[str, Any], temb_channels: int) -> dict[str, Any]:
    """The entries of `BlockSpec` that are the same for all blocks, from the same config."""
    return {
        "temb_channels": temb_channels,
        "time_is_activated": not settings.get("resnet_skip_time_act", False),
        "groups": settings["norm_num_groups"],
        "attn_groups": settings["norm_num_groups"],
        "eps": settings["norm_eps"],
        "act_fn": settings["act_fn"],
        "dropout": settings.get("dropout", 0.0),
        "time_scale_shift": settings["resnet_time_scale_shift"],
        "linear_projection": settings["use_linear_projection"],
        "upcast_attention": settings["upcast_attention"],
    }


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A list as a tuple, anything else as a tuple of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def token_mask(mask: Tensor | None, sample: Tensor) -> Tensor | None:
    """A mask of tokens (B, T), 1 or True to keep, as bool, of which kernels know that it hides for certain."""
    if mask is None:
        return None
    if len(mask) not in (1, len(sample)):
        raise ValueError(f"the attention mask has {len(mask)} rows for {len(sample)} samples")
    return once(_is_one, mask)


def _is_one(mask: Tensor) -> Tensor:
    return mask == 1


def add_each(skips: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
    """The skips of a UNet plus what a ControlNet made for each.

    Raises:
        ValueError: if the counts or shapes differ.
    """
    if len(skips) != len(residuals):
        raise ValueError(
            f"down_block_additional_residuals has {len(residuals)} entries, but this UNet has {len(skips)} skips"
        )
    for skip, residual in zip(skips, residuals, strict=True):
        # Pooled conditions have one value a channel.
        sides = (skip.shape[2:], (1, 1))
        fits = residual.shape[1:2] == skip.shape[1:2] and residual.shape[2:] in sides
        if not fits or len(residual) not in (1, len(skip)):
            raise ValueError(
                f"down_block_additional_residuals has an entry of the shape {tuple(residual.shape)} for a skip of the "
                f"shape {tuple(skip.shape)}"
            )
    return [skip + residual for skip, residual in zip(skips, residuals, strict=True)]
