"""What a model's output says of the clean sample and of the noise, and how the clean sample is kept in range.

Products and sums are rounded one by one, as `rounding` says why.
"""

import math

import numpy as np
import torch

from .rounding import mixed
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
        return (output * -sigma).add_(sample)
    if kind == "v_prediction":
        return (output * -sigma).add_(sample * alpha)
    if alpha == 0:
        raise ValueError(
            "prediction_type='epsilon' cannot start from pure noise (rescale_betas_zero_snr=True): "
            "use a model of 'v_prediction' or 'sample'"
        )
    return (output * -sigma).add_(sample).div_(alpha)


def predict_original_ve(
    kind: str, output: torch.Tensor, sample: torch.Tensor, sigma: float, scale: float
) -> torch.Tensor:
    """The same for ``sample = x_0 + sigma eps``, where the model saw the sample divided by ``scale``, to unit variance.

    Sigmas reach 20,000, where a float32 sample is exact to 0.002 at best.
    """
    if kind == "v_prediction":
        single = np.float32(sigma)
        variance = float(single * single + np.float32(1))
        return (output * float(-single / np.float32(scale))).add_(sample / variance)
    if kind == "epsilon":
        return sample - output * sigma
    return predict_original(kind, output, sample, 1.0, sigma)


def noise_in(kind: str, output: torch.Tensor, sample: torch.Tensor, alpha: float, sigma: float) -> torch.Tensor:
    """The noise that a model's output implies; the arguments are those of `predict_original`."""
    if kind == "epsilon":
        return output
    if kind == "sample":
        return predict_noise(output, sample, alpha, sigma)
    return mixed((output, alpha), (sample, sigma if kind == "v_prediction" else 1))


def predict_noise(original: torch.Tensor, sample: torch.Tensor, alpha: float, sigma: float) -> torch.Tensor:
    """The noise that a predicted clean sample implies, for ``sample = alpha x_0 + sigma eps``."""
    return (original * -alpha).add_(sample).div_(sigma)


def ancestral_split(sigma: float, sigma_next: float) -> tuple[float, float]:
    """How far down to go and how much noise to add then, so that the level is `sigma_next` (k-diffusion; DDPM's eq. 7).

    ``up^2 = sigma_next^2 (sigma^2 - sigma_next^2) / sigma^2`` and ``down^2 = sigma_next^2 - up^2``.
    """
    return sigma_next**2 / sigma, sigma_next * math.sqrt(max(1 - (sigma_next / sigma) ** 2, 0.0))


def ancestral_splits(sigmas: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for every step of a float32 schedule, ``(down, up)``.

    As the formulas stand, in float32: the differences of squares lose digits, and a run that is compared with other
    libraries' has to lose the same.
    """
    here, after = sigmas[:-1] ** 2, sigmas[1:] ** 2
    up = (after * (here - after) / here).clamp(min=0).sqrt()
    return (after - up**2).clamp(min=0).sqrt(), up


def threshold_sample(original: torch.Tensor, ratio: float, most: float) -> torch.Tensor:
    """Dynamic thresholding (Imagen, arXiv 2205.11487, section 2.3), for models in pixel space.

    Each image's values are clamped to its own `ratio` quantile of magnitude, which is kept in [1, `most`], and divided
    by it.
    """
    rows = original.flatten(1).float()
    bound = torch.quantile(rows.abs(), ratio, dim=1, keepdim=True).clamp(1, max(most, 1))
    return (rows.clamp(-bound, bound) / bound).reshape(original.shape).to(original.dtype)
