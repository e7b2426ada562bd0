"""Noise schedules and the spacing of steps, as plain functions on numpy arrays and Python numbers.

Two scales are used. A variance-preserving (VP) sample is ``x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) eps`` with ``a_t``
the running product of ``1 - beta`` (DDPM, arXiv 2006.11239). A variance-exploding (VE) sample is the same one divided
by ``sqrt(a_t)``: ``x = x_0 + sigma eps`` with ``sigma = sqrt((1 - a_t) / a_t)`` (Karras et al., arXiv 2206.00364).
Arrays of sigmas and timesteps run the way of sampling: from the most noise to the least.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.floating[Any]]
Numbers = Sequence[float] | torch.Tensor | npt.NDArray[Any]

BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid")
SPACINGS = ("linspace", "leading", "trailing")
MOST_TRAIN_STEPS = 1_000_000
SIGMA_MODES = ("karras", "exponential", "beta")


def choice(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    """`value`, if it is one of `allowed`; otherwise a ValueError that lists them."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {list(allowed)}")
    return value


def make_betas(
    schedule: str, start: float, end: float, count: int, trained: Numbers | None = None, *, zero_snr: bool = False
) -> torch.Tensor:
    """The variance that each training step adds, float32 of shape (count,).

    Args:
        schedule: "linear", "scaled_linear" (linear in the square root, as latent diffusion has it),
            "squaredcos_cap_v2" (arXiv 2102.09672, eq. 17, capped at 0.999) or "sigmoid".
        start: the first beta. "squaredcos_cap_v2" does not use it.
        end: the last beta.
        count: how many training steps there are.
        trained: betas to take as they are, in place of a schedule.
        zero_snr: rescale, so that the last step is pure noise (arXiv 2305.08891, algorithm 1).
    """
    check_train_steps(count)
    if trained is not None:
        betas = torch.as_tensor(trained, dtype=torch.float32).clone()
    elif choice("beta_schedule", schedule, BETA_SCHEDULES) == "linear":
        betas = torch.linspace(start, end, count, dtype=torch.float32)
    elif schedule == "scaled_linear":
        betas = torch.linspace(start**0.5, end**0.5, count, dtype=torch.float32) ** 2
    elif schedule == "sigmoid":
        betas = torch.sigmoid(torch.linspace(-6, 6, count)) * (end - start) + start
    else:
        kept = [math.cos((step / count + 0.008) / 1.008 * math.pi / 2) ** 2 for step in range(count + 1)]
        betas = torch.tensor([min(1 - kept[i + 1] / kept[i], 0.999) for i in range(count)], dtype=torch.float32)
    if betas.ndim != 1 or len(betas) != count:
        raise ValueError(
            f"trained_betas has shape {tuple(betas.shape)}, expected ({count},) as num_train_timesteps says"
        )
    return rescale_zero_snr(betas) if zero_snr else betas


def check_train_steps(count: Any) -> int:
    """`num_train_timesteps`, if it is a number of steps that a table can be made of."""
    whole = isinstance(count, int) and not isinstance(count, bool)
    if not whole or not 1 <= count <= MOST_TRAIN_STEPS:
        raise ValueError(f"num_train_timesteps={count!r} must be an integer from 1 to {MOST_TRAIN_STEPS}")
    return count


def rescale_zero_snr(betas: torch.Tensor) -> torch.Tensor:
    """Betas whose last step leaves no signal and whose first step is as before (arXiv 2305.08891, algorithm 1)."""
    roots = torch.cumprod(1.0 - betas, dim=0).sqrt()
    first, last = roots[0].clone(), roots[-1].clone()
    kept = ((roots - last) * (first / (first - last))) ** 2
    return 1 - torch.cat([kept[:1], kept[1:] / kept[:-1]])


def training_sigmas(alphas_cumprod: torch.Tensor) -> Array:
    """The VE noise level of every training step, ascending: ``sqrt((1 - a) / a)``."""
    return np.asarray(((1 - alphas_cumprod) / alphas_cumprod) ** 0.5, dtype=np.float64)


def sigma_at(timesteps: Array | float, sigmas: Array) -> Array:
    """The sigma at a timestep, whole or not, linear between the training steps' `sigmas` (ascending)."""
    return np.asarray(np.interp(timesteps, np.arange(len(sigmas)), sigmas), dtype=np.float64)


