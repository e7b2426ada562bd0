"""The diagonal Gaussian over latents that a variational autoencoder's encoder describes."""

import math
from collections.abc import Sequence

import torch

from diffusion_core.randomness import Generators, randn_tensor


class DiagonalGaussianDistribution:
    """A Gaussian for each latent element, all independent (Kingma and Welling 2013, appendix B).

    Args:
        parameters: means and logarithms of variances, stacked along the channels: (B, 2 C, ...).
        deterministic: a variance of zero: samples are the mean.
    """

    def __init__(self, parameters: torch.Tensor, deterministic: bool = False) -> None:
        self.parameters = parameters
        self.deterministic = deterministic
        self.mean, logvar = parameters.chunk(2, dim=1)
        self.logvar = logvar.clamp(-30.0, 20.0)
        if deterministic:
            self.std = self.var = torch.zeros_like(self.mean)
        else:
            self.std = torch.exp(0.5 * self.logvar)
            self.var = torch.exp(self.logvar)

    def sample(self, generator: Generators | None = None) -> torch.Tensor:
        """Draw latents (B, C, ...), on the generator's own device; a list has one generator for each sample."""
        noise = randn_tensor(self.mean.shape, generator, self.parameters.device, self.parameters.dtype)
        return self.mean + self.std * noise

    def mode(self) -> torch.Tensor:
        """The most likely latents, which are the means."""
        return self.mean

    def kl(self, other: "DiagonalGaussianDistribution | None" = None) -> torch.Tensor:
        """The Kullback-Leibler divergence from `other`, or from the standard normal, in nats: (B,).

        Zero for a deterministic distribution.
        """
        if self.deterministic:
            return self.mean.new_zeros(len(self.mean))
        if other is None:
            terms = self.mean.square() + self.var - 1.0 - self.logvar
        else:
            distance = (self.mean - other.mean).square() / other.var
            terms = distance + self.var / other.var - 1.0 - self.logvar + other.logvar
        return 0.5 * terms.flatten(1).sum(1)

    def nll(self, sample: torch.Tensor, dims: Sequence[int] | None = None) -> torch.Tensor:
        """The negative log-likelihood of latents in nats, summed over `dims`: by default all but the batch."""
        if self.deterministic:
            return self.mean.new_zeros(len(self.mean))
        dims = tuple(range(1, sample.dim())) if dims is None else tuple(dims)
        terms = math.log(2.0 * math.pi) + self.logvar + (sample - self.mean).square() / self.var
        return 0.5 * terms.sum(dim=dims)
