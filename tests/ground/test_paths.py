"""The import paths that code written for the reference uses."""

import importlib

import pytest

import diffusion_core


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("utils", ["BaseOutput", "load_image", "logging", "make_image_grid", "numpy_to_pil", "pt_to_pil"]),
        ("utils", ["export_to_gif", "export_to_video", "load_video"]),
        ("video_processor", ["VideoProcessor"]),
        ("utils.logging", ["INFO", "disable_progress_bar", "enable_progress_bar", "get_logger", "set_verbosity_info"]),
        ("utils.torch_utils", ["randn_tensor"]),
        ("image_processor", ["VaeImageProcessor"]),
        ("callbacks", ["MultiPipelineCallbacks", "PipelineCallback", "SDCFGCutoffCallback"]),
        ("configuration_utils", ["ConfigMixin", "FrozenDict", "register_to_config"]),
    ],
)
def test_familiar_paths_lead_to_what_the_reference_has_there(path: str, names: list[str]) -> None:
    ours = importlib.import_module(f"diffusion_core.{path}")
    theirs = importlib.import_module(f"diffusers.{path}")
    for name in names:
        assert name in ours.__all__
        assert hasattr(ours, name)
        assert hasattr(theirs, name)


def test_they_are_the_same_objects() -> None:
    from diffusion_core.configuration_utils import ConfigMixin
    from diffusion_core.utils import logging

    assert ConfigMixin is diffusion_core.ConfigMixin
    assert logging.disable_progress_bar is diffusion_core.disable_progress_bar