def timestep_at(sigma: Array | float, sigmas: Array) -> Array:
    """The timestep of a sigma, linear in ``log sigma`` between training steps; the inverse of the schedule.

    The logarithms of training's sigmas are float32, the rest is in the precision of `sigma`: so timesteps equal the
    reference's to the last digit.
    """
    logs, here = np.log(np.maximum(sigmas.astype(np.float32), 1e-10)), np.log(np.maximum(sigma, 1e-10))
    below = np.clip(np.searchsorted(logs, here, side="right") - 1, 0, max(len(logs) - 2, 0))
    above = np.minimum(below + 1, len(logs) - 1)
    share = np.clip((logs[below] - here) / np.minimum(logs[below] - logs[above], -1e-30), 0, 1)
    return np.asarray((1 - share) * below.astype(share.dtype) + share * above.astype(share.dtype), dtype=np.float64)


def check_steps(num_inference_steps: Any, train_steps: int | None = None) -> int:
    """`num_inference_steps` as an int, or an error that names it.

    Args:
        num_inference_steps: what the caller gave.
        train_steps: the most there may be; None for no limit.
    """
    if num_inference_steps is None:
        raise ValueError("give num_inference_steps, or a list of timesteps or sigmas")
    if isinstance(num_inference_steps, bool) or int(num_inference_steps) != num_inference_steps:
        raise TypeError(f"num_inference_steps={num_inference_steps!r} must be an integer")
    steps = int(num_inference_steps)
    if steps < 1 or (train_steps is not None and steps > train_steps):
        bound = "" if train_steps is None else f" and at most num_train_timesteps={train_steps}"
        raise ValueError(f"num_inference_steps={steps} must be at least 1{bound}")
    return steps


