"""What a call of any pipeline of pictures does to values, threads and absent parts. A new family joins by its entry."""

import threading
from typing import Any

import pytest
import torch

from diffusion_core.errors import NumericalError

from .families import CASES, FAMILIES, Family, pipe
from .family_draws import takes_pictures

PICTURES = [(family, task) for family, task in CASES if takes_pictures(family, task)]
every_pipeline = pytest.mark.parametrize(
    ("family", "task"), PICTURES, ids=[f"{family}-{task}" for family, task in PICTURES]
)
every_family = pytest.mark.parametrize("family", [each for each in FAMILIES if (each, each.main) in PICTURES], ids=str)


@every_pipeline
def test_the_loop_waits_for_no_value(family: Family, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one number of a tensor would wait for the device; between the first and the last step none is read."""
    reads: list[str] = []
    watching = [False]
    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "nonzero"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            if watching[0]:
                reads.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    steps: list[int] = []

    def watch(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> None:
        steps.append(step)
        watching[0] = step < pipeline.num_timesteps - 2

    pipe(family, task)(**family.call(task, num_inference_steps=5, callback_on_step_end=watch))
    assert len(steps) >= 3
    assert reads == []


@every_family
def test_threads_share_a_pipeline(family: Family) -> None:
    made, name = pipe(family), family.guidance[0]
    work = [
        {"prompt": ["a red cat"], "num_inference_steps": 2, name: family.guidance[1]},
        {"prompt": ["on the mat"], "num_inference_steps": 4, name: family.guidance[2]},
        {"prompt": ["a dog " * 5], "num_inference_steps": 3, name: 1.5},
    ]
    alone = [made(**family.call(family.main, **each)).images for each in work]
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        try:
            results[index] = made(**family.call(family.main, **work[index])).images
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, expected in enumerate(alone):
        assert isinstance(results[index], torch.Tensor), results[index]
        torch.testing.assert_close(results[index], expected, atol=1e-5, rtol=0)


@every_pipeline
def test_latents_that_are_not_finite_are_an_error(family: Family, task: str) -> None:
    def spoil(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * float("nan")}

    with pytest.raises(NumericalError, match=r"latents are not finite.*bfloat16"):
        pipe(family, task)(**family.call(task, callback_on_step_end=spoil))


@every_family
def test_without_an_autoencoder_latents_keep_their_scale(family: Family) -> None:
    whole = pipe(family)
    made = type(whole).from_pipe(whole, vae=None)
    made.set_progress_bar_config(disable=True)
    assert made.vae_scale_factor == whole.vae_scale_factor
    arguments = family.call(family.main)
    if family.main == "text" and not {"image", "control_image"} & arguments.keys():
        wanted = whole(**family.call(family.main, output_type="latent")).images
        assert torch.equal(made(**family.call(family.main, output_type="latent")).images, wanted)
    with pytest.raises(ValueError, match=r"needs vae.*output_type='latent'"):
        made(**arguments)
