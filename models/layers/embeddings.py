"""Embeddings of scalars (the timestep, sizes) and of pooled text, as vectors that condition the blocks."""

import math

import torch
from torch import nn

from ...offload.attention import DEFAULT, attention
from ...offload.runs import once
from .activations import get_activation


def get_timestep_embedding(
    timesteps: torch.Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1,
    scale: float = 1,
    max_period: int = 10000,
) -> torch.Tensor:
    """Sinusoids of geometrically spaced frequencies (Vaswani et al. 2017, section 3.5; Ho et al. 2020, appendix B).

    Args:
        timesteps: shape (N,), any real dtype; fractions are fine.
        embedding_dim: length of an embedding; the last entry is zero where it is odd.
        flip_sin_to_cos: cosines first.
        downscale_freq_shift: the frequencies end at `max_period ** -(1 - 1 / half)` for 0, at `1 / max_period` for 1.
        scale: factor of the angles.
        max_period: longest wavelength over 2 pi.

    Returns:
        Shape (N, embedding_dim), float32.

    Raises:
        ValueError: if `timesteps` does not have one dimension.
    """
    if timesteps.dim() != 1:
        raise ValueError(f"timesteps must have one dimension, not the shape {tuple(timesteps.shape)}")
    half = embedding_dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    frequencies = torch.exp(steps * -math.log(max_period) / (half - downscale_freq_shift))
    angles = scale * (timesteps.float()[:, None] * frequencies)
    waves = [angles.cos(), angles.sin()] if flip_sin_to_cos else [angles.sin(), angles.cos()]
    if embedding_dim % 2:
        waves.append(torch.zeros_like(angles[:, :1]))
    return torch.cat(waves, dim=-1)


class Timesteps(nn.Module):
    """`get_timestep_embedding` as a layer without weights: (N,) -> (N, num_channels), in float32."""

    def __init__(
        self, num_channels: int, flip_sin_to_cos: bool = True, downscale_freq_shift: float = 0, scale: float = 1
    ) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.flip_sin_to_cos = flip_sin_to_cos
        self.downscale_freq_shift = downscale_freq_shift
        self.scale = scale

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        return get_timestep_embedding(
            timesteps, self.num_channels, self.flip_sin_to_cos, self.downscale_freq_shift, self.scale
        )


class GaussianFourierProjection(nn.Module):
    """Sinusoids of fixed random frequencies (Tancik et al. 2020; Song et al. 2021): (N,) -> (N, 2 * embedding_size).

    The frequencies are a parameter that is saved and never trained.
    """

    def __init__(
        self, embedding_size: int = 256, scale: float = 1.0, log: bool = True, flip_sin_to_cos: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(embedding_size) * scale, requires_grad=False)
        self.log = log
        self.flip_sin_to_cos = flip_sin_to_cos

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        points = timesteps.log() if self.log else timesteps
        angles = points[:, None] * self.weight * (2 * math.pi)
        waves = [angles.cos(), angles.sin()] if self.flip_sin_to_cos else [angles.sin(), angles.cos()]
        return torch.cat(waves, dim=-1)


class TimestepEmbedding(nn.Module):
    """Two linear layers with an activation between: (N, in_channels) -> (N, out_dim or time_embed_dim).

    `cond_proj_dim` adds a projection of a second vector to the input, as LCM does with the guidance scale.
    """

    def __init__(
        self,
        in_channels: int,
        time_embed_dim: int,
        act_fn: str = "silu",
        out_dim: int | None = None,
        post_act_fn: str | None = None,
        cond_proj_dim: int | None = None,
        sample_proj_bias: bool = True,
    ) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, time_embed_dim, bias=sample_proj_bias)
        self.cond_proj = nn.Linear(cond_proj_dim, in_channels, bias=False) if cond_proj_dim is not None else None
        self.act = get_activation(act_fn)
        self.linear_2 = nn.Linear(time_embed_dim, out_dim or time_embed_dim, bias=sample_proj_bias)
        self.post_act = get_activation(post_act_fn) if post_act_fn is not None else None

    def forward(self, sample: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
        if condition is not None:
            if self.cond_proj is None:
                raise ValueError("a condition was given, but this model has no time_cond_proj_dim to take it")
            sample = sample + self.cond_proj(condition)
        sample = self.linear_2(self.act(self.linear_1(sample)))
        return sample if self.post_act is None else self.post_act(sample)


class AttentionPooling(nn.Module):
    """Tokens to one vector: their mean attends to itself and to them (as in CLIP's ResNets, Radford et al. 2021)."""

    def __init__(self, num_heads: int, embed_dim: int) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}")
        self.num_heads, self.dim_head, self.attention_settings = num_heads, embed_dim // num_heads, DEFAULT
        self.positional_embedding = nn.Parameter(torch.randn(1, embed_dim) / embed_dim**0.5)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mean = tokens.mean(dim=1, keepdim=True) + self.positional_embedding
        tokens = torch.cat([mean, tokens], dim=1)
        heads = (tokens.shape[0], -1, self.num_heads, self.dim_head)
        query, key, value = self.q_proj(mean), self.k_proj(tokens), self.v_proj(tokens)
        parts = (query.reshape(heads), key.reshape(heads), value.reshape(heads))
        pooled = attention(*parts, settings=self.attention_settings)
        return pooled.flatten(1)


