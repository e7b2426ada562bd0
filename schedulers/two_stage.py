"""What solvers share that call the model twice a step: Heun's, and the midpoint methods of DPM-Solver-2's kind."""

from itertools import zip_longest

import numpy as np
import numpy.typing as npt
import torch

from .base import Device, Timestep, VEScheduler
from .sigmas import Array


def between(start: Array, end: Array) -> npt.NDArray[np.float32]:
    """The geometric means of two rows of sigmas, by way of float32 logarithms, whose order shows in the last digit."""
    first, second = (torch.as_tensor(levels).float().log() for levels in (start, end))
    return np.asarray(first.lerp(second, 0.5).exp().numpy())


class TwoStageScheduler(VEScheduler):
    """Base of those: `timesteps` holds both calls of every step, `sigmas` the level that the model sees at each.

    n steps take 2n - 1 calls, for the last one ends at no noise, where there is nothing to correct. Even positions
    begin a step, so a run may start at any of them.
    """

    order = 2
    _pending: tuple[torch.Tensor, torch.Tensor] | None = None

    def _forget(self) -> None:
        super()._forget()
        self._pending = None

    @property
    def state_in_first_order(self) -> bool:
        """Whether the next call begins a step."""
        return self._pending is None

    def _take_two_stages(
        self,
        times: Array,
        levels: Array,
        second_times: Array,
        second_levels: Array,
        device: Device,
        *,
        exact: bool = False,
    ) -> None:
        """Interleave n steps (n timesteps, n + 1 sigmas) with the second calls of the first n - 1 of them.

        With `exact`, timesteps are float64 where the device has it: they are fractions, of which a model that magnifies
        them shows the digits that float32 drops (3e-5 in one).
        """
        self.num_inference_steps = len(times)
        both_times = [time for pair in zip_longest(times, second_times) for time in pair if time is not None]
        both_levels = [level for pair in zip_longest(levels[:-1], second_levels) for level in pair if level is not None]
        has_float64 = torch.device("cpu" if device is None else device).type not in ("mps", "npu")
        dtype = torch.float64 if exact and has_float64 else torch.float32
        self._take_schedule(both_times, device, sigmas=[*both_levels, levels[-1]], dtype=dtype)

    def _check_train_steps(self, num_train_timesteps: int | None) -> None:
        """The argument is there for callers of the reference; it can only repeat the config."""
        if num_train_timesteps not in (None, len(self)):
            raise ValueError(f"num_train_timesteps={num_train_timesteps} differs from the config's {len(self)}")

    def set_begin_index(self, begin_index: int = 0) -> None:
        if begin_index % 2:
            raise ValueError(f"begin_index={begin_index} is amid a step; {type(self).__name__} starts at even indices")
        super().set_begin_index(begin_index)

    def _index(self, timestep: Timestep) -> int:
        index = super()._index(timestep)
        if index % 2 and self._pending is None:
            self._step_index = None
            raise ValueError(
                f"a run of {type(self).__name__} cannot start at index {index} of `timesteps`, amid a step: start at "
                f"an even index, `timesteps[order * k:]`"
            )
        return index
