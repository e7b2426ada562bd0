"""`CogVideoXTransformer3DModel`: the denoiser of CogVideoX (Yang et al. 2024, arXiv 2408.06072)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...offload.runs import once
from ..base import Model
from ..layers.embeddings import TimestepEmbedding, Timesteps, batched_timestep
from ..layers.joint_attention import JointAttention
from ..layers.modulation import Modulating, Vector, gated, modulate
from ..layers.patches import sincos_1d, sincos_2d
from ..layers.rotary import RotaryTable
from ..layers.transformer import FeedForward
from .checks import check_attention_kwargs, check_tokens
from .outputs import Transformer2DModelOutput


class CogVideoXPatchEmbed(nn.Module):
    """Films (B, F, C, H, W) to tokens (B, F * h * w, dim), and text to tokens of as many channels.

    Args:
        patch_size: height and width of a patch.
        patch_size_t: frames of a patch; None takes one frame and a convolution.
        in_channels: channels of the latents.
        dim: channels of a token.
        text_embed_dim: channels of the text.
        bias: whether the convolution has one.
    """

    def __init__(
        self, patch_size: int, patch_size_t: int | None, in_channels: int, dim: int, text_embed_dim: int, bias: bool
    ) -> None:
        super().__init__()
        self.patch_size, self.patch_size_t = patch_size, patch_size_t
        if patch_size_t is None:
            self.proj: nn.Module = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size, bias=bias)
        else:
            self.proj = nn.Linear(in_channels * patch_size * patch_size * patch_size_t, dim)
        self.text_proj = nn.Linear(text_embed_dim, dim)

    def forward(self, film: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        batch, frames, channels, height, width = film.shape
        p, p_t = self.patch_size, self.patch_size_t
        if p_t is None:
            tokens = self.proj(film.flatten(0, 1)).flatten(2).transpose(1, 2)
            return tokens.reshape(batch, -1, tokens.shape[-1]), once(self.text_proj, text)
        patches = film.reshape(batch, frames // p_t, p_t, channels, height // p, p, width // p, p)
        patches = patches.permute(0, 1, 4, 6, 3, 2, 5, 7).flatten(4).flatten(1, 3)
        return self.proj(patches), once(self.text_proj, text)


class CogVideoXLayerNormZero(Modulating):
    """The norm of text and film before a layer, each with its own shift, scale and gate ("expert adaptive layer norm",
    Yang et al. 2024, section 2.2)."""

    def __init__(self, conditioning_dim: int, dim: int, elementwise_affine: bool, eps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(conditioning_dim, 6 * dim)
        self.norm = nn.LayerNorm(dim, eps=eps, elementwise_affine=elementwise_affine)

    def forward(self, film: Tensor, text: Tensor, temb: Vector) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Modulate tokens (B, S, dim) and (B, T, dim) by `temb`; returns both, and the gates (B, dim) of both."""
        shift, scale, gate, text_shift, text_scale, text_gate = self.make(temb).chunk(6, dim=1)
        return (
            modulate(self.norm(film), shift, scale),
            modulate(self.norm(text), text_shift, text_scale),
            gate,
            text_gate,
        )


