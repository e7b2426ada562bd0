"""What every scheduler shares: the config file, the state of a run, noise, prediction types, limits on values.

A scheduler is an ODE or SDE solver over a schedule. `set_timesteps` computes all that a step needs as Python floats on
the host, so that `step` is a handful of tensor operations and never waits for the device. What belongs to one run (the
step counter, earlier model outputs) is kept apart from what belongs to the schedule, and `copy_for_run` gives a run
its own.

To write one: derive from `VPScheduler` (the sample keeps unit variance), `VEScheduler` (the sample's noise has standard
deviation sigma) or `Scheduler` (anything else, such as flow matching); in `set_timesteps` call `_take_schedule`; in
`step` begin with ``index = self._index(timestep)`` and end with ``self._step_index = index + 1``; clear histories in
`_forget`.
"""

import copy
import enum
import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, cast

import numpy as np
import torch

from diffusion_core.config import ConfigMixin
from diffusion_core.outputs import BaseOutput
from diffusion_core.randomness import Generators, randn_tensor

from .predictions import ancestral_split as ancestral_split
from .predictions import predict_noise as predict_noise
from .predictions import predict_original, predict_original_ve, threshold_sample
from .sigmas import (
    Array,
    Numbers,
    check_sigmas,
    check_steps,
    check_timesteps,
    make_betas,
    respaced,
    sigma_at,
    sigma_mode,
    spaced_timesteps,
    timestep_at,
    training_sigmas,
)

Device = torch.device | str | None
Timestep = float | torch.Tensor

# Schedulers that can take each other's config: all walk the same VP noise schedule.
KARRAS_FAMILY = (
    "DDIMScheduler",
    "DDPMScheduler",
    "PNDMScheduler",
    "LMSDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "DEISMultistepScheduler",
    "UniPCMultistepScheduler",
    "DPMSolverSDEScheduler",
)
KarrasDiffusionSchedulers = enum.Enum("KarrasDiffusionSchedulers", list(KARRAS_FAMILY))


@dataclass
class SchedulerOutput(BaseOutput):
    """One step's result.

    Args:
        prev_sample: the sample at the next, lower noise level; what the model gets next.
        pred_original_sample: the clean sample as the model now sees it, where the scheduler computes it.
    """

    prev_sample: torch.Tensor
    pred_original_sample: torch.Tensor | None = None


