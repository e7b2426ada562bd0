"""What the flow-matching solvers share: the straight path's schedule, and noise along it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .base import Scheduler, tensor_of, to_list
from .sigmas import (
    Array,
    Numbers,
    check_sigmas,
    check_steps,
    check_timesteps,
    check_train_steps,
    flow_timesteps,
    shifted,
)


class FlowMatchScheduler(Scheduler):
    """Base of those: the sample is ``(1 - sigma) x_0 + sigma eps`` and the model predicts the flow ``eps - x_0``
    (rectified flow, arXiv 2209.03003; SD3, arXiv 2403.03206, eq. 13).

    Attributes:
        sigma_min, sigma_max: the ends of training's noise levels, from which steps are spaced.
        shift: how far the levels are moved towards noise (2403.03206, eq. 23).
    """

    init_noise_sigma: float = 1.0
    _shift: float

    def _take_training_schedule(self, *, shift_it: bool = True) -> None:
        """Make every training timestep the schedule."""
        count = check_train_steps(self.config["num_train_timesteps"])
        self._shift = float(self.config["shift"])
        levels = np.linspace(count, 1, count) / count
        if shift_it:
            levels = shifted(levels, self._shift)
        self.sigma_min, self.sigma_max = to_list(tensor_of([float(levels[-1]), float(levels[0])], torch.float32))
        self._take_schedule(flow_timesteps(levels, count), "cpu", sigmas=levels)

    @property
    def shift(self) -> float:
        """The shift in use: the config's, unless `set_shift` changed it."""
        return self._shift

    def set_shift(self, shift: float) -> None:
        """Shift differently from the next `set_timesteps` on. The config stays as it is."""
        if not shift > 0:
            raise ValueError(f"shift={shift!r} must be above 0")
        self._shift = float(shift)

    def _even(self, steps: Any) -> Array:
        """Levels spread evenly over those of training."""
        return np.linspace(self.sigma_max, self.sigma_min, check_steps(steps))

    def _given(
        self, steps: int | None, timesteps: Numbers | None, sigmas: Numbers | None, move: Callable[[Array], Array]
    ) -> tuple[Array | None, Array]:
        """A caller's timesteps, if there are any, and the levels of the steps, before the end is put behind them.

        Args:
            move: shifts the levels as the scheduler does.
        """
        count = len(self)
        times = None if timesteps is None else check_timesteps(timesteps, count + 1)
        if sigmas is not None:
            levels = check_sigmas(sigmas, most=1.0, ends=len(sigmas) > 1)
            levels = levels[:-1] if levels[-1] == 0 else levels
        elif times is not None:
            levels = times / count
        else:
            return None, move(self._even(steps))
        if times is not None and sigmas is None and times[-1] == 0:
            raise ValueError("timesteps ends with 0, where no noise is left to take a step from: leave it out")
        if times is not None and len(times) != len(levels):
            raise ValueError(
                f"timesteps has {len(times)} values for {len(levels)} sigmas above 0: give one, not both, or as "
                f"many of each"
            )
        if steps is not None and steps not in (len(levels), len(levels) + (sigmas is not None)):
            raise ValueError(f"num_inference_steps={steps} disagrees with a list of {len(levels)} steps; give one")
        return times, move(levels)

    # --- noise -------------------------------------------------------------------------------------------------

    def _noise_levels(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._begin_index if self._step_index is None else self._step_index
        if index is not None:
            # within a run its own level is meant, and the device is not waited for
            sigmas = [self._sigmas[min(index, len(self._sigmas) - 1)]] * len(timesteps)
        else:
            sigmas = [self._sigma_of(time) for time in to_list(timesteps)]
        return torch.tensor([1 - sigma for sigma in sigmas]), torch.tensor(sigmas)

    def _sigma_of(self, timestep: float) -> float:
        """The level of a timestep: the schedule's where it has it, else its share of training."""
        for time, sigma in zip(self._times, self._sigmas, strict=False):
            if math.isclose(time, timestep, rel_tol=1e-6, abs_tol=1e-6):
                return sigma
        share = timestep / len(self)
        return 1 - share if self.config.get("invert_sigmas") else share

    def scale_noise(
        self, sample: torch.Tensor, timestep: torch.Tensor | float, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A clean sample brought to the noise level of a timestep.

        Args:
            sample: (B, ...), clean.
            timestep: (B,), (1,) or one number.
            noise: standard normal, like `sample`; drawn if it is not given.
        """
        noise = self._randn(sample, None) if noise is None else noise
        return self.add_noise(sample, noise, torch.as_tensor(timestep))
