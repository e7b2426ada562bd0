"""Schedules of flow models: noise levels that the pipeline lays out, shifted by the size of the picture."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..offload.runs import told
from .loop import check_count


def share_of_noise(timestep: torch.Tensor, count: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A flow scheduler's timestep as models take it: the share of noise from 0 to 1, for `count` samples."""
    return told(_share_of_noise, timestep, count, dtype)


def _share_of_noise(timestep: torch.Tensor, count: int | None, dtype: torch.dtype | None) -> torch.Tensor:
    share = timestep.to(dtype or timestep.dtype) / 1000
    return share if count is None else share.expand(count)


def one_a_sample(timestep: torch.Tensor, count: int) -> torch.Tensor:
    """A timestep for each sample."""
    return told(_expanded, timestep, count)


def _expanded(timestep: torch.Tensor, count: int) -> torch.Tensor:
    return timestep.expand(count)


def image_shift(config: Mapping[str, Any], tokens: int) -> float:
    """The `mu` of dynamic shifting: larger pictures need more noise (Esser et al. 2024, section 5.3.2).

    Args:
        config: of the scheduler: `mu` is `base_shift` at `base_image_seq_len` tokens, `max_shift` at
            `max_image_seq_len`, and on the straight line through both elsewhere.
        tokens: of the picture.
    """
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (most - base) / (high - low)
    return tokens * slope + (base - slope * low)


def flow_schedule(
    scheduler: Any, count: Any, tokens: int, *, sigmas: Sequence[float] | None = None, always: bool = False
) -> dict[str, Any]:
    """What `set_timesteps` of a scheduler is given: evenly spaced noise levels unless `sigmas` says others, and `mu`.

    Args:
        scheduler: one that takes no `mu` is given none.
        count: the number of steps.
        tokens: of the picture, for `mu`.
        sigmas: from 1 down, the end 0 left out.
        always: give levels also to a solver that knows how to space those of flows; else it does so itself.
    """
    if sigmas is None and (always or not scheduler.config.get("use_flow_sigmas")):
        steps = check_count("num_inference_steps", count)
        sigmas = np.linspace(1.0, 1 / steps, steps).tolist()
    shifts = "mu" in inspect.signature(scheduler.set_timesteps).parameters
    return {"sigmas": sigmas, **({"mu": image_shift(scheduler.config, tokens)} if shifts else {})}