class Scheduler(ConfigMixin):
    """Base of all schedulers.

    Attributes:
        timesteps: what the model is told at each step, falling, on the device that `set_timesteps` was given.
        sigmas: the noise level of each step and of the end, on the CPU; None for schedulers that have none.
        num_inference_steps: how many steps were asked for; None before `set_timesteps`.
        init_noise_sigma: the standard deviation of the noise that sampling starts from.
        order: how many model calls a step takes (2 for Heun and its kin).
    """

    config_name: ClassVar[str] = "scheduler_config.json"
    order: ClassVar[int] = 1
    has_compatibles: ClassVar[bool] = True
    _compatibles: ClassVar[Sequence[str]] = ()

    num_inference_steps: int | None = None
    timesteps: torch.Tensor
    sigmas: torch.Tensor | None = None
    _times: list[float]
    _sigmas: list[float]
    _step_index: int | None = None
    _begin_index: int | None = None

    # --- files -------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        subfolder: str | None = None,
        return_unused_kwargs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Read `scheduler_config.json` from a folder or a Hub repo and build the scheduler that it describes.

        Args:
            pretrained_model_name_or_path: a folder, a config file, or a repo id.
            subfolder: where in it the config lies, such as "scheduler".
            return_unused_kwargs: also return the entries of `kwargs` that this class does not take.
            **kwargs: options of the download (`revision`, `token`, `cache_dir`, `force_download`,
                `local_files_only`), and config values to override.

        Raises:
            ConfigError: if there is no such file or it is not a JSON object.
        """
        hub = {key: kwargs.pop(key) for key in _HUB_OPTIONS if key in kwargs}
        config = cls.load_config(pretrained_model_name_or_path, subfolder=subfolder, **hub)
        return cls.from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **_: Any) -> None:
        """Write `scheduler_config.json` into a folder, which is made if need be."""
        self.save_config(save_directory)

    @property
    def compatibles(self) -> list[type["Scheduler"]]:
        """The classes that can be built from this scheduler's config."""
        package = importlib.import_module(__package__ or "")
        return [getattr(package, name) for name in self._compatibles if hasattr(package, name)]

    def _own_config(self) -> dict[str, Any]:
        """The entries of the config that this class knows. One that came along from another class has no effect."""
        known = self.config_arguments()
        return {key: value for key, value in self.config.items() if key in known}

    def _option(self, name: str, default: Any = None) -> Any:
        """One such entry."""
        return self.config[name] if name in self.config_arguments() else default

    # --- the state of a run ------------------------------------------------------------------------------------

    def copy_for_run(self) -> Any:
        """An independent scheduler with the same schedule, at its beginning: two runs can go on at once."""
        twin = copy.copy(self)
        twin._begin_index = None
        twin._forget()
        return twin

    def _forget(self) -> None:
        """Drop what belongs to a run. Subclasses that keep earlier model outputs clear them here, too."""
        self._step_index = None

    def _take_schedule(
        self,
        timesteps: Array | Sequence[float],
        device: Device,
        *,
        sigmas: Array | Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make this the schedule, and start afresh.

        `_times` and `_sigmas` are the host copies, rounded as the tensors are.
        """
        times = tensor_of(timesteps, dtype)
        self._times = to_list(times)
        self.timesteps = times.to(device)
        if sigmas is not None:
            self.sigmas = tensor_of(sigmas, torch.float32)
            self._sigmas = to_list(self.sigmas)
        self._begin_index = None
        self._forget()

    @property
    def step_index(self) -> int | None:
        """The index of the step that comes next; None before the first one."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """The index that the run starts from, where `set_begin_index` said it."""
        return self._begin_index

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Say where in the schedule the run starts; image-to-image starts in the middle."""
        if not 0 <= begin_index < len(self._times):
            raise ValueError(f"begin_index={begin_index} must be at least 0 and less than {len(self._times)}")
        self._begin_index = begin_index

    def index_for_timestep(self, timestep: Timestep, schedule_timesteps: torch.Tensor | None = None) -> int:
        """Where in the schedule a timestep stands.

        An element of `self.timesteps` is recognised by its place in memory, without a look at its value and so without
        waiting for the device. Where a timestep stands twice, its second place counts for solvers of order 2, which
        list a timestep as the end of one step and the beginning of the next; for the others its first, so that a run
        from there has a step left for every timestep.

        Raises:
            ValueError: if it is not in the schedule.
        """
        if schedule_timesteps is None and isinstance(timestep, torch.Tensor) and self._holds(timestep):
            return int(timestep.storage_offset()) - int(self.timesteps.storage_offset())
        times = self._times if schedule_timesteps is None else to_list(schedule_timesteps)
        value = _scalar(timestep)
        found = [index for index, time in enumerate(times) if abs(time - value) < 1e-3]
        if not found:
            raise ValueError(
                f"timestep={value:g} is not in the schedule, which goes from {times[0]:g} to {times[-1]:g} in "
                f"{len(times)} values; pass elements of `timesteps`, and call `set_timesteps` first"
            )
        return found[min(self.order - 1, len(found) - 1)]

    def _holds(self, timestep: torch.Tensor) -> bool:
        """Whether a tensor is one element of `timesteps`, the very memory."""
        mine = self.timesteps
        if timestep.numel() != 1 or timestep.dtype != mine.dtype or timestep.device != mine.device:
            return False
        return timestep.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()

    def _index(self, timestep: Timestep) -> int:
        """The index of the step to take: counted, after the first."""
        if self._step_index is None:
            begin = self._begin_index
            self._step_index = self.index_for_timestep(timestep) if begin is None else begin
        if self._step_index >= len(self._times):
            raise ValueError(f"all {len(self._times)} steps are done; call `set_timesteps` to start another run")
        return self._step_index

    def __len__(self) -> int:
        return int(self.config["num_train_timesteps"])

    # --- noise -------------------------------------------------------------------------------------------------

    def scale_model_input(self, sample: torch.Tensor, timestep: Timestep | None = None) -> torch.Tensor:
        """The sample as the model wants to see it; call it before the model. Here it is the sample itself."""
        return sample

    def _noise_levels(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(alpha, sigma)`` of ``alpha x_0 + sigma eps`` at each of `timesteps` (1-D), as float32."""
        raise TypeError(f"{type(self).__name__} cannot add noise by timestep")

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Clean samples brought to the noise level of `timesteps`.

        Works before `set_timesteps`, too: then for every timestep of training.

        Args:
            original_samples: (B, ...).
            noise: standard normal, of the same shape.
            timesteps: (B,), (1,) or a scalar.
        """
        signal, spread = self._columns(timesteps, original_samples)
        return signal * original_samples + spread * noise

    def _columns(self, timesteps: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The noise levels with the axes and the dtype of `like`, on its device where there are several."""
        shape = (-1,) + (1,) * (like.ndim - 1)
        levels = self._noise_levels(self._on_host(timesteps.reshape(-1)))
        if len(levels[0]) == 1:
            # Numbers of the host go along with each operation; a copy to the device would be waited for.
            signal, spread = (level.to(like.dtype).reshape(()) for level in levels)
        else:
            signal, spread = (level.to(like).reshape(shape) for level in levels)
        return signal, spread

    def _on_host(self, timesteps: torch.Tensor) -> torch.Tensor:
        """An element of `timesteps` as the host knows it, without waiting for the device; others as they are."""
        if not self._holds(timesteps):
            return timesteps
        return torch.tensor([self._times[self.index_for_timestep(timesteps)]], dtype=timesteps.dtype)

    def _randn(self, like: torch.Tensor, generator: Generators | None) -> torch.Tensor:
        """Fresh noise for a sample; from a list of generators, each image's from its own."""
        return randn_tensor(like.shape, generator=generator, device=like.device, dtype=like.dtype)

    # --- limits ------------------------------------------------------------------------------------------------

    def _limit(self, original: torch.Tensor) -> torch.Tensor:
        """The predicted clean sample, kept in range as the config's `thresholding` or `clip_sample` says."""
        config = self.config
        if self._option("thresholding"):
            return threshold_sample(original, config["dynamic_thresholding_ratio"], config["sample_max_value"])
        if self._option("clip_sample"):
            bound = self._option("clip_sample_range", 1.0)
            return original.clamp(-bound, bound)
        return original

    @staticmethod
    def _result(
        return_dict: bool, sample: torch.Tensor, original: torch.Tensor | None = None
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        output = SchedulerOutput(sample, original)
        return output if return_dict else output.to_tuple()


SchedulerMixin = Scheduler
_HUB_OPTIONS = ("revision", "token", "cache_dir", "force_download", "local_files_only")


class VPScheduler(Scheduler):
    """Base of those whose sample is ``sqrt(a_t) x_0 + sqrt(1 - a_t) eps``, of unit variance throughout.

    Attributes:
        betas, alphas, alphas_cumprod: the training schedule, float32 of shape (num_train_timesteps,), on the CPU.
    """

    _compatibles = KARRAS_FAMILY
    init_noise_sigma: float = 1.0
    _final_share: float = 1.0
    # whether a step goes down by a fixed stride, or to the next timestep
    _strides: ClassVar[bool] = False
    _kept: list[float]
    _moves: list[tuple[float, float]]
    _stride: int

    def _take_training_schedule(self, *, ends_clean: bool = True) -> None:
        """Compute betas and alphas from the config, and make every training timestep the schedule.

        Args:
            ends_clean: whether the step after the last timestep leaves no noise, or that of timestep 0.
        """
        config = self.config
        self.betas = make_betas(
            config["beta_schedule"],
            config["beta_start"],
            config["beta_end"],
            config["num_train_timesteps"],
            config["trained_betas"],
            zero_snr=bool(config.get("rescale_betas_zero_snr")),
        )
        self.alphas = 1.0 - self.betas
        self.alphas_cumprod = torch.cumprod(self.alphas, dim=0)
        # the same on the host, for steps
        self._kept = to_list(self.alphas_cumprod)
        self._final_share = 1.0 if ends_clean else self._kept[0]
        self._stride = 1
        times = range(len(self._kept) - 1, -1, -1)
        self._moves = [self._move(time) for time in times]
        self._take_schedule(times, "cpu", dtype=torch.int64)

    def _take_vp_schedule(
        self, num_inference_steps: int | None, device: Device, timesteps: Numbers | None, sigmas: Numbers | None
    ) -> None:
        """Take n steps as the schedule: spaced as the config says, or at the caller's timesteps or VE sigmas.

        `_moves` then holds what the running product of alphas is at each step, and what it is to become.
        """
        check_one_schedule(num_inference_steps, timesteps, sigmas)
        kept = self._kept
        if sigmas is not None:
            levels = check_sigmas(sigmas)
            times, dtype = timestep_at(levels[:-1], training_sigmas(self.alphas_cumprod)), torch.float32
            shares = [1 / (1 + float(level) ** 2) for level in levels]
            self._moves = list(pairwise(shares))
        elif timesteps is not None:
            times, dtype = check_timesteps(timesteps, len(kept), whole=True), torch.int64
            self._moves = list(pairwise([*(kept[int(time)] for time in times), self._final_share]))
        else:
            config, count = self.config, check_steps(num_inference_steps)
            dtype = torch.int64
            times = spaced_timesteps(config["timestep_spacing"], count, len(kept), offset=config["steps_offset"])
            self._stride = len(kept) // count
            if self._strides:
                self._moves = [self._move(int(time)) for time in times]
            else:
                self._moves = list(pairwise([*(kept[int(time)] for time in times), self._final_share]))
        self.num_inference_steps = len(times)
        self._take_schedule(times, device, dtype=dtype)

    def _share(self, timestep: int) -> float:
        """The running product of alphas at a timestep; below 0, the value that sampling ends with."""
        return self._kept[timestep] if timestep >= 0 else self._final_share

    def _move(self, timestep: int) -> tuple[float, float]:
        """Where a step of the usual stride from a timestep starts and ends."""
        return self._share(timestep), self._share(timestep - self._stride)

    def _move_for(self, timestep: Timestep) -> tuple[float, float]:
        """The move of this step: found by the timestep, which may be any of training; counted where reading the
        timestep would mean waiting for the device."""
        remote = isinstance(timestep, torch.Tensor) and timestep.device.type != "cpu" and not self._holds(timestep)
        if remote and self._step_index is not None:
            return self._moves[self._index(timestep)]
        try:
            self._step_index = self.index_for_timestep(timestep)
        except ValueError:
            value = _scalar(timestep)
            if not (0 <= value < len(self._kept) and value == int(value)):
                raise
            return self._move(int(value))
        return self._moves[self._step_index]

    def _single(self, timestep: Timestep) -> tuple[np.float32, np.float32]:
        """The move in float32, for weights that are rounded as the reference rounds them: where a step is small, they
        are differences in which float32 loses digits."""
        kept, kept_next = self._move_for(timestep)
        return np.float32(kept), np.float32(kept_next)

    def _step_done(self) -> None:
        self._step_index = None if self._step_index is None else self._step_index + 1

    def _noise_levels(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self.alphas_cumprod.to(timesteps.device)
        if timesteps.is_floating_point():
            low = timesteps.long()
            high = (low + 1).clamp(max=len(kept) - 1)
            kept = torch.lerp(kept[low], kept[high], timesteps.float() - low)
        else:
            kept = kept[timesteps]
        return kept.sqrt(), (1 - kept).sqrt()

    def _predict_original(self, output: torch.Tensor, sample: torch.Tensor, alpha: float, sigma: float) -> torch.Tensor:
        """The clean sample that the output implies, kept in range."""
        config, kind = self.config, self.config["prediction_type"]
        if alpha == 0 and kind == "epsilon" and (config.get("clip_sample") or config.get("thresholding")):
            # the sign is all that pure noise tells; the limit bounds it
            sign = torch.sub(sample, output, alpha=sigma).mul_(math.inf)
            return self._limit(sign.nan_to_num_(0.0, math.inf, -math.inf))
        return self._limit(predict_original(kind, output, sample, alpha, sigma))

    def get_velocity(self, sample: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """``v = alpha eps - sigma x_0``, what a v-prediction model learns (arXiv 2202.00512, appendix D)."""
        shape = (-1,) + (1,) * (sample.ndim - 1)
        signal, spread = VPScheduler._noise_levels(self, timesteps.reshape(-1))
        return signal.to(sample).reshape(shape) * noise - spread.to(sample).reshape(shape) * sample


class VEScheduler(VPScheduler):
    """Base of those whose sample is ``x_0 + sigma eps``: a VP sample divided by ``sqrt(a_t)``.

    The model still wants the VP sample, which `scale_model_input` gives.
    """

    _scales: dict[float, float]

    def _take_training_schedule(self, *, ends_clean: bool = True) -> None:
        super()._take_training_schedule(ends_clean=ends_clean)
        if self.config.get("rescale_betas_zero_snr"):
            # pure noise would have an infinite sigma; this leaves 4096
            self.alphas_cumprod[-1] = 2**-24
            self._kept[-1] = 2**-24
        self._training_sigmas = training_sigmas(self.alphas_cumprod)
        times = np.arange(len(self._kept), dtype=np.float64)[::-1]
        self._take_schedule(times, "cpu", sigmas=[*self._training_sigmas[::-1], 0.0])

    def _take_schedule(self, timesteps: Array | Sequence[float], device: Device, **given: Any) -> None:
        super()._take_schedule(timesteps, device, **given)
        if self.sigmas is not None:
            # sqrt(sigma^2 + 1), by torch: its square root is not quite numpy's
            self._scales = dict(zip(self._sigmas, to_list((self.sigmas**2 + 1).sqrt()), strict=True))

    @property
    def init_noise_sigma(self) -> float:  # type: ignore[override]
        """The standard deviation of the first sample: its noise alone, or with the image's variance if "leading"."""
        highest = max(self._sigmas)
        leading = self.config["timestep_spacing"] == "leading"
        return math.hypot(highest, 1.0) if leading else highest

    def scale_model_input(self, sample: torch.Tensor, timestep: Timestep | None = None) -> torch.Tensor:
        """``sample / sqrt(sigma^2 + 1)``: of unit variance, as the model was trained on."""
        if timestep is None:
            raise ValueError(f"{type(self).__name__}.scale_model_input needs the timestep")
        return sample / self._scales[self._sigmas[self._index(timestep)]]

    def _sigma_schedule(
        self, num_inference_steps: int | None, timesteps: Numbers | None, sigmas: Numbers | None
    ) -> tuple[Array, Array]:
        """The timesteps of n steps and their n + 1 sigmas, the last of which is where sampling ends."""
        config = self._own_config()
        known = self._training_sigmas
        mode = sigma_mode(config)
        check_one_schedule(num_inference_steps, timesteps, sigmas, mode)
        if sigmas is not None:
            levels = check_sigmas(sigmas)
            return timestep_at(levels[:-1], known), levels
        train_steps = len(known)
        if timesteps is not None:
            times = check_timesteps(timesteps, train_steps)
        else:
            spacing, offset = config["timestep_spacing"], config["steps_offset"]
            count = check_steps(num_inference_steps)
            times = spaced_timesteps(spacing, count, train_steps, offset=offset, whole=False)
        # the levels are those of the timesteps that the model is told, which are float32
        levels = sigma_at(times.astype(np.float32), known)
        high, low = levels[0], levels[-1]
        if mode is not None:
            ends = (known[-1], known[0]) if config.get("interpolation_type") == "log_linear" else (high, low)
            high, low = config.get("sigma_max"), config.get("sigma_min")
            high, low = ends[0] if high is None else high, ends[1] if low is None else low
            levels = respaced(mode, float(high), float(low), len(levels))
            times = timestep_at(levels, known)
        # a step from the lowest level to itself would do nothing, so that one goes on to 0
        noisy = config.get("final_sigmas_type") == "sigma_min" and levels[-1] > known[0] * (1 + 1e-6)
        return times, np.append(levels, known[0] if noisy else 0.0)

    def _noise_levels(self, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._begin_index if self._step_index is None else self._step_index
        if index is not None:
            # within a run its own level is meant, and the device is not waited for
            spread = [self._sigmas[index]] * len(timesteps)
        else:
            spread = [self._sigma_of(time) for time in to_list(timesteps)]
        return torch.ones(len(spread)), torch.tensor(spread)

    def _sigma_of(self, timestep: float) -> float:
        """The sigma of a timestep: the schedule's where it has it, else that of training."""
        try:
            return self._sigmas[self.index_for_timestep(timestep)]
        except ValueError:
            return float(sigma_at(timestep, self._training_sigmas))

    def _solve(
        self, output: torch.Tensor, sample: torch.Tensor, sigma: float, raised: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The predicted clean sample and the slope ``dx / dsigma = (x - x_0) / sigma`` (arXiv 2206.00364, eq. 3).

        Args:
            raised: the sample's level where noise has been added since the model saw it at `sigma`.
        """
        kind, level = self.config["prediction_type"], sigma if raised is None else raised
        # a v-prediction is taken for the level at which the model made it
        made = sigma if kind == "v_prediction" else level
        original = predict_original_ve(kind, output, sample, made, self._scales[sigma])
        return original, (sample - original).div_(level)

    @staticmethod
    def _moved(sample: torch.Tensor, slope: torch.Tensor, start: float, end: float) -> torch.Tensor:
        """The sample moved along a slope from one sigma to another, rounded as `predict_original_ve` says."""
        return (slope * float(np.float32(end) - np.float32(start))).add_(sample)


def check_one_schedule(
    num_inference_steps: int | None, timesteps: Numbers | None, sigmas: Numbers | None, mode: str | None = None
) -> None:
    """Refuse a schedule given in two ways, or in none.

    A count next to a list is taken where it agrees with it (n timesteps; n or n + 1 sigmas).

    Args:
        mode: the name of the sigma spacing that the config asks for, which a list would contradict.
    """
    if timesteps is not None and sigmas is not None:
        raise ValueError("give timesteps or sigmas, not both")
    name, given = ("timesteps", timesteps) if timesteps is not None else ("sigmas", sigmas)
    if given is None:
        if num_inference_steps is None:
            raise ValueError("give num_inference_steps, timesteps or sigmas")
        return
    if mode is not None and name == "timesteps":
        raise ValueError(f"timesteps cannot be given while the config has use_{mode}_sigmas=True; set it to False")
    counts = (len(given),) if name == "timesteps" else (len(given), len(given) - 1)
    if num_inference_steps is not None and num_inference_steps not in counts:
        raise ValueError(f"num_inference_steps={num_inference_steps} disagrees with {len(given)} {name}; give one")


def full_precision(sample: torch.Tensor) -> torch.Tensor:
    """The sample in float32 where it is in half precision, so that a step loses nothing."""
    return sample.float() if sample.dtype in (torch.float16, torch.bfloat16) else sample


def tensor_of(values: Array | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Numbers as a CPU tensor, rounded once."""
    return torch.tensor(np.asarray(values, dtype=np.float64).tolist(), dtype=torch.float64).to(dtype)


def to_list(values: torch.Tensor) -> list[float]:
    """The values of a 1-D tensor on the host."""
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _scalar(timestep: Timestep) -> float:
    if isinstance(timestep, torch.Tensor):
        if timestep.numel() != 1:
            raise ValueError(f"timestep must be one number, got a tensor of shape {tuple(timestep.shape)}")
        return float(timestep.item())
    return float(timestep)
