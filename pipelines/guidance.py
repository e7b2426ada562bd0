"""Guidance: from a prediction with the prompt and one without it to the one that is followed."""

import math

import torch


def guide(prediction: torch.Tensor, scale: float, rescale: float = 0.0) -> torch.Tensor:
    """Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598, equation 6).

    Args:
        prediction: shape (2 N, ...), the N predictions without the prompt, then the N with it.
        scale: how far to go from the first to the second; 1 gives the second, more goes beyond it.
        rescale: as for `rescale_guided`; 0 leaves the result as it is.

    Returns:
        The guided prediction, shape (N, ...).
    """
    without, with_prompt = prediction.chunk(2)
    guided = without + scale * (with_prompt - without)
    return rescale_guided(guided, with_prompt, rescale) if rescale > 0.0 else guided


def rescale_guided(guided: torch.Tensor, with_prompt: torch.Tensor, rescale: float) -> torch.Tensor:
    """Bring a guided prediction back towards the spread of the unguided one, against overexposed pictures.

    Lin et al. 2023, arXiv 2305.08891, equations 15 and 16 (section 3.4).

    Args:
        guided: shape (N, ...).
        with_prompt: the prediction with the prompt, whose standard deviation is the aim.
        rescale: from 0 (not at all) to 1 (fully); the paper takes 0.7.
    """
    axes = tuple(range(1, guided.ndim))
    factor = with_prompt.std(dim=axes, keepdim=True) / guided.std(dim=axes, keepdim=True)
    return rescale * (guided * factor) + (1 - rescale) * guided


def guidance_embedding(
    scales: torch.Tensor, size: int = 512, dtype: torch.dtype | None = torch.float32
) -> torch.Tensor:
    """The guidance scale as a vector for models that were distilled to take it (Meng et al. 2022, arXiv 2210.03142).

    Args:
        scales: guidance scales minus one, shape (N,).
        size: of the vector.
        dtype: of the vector.

    Returns:
        Sines, then cosines, of the scale times 1000 at frequencies falling from 1 to 1/10000: shape (N, size).
    """
    half = size // 2
    frequencies = torch.exp(torch.arange(half, dtype=dtype, device=scales.device) * (-math.log(10000.0) / (half - 1)))
    angles = (scales.to(dtype) * 1000.0)[:, None] * frequencies
    return torch.nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, size % 2))
