"""What the samplers for consistency-distilled models share: the few timesteps that their teacher was taught with."""

from typing import Any

import numpy as np
import torch

from .base import Device, VPScheduler, check_one_schedule
from .sigmas import Array, Numbers, check_sigmas, check_steps, check_timesteps, choice, timestep_at, training_sigmas


class ConsistencyScheduler(VPScheduler):
    """Base of LCM and TCD: a student knows some timesteps only, and takes a few of those.

    Attributes:
        final_alpha_cumprod: the running product of alphas after the last step.
    """

    _compatibles = ()
    custom_timesteps = False

    def _prepare(self) -> None:
        """Check the config, and take the training schedule."""
        choice("prediction_type", self.config["prediction_type"], ("epsilon", "sample", "v_prediction"))
        self._take_training_schedule(ends_clean=bool(self.config["set_alpha_to_one"]))
        self.final_alpha_cumprod = torch.tensor(1.0) if self.config["set_alpha_to_one"] else self.alphas_cumprod[0]

    def _origin(self, original_inference_steps: int | None, strength: float) -> Array:
        """The timesteps that the student was taught, rising, up to `strength` of the schedule."""
        count = original_inference_steps or int(self.config["original_inference_steps"])
        if not 1 <= count <= len(self):
            raise ValueError(f"original_inference_steps={count} must be at least 1 and at most {len(self)}")
        return np.arange(1, int(count * strength) + 1, dtype=np.float64) * (len(self) // count) - 1

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Device = None,
        original_inference_steps: int | None = None,
        timesteps: Numbers | None = None,
        strength: float = 1.0,
        sigmas: Numbers | None = None,
    ) -> None:
        """Lay out the steps of a run.

        Args:
            num_inference_steps: how many; no more than the student was taught.
            device: where `timesteps` shall lie.
            original_inference_steps: how many timesteps the student was taught, instead of the config's.
            timesteps: in place of a number of steps: whole numbers, falling.
            strength: in (0, 1]: the share of the schedule that is run, for image-to-image.
            sigmas: in place of a number of steps: noise / signal of each step, falling; taken at the nearest timestep.
        """
        if not 0 < strength <= 1:
            raise ValueError(f"strength={strength!r} must be above 0 and at most 1")
        check_one_schedule(num_inference_steps, timesteps, sigmas)
        self.custom_timesteps = num_inference_steps is None
        if sigmas is not None:
            levels = check_sigmas(sigmas, ends=len(sigmas) > 1)
            levels = levels[:-1] if levels[-1] == 0 else levels
            timesteps = np.round(timestep_at(levels, training_sigmas(self.alphas_cumprod)))
        if timesteps is not None:
            times = check_timesteps(timesteps, len(self), whole=True)
            self.num_inference_steps = len(times)
            times = times[len(times) - max(1, int(len(times) * strength)) :]
        else:
            times = self._few(check_steps(num_inference_steps, len(self)), original_inference_steps, strength)
            self.num_inference_steps = len(times)
        self._take_schedule(times, device, dtype=torch.int64)

    def _few(self, steps: int, original_inference_steps: int | None, strength: float) -> Array:
        """`steps` of the taught timesteps, evenly, from the most noise on."""
        taught = self._origin(original_inference_steps, strength)[::-1]
        if steps > len(taught):
            raise ValueError(
                f"num_inference_steps={steps} is more than the {len(taught)} timesteps that the model was taught "
                f"(original_inference_steps x strength={strength:g}); use fewer steps"
            )
        return taught[np.floor(np.linspace(0, len(taught), steps, endpoint=False)).astype(int)]

    def _begin_step(self, timestep: Any) -> tuple[int, int, int | None]:
        """The step's index, its timestep and the next one, None after the last."""
        if self.num_inference_steps is None:
            raise ValueError("call `set_timesteps` before `step`")
        index = self._index(timestep)
        following = int(self._times[index + 1]) if index + 1 < len(self._times) else None
        return index, int(self._times[index]), following
