"""The import paths that code written for the reference uses."""

import importlib

import diffusers
import pytest

import diffusion_core


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("utils", ["BaseOutput", "export_to_video", "load_image", "logging", "make_image_grid", "numpy_to_pil"]),
        ("utils.export_utils", ["export_to_gif", "export_to_video"]),
        ("utils.import_utils", ["is_accelerate_available", "is_torch_available", "is_xformers_available"]),
        ("utils.loading_utils", ["load_image", "load_video"]),
        ("utils.outputs", ["BaseOutput"]),
        ("utils.pil_utils", ["make_image_grid", "numpy_to_pil", "pt_to_pil"]),
        ("utils", ["export_to_gif", "export_to_video", "load_video"]),
        ("video_processor", ["VideoProcessor"]),
        ("utils.logging", ["INFO", "disable_progress_bar", "enable_progress_bar", "get_logger", "set_verbosity_info"]),
        ("utils.torch_utils", ["randn_tensor"]),
        ("image_processor", ["VaeImageProcessor"]),
        ("callbacks", ["MultiPipelineCallbacks", "PipelineCallback", "SDCFGCutoffCallback"]),
        ("configuration_utils", ["ConfigMixin", "FrozenDict", "register_to_config"]),
        ("models", ["AutoencoderKL", "AutoencoderTiny", "ControlNetModel", "UNet2DConditionModel", "UNet2DModel"]),
        ("models.attention_dispatch", ["AttentionBackendName", "attention_backend", "dispatch_attention_fn"]),
        ("models.attention_processor", ["Attention", "AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor"]),
        ("models.auto_model", ["AutoModel"]),
        ("models.autoencoders", ["AutoencoderKL", "AutoencoderTiny", "AsymmetricAutoencoderKL"]),
        ("models.autoencoders.autoencoder_kl", ["AutoencoderKL"]),
        ("models.autoencoders.autoencoder_asym_kl", ["AsymmetricAutoencoderKL"]),
        ("models.autoencoders.autoencoder_tiny", ["AutoencoderTiny", "AutoencoderTinyOutput"]),
        ("models.autoencoders.vae", ["Decoder", "Encoder"]),
        ("models.controlnets", ["ControlNetModel"]),
        ("models.controlnets.controlnet", ["ControlNetModel", "ControlNetOutput"]),
        ("models.modeling_outputs", ["AutoencoderKLOutput"]),
        ("models.modeling_utils", ["ModelMixin"]),
        ("models.unets", ["UNet2DConditionModel", "UNet2DModel"]),
        ("models.unets.unet_2d", ["UNet2DModel", "UNet2DOutput"]),
        ("models.unets.unet_2d_condition", ["UNet2DConditionModel", "UNet2DConditionOutput"]),
        ("pipelines", ["DDPMPipeline", "DiffusionPipeline", "StableDiffusionPipeline"]),
        ("pipelines.auto_pipeline", ["AutoPipelineForText2Image"]),
        ("pipelines.pipeline_utils", ["DiffusionPipeline", "ImagePipelineOutput"]),
        (
            "pipelines.stable_diffusion",
            ["StableDiffusionPipeline", "StableDiffusionPipelineOutput", "StableDiffusionSafetyChecker"],
        ),
        ("pipelines.stable_diffusion.pipeline_output", ["StableDiffusionPipelineOutput"]),
        ("pipelines.stable_diffusion.pipeline_stable_diffusion", ["StableDiffusionPipeline"]),
        ("pipelines.stable_diffusion.pipeline_stable_diffusion_img2img", ["StableDiffusionImg2ImgPipeline"]),
        ("pipelines.stable_diffusion.safety_checker", ["StableDiffusionSafetyChecker"]),
        ("schedulers", ["DDIMScheduler", "KarrasDiffusionSchedulers", "SchedulerMixin"]),
        ("schedulers.scheduling_ddim", ["DDIMScheduler", "DDIMSchedulerOutput"]),
        ("schedulers.scheduling_utils", ["KarrasDiffusionSchedulers", "SchedulerMixin", "SchedulerOutput"]),
    ],
)
def test_familiar_paths_lead_to_what_the_reference_has_there(path: str, names: list[str]) -> None:
    ours = importlib.import_module(f"diffusion_core.{path}")
    theirs = importlib.import_module(f"diffusers.{path}")
    for name in names:
        assert hasattr(ours, name)
        assert hasattr(theirs, name)


def test_every_scheduler_has_its_familiar_path() -> None:
    names = [name for name in dir(diffusion_core) if name.endswith("Scheduler") and hasattr(diffusers, name)]
    assert len(names) > 15
    for name in names:
        path = getattr(diffusers, name).__module__.removeprefix("diffusers.")
        found = importlib.import_module(f"diffusion_core.{path}")
        assert getattr(found, name) is getattr(diffusion_core, name)


def test_a_familiar_path_has_no_other_names() -> None:
    from diffusion_core.schedulers import scheduling_ddim

    assert "diffusion_core.schedulers.ddim" in (scheduling_ddim.__doc__ or "")
    with pytest.raises(AttributeError, match="scheduling_ddim has no 'UNet2DConditionModel'"):
        scheduling_ddim.UNet2DConditionModel  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("diffusion_core.schedulers.scheduling_unknown")
    with pytest.raises(ImportError):
        exec("from diffusion_core.models.modeling_utils import UNet2DConditionModel")


def test_they_are_the_same_objects() -> None:
    from diffusion_core.configuration_utils import ConfigMixin
    from diffusion_core.utils import logging

    assert ConfigMixin is diffusion_core.ConfigMixin
    assert logging.disable_progress_bar is diffusion_core.disable_progress_bar