class CogVideoXBlock(nn.Module):
    """Film and text attend to each other as one sequence, then a feed-forward.

    Args:
        dim: channels of the tokens.
        heads: number of heads.
        dim_head: channels of a head.
        time_embed_dim: length of the vector that modulates the norms.
        activation_fn: see `FeedForward`.
        attention_bias: whether the projections to query, key and value have biases.
        norm_elementwise_affine, norm_eps: of the norms before the layers.
        dropout: probability, in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        dim_head: int,
        time_embed_dim: int,
        *,
        activation_fn: str,
        attention_bias: bool,
        norm_elementwise_affine: bool,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.norm1 = CogVideoXLayerNormZero(time_embed_dim, dim, norm_elementwise_affine, norm_eps)
        self.attn1 = JointAttention(dim, heads=heads, dim_head=dim_head, bias=attention_bias, qk_norm="layer_norm")
        self.norm2 = CogVideoXLayerNormZero(time_embed_dim, dim, norm_elementwise_affine, norm_eps)
        self.ff = FeedForward(dim, dropout=dropout, activation_fn=activation_fn)

    def forward(self, film: Tensor, text: Tensor, temb: Tensor, rotary: RotaryTable | None) -> tuple[Tensor, Tensor]:
        """Transform film (B, S, dim) and text (B, T, dim); `rotary` is of the text, then the film."""
        parts = [text.shape[1], film.shape[1]]
        normed, normed_text, gate, text_gate = self.norm1(film, text, temb)
        attended, _ = self.attn1(torch.cat([normed_text, normed], dim=1), rotary=rotary)
        text_change, change = attended.split(parts, dim=1)
        film, text = film + gated(change, gate), text + gated(text_change, text_gate)

        normed, normed_text, gate, text_gate = self.norm2(film, text, temb)
        text_change, change = self.ff(torch.cat([normed_text, normed], dim=1)).split(parts, dim=1)
        return film + gated(change, gate), text + gated(text_change, text_gate)


class CogVideoXLayerNormOut(Modulating):
    """The norm before the last layer, with shift and scale."""

    def __init__(self, conditioning_dim: int, dim: int, elementwise_affine: bool, eps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(conditioning_dim, 2 * dim)
        self.norm = nn.LayerNorm(dim, eps=eps, elementwise_affine=elementwise_affine)

    def forward(self, film: Tensor, temb: Vector) -> Tensor:
        shift, scale = self.make(temb).chunk(2, dim=1)
        return modulate(self.norm(film), shift, scale)


class CogVideoXTransformer3DModel(Model):
    """A transformer over patches of a film's latents and text, as one sequence.

    Args:
        num_attention_heads: number of heads.
        attention_head_dim: channels of a head.
        in_channels: channels of the latents; twice as many with an image to start from.
        out_channels: channels of the prediction; `in_channels` if None.
        flip_sin_to_cos, freq_shift: of the sinusoids of the timestep, see `get_timestep_embedding`.
        time_embed_dim: length of the vector that modulates the blocks.
        ofs_embed_dim: length of the embedding of `ofs`, equal to `time_embed_dim`; None takes no `ofs`.
        text_embed_dim: channels of the text tokens.
        num_layers: number of blocks.
        dropout: probability, in training.
        attention_bias: whether the projections to query, key and value have biases.
        sample_width, sample_height: of the latents it was trained for.
        sample_frames: of the film it was trained for, before the autoencoder.
        patch_size: height and width of a patch.
        patch_size_t: frames of a patch (1.5); None takes one frame.
        temporal_compression_ratio: frames of the film for each of the latents, past the first.
        max_text_seq_length: text tokens that the learned positions are made for.
        activation_fn, timestep_activation_fn: names of activations.
        norm_elementwise_affine, norm_eps: of the layer norms.
        spatial_interpolation_scale, temporal_interpolation_scale: rows, columns and frames are divided by these
            before they become sinusoidal positions.
        use_rotary_positional_embeddings: positions come as `image_rotary_emb`.
        use_learned_positional_embeddings: positions are weights, for the trained size only; films of other lengths
            than the trained one get sinusoids in their place.
        patch_bias: whether the convolution over patches has a bias.

    Raises:
        ValueError: for learned positions without rotary ones, and numbers that do not fit.
    """

    _repeated_blocks: ClassVar[list[str]] = ["CogVideoXBlock"]
    _no_split_modules: ClassVar[list[str] | None] = ["CogVideoXBlock", "CogVideoXPatchEmbed"]
    _keep_in_fp32_modules: ClassVar[list[str] | None] = None
    _skip_layerwise_casting_patterns: ClassVar[list[str] | tuple[str, ...] | None] = ["patch_embed", "norm"]
    _supports_gradient_checkpointing: ClassVar[bool] = False
    _modulated_by: ClassVar[tuple[str, ...]] = ("timestep", "ofs")

    def __init__(
        self,
        num_attention_heads: int = 30,
        attention_head_dim: int = 64,
        in_channels: int = 16,
        out_channels: int | None = 16,
        flip_sin_to_cos: bool = True,
        freq_shift: int = 0,
        time_embed_dim: int = 512,
        ofs_embed_dim: int | None = None,
        text_embed_dim: int = 4096,
        num_layers: int = 30,
        dropout: float = 0.0,
        attention_bias: bool = True,
        sample_width: int = 90,
        sample_height: int = 60,
        sample_frames: int = 49,
        patch_size: int = 2,
        patch_size_t: int | None = None,
        temporal_compression_ratio: int = 4,
        max_text_seq_length: int = 226,
        activation_fn: str = "gelu-approximate",
        timestep_activation_fn: str = "silu",
        norm_elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        spatial_interpolation_scale: float = 1.875,
        temporal_interpolation_scale: float = 1.0,
        use_rotary_positional_embeddings: bool = False,
        use_learned_positional_embeddings: bool = False,
        patch_bias: bool = True,
    ) -> None:
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        if use_learned_positional_embeddings and not use_rotary_positional_embeddings:
            raise ValueError(
                "use_learned_positional_embeddings=True goes with use_rotary_positional_embeddings=True only: "
                "no checkpoint has learned positions alone"
            )
        if dim % 16 and not use_rotary_positional_embeddings:
            raise ValueError(f"{dim} channels a token are not a multiple of 16, which positions of three axes need")
        if ofs_embed_dim not in (None, time_embed_dim):
            raise ValueError(f"ofs_embed_dim={ofs_embed_dim} must be time_embed_dim={time_embed_dim}: both are added")
        self.out_channels = out_channels or in_channels
        self.patch_embed = CogVideoXPatchEmbed(
            patch_size, patch_size_t, in_channels, dim, text_embed_dim, bias=patch_bias
        )
        if use_learned_positional_embeddings:
            frames = (sample_frames - 1) // temporal_compression_ratio + 1
            tokens = max_text_seq_length + frames * (sample_height // patch_size) * (sample_width // patch_size)
            self.patch_embed.register_buffer("pos_embedding", torch.zeros(1, tokens, dim))
        self.time_proj = Timesteps(dim, flip_sin_to_cos, freq_shift)
        self.time_embedding = TimestepEmbedding(dim, time_embed_dim, timestep_activation_fn)
        self.ofs_proj = self.ofs_embedding = None
        if ofs_embed_dim:
            self.ofs_proj = Timesteps(ofs_embed_dim, flip_sin_to_cos, freq_shift)
            self.ofs_embedding = TimestepEmbedding(ofs_embed_dim, ofs_embed_dim, timestep_activation_fn)
        self.transformer_blocks = nn.ModuleList(
            CogVideoXBlock(
                dim,
                num_attention_heads,
                attention_head_dim,
                time_embed_dim,
                activation_fn=activation_fn,
                attention_bias=attention_bias,
                norm_elementwise_affine=norm_elementwise_affine,
                norm_eps=norm_eps,
                dropout=dropout,
            )
            for _ in range(num_layers)
        )
        self.norm_final = nn.LayerNorm(dim, eps=norm_eps, elementwise_affine=norm_elementwise_affine)
        self.norm_out = CogVideoXLayerNormOut(time_embed_dim, dim, norm_elementwise_affine, norm_eps)
        self.proj_out = nn.Linear(dim, patch_size * patch_size * (patch_size_t or 1) * self.out_channels)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor | float,
        timestep_cond: Tensor | None = None,
        ofs: Tensor | float | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        attention_kwargs: Mapping[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict what the scheduler's `prediction_type` says, of a film's noisy latents.

        Args:
            hidden_states: latents (B, F, in_channels, H, W), of sizes that patches divide.
            encoder_hidden_states: text tokens (B, T, text_embed_dim).
            timestep: from 0 to 1000: a number, a scalar tensor or one a sample.
            timestep_cond: must be None: no checkpoint takes it.
            ofs: a number of image-to-video checkpoints of 1.5, 2.0 for theirs; one, or one a sample.
            image_rotary_emb: cosines and sines (S, attention_head_dim) for the S patches; see
                `get_3d_rotary_pos_embed`.
            attention_kwargs: {"scale": x} is the strength of LoRA layers; nothing else is taken.
            return_dict: False gives a tuple.

        Returns:
            The prediction, (B, F, out_channels, H, W).

        Raises:
            ValueError: for inputs that are missing or whose shapes do not fit.
        """
        self._check(hidden_states, encoder_hidden_states, timestep_cond, ofs, image_rotary_emb)
        check_attention_kwargs(attention_kwargs, "attention_kwargs")
        film, text = self.patch_embed(hidden_states, encoder_hidden_states)
        film, text = self._add_positions(film, text, hidden_states)
        temb = self._embed_time(hidden_states, timestep, ofs)
        rotary = None if image_rotary_emb is None else once(_with_text, *image_rotary_emb, text.shape[1])

        for block in self.transformer_blocks:
            film, text = block(film, text, temb, rotary)

        tokens = self.proj_out(self.norm_out(self.norm_final(film), temb))
        sample = self._from_patches(tokens, hidden_states)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _embed_time(self, latents: Tensor, timestep: Tensor | float, ofs: Tensor | float | None) -> Tensor:
        temb = self.time_embedding(self.time_proj(batched_timestep(timestep, latents)).to(latents.dtype))
        if self.ofs_embedding is not None and self.ofs_proj is not None and ofs is not None:
            temb = temb + self.ofs_embedding(self.ofs_proj(batched_timestep(ofs, latents)).to(latents.dtype))
        return temb

    def _grid(self, latents: Tensor) -> tuple[int, int, int]:
        """Frames, rows and columns of patches."""
        _, frames, _, height, width = latents.shape
        return frames // (self.patch_size_t or 1), height // self.patch_size, width // self.patch_size

    def _add_positions(self, film: Tensor, text: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Sinusoids on three axes, or learned positions; none where positions are rotary alone."""
        if self.use_learned_positional_embeddings:
            table = self.patch_embed.get_buffer("pos_embedding").to(film.dtype)
            first = self.max_text_seq_length
            if film.shape[1] == table.shape[1] - first:
                return film + table[:, first:], text + table[:, : text.shape[1]]
        elif self.use_rotary_positional_embeddings:
            return film, text
        return film + once(self._sinusoids, self._grid(latents), film.shape[-1], film.device).to(film.dtype), text

    def _sinusoids(self, grid: tuple[int, int, int], channels: int, device: torch.device) -> Tensor:
        """A quarter of the channels tells the frame, the others row and column: (tokens, channels)."""
        frames, rows, columns = grid
        exact = torch.float32 if device.type == "mps" else torch.float64
        times = torch.arange(frames, dtype=exact, device=device) / self.temporal_interpolation_scale
        over_time = sincos_1d(times, channels // 4).float()[:, None].expand(-1, rows * columns, -1)
        scale = self.spatial_interpolation_scale
        over_space = sincos_2d(rows, columns, 3 * (channels // 4), interpolation_scale=scale, device=device)
        return torch.cat([over_time, over_space.expand(frames, -1, -1)], dim=2).flatten(0, 1)

    def _from_patches(self, tokens: Tensor, latents: Tensor) -> Tensor:
        frames, rows, columns = self._grid(latents)
        p, p_t = self.patch_size, self.patch_size_t or 1
        patches = tokens.reshape(tokens.shape[0], frames, rows, columns, self.out_channels, p_t, p, p)
        film = patches.permute(0, 1, 5, 4, 2, 6, 3, 7)
        return film.reshape(tokens.shape[0], frames * p_t, self.out_channels, rows * p, columns * p)

    def _check(self, latents: Tensor, text: Tensor, timestep_cond: Any, ofs: Any, rotary: Any) -> None:
        """Refuse inputs that do not fit."""
        if latents.ndim != 5 or latents.shape[2] != self.in_channels:
            expected = f"(batch, frames, {self.in_channels}, height, width)"
            raise ValueError(f"hidden_states has the shape {tuple(latents.shape)}, expected {expected}")
        batch, frames, _, height, width = latents.shape
        p, p_t = self.patch_size, self.patch_size_t or 1
        if frames % p_t or height % p or width % p:
            raise ValueError(f"{frames} frames of {height} x {width} do not part into patches of {p_t} x {p} x {p}")
        check_tokens("encoder_hidden_states", text, batch, self.text_embed_dim)
        if timestep_cond is not None:
            raise ValueError("timestep_cond is not taken by this model")
        if ofs is None and self.ofs_embedding is not None:
            raise ValueError("this model needs ofs: 2.0 for the published checkpoints")
        if self.use_rotary_positional_embeddings == (rotary is None):
            wanted = "needs" if rotary is None else "does not take"
            raise ValueError(f"this model {wanted} image_rotary_emb (use_rotary_positional_embeddings)")
        if rotary is not None and rotary[0].shape[0] != (frames // p_t) * (height // p) * (width // p):
            raise ValueError(f"image_rotary_emb is for {rotary[0].shape[0]} patches: make it for the size of the film")
        if self.use_learned_positional_embeddings:
            trained = (self.sample_height, self.sample_width)
            if (height, width) != trained:
                raise ValueError(
                    f"this model's learned positions are for latents of {trained[0]} x {trained[1]} (height x width), "
                    f"not {height} x {width}"
                )
            if text.shape[1] > self.max_text_seq_length:
                raise ValueError(f"{text.shape[1]} text tokens exceed max_text_seq_length={self.max_text_seq_length}")


def _with_text(cos: Tensor, sin: Tensor, count: int) -> RotaryTable:
    """The table of film patches, given for each channel, with `count` text tokens before it that do not turn."""
    cos, sin = cos[:, None, ::2], sin[:, None, ::2]
    still = cos.new_ones(count, *cos.shape[1:])
    return RotaryTable(torch.cat([still, cos]).float(), torch.cat([torch.zeros_like(still), sin]).float())