def spaced_timesteps(
    spacing: str, steps: int, train_steps: int, *, offset: int = 0, drop_last: bool = False, whole: bool = True
) -> Array:
    """`steps` timesteps from many to few, no two the same (arXiv 2305.08891, table 2).

    Args:
        spacing: "linspace" (both ends of training), "leading" (multiples of a whole step, plus `offset`) or
            "trailing" (from the last step down).
        steps: how many.
        train_steps: how many training steps there are, T.
        offset: added for "leading"; made smaller where it would pass the last training step.
        drop_last: space one more and leave out the lowest, as solvers do that end at another noise level.
        whole: round "linspace" to integers.

    Raises:
        ValueError: for an unknown spacing, or more steps than T where they must be whole numbers.
    """
    choice("timestep_spacing", spacing, SPACINGS)
    check_steps(steps, train_steps if whole or spacing != "linspace" else None)
    knots = steps + 1 if drop_last and steps < train_steps else steps
    if spacing == "trailing":
        times = np.arange(train_steps, 0, -(train_steps / steps))[:steps]
        return np.asarray(np.round(times) - 1, dtype=np.float64)
    if spacing == "linspace":
        # rising, then turned: which way halves are rounded hangs on the last digit
        times = np.linspace(0, train_steps - 1, knots)[::-1][:steps]
        return np.asarray(np.round(times) if whole else times, dtype=np.float64)
    times = np.arange(knots)[::-1][:steps] * float(train_steps // knots)
    return np.asarray(times + max(0, min(offset, train_steps - 1 - times[0])), dtype=np.float64)


def sigma_mode(config: Mapping[str, Any]) -> str | None:
    """Which of `use_karras_sigmas`, `use_exponential_sigmas`, `use_beta_sigmas` is set.

    Raises:
        ValueError: if more than one is.
    """
    chosen = [mode for mode in SIGMA_MODES if config.get(f"use_{mode}_sigmas")]
    if len(chosen) > 1:
        raise ValueError(f"set only one of {[f'use_{mode}_sigmas' for mode in chosen]}")
    return chosen[0] if chosen else None


def respaced(mode: str, high: float, low: float, steps: int) -> Array:
    """`steps` sigmas from `high` to `low`, spaced as "karras", "exponential" or "beta" has it."""
    spacings = {"karras": karras_sigmas, "exponential": exponential_sigmas, "beta": beta_sigmas}
    return spacings[choice("sigma spacing", mode, tuple(spacings))](high, low, steps)


def karras_sigmas(high: float, low: float, steps: int, rho: float = 7.0) -> Array:
    """Even in ``sigma ** (1 / rho)`` (Karras et al., arXiv 2206.00364, eq. 5)."""
    ramp = np.linspace(0, 1, steps, dtype=np.float64)
    roots: Array = high ** (1 / rho) + ramp * (low ** (1 / rho) - high ** (1 / rho))
    return np.asarray(roots**rho, dtype=np.float64)


def exponential_sigmas(high: float, low: float, steps: int) -> Array:
    """Even in ``log sigma``."""
    return np.asarray(np.exp(np.linspace(math.log(high), math.log(low), steps)), dtype=np.float64)


def beta_sigmas(high: float, low: float, steps: int, alpha: float = 0.6, beta: float = 0.6) -> Array:
    """At even quantiles of a beta distribution between `low` and `high` (arXiv 2407.12173, section 3.2)."""
    from scipy.special import betaincinv  # pyright: ignore  # no stubs; heavy, so only for those who ask for it

    quantiles: Array = betaincinv(alpha, beta, 1 - np.linspace(0, 1, steps))  # pyright: ignore[reportUnknownVariableType]
    return low + quantiles * (high - low)


def shifted(sigmas: Array, shift: float) -> Array:
    """Flow sigmas moved towards noise: ``shift s / (1 + (shift - 1) s)`` (arXiv 2403.03206, eq. 23)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def shifted_by_mu(sigmas: Array, mu: float, kind: str = "exponential", power: float = 1.0) -> Array:
    """Flow sigmas shifted by resolution: ``m / (m + (1 / s - 1) ** power)`` with ``m = exp(mu)`` or ``m = mu``."""
    factor = math.exp(mu) if choice("time_shift_type", kind, ("exponential", "linear")) == "exponential" else mu
    return factor / (factor + (1 / sigmas - 1) ** power)


def stretched(sigmas: Array, terminal: float) -> Array:
    """Flow sigmas scaled so that the last one is `terminal` and what is 1 stays 1 (LTX-Video, arXiv 2501.00103).

    Where the last one is 1 itself, as in a single step, they stay as they are.
    """
    signal = 1 - sigmas
    return sigmas if signal[-1] == 0 else 1 - signal / (signal[-1] / (1 - terminal))


def flow_timesteps(sigmas: Array, train_steps: int) -> Array:
    """The timesteps of flow sigmas in [0, 1]."""
    return sigmas * train_steps


def check_timesteps(timesteps: Numbers, limit: float, *, whole: bool = False) -> Array:
    """A caller's own timesteps: at least one, falling strictly, from `limit` - 1 or less to 0 or more.

    Args:
        timesteps: a list, array or tensor.
        limit: the number of training steps.
        whole: refuse fractions.
    """
    values = _numbers("timesteps", timesteps)
    if values[0] > limit - 1 or values[-1] < 0:
        raise ValueError(f"timesteps must lie in [0, {limit - 1}], got {values[0]:g} to {values[-1]:g}")
    if whole and bool((values != np.round(values)).any()):
        raise ValueError("timesteps must be whole numbers for this scheduler; give sigmas for levels in between")
    return values


def check_sigmas(sigmas: Numbers, *, most: float = math.inf, ends: bool = True) -> Array:
    """A caller's own sigmas: finite, falling strictly, in [0, most].

    Args:
        sigmas: a list, array or tensor.
        most: the largest that makes sense, 1 for flow.
        ends: whether the last one is where sampling ends (mostly 0), so that n + 1 sigmas are n steps.
    """
    values = _numbers("sigmas", sigmas)
    if ends and len(values) < 2:
        raise ValueError("sigmas needs two values or more: the level of each step, then that of the end, mostly 0")
    if values[0] > most or values[-1] < 0:
        raise ValueError(f"sigmas must lie in [0, {most:g}], got {values[0]:g} to {values[-1]:g}")
    if (values[:-1] if ends else values).min() == 0:
        raise ValueError("sigmas holds a 0 before the end: a step cannot start from no noise")
    return values


def _numbers(name: str, given: Numbers) -> Array:
    values = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"{name} must be a list of at least one number, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} must be finite")
    falls = np.diff(values) < 0
    if not falls.all():
        at = int(np.argmin(falls))
        raise ValueError(f"{name} must fall strictly; at {at + 1} it goes from {values[at]:g} to {values[at + 1]:g}")
    return values
