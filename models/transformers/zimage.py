"""`ZImageTransformer2DModel`: the denoiser of Z-Image (Z-Image team 2025, arXiv 2511.22699)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Model
from ..layers.embeddings import Timesteps, batched_timestep
from ..layers.joint_attention import JointAttention
from ..layers.rotary import RotaryTable, rotary_table
from .checks import check_attention_kwargs
from .outputs import Transformer2DModelOutput

# Sequences are filled up to multiples of this with learned tokens, which take part.
MULTIPLE = 32
# Channels of the vector that modulates blocks, at most.
MODULATION = 256


class ZImageTimestepEmbedder(nn.Module):
    """The vector that modulates all blocks: (B,) times to (B, channels)."""

    def __init__(self, channels: int, hidden: int = 1024) -> None:
        super().__init__()
        self.time_proj = Timesteps(256)
        self.mlp = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, channels))

    def forward(self, times: Tensor) -> Tensor:
        return self.mlp(self.time_proj(times).to(self.mlp[0].weight.dtype))


class ZImageFeedForward(nn.Module):
    """Two layers of which the first is gated by a third (SwiGLU, Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(tokens)) * self.w3(tokens))


class ZImageTransformerBlock(nn.Module):
    """Attention and feed-forward, each between two norms (section 3 of the paper, "sandwich norms").

    Args:
        dim: channels of the tokens.
        heads: number of heads.
        norm_eps: of the norms.
        qk_norm: whether queries and keys are normed, head by head.
        modulated: whether the time scales what goes into each part, and gates what comes out.
    """

    def __init__(self, dim: int, heads: int, norm_eps: float, qk_norm: bool, *, modulated: bool = True) -> None:
        super().__init__()
        self.attention = JointAttention(
            dim,
            heads=heads,
            dim_head=dim // heads,
            bias=False,
            out_bias=False,
            qk_norm="rms_norm" if qk_norm else None,
            eps=1e-5,
        )
        self.feed_forward = ZImageFeedForward(dim, int(dim / 3 * 8))
        self.attention_norm1, self.attention_norm2 = nn.RMSNorm(dim, eps=norm_eps), nn.RMSNorm(dim, eps=norm_eps)
        self.ffn_norm1, self.ffn_norm2 = nn.RMSNorm(dim, eps=norm_eps), nn.RMSNorm(dim, eps=norm_eps)
        # A list of one, since checkpoints call it `adaLN_modulation.0`.
        self.adaLN_modulation = nn.Sequential(nn.Linear(min(dim, MODULATION), 4 * dim)) if modulated else None

    def forward(
        self, tokens: Tensor, rotary: RotaryTable, attention_mask: Tensor | None = None, temb: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, S, dim), modulated by `temb` (B, channels); `attention_mask` (B, S) is True where they count."""
        if self.adaLN_modulation is None or temb is None:
            attended, _ = self.attention(self.attention_norm1(tokens), rotary=rotary, attention_mask=attention_mask)
            tokens = tokens + self.attention_norm2(attended)
            return tokens + self.ffn_norm2(self.feed_forward(self.ffn_norm1(tokens)))
        scale, gate, fed_scale, fed_gate = self.adaLN_modulation(temb)[:, None].chunk(4, dim=-1)
        normed = self.attention_norm1(tokens) * (1 + scale)
        attended, _ = self.attention(normed, rotary=rotary, attention_mask=attention_mask)
        tokens = tokens + gate.tanh() * self.attention_norm2(attended)
        fed = self.feed_forward(self.ffn_norm1(tokens) * (1 + fed_scale))
        return tokens + fed_gate.tanh() * self.ffn_norm2(fed)


class ZImageFinalLayer(nn.Module):
    """From tokens (B, S, dim) to patches (B, S, channels), scaled by the time."""

    def __init__(self, dim: int, channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(dim, channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(min(dim, MODULATION), dim))

    def forward(self, tokens: Tensor, temb: Tensor) -> Tensor:
        return self.linear(self.norm_final(tokens) * (1 + self.adaLN_modulation(temb)[:, None]))


class ZImageTransformer2DModel(Model):
    """A flow transformer with a single stream of image and text tokens ("S3-DiT", section 3 of the paper).

    Image and text pass a few blocks of their own first. Text takes whole numbers on the first axis of positions, the
    picture the one that follows, with rows and columns on the other axes.

    Args:
        all_patch_size: heights and widths of patches, of which `forward` takes one.
        all_f_patch_size: how many frames patches have, one for each.
        in_channels: channels of the latents, and of the prediction.
        dim: channels of the tokens.
        n_layers: blocks over both streams.
        n_refiner_layers: blocks over each stream before.
        n_heads: number of heads.
        n_kv_heads: must be `n_heads`.
        norm_eps: of the norms.
        qk_norm: whether queries and keys are normed.
        cap_feat_dim: channels of the text.
        siglip_feat_dim: must be None; models for editing have it.
        rope_theta: base of the frequencies of positions.
        t_scale: factor of the time.
        axes_dims: the channels of a head that turn with text or frame, row and column.
        axes_lens: how many positions there are at most on each axis.

    Raises:
        ValueError: for numbers that do not fit.
    """

    _repeated_blocks: ClassVar[list[str]] = ["ZImageTransformerBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["ZImageTransformerBlock"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["t_embedder", "cap_embedder"]
    _supports_gradient_checkpointing: ClassVar[bool] = False

    def __init__(
        self,
        all_patch_size: Sequence[int] = (2,),
        all_f_patch_size: Sequence[int] = (1,),
        in_channels: int = 16,
        dim: int = 3840,
        n_layers: int = 30,
        n_refiner_layers: int = 2,
        n_heads: int = 30,
        n_kv_heads: int = 30,
        norm_eps: float = 1e-5,
        qk_norm: bool = True,
        cap_feat_dim: int = 2560,
        siglip_feat_dim: int | None = None,
        rope_theta: float = 256.0,
        t_scale: float = 1000.0,
        axes_dims: Sequence[int] = (32, 48, 48),
        axes_lens: Sequence[int] = (1024, 512, 512),
    ) -> None:
        super().__init__()
        _check_numbers(self.config)
        self.in_channels = in_channels

        def blocks(count: int, *, modulated: bool = True) -> nn.ModuleList:
            made = (ZImageTransformerBlock(dim, n_heads, norm_eps, qk_norm, modulated=modulated) for _ in range(count))
            return nn.ModuleList(made)

        sizes = list(zip(all_patch_size, all_f_patch_size, strict=True))
        volumes = {f"{side}-{frames}": side * side * frames * in_channels for side, frames in sizes}
        self.all_x_embedder = nn.ModuleDict({key: nn.Linear(volume, dim) for key, volume in volumes.items()})
        self.all_final_layer = nn.ModuleDict({key: ZImageFinalLayer(dim, volume) for key, volume in volumes.items()})
        self.noise_refiner = blocks(n_refiner_layers)
        self.context_refiner = blocks(n_refiner_layers, modulated=False)
        self.t_embedder = ZImageTimestepEmbedder(min(dim, MODULATION))
        self.cap_embedder = nn.Sequential(nn.RMSNorm(cap_feat_dim, eps=norm_eps), nn.Linear(cap_feat_dim, dim))
        self.x_pad_token = nn.Parameter(torch.zeros(1, dim))
        self.cap_pad_token = nn.Parameter(torch.zeros(1, dim))
        self.layers = blocks(n_layers)

    def forward(
        self,
        x: Sequence[Tensor],
        t: Tensor,
        cap_feats: Sequence[Tensor],
        return_dict: bool = True,
        controlnet_block_samples: Mapping[int, Tensor] | None = None,
        siglip_feats: Any = None,
        image_noise_mask: Any = None,
        patch_size: int = 2,
        f_patch_size: int = 1,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
    ) -> Transformer2DModelOutput | tuple[list[Tensor]]:
        """Predict the flow of latents.

        Args:
            x: latents of each sample, (in_channels, frames, height, width); samples may differ in size.
            t: the time of each sample (B,), from 0 for noise to 1.
            cap_feats: text of each sample, (tokens, cap_feat_dim); samples may differ in length.
            return_dict: False gives a tuple.
            controlnet_block_samples, siglip_feats, image_noise_mask: must be None.
            patch_size, f_patch_size: one of those that the config has.
            joint_attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.

        Returns:
            The flow of each sample, as `x`.

        Raises:
            ValueError: for inputs that are not taken, or whose shapes do not fit.
        """
        check_attention_kwargs(joint_attention_kwargs)
        if any(each is not None for each in (controlnet_block_samples, siglip_feats, image_noise_mask)):
            raise ValueError("controlnet_block_samples, siglip_feats and image_noise_mask must be None")
        patch, key = self._patch(patch_size, f_patch_size)
        self._check(x, cap_feats, patch)
        temb = self.t_embedder(batched_timestep(t, torch.empty(len(x), device=x[0].device)) * self.config.t_scale)
        grids = [[side // step for side, step in zip(each.shape[1:], patch, strict=True)] for each in x]
        words = [_filled(len(each)) for each in cap_feats]
        text, text_mask = _batch([self._text(each) for each in cap_feats])
        patches = [_to_patches(each, grid, patch) for each, grid in zip(x, grids, strict=True)]
        image, image_mask = _batch([self._image(each, key) for each in patches])
        device, axes, theta = image.device, self.config.axes_dims, self.config.rope_theta
        text_at = _stacked([_text_positions(count, device) for count in words])
        image_at = _stacked([_positions(grid, count, device) for grid, count in zip(grids, words, strict=True)])

        image_rotary = rotary_table(image_at, axes, theta)
        for block in self.noise_refiner:
            image = block(image, image_rotary, image_mask, temb)
        text_rotary = rotary_table(text_at, axes, theta)
        for block in self.context_refiner:
            text = block(text, text_rotary, text_mask)
        tokens = torch.cat([image, text], dim=1)
        rotary = RotaryTable(*(torch.cat(pair, dim=1) for pair in zip(image_rotary, text_rotary, strict=True)))
        mask = _joined(image_mask, text_mask, image, text)
        for block in self.layers:
            tokens = block(tokens, rotary, mask, temb)
        found = self.all_final_layer[key](tokens[:, : image.shape[1]], temb)
        sample = [_from_patches(each, grid, patch) for each, grid in zip(found, grids, strict=True)]
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)  # type: ignore[arg-type]

    def _text(self, features: Tensor) -> Tensor:
        """The tokens of one text (tokens, cap_feat_dim), filled up."""
        rest = self.cap_pad_token.expand(_filled(len(features)) - len(features), -1)
        return torch.cat([self.cap_embedder(features), rest])

    def _image(self, patches: Tensor, key: str) -> Tensor:
        """The tokens of one sample's patches (patches, values), filled up."""
        rest = self.x_pad_token.expand(_filled(len(patches)) - len(patches), -1)
        return torch.cat([self.all_x_embedder[key](patches), rest])

    def _patch(self, size: int, frames: int) -> tuple[tuple[int, int, int], str]:
        """Frames, height and width of a patch, as numbers that a compiler knows, and the name of its layers."""
        for each, along in zip(self.config.all_patch_size, self.config.all_f_patch_size, strict=True):
            if each == size and along == frames:
                return (along, each, each), f"{each}-{along}"
        known = list(self.all_x_embedder)
        raise ValueError(f"patch_size={size} with f_patch_size={frames} is not among those of the config, {known}")

    def _check(self, x: Sequence[Tensor], text: Sequence[Tensor], patch: tuple[int, int, int]) -> None:
        """Refuse inputs that do not fit."""
        if len(x) != len(text) or not len(x):
            raise ValueError(f"x has {len(x)} samples and cap_feats {len(text)}: pass a list with one for each")
        for each in x:
            if each.ndim != 4 or each.shape[0] != self.in_channels:
                raise ValueError(
                    f"x has the shape {tuple(each.shape)}, expected ({self.in_channels}, frames, height, width)"
                )
            if any(side % step for side, step in zip(each.shape[1:], patch, strict=True)):
                raise ValueError(f"x has the shape {tuple(each.shape)}, which patches of {patch} do not divide")
        for each in text:
            if each.ndim != 2 or each.shape[1] != self.config.cap_feat_dim:
                raise ValueError(
                    f"cap_feats has the shape {tuple(each.shape)}, expected (tokens, {self.config.cap_feat_dim})"
                )
        lens = self.config.axes_lens
        for each, words in zip(x, text, strict=True):
            ends = [_filled(len(words)) + 1 + each.shape[1] // patch[0]]
            ends += [side // step for side, step in zip(each.shape[2:], patch[1:], strict=True)]
            if any(end > most for end, most in zip(ends, lens, strict=True)):
                raise ValueError(f"text and latents take {ends} positions, more than axes_lens={tuple(lens)}")


def _check_numbers(config: Any) -> None:
    head = config.dim // config.n_heads
    if config.n_kv_heads != config.n_heads or config.siglip_feat_dim is not None:
        raise ValueError("n_kv_heads must be n_heads, and siglip_feat_dim None: other models are not supported")
    if config.dim % config.n_heads or sum(config.axes_dims) != head or any(dim % 2 for dim in config.axes_dims):
        raise ValueError(
            f"axes_dims={tuple(config.axes_dims)} must be even numbers that add up to dim / n_heads = {head}"
        )


def _filled(count: int) -> int:
    return -(-count // MULTIPLE) * MULTIPLE


def _to_patches(latents: Tensor, grid: Sequence[int], patch: tuple[int, int, int]) -> Tensor:
    """Latents (C, frames, height, width) to patches (patches, values), the channels last."""
    frames, rows, columns = grid
    blocks = latents.reshape(-1, frames, patch[0], rows, patch[1], columns, patch[2])
    return blocks.permute(1, 3, 5, 2, 4, 6, 0).reshape(frames * rows * columns, -1)


def _from_patches(tokens: Tensor, grid: Sequence[int], patch: tuple[int, int, int]) -> Tensor:
    """The way back from `_to_patches`; what `tokens` are filled up with is left out."""
    frames, rows, columns = grid
    blocks = tokens[: frames * rows * columns].reshape(frames, rows, columns, *patch, -1)
    return blocks.permute(6, 0, 3, 1, 4, 2, 5).reshape(-1, frames * patch[0], rows * patch[1], columns * patch[2])


def _text_positions(count: int, device: torch.device) -> Tensor:
    """Positions (count, 3) of text: 1, 2, ... on the first axis."""
    return F.pad(torch.arange(1, count + 1, device=device)[:, None], (0, 2))


def _positions(grid: Sequence[int], words: int, device: torch.device) -> Tensor:
    """Positions (tokens, 3) of patches behind a text of `words` tokens; those that fill up have none."""
    starts = (words + 1, 0, 0)
    axes = [torch.arange(start, start + count, device=device) for start, count in zip(starts, grid, strict=True)]
    found = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    return F.pad(found, (0, 0, 0, _filled(len(found)) - len(found)))


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _batch(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Samples (tokens, dim) as a batch, and which tokens count (B, tokens); None if all do."""
    counts = [len(row) for row in rows]
    if all(count == counts[0] for count in counts):  # a set would make them constants to a compiler
        return torch.stack(list(rows)), None
    # Compared with numbers of the host: a tensor of them would have to be copied to the device, which waits.
    places = torch.arange(max(counts), device=rows[0].device)
    return _stacked(rows), torch.stack([places < count for count in counts])


def _joined(first: Tensor | None, second: Tensor | None, image: Tensor, text: Tensor) -> Tensor | None:
    """One mask for both streams."""
    if first is None and second is None:
        return None
    whole = [
        each.new_ones(each.shape[:2], dtype=torch.bool) if mask is None else mask
        for mask, each in ((first, image), (second, text))
    ]
    return torch.cat(whole, dim=1)
