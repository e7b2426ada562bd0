"""DPM-Solver++(SDE): a two-stage stochastic solver whose noise is one Brownian path."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators

from .base import Device, Timestep, full_precision, to_list
from .predictions import ancestral_split
from .sigmas import Numbers, choice, sigma_mode, timestep_at
from .two_stage import TwoStageScheduler


@dataclass
class DPMSolverSDESchedulerOutput(BaseOutput):
    """One step's result.

    Args:
        prev_sample: the sample for the next call of the model.
        pred_original_sample: the clean sample as the model now sees it.
    """

    prev_sample: torch.Tensor
    pred_original_sample: torch.Tensor | None = None


class DPMSolverSDEScheduler(TwoStageScheduler):
    """DPM-Solver++(SDE) (Crowson, k-diffusion's `sample_dpmpp_sde`): the singlestep method of DPM-Solver++, arXiv
    2211.01095, algorithm 1, on the diffusion SDE.

    Each step goes to the geometric mean of both sigmas, and from its start to its end with the data predicted there.
    Both parts add noise from one Brownian path, so that a seed draws much the same picture with more steps. Needs the
    package torchsde (extra "sde").

    Args:
        num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas: the training schedule (see
            `sigmas.make_betas`).
        prediction_type: "epsilon", "sample" or "v_prediction".
        use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas: another spacing of noise levels.
        noise_sampler_seed: of the Brownian path; None for a new one each run. A list has one for each image.
        timestep_spacing, steps_offset: see `sigmas.spaced_timesteps`.
    """

    _path: "BrownianPath | None" = None

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        beta_schedule: str = "linear",
        trained_betas: Sequence[float] | None = None,
        prediction_type: str = "epsilon",
        use_karras_sigmas: bool | None = False,
        use_exponential_sigmas: bool | None = False,
        use_beta_sigmas: bool | None = False,
        noise_sampler_seed: int | Sequence[int] | None = None,
        timestep_spacing: str = "linspace",
        steps_offset: int = 0,
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        sigma_mode(self.config)
        self._take_training_schedule()

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        num_train_timesteps: int | None = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Choose the steps: how many, or which timesteps (falling), or which sigmas (falling, with the end).

        Raises:
            ImportError: if torchsde is not installed.
        """
        _torchsde()
        self._check_train_steps(num_train_timesteps)
        times, levels = self._sigma_schedule(num_inference_steps, timesteps, sigmas)
        between = np.asarray(np.sqrt(levels[:-2] * levels[1:-1]), dtype=np.float64)
        second_times = timestep_at(between, self._training_sigmas)
        self._take_two_stages(times, levels, second_times, between, device, exact=True)
        # A Brownian path is rough: where two levels differ in the last digit, its values differ in the third. So they
        # are rounded as the reference rounds them, in float32 and by way of the logarithm.
        places = -torch.tensor(levels[:-1].tolist()).log()
        starts = to_list((-places).exp())
        middles = to_list((-(places[:-1] + places.diff() * 0.5)).exp())
        self._ways = [way for k in range(len(middles)) for way in ((starts[k], middles[k]), (starts[k], starts[k + 1]))]

    def _forget(self) -> None:
        super()._forget()
        self._path = None

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        return_dict: bool = True,
        s_noise: float = 1.0,
        generator: Generators | None = None,
    ) -> Any:
        """Half of a step: to the midpoint, or from the start to the end.

        Args:
            model_output: (B, ...), what the network returned for ``scale_model_input(sample, timestep)``.
            timestep: an element of `timesteps`.
            sample: (B, ...), the current sample.
            return_dict: return a `DPMSolverSDESchedulerOutput`, or else a tuple.
            s_noise: scales the noise.
            generator: draws the seed of the path, where the config has none; a list has one for each image.
        """
        if self.num_inference_steps is None:
            raise ValueError("call `set_timesteps` before `step`")
        index = self._index(timestep)
        moving = full_precision(sample)
        original, _ = self._solve(full_precision(model_output), moving, self._sigmas[index])
        first = self._pending is None
        origin = moving if self._pending is None else self._pending[0]
        if index == len(self._ways):
            moved, first = original, False
        else:
            start, end = self._ways[index]
            down, up = ancestral_split(start, end)
            moved = torch.add(origin * (down / start), original, alpha=1 - down / start)
            noise = self._brownian(moving, generator)(start, end)
            moved = moved.add_(noise.to(moved), alpha=up * s_noise)
        self._pending = (moving, original) if first else None
        moved = moved.to(model_output.dtype)
        self._step_index = index + 1
        return DPMSolverSDESchedulerOutput(moved, original) if return_dict else (moved, original)

    def _brownian(self, sample: torch.Tensor, generator: Generators | None) -> "BrownianPath":
        """The run's path, made at its first step."""
        if self._path is None:
            seeds = self.config["noise_sampler_seed"]
            if seeds is None:
                seeds = _draw_seeds(generator)
            levels = [sigma for sigma in self._sigmas if sigma > 0]
            self._path = BrownianPath(sample, min(levels), max(levels), seeds)
        return self._path


class BrownianPath:
    """Brownian motion over noise levels, drawn on the CPU so that a seed gives the same on every device.

    Args:
        like: the sample: (B, ...), its dtype, its device.
        low, high: the levels between which the path is asked for.
        seeds: one for the batch, or a list with one for each image.
    """

    def __init__(self, like: torch.Tensor, low: float, high: float, seeds: int | Sequence[int]) -> None:
        tree = _torchsde().BrownianTree
        several = not isinstance(seeds, int)
        if several and len(seeds) != len(like):
            raise ValueError(f"noise_sampler_seed has {len(seeds)} seeds for {len(like)} images")
        start = torch.zeros(like.shape[1:] if several else like.shape, dtype=like.dtype)
        ends = torch.tensor(low), torch.tensor(high)
        self._low, self._high = low, high
        self._device = like.device
        self._several = several
        self._trees = [tree(ends[0], start, ends[1], entropy=seed) for seed in ([seeds] if not several else seeds)]

    def __call__(self, sigma: float, sigma_next: float) -> torch.Tensor:
        """What the path gains on the way from one level to another, scaled to unit variance."""
        low, high = (min(max(level, self._low), self._high) for level in sorted((sigma, sigma_next)))
        gains = [tree(torch.tensor(low), torch.tensor(high)) for tree in self._trees]
        gain = torch.stack(gains) if self._several else gains[0]
        sign = 1 if sigma < sigma_next else -1
        return (gain * (sign / math.sqrt(high - low))).to(self._device)


def _draw_seeds(generator: Generators | None) -> int | list[int]:
    def draw(one: torch.Generator | None) -> int:
        device = "cpu" if one is None else one.device
        return int(torch.randint(0, 2**63 - 1, (), generator=one, device=device).item())

    return [draw(one) for one in generator] if isinstance(generator, list) else draw(generator)


def _torchsde() -> Any:
    try:
        import torchsde  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ImportError as error:
        raise ImportError(
            "DPMSolverSDEScheduler draws its noise with torchsde, which is not installed: `pip install torchsde`"
        ) from error
    return torchsde