class TextTimeEmbedding(nn.Module):
    """Text tokens (N, tokens, encoder_dim) to a vector that is added to the time embedding (N, time_embed_dim)."""

    def __init__(self, encoder_dim: int, time_embed_dim: int, num_heads: int = 64) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(encoder_dim)
        self.pool = AttentionPooling(num_heads, encoder_dim)
        self.proj = nn.Linear(encoder_dim, time_embed_dim)
        self.norm2 = nn.LayerNorm(time_embed_dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm2(self.proj(self.pool(self.norm1(tokens))))


class TextProjection(nn.Module):
    """Two linear layers with an activation between: text of `in_features` to `out_features` channels."""

    def __init__(
        self, in_features: int, hidden_size: int, out_features: int | None = None, act_fn: str = "gelu_tanh"
    ) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features, hidden_size)
        self.act_1 = get_activation(act_fn)
        self.linear_2 = nn.Linear(hidden_size, out_features or hidden_size)

    def forward(self, caption: torch.Tensor) -> torch.Tensor:
        return once(self._project, caption)

    def _project(self, caption: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act_1(self.linear_1(caption)))


class CombinedTimestepTextProjEmbeddings(nn.Module):
    """The vector that modulates an MM-DiT: time plus pooled text (Esser et al. 2024, section 4), plus guidance.

    Args:
        embedding_dim: length of the result.
        pooled_projection_dim: length of the pooled text.
        guidance_embeds: the guidance scale is an input too, as in models that were distilled with guidance.
    """

    def __init__(self, embedding_dim: int, pooled_projection_dim: int, guidance_embeds: bool = False) -> None:
        super().__init__()
        self.time_proj = Timesteps(256)
        self.timestep_embedder = TimestepEmbedding(256, embedding_dim)
        self.guidance_embedder = TimestepEmbedding(256, embedding_dim) if guidance_embeds else None
        self.text_embedder = TextProjection(pooled_projection_dim, embedding_dim, act_fn="silu")

    def forward(
        self, timestep: torch.Tensor, pooled_projection: torch.Tensor, guidance: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embed (B,) times, of 0 to 1000, and (B, pooled_projection_dim) text; the result is (B, embedding_dim).

        Args:
            guidance: (B,), scaled as the times are.

        Raises:
            ValueError: if `guidance` is missing where it is an input, or given where it is not.
        """
        dtype = pooled_projection.dtype
        embedding = self.timestep_embedder(self.time_proj(timestep).to(dtype))
        if self.guidance_embedder is not None:
            if guidance is None:
                raise ValueError("this model was distilled with guidance: pass `guidance`, one number a sample")
            embedding = embedding + once(self._embed_guidance, guidance, dtype)
        elif guidance is not None:
            raise ValueError("`guidance` was given, but this model takes none (guidance_embeds is False)")
        return embedding + self.text_embedder(pooled_projection)

    def _embed_guidance(self, guidance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self.guidance_embedder is not None
        return self.guidance_embedder(self.time_proj(guidance).to(dtype))


def batched_timestep(timestep: torch.Tensor | float | int, sample: torch.Tensor) -> torch.Tensor:
    """The timestep as one number a sample, on the sample's device: a number, a scalar or one a sample is taken.

    Raises:
        ValueError: if the count of timesteps is neither 1 nor the batch size.
    """
    return one_a_sample(timestep, sample.shape[0], sample.device)


def one_a_sample(timestep: torch.Tensor | float | int, batch: int, device: torch.device) -> torch.Tensor:
    """As `batched_timestep`, for a batch of this size on a device."""
    if not isinstance(timestep, torch.Tensor):
        return torch.full((batch,), timestep, device=device)
    timestep = timestep.to(device).reshape(-1)
    if timestep.shape[0] not in (1, batch):
        raise ValueError(f"timestep holds {timestep.shape[0]} values; give one, or one a sample ({batch})")
    return timestep.expand(batch)
