"""A linear multistep method on the probability-flow ODE."""

import numpy as np
import torch

from .base import Device, SchedulerOutput, Timestep, VEScheduler
from .sigmas import Numbers, choice


class LMSDiscreteScheduler(VEScheduler):
    """LMS (Crowson, k-diffusion's `sample_lms`): Adams-Bashforth in sigma, for uneven steps.

    The slope is taken to be the polynomial through its last `order` values, and integrated.

    Args:
        num_train_timesteps: how many noise levels training had, T.
        beta_start, beta_end, beta_schedule, trained_betas: the noise that each adds; see `make_betas`.
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas: one may choose another spacing of sigmas.
        prediction_type: "epsilon", "sample" or "v_prediction".
        timestep_spacing, steps_offset: how the steps are spread; see `spaced_timesteps`.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.0001,
        beta_end: float = 0.02,
        beta_schedule: str = "linear",
        trained_betas: Numbers | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        prediction_type: str = "epsilon",
        timestep_spacing: str = "linspace",
        steps_offset: int = 0,
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        self._take_training_schedule()

    def _forget(self) -> None:
        super()._forget()
        self._slopes: list[torch.Tensor] = []

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Choose the steps: how many, or which timesteps (falling), or which sigmas (falling, with the end)."""
        times, levels = self._sigma_schedule(num_inference_steps, timesteps, sigmas)
        self.num_inference_steps = len(times)
        self._take_schedule(times, device, sigmas=levels)

    def get_lms_coefficient(self, order: int, t: int, current_order: int) -> float:
        """The weight of the slope `current_order` steps ago in step number `t` of the method of `order`.

        The integral over the step of the Lagrange polynomial that is 1 at that slope's sigma and 0 at the others',
        by quadrature of its float32 values. The closed form is nearer the truth by 1e-7, but on a steep schedule, where
        sigmas fall from thousands to nothing in a step, pictures only equal the reference's if its rounding is kept.
        """
        from scipy.integrate import quad  # pyright: ignore  # no stubs; heavy, so only for those who ask for it

        levels = [np.float32(self._sigmas[t - back]) for back in range(order)]
        others = [level for back, level in enumerate(levels) if back != current_order]
        spans = [levels[current_order] - level for level in others]

        def basis(sigma: float) -> float:
            here = np.float32(sigma)
            product = np.float32(1)
            for level, span in zip(others, spans, strict=True):
                product *= (here - level) / span
            return float(product)

        return float(quad(basis, self._sigmas[t], self._sigmas[t + 1], epsrel=1e-4)[0])  # pyright: ignore

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        order: int = 4,
        return_dict: bool = True,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """One step: the sample at the next sigma.

        Args:
            model_output: what the model predicted for ``scale_model_input(sample, timestep)``, (B, ...).
            timestep: an element of `timesteps`; only the first one is looked at.
            sample: x, (B, ...).
            order: how many slopes to use, where as many steps have been taken.
            return_dict: return a `SchedulerOutput` rather than a tuple.
        """
        if order < 1:
            raise ValueError(f"order={order} must be at least 1")
        index = self._index(timestep)
        original, slope = self._solve(model_output, sample, self._sigmas[index])
        self._slopes = [slope, *self._slopes[: order - 1]]
        usable = len(self._slopes)
        weights = [self.get_lms_coefficient(usable, index, back) for back in range(usable)]
        moves = [past * weight for past, weight in zip(self._slopes, weights, strict=True)]
        previous = sum(moves[1:], start=moves[0]).add_(sample)
        self._step_index = index + 1
        return self._result(return_dict, previous, original)
