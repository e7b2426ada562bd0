"""Heun's method for flow matching."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators

from .base import Device, Timestep, full_precision
from .flow_matching import FlowMatchScheduler
from .sigmas import Numbers, flow_timesteps, shifted


@dataclass
class FlowMatchHeunDiscreteSchedulerOutput(BaseOutput):
    """One step's result.

    Args:
        prev_sample: the sample for the next call of the model.
    """

    prev_sample: torch.Tensor


class FlowMatchHeunDiscreteScheduler(FlowMatchScheduler):
    """Heun's method (Karras et al., arXiv 2206.00364, algorithm 2) on the straight path (SD3, arXiv 2403.03206).

    Each step calls the model twice: where it starts, and where Euler's method would end. The last step, to the data, is
    Euler's. n steps have 2n - 1 timesteps.

    Args:
        num_train_timesteps: how many noise levels training had; `timesteps` are sigmas times this.
        shift: moves the noise levels towards noise (2403.03206, eq. 23).
    """

    order = 2
    _pending: tuple[torch.Tensor, torch.Tensor, float] | None = None

    def __init__(self, num_train_timesteps: int = 1000, shift: float = 1.0) -> None:
        self._take_training_schedule()

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Lay out the steps of a run.

        Args:
            num_inference_steps: how many.
            device: where `timesteps` shall lie.
            timesteps: what the model is told at each step, falling; their levels are their share of
                `num_train_timesteps`, shifted.
            sigmas: each step's noise level in (0, 1], falling; shifted, too.
        """
        if timesteps is not None and sigmas is not None:
            raise ValueError("give timesteps or sigmas, not both")
        times, levels = self._given(num_inference_steps, timesteps, sigmas, lambda given: shifted(given, self._shift))
        times = flow_timesteps(levels, len(self)) if times is None else times
        self.num_inference_steps = len(levels)
        twice = np.repeat(np.arange(len(levels)), 2)[1:]
        self._take_schedule(times[twice], device, sigmas=np.append(levels[twice], 0.0))

    def _forget(self) -> None:
        super()._forget()
        self._pending = None

    @property
    def state_in_first_order(self) -> bool:
        """Whether the next call of the model begins a step."""
        return self._pending is None

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float = math.inf,
        s_noise: float = 1.0,
        generator: Generators | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Half a step: to the place where the model is called again, or from there to the end.

        Args:
            model_output: (B, ...), the flow that the model predicts.
            timestep: an element of `timesteps`.
            sample: (B, ...), the current sample.
            s_churn, s_tmin, s_tmax, s_noise: add noise before a step (2206.00364, algorithm 2), for levels between
                s_tmin and s_tmax.
            generator: draws it; a list has one for each image.
            return_dict: return a `FlowMatchHeunDiscreteSchedulerOutput`, or else a tuple.
        """
        if self.num_inference_steps is None:
            raise ValueError("call `set_timesteps` before `step`")
        index = self._index(timestep)
        moving = full_precision(sample)
        if self._pending is None:
            sigma, end = self._sigmas[index], self._sigmas[index + 1]
            churned = s_tmin <= sigma <= s_tmax and end < sigma
            churn = min(s_churn / (len(self._sigmas) - 1), math.sqrt(2) - 1) if churned else 0.0
            raised = sigma * (1 + churn)
            if churn > 0:
                fresh = self._randn(moving, generator)
                moving = torch.add(moving, fresh, alpha=s_noise * math.sqrt(raised**2 - sigma**2))
                self._randn(moving, generator)  # the reference draws once more a step; so a seed gives its picture
            slope = full_precision(model_output) * (sigma / raised)
            moved = moving if end == sigma else torch.add(moving, slope, alpha=end - raised)
            # a run that starts where a timestep stands for the second time stays there until a step begins
            self._pending = None if end in (0, sigma) else (moving, slope, end - raised)
        else:
            origin, slope, distance = self._pending
            moved = torch.add(origin, slope + model_output, alpha=distance / 2)
            self._pending = None
        moved = moved.to(model_output.dtype)
        self._step_index = index + 1
        return FlowMatchHeunDiscreteSchedulerOutput(moved) if return_dict else (moved,)
