"""What CogVideoX's two schedulers share: a noise schedule that is shifted towards noise."""

from typing import Any

import torch

from .base import Device, VPScheduler, to_list
from .sigmas import Numbers, choice, make_betas


class CogVideoXScheduler(VPScheduler):
    """Base of those (CogVideoX, arXiv 2408.06072, section 3; progressive shift as in arXiv 2301.11093, eq. 4).

    The signal-to-noise ratio of each training step is divided by `snr_shift_scale`; then, with
    `rescale_betas_zero_snr`, the last step is made pure noise.
    """

    _strides = True

    def __init__(
        self,
        num_train_timesteps: int = 1000,
        beta_start: float = 0.00085,
        beta_end: float = 0.0120,
        beta_schedule: str = "scaled_linear",
        trained_betas: Numbers | None = None,
        clip_sample: bool = True,
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
        prediction_type: str = "epsilon",
        clip_sample_range: float = 1.0,
        sample_max_value: float = 1.0,
        timestep_spacing: str = "leading",
        rescale_betas_zero_snr: bool = False,
        snr_shift_scale: float = 3.0,
    ) -> None:
        choice("prediction_type", prediction_type, ("epsilon", "sample", "v_prediction"))
        if not snr_shift_scale > 0:
            raise ValueError(f"snr_shift_scale={snr_shift_scale!r} must be above 0")
        self._take_training_schedule(ends_clean=set_alpha_to_one)

    def _take_training_schedule(self, *, ends_clean: bool = True) -> None:
        super()._take_training_schedule(ends_clean=ends_clean)
        config = self.config
        low, high, count = config["beta_start"], config["beta_end"], len(self._kept)
        if config["beta_schedule"] == "scaled_linear" and config["trained_betas"] is None:
            self.betas = torch.linspace(low**0.5, high**0.5, count, dtype=torch.float64) ** 2
        else:
            # As they are: the shift comes first, and then the last step is made pure noise.
            self.betas = make_betas(config["beta_schedule"], low, high, count, config["trained_betas"])
        self.alphas = 1.0 - self.betas
        kept = torch.cumprod(1 - self.betas.double(), dim=0)
        shift = config["snr_shift_scale"]
        kept = kept / (shift + (1 - shift) * kept)
        if config["rescale_betas_zero_snr"]:
            roots = kept.sqrt()
            kept = ((roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))) ** 2
        self.alphas_cumprod = kept
        self._kept = to_list(kept)
        self._final_share = 1.0 if ends_clean else self._kept[0]
        self.final_alpha_cumprod = torch.tensor(self._final_share)
        self._moves = [self._move(int(time)) for time in self._times]

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        timesteps: Numbers | None = None,
        sigmas: Numbers | None = None,
    ) -> None:
        """Choose the steps: how many, or which timesteps (falling), or which VE sigmas (falling, with the end)."""
        self._stride = 1
        self._take_vp_schedule(num_inference_steps, device, timesteps, sigmas)

    def _ready(self) -> None:
        if self.num_inference_steps is None:
            raise ValueError("call `set_timesteps` before `step`")

    def _result_like(self, sample: torch.Tensor, moved: torch.Tensor, original: torch.Tensor, return_dict: bool) -> Any:
        """The step's result, in the dtype that the sample came in."""
        self._step_done()
        return self._result(return_dict, moved.to(sample.dtype), original.to(sample.dtype))
