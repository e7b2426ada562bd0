"""Euler's method for flow matching."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffusion_core.config import FrozenDict
from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators

from .base import Device, Timestep, full_precision
from .flow_matching import FlowMatchScheduler
from .sigmas import (
    Array,
    Numbers,
    check_steps,
    choice,
    flow_timesteps,
    respaced,
    shifted,
    shifted_by_mu,
    sigma_mode,
    stretched,
)


@dataclass
class FlowMatchEulerDiscreteSchedulerOutput(BaseOutput):
    """One step's result.

    Args:
        prev_sample: the sample at the next, lower noise level.
    """

    prev_sample: torch.Tensor


class FlowMatchEulerDiscreteScheduler(FlowMatchScheduler):
    """Euler's method on the straight path: ``x' = x + (sigma' - sigma) v`` (SD3, arXiv 2403.03206, eq. 1 and 23).

    Args:
        num_train_timesteps: how many noise levels training had; `timesteps` are sigmas times this.
        shift: moves the noise levels towards noise, more for larger images.
        use_dynamic_shifting, time_shift_type: shift by the `mu` of the run instead, "exponential" or "linear".
        base_shift, max_shift, base_image_seq_len, max_image_seq_len: what pipelines compute `mu` from.
        invert_sigmas: run from data to noise, as models do whose sigma counts the data.
        shift_terminal: stretch the levels so that the last step starts from this one (LTX-Video, arXiv 2501.00103).
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas: another spacing, between the shifted ends.
        stochastic_sampling: predict the data and noise it afresh at every step.
        shift_once: space steps over the unshifted levels of training, so that `shift` acts once. Released checkpoints
            are used with False, where it acts on the ends of the schedule once more: with ``shift=3`` and 1000 steps
            the last one starts from 0.0089 rather than 0.0030.
    """

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        shift: float = 1.0,
        use_dynamic_shifting: bool = False,
        base_shift: float | None = 0.5,
        max_shift: float | None = 1.15,
        base_image_seq_len: int | None = 256,
        max_image_seq_len: int | None = 4096,
        invert_sigmas: bool = False,
        shift_terminal: float | None = None,
        use_karras_sigmas: bool = False,
        use_exponential_sigmas: bool = False,
        use_beta_sigmas: bool = False,
        time_shift_type: str = "exponential",
        stochastic_sampling: bool = False,
        shift_once: bool = False,
    ) -> None:
        choice("time_shift_type", time_shift_type, ("exponential", "linear"))
        if shift_terminal is not None and not 0 <= shift_terminal < 1:
            raise ValueError(f"shift_terminal={shift_terminal!r} must be at least 0 and below 1")
        sigma_mode(self.config)
        if not shift_once:
            # our own option: files and configs are diffusers' where it is not used
            self._internal_dict = FrozenDict({key: self.config[key] for key in self.config if key != "shift_once"})
        self._take_training_schedule(shift_it=not use_dynamic_shifting)

    def time_shift(self, mu: float, sigma: float, t: torch.Tensor | Array) -> Any:
        """``t`` shifted by resolution (see `sigmas.shifted_by_mu`); `sigma` is the power."""
        kind = self.config["time_shift_type"]
        return shifted_by_mu(t, mu, kind, sigma)  # type: ignore[arg-type]

    def stretch_shift_to_terminal(self, t: torch.Tensor | Array) -> Any:
        """``t`` stretched so that its last value is `shift_terminal`."""
        return stretched(t, self.config["shift_terminal"])  # type: ignore[arg-type]

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        sigmas: Numbers | None = None,
        mu: float | None = None,
        timesteps: Numbers | None = None,
    ) -> None:
        """Lay out the steps of a run.

        Args:
            num_inference_steps: how many.
            device: where `timesteps` shall lie.
            sigmas: in place of a number of steps: each step's noise level, in (0, 1], falling; the end, 0, is put
                behind them if it is not there. They are shifted as all levels are.
            mu: the shift, with `use_dynamic_shifting`; ignored without.
            timesteps: what the model is told at each step; their levels, unless `sigmas` says them, are their share
                of `num_train_timesteps`, shifted.
        """
        config = self.config
        if config["use_dynamic_shifting"] and mu is None:
            raise ValueError("use_dynamic_shifting=True needs `mu`: pass it to set_timesteps")

        def move(levels: Array) -> Array:
            if config["use_dynamic_shifting"]:
                assert mu is not None
                levels = shifted_by_mu(levels, mu, config["time_shift_type"])
            else:
                levels = shifted(levels, self._shift)
            if config["shift_terminal"]:
                levels = stretched(levels, config["shift_terminal"])
            mode = sigma_mode(config)
            return levels if mode is None else respaced(mode, float(levels[0]), float(levels[-1]), len(levels))

        times, levels = self._given(num_inference_steps, timesteps, sigmas, move)
        levels = 1 - levels if config["invert_sigmas"] else levels
        times = flow_timesteps(levels, len(self)) if times is None or config["invert_sigmas"] else times
        self.num_inference_steps = len(levels)
        self._take_schedule(times, device, sigmas=np.append(levels, 1.0 if config["invert_sigmas"] else 0.0))

    def _even(self, steps: Any) -> Array:
        if self.config.get("shift_once"):
            return np.linspace(1, 1 / len(self), check_steps(steps), dtype=np.float64)
        return super()._even(steps)

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
        per_token_timesteps: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """One step down in noise.

        Args:
            model_output: (B, ...), the flow that the model predicts.
            timestep: an element of `timesteps`.
            sample: (B, ...), the current sample.
            s_churn, s_tmin, s_tmax, s_noise: without effect; callers of other schedulers pass them.
            generator: draws the noise of `stochastic_sampling`; a list has one for each image.
            per_token_timesteps: (B, N) where each of N tokens has a timestep of its own, as in LTX-Video. A token goes
                to the next lower level of the schedule, and `model_output` (B, N, D) is the flow towards the data, the
                negative of the usual.
            return_dict: return a `FlowMatchEulerDiscreteSchedulerOutput`, or else a tuple.
        """
        if self.num_inference_steps is None:
            raise ValueError("call `set_timesteps` before `step`")
        index = self._index(timestep)
        sigma, end = self._sigmas[index], self._sigmas[index + 1]
        moving = full_precision(sample)
        if per_token_timesteps is not None:
            moved = self._step_tokens(model_output, moving, per_token_timesteps, generator)
        elif self.config["stochastic_sampling"]:
            fresh = self._randn(moving, generator)
            moved = torch.sub(moving, model_output, alpha=sigma).mul_(1 - end).add_(fresh, alpha=end)
        else:
            moved = torch.add(moving, model_output, alpha=end - sigma)
        moved = moved.to(model_output.dtype)
        self._step_index = index + 1
        return FlowMatchEulerDiscreteSchedulerOutput(moved) if return_dict else (moved,)

    def _step_tokens(
        self, flow: torch.Tensor, sample: torch.Tensor, timesteps: torch.Tensor, generator: Generators | None
    ) -> torch.Tensor:
        """Each token to the highest level of the schedule below its own."""
        here = timesteps.to(torch.float32) / len(self)
        levels = torch.tensor(self._sigmas, device=here.device)
        below = torch.where(levels < here.unsqueeze(-1) - 1e-6, levels, 0.0).amax(-1)
        here, below = here.unsqueeze(-1), below.unsqueeze(-1)
        if self.config["stochastic_sampling"]:
            return (1 - below) * (sample - here * flow) + below * self._randn(sample, generator)
        return sample + (here - below) * flow
