"""What a model's output says of the clean sample and of the noise, and how the clean sample is kept in range."""

import math

import torch

from .sigmas import choice


def predict_original(kind: str, output: torch.Tensor, sample: torch.Tensor, alpha: float, sigma: float) -> torch.Tensor:
    """The clean sample that a model's output implies, for ``sample = alpha x_0 + sigma eps``.

    Args:
        kind: "epsilon", "sample", "v_prediction" (for ``alpha^2 + sigma^2 = 1``) or "flow_prediction" (for
            ``alpha = 1 - sigma``; the output is ``eps - x_0``).
        output: what the model returned.
        sample: what it was given, before any scaling.
        alpha: the signal's share.
        sigma: the noise's standard deviation.

    Raises:
        ValueError: for another `kind`, or "epsilon" where no signal is left to solve for.
    """
    choice("prediction_type", kind, ("epsilon", "sample", "v_prediction", "flow_prediction"))
    if kind == "sample":
        return output
    if kind == "flow_prediction":
        return torch.sub(sample, output, alpha=sigma)
    if kind == "v_prediction":
        return torch.sub(alpha * sample, output, alpha=sigma)
    if alpha == 0:
        raise ValueError(
            "prediction_type='epsilon' cannot start from pure noise (rescale_betas_zero_snr=True): "
            "use a model of 'v_prediction' or 'sample'"
        )
    return torch.sub(sample, output, alpha=sigma).div_(alpha)


def predict_original_ve(kind: str, output: torch.Tensor, sample: torch.Tensor, sigma: float) -> torch.Tensor:
    """The same for ``sample = x_0 + sigma eps``, where the model saw the sample scaled to unit variance."""
    if kind == "v_prediction":
        scale = 1 / math.hypot(sigma, 1.0)
        return torch.sub(sample * scale**2, output, alpha=sigma * scale)
    return predict_original(kind, output, sample, 1.0, sigma)


def predict_noise(original: torch.Tensor, sample: torch.Tensor, alpha: float, sigma: float) -> torch.Tensor:
    """The noise that a predicted clean sample implies, for ``sample = alpha x_0 + sigma eps``."""
    return torch.sub(sample, original, alpha=alpha).div_(sigma)


def ancestral_split(sigma: float, sigma_next: float) -> tuple[float, float]:
    """How far down to go and how much noise to add then, so that the level is `sigma_next` (k-diffusion; DDPM's eq. 7).

    ``up^2 = sigma_next^2 (sigma^2 - sigma_next^2) / sigma^2`` and ``down^2 = sigma_next^2 - up^2``.
    """
    return sigma_next**2 / sigma, sigma_next * math.sqrt(max(1 - (sigma_next / sigma) ** 2, 0.0))


def threshold_sample(original: torch.Tensor, ratio: float, most: float) -> torch.Tensor:
    """Dynamic thresholding (Imagen, arXiv 2205.11487, section 2.3), for models in pixel space.

    Each image's values are clamped to its own `ratio` quantile of magnitude, which is kept in [1, `most`], and divided
    by it.
    """
    rows = original.flatten(1).float()
    bound = torch.quantile(rows.abs(), ratio, dim=1, keepdim=True).clamp(1, max(most, 1))
    return (rows.clamp(-bound, bound) / bound).reshape(original.shape).to(original.dtype)
