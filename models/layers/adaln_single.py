"""`AdaLayerNormSingle`: the one modulation that all blocks share ("adaLN-single", Chen et al. 2024)."""

import torch
import torch.nn.functional as F
from torch import nn

from .embeddings import TimestepEmbedding, Timesteps

Tensor = torch.Tensor


class TimestepSizeEmbeddings(nn.Module):
    """Time, and for PixArt-alpha at 1024 pixels also the picture's size, as one vector (Chen et al. 2024, table 7).

    Args:
        embedding_dim: length of the result, a multiple of 3 where sizes are embedded.
        use_additional_conditions: embed height, width and aspect ratio, each into a third of the vector.

    Raises:
        ValueError: if the length cannot be cut into thirds.
    """

    def __init__(self, embedding_dim: int, use_additional_conditions: bool = False) -> None:
        super().__init__()
        self.time_proj = Timesteps(256)
        self.timestep_embedder = TimestepEmbedding(256, embedding_dim)
        self.takes_sizes = use_additional_conditions
        if not use_additional_conditions:
            return
        if embedding_dim % 3:
            raise ValueError(
                f"use_additional_conditions=True embeds height, width and aspect ratio in a third of the channels "
                f"each, but {embedding_dim} channels are not a multiple of 3"
            )
        self.resolution_embedder = TimestepEmbedding(256, embedding_dim // 3)
        self.aspect_ratio_embedder = TimestepEmbedding(256, embedding_dim // 3)

    def forward(
        self, timestep: Tensor, dtype: torch.dtype, resolution: Tensor | None = None, aspect_ratio: Tensor | None = None
    ) -> Tensor:
        """Embed times (N,), and sizes (B, 2) and ratios (B, 1) where they are inputs: (N, embedding_dim)."""
        embedding = self.timestep_embedder(self.time_proj(timestep).to(dtype))
        if not self.takes_sizes:
            return embedding
        if resolution is None or aspect_ratio is None:
            raise ValueError(
                'added_cond_kwargs must hold "resolution" (B, 2) and "aspect_ratio" (B, 1): this model takes sizes'
            )
        sizes = self.resolution_embedder(self.time_proj(resolution.flatten()).to(dtype))
        ratio = self.aspect_ratio_embedder(self.time_proj(aspect_ratio.flatten()).to(dtype))
        rows = resolution.shape[0]
        return embedding + torch.cat([sizes.reshape(rows, -1), ratio.reshape(rows, -1)], dim=1)


class AdaLayerNormSingle(nn.Module):
    """From time (and sizes) to six vectors for all blocks; each block adds a learned table of its own to them."""

    def __init__(self, embedding_dim: int, use_additional_conditions: bool = False) -> None:
        super().__init__()
        self.emb = TimestepSizeEmbeddings(embedding_dim, use_additional_conditions)
        self.linear = nn.Linear(embedding_dim, 6 * embedding_dim)

    def forward(
        self, timestep: Tensor, dtype: torch.dtype, resolution: Tensor | None = None, aspect_ratio: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Times (N,) to the vectors for the blocks, (N, 6 * embedding_dim), and for the last layer (N, embedding_dim).

        Args:
            timestep: from 0 to 1000.
            dtype: what the model computes in.
            resolution: height and width in pixels, (N, 2); aspect_ratio: height / width, (N, 1).
        """
        embedded = self.emb(timestep, dtype, resolution, aspect_ratio)
        return self.linear(F.silu(embedded)), embedded
