"""The UNets against the reference with the same weights, on real configs, and on input that does not fit."""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core import UNet2DConditionModel, UNet2DModel
from diffusion_core.models.layers.resnet import ResnetBlock2D
from tests.support import hub_config

CROSS = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
INNER_CROSS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
SIZES = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 30,
    "use_linear_projection": True,
}
PLAIN = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
OUTER_ATTENTION = {
    "down_block_types": ("AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D"),
}
SCORE = {
    "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
    "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
    "time_embedding_type": "fourier",
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sizes(batch: int) -> dict[str, Any]:
    return {"added_cond_kwargs": {"text_embeds": seeded(batch, 6, seed=5), "time_ids": 100 * seeded(batch, 6, seed=6)}}


def labels(batch: int) -> dict[str, Any]:
    return {"class_labels": torch.arange(batch)}


def control(batch: int) -> dict[str, Any]:
    shapes = [(8, 8), (8, 8), (8, 4), (16, 4)]
    downs = [seeded(batch, channels, size, size, seed=7) for channels, size in shapes]
    return {"down_block_additional_residuals": downs, "mid_block_additional_residual": seeded(batch, 16, 4, 4)}


def adapter(*shapes: tuple[int, int]) -> Any:
    return lambda batch: {
        "down_intrablock_additional_residuals": [seeded(batch, channels, size, size) for channels, size in shapes]
    }


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """The reference empties lists that it is given."""
    return {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}


def pair(name: str, config: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The reference's model and ours with the same weights, exchanged strictly in both directions."""
    torch.manual_seed(0)
    theirs = getattr(diffusers, name)(**config).eval()
    ours = {"UNet2DConditionModel": UNet2DConditionModel, "UNet2DModel": UNet2DModel}[name](**config).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def tell(vector: int) -> Any:
    return lambda batch: {"class_labels": seeded(batch, vector)}


TEXT_CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "sd1": ({}, None),
    "sd2": ({"use_linear_projection": True, "attention_head_dim": (2, 4), "upcast_attention": True}, None),
    "sdxl": ({**INNER_CROSS, **SIZES, "transformer_layers_per_block": (1, 2)}, sizes),
    "refiner": ({**SIZES, "transformer_layers_per_block": 2, "attention_head_dim": (2, 4)}, sizes),
    "inpainting": ({"in_channels": 9}, None),
    "lcm": ({"time_cond_proj_dim": 8}, lambda batch: {"timestep_cond": seeded(batch, 8)}),
    "lcm without guidance": ({"time_cond_proj_dim": 8}, None),
    "classes": ({"num_class_embeds": 5}, labels),
    "classes beside time": ({"num_class_embeds": 5, "class_embeddings_concat": True}, labels),
    "class timestep": ({"class_embed_type": "timestep"}, labels),
    "class identity": ({"class_embed_type": "identity"}, tell(32)),
    "class projection": ({"class_embed_type": "projection", "projection_class_embeddings_input_dim": 6}, tell(6)),
    "class linear": ({"class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": 6}, tell(6)),
    "fourier": ({"time_embedding_type": "fourier", "flip_sin_to_cos": False, "time_embedding_dim": 20}, None),
    "positional": ({"flip_sin_to_cos": False, "freq_shift": 1, "time_embedding_dim": 20}, None),
    "pooled text": ({"addition_embed_type": "text", "addition_embed_type_num_heads": 4, "encoder_hid_dim": 8}, None),
    "text projection": ({"encoder_hid_dim": 6}, None),
    "no middle": ({"mid_block_type": None}, None),
    "plain middle": ({"mid_block_type": "UNetMidBlock2D", "mid_block_scale_factor": 2.0}, None),
    "scale and shift": ({"resnet_time_scale_shift": "scale_shift"}, None),
    "only text": ({"only_cross_attention": (True, False)}, None),
    "activations": ({"act_fn": "mish", "timestep_post_act": "gelu", "time_embedding_act_fn": "relu"}, None),
    "kernels": ({"conv_in_kernel": 5, "conv_out_kernel": 1, "center_input_sample": True}, None),
    "padding at the end": ({"downsample_padding": 0}, None),
    "depths by layer": (
        {"transformer_layers_per_block": ((1,), 1), "reverse_transformer_layers_per_block": (1, (1, 2))},
        None,
    ),
    "depths reversed": ({"transformer_layers_per_block": (2, 3), "reverse_transformer_layers_per_block": (1, 2)}, None),
    "layers by block": ({"layers_per_block": (2, 1), "cross_attention_dim": (12, 12)}, None),
    "attention over pixels": ({**OUTER_ATTENTION, "mid_block_scale_factor": 2.0}, None),
    "residual resampling": (
        {
            "down_block_types": ("ResnetDownsampleBlock2D",) * 2,
            "up_block_types": ("ResnetUpsampleBlock2D",) * 2,
            "resnet_skip_time_act": True,
            "resnet_out_scale_factor": 1.5,
        },
        None,
    ),
    "controlnet": ({}, control),
    "t2i": ({}, adapter((8, 8), (16, 4))),
    "t2i with controlnet": ({}, lambda batch: {**control(batch), **adapter((8, 8), (16, 4))(batch)}),
    "t2i of sdxl": (INNER_CROSS, adapter((8, 4), (16, 4), (16, 4))),
    "text mask": ({}, lambda batch: {"encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]])}),
    "pixel mask": (
        {"mid_block_type": "UNetMidBlock2D"},
        lambda batch: {"attention_mask": (seeded(batch, 64) > -0.5).float()},
    ),
}


@pytest.mark.parametrize("case", TEXT_CASES)
def test_condition_model_matches(case: str) -> None:
    changes, extra = TEXT_CASES[case]
    config = {**CROSS, **changes}
    theirs, ours = pair("UNet2DConditionModel", config)
    sample = seeded(2, config.get("in_channels", 4), 8, 8, seed=1)
    text = seeded(2, 5, config.get("encoder_hid_dim") or 12, seed=2)
    inputs = extra(2) if extra else {}
    with torch.no_grad():
        got = ours(sample, 7, text, **copied(inputs)).sample
        assert (got - theirs(sample, 7, text, **copied(inputs)).sample).abs().max() <= 1e-5
        if inputs:
            assert (got - ours(sample, 8, text, **copied(inputs)).sample).abs().max() > 1e-5


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(8, 8), (9, 7), (12, 8), (5, 16)])
@pytest.mark.parametrize("blocks", [2, 3])
def test_condition_model_matches_at_any_size(batch: int, size: tuple[int, int], blocks: int) -> None:
    config = {**CROSS, "block_out_channels": (8, 16, 16)[:blocks]}
    config |= {
        "down_block_types": ("CrossAttnDownBlock2D",) * blocks,
        "up_block_types": ("CrossAttnUpBlock2D",) * blocks,
    }
    theirs, ours = pair("UNet2DConditionModel", config)
    sample, text = seeded(batch, 4, *size), seeded(batch, 5, 12)
    with torch.no_grad():
        got = ours(sample, 7, text, return_dict=False)[0]
        assert got.shape == sample.shape
        assert (got - theirs(sample, 7, text).sample).abs().max() <= 1e-5


@pytest.mark.parametrize("timestep", [0, 3.5, torch.tensor(999), torch.tensor([1, 2]), torch.tensor([1.5])], ids=str)
def test_condition_model_takes_timesteps_of_any_kind(timestep: Any) -> None:
    theirs, ours = pair("UNet2DConditionModel", CROSS)
    sample, text = seeded(2, 4, 8, 8), seeded(2, 5, 12)
    with torch.no_grad():
        difference = ours(sample, timestep, text).sample - theirs(sample, timestep, text).sample
    assert difference.abs().max() <= 1e-5


PICTURE_CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "ddpm": ({"freq_shift": 1, "flip_sin_to_cos": False, "norm_eps": 1e-6, "downsample_padding": 0}, None),
    "one head": ({"attention_head_dim": None}, None),
    "ldm": ({"downsample_type": "resnet", "upsample_type": "resnet"}, None),
    "ldm with outer attention": ({"downsample_type": "resnet", "upsample_type": "resnet", **OUTER_ATTENTION}, None),
    "score": ({**SCORE, "norm_eps": 1e-6}, None),
    "score of three sizes": (
        {
            **SCORE,
            "block_out_channels": (32, 64, 64),
            "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D", "SkipDownBlock2D"),
            "up_block_types": ("SkipUpBlock2D", "AttnSkipUpBlock2D", "SkipUpBlock2D"),
            "mid_block_scale_factor": 2**0.5,
        },
        None,
    ),
    "score without groups": ({**SCORE, "norm_num_groups": None}, None),
    "fourier": ({"time_embedding_type": "fourier", "center_input_sample": True}, None),
    "learned": ({"time_embedding_type": "learned", "num_train_timesteps": 10}, None),
    "classes": ({"num_class_embeds": 5}, labels),
    "class timestep": ({"class_embed_type": "timestep"}, labels),
    "class identity": ({"class_embed_type": "identity"}, tell(128)),
    "scale and shift": ({"resnet_time_scale_shift": "scale_shift"}, None),
    "attention groups": ({"resnet_time_scale_shift": "scale_shift", "attn_norm_num_groups": 2}, None),
    "no attention": ({"add_attention": False}, None),
    "no middle": ({"mid_block_type": None}, None),
    "residual resampling": (
        {
            "down_block_types": ("ResnetDownsampleBlock2D",) * 2,
            "up_block_types": ("ResnetUpsampleBlock2D",) * 2,
        },
        None,
    ),
    "activation": ({"act_fn": "gelu", "time_embedding_dim": 20}, None),
}


@pytest.mark.parametrize("case", PICTURE_CASES)
def test_picture_model_matches(case: str) -> None:
    changes, extra = PICTURE_CASES[case]
    theirs, ours = pair("UNet2DModel", {**PLAIN, **changes})
    inputs = extra(2) if extra else {}
    for size, timestep in (((8, 8), torch.tensor(7)), ((12, 4), torch.tensor([1, 9]))):
        sample = seeded(2, 3, *size, seed=1)
        with torch.no_grad():
            got = ours(sample, timestep, **inputs).sample
            assert (got - theirs(sample, timestep, **inputs).sample).abs().max() <= 1e-5


def test_picture_model_takes_odd_sizes() -> None:
    _, ours = pair("UNet2DModel", PLAIN)
    assert ours(seeded(1, 3, 9, 7), 3).sample.shape == (1, 3, 9, 7)


def test_picture_model_keeps_the_fraction_of_a_timestep() -> None:
    """The reference cuts it off where the timestep is a Python number, not where it is a tensor."""
    theirs, ours = pair("UNet2DModel", PLAIN)
    sample = seeded(1, 3, 8, 8)
    with torch.no_grad():
        right = theirs(sample, torch.tensor(3.5)).sample
        assert (ours(sample, 3.5).sample - right).abs().max() <= 1e-5
        assert (theirs(sample, 3.5).sample - right).abs().max() > 1e-4


CONFIGS = {
    "runwayml/stable-diffusion-v1-5": 859.52,
    "runwayml/stable-diffusion-inpainting": 859.54,
    "stabilityai/stable-diffusion-2-1": 865.91,
    "stabilityai/stable-diffusion-xl-base-1.0": 2567.46,
    "stabilityai/stable-diffusion-xl-refiner-1.0": 2259.53,
    "diffusers/stable-diffusion-xl-1.0-inpainting-0.1": 2567.48,
}


@pytest.mark.parametrize("repo", CONFIGS)
def test_real_configs(repo: str) -> None:
    config = json.loads(hub_config(f"{repo}/unet/config.json").read_text())
    with torch.device("meta"):
        ours = UNet2DConditionModel.from_config(config)
        theirs = diffusers.UNet2DConditionModel.from_config(config)
    mine = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert mine == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert round(sum(parameter.numel() for parameter in ours.parameters()) / 1e6, 2) == CONFIGS[repo]
    assert not set(ours._no_split_modules or ()) - {type(module).__name__ for module in ours.modules()}


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "UNet2DModel"])
def test_config_keys_and_defaults_equal_the_reference(name: str) -> None:
    theirs = inspect.signature(getattr(diffusers, name).__init__).parameters
    ours = inspect.signature(globals()[name].__init__).parameters
    assert {key: entry.default for key, entry in ours.items()} == {key: entry.default for key, entry in theirs.items()}
    theirs = inspect.signature(getattr(diffusers, name).forward).parameters
    assert list(inspect.signature(globals()[name].forward).parameters) == list(theirs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_out_channels": (8,)}, ["block_out_channels", "1 entries", "2 down_block_types"]),
        ({"attention_head_dim": (2, 2, 2)}, ["attention_head_dim", "3 entries", "2 down_block_types"]),
        ({"attention_head_dim": 3}, ["8 channels", "3 heads"]),
        ({"norm_num_groups": 3}, ["8", "3"]),
        ({"norm_num_groups": None}, ["norm_num_groups"]),
        ({"layers_per_block": (1,)}, ["layers_per_block", "1 entries"]),
        ({"cross_attention_dim": (1, 2, 3)}, ["cross_attention_dim", "3 entries"]),
        ({"cross_attention_dim": None}, ["cross_attention_dim"]),
        ({"up_block_types": ("UpBlock2D",)}, ["2 entries", "1"]),
        ({"down_block_types": ("KDownBlock2D", "DownBlock2D")}, ["KDownBlock2D", "CrossAttnDownBlock2D"]),
        ({"up_block_types": ("SkipUpBlock2D", "UpBlock2D")}, ["SkipUpBlock2D"]),
        ({"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}, ["mid_block_type", "UNetMidBlock2DCrossAttn"]),
        ({"dual_cross_attention": True}, ["dual_cross_attention"]),
        ({"attention_type": "gated"}, ["attention_type", "gated"]),
        ({"num_attention_heads": 4}, ["num_attention_heads", "attention_head_dim"]),
        ({"class_embed_type": "other"}, ["class_embed_type", "other"]),
        ({"class_embed_type": "projection"}, ["projection_class_embeddings_input_dim"]),
        ({"class_embeddings_concat": True}, ["class_embeddings_concat", "num_class_embeds"]),
        (
            {**SIZES, "num_class_embeds": 5, "class_embeddings_concat": True},
            ["concat", "addition_embed_type='text_time'"],
        ),
        ({"addition_embed_type": "image"}, ["addition_embed_type", "image"]),
        ({"addition_embed_type": "text_time"}, ["addition_time_embed_dim"]),
        ({"addition_embed_type": "text"}, ["12", "64"]),
        ({"encoder_hid_dim_type": "text_proj"}, ["encoder_hid_dim"]),
        ({"encoder_hid_dim_type": "image_proj", "encoder_hid_dim": 4}, ["image_proj"]),
        ({"time_embedding_type": "other"}, ["time_embedding_type", "other"]),
        ({"resnet_time_scale_shift": "spatial"}, ["spatial", "scale_shift"]),
        ({"act_fn": "other"}, ["other", "silu"]),
        ({"transformer_layers_per_block": ((1,), 1)}, ["reverse_transformer_layers_per_block"]),
        ({"transformer_layers_per_block": ((1, 1), 1), "reverse_transformer_layers_per_block": (1, 1)}, ["2", "1"]),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        UNet2DConditionModel(**{**CROSS, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}, ["CrossAttnDownBlock2D"]),
        ({"block_out_channels": (32,)}, ["block_out_channels", "1 entries"]),
        ({"attention_head_dim": 7}, ["64 channels", "7"]),
        ({"norm_num_groups": None}, ["norm_num_groups"]),
        ({"time_embedding_type": "learned"}, ["num_train_timesteps"]),
        ({"time_embedding_type": "other"}, ["other", "positional"]),
        ({"mid_block_type": "other"}, ["other", "UNetMidBlock2D"]),
        ({"class_embed_type": "projection"}, ["projection"]),
        ({"downsample_type": "other"}, ["downsample_type", "other"]),
    ],
    ids=str,
)
def test_picture_configs_that_do_not_fit_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        UNet2DModel(**{**PLAIN, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "inputs", "words"),
    [
        ({}, {"sample": seeded(2, 3, 8, 8)}, ["3 channels", "in_channels=4"]),
        ({}, {"encoder_hidden_states": None}, ["encoder_hidden_states"]),
        ({}, {"encoder_hidden_states": seeded(2, 5, 13)}, ["13", "12"]),
        ({}, {"encoder_hidden_states": seeded(3, 5, 12)}, ["(3, 5, 12)", "2"]),
        ({}, {"encoder_attention_mask": torch.ones(2, 6)}, ["6 tokens", "5"]),
        ({}, {"timestep": torch.tensor([1, 2, 3])}, ["3 values", "2"]),
        ({}, {"class_labels": torch.tensor([1, 2])}, ["class_labels", "num_class_embeds"]),
        ({}, {"timestep_cond": seeded(2, 4)}, ["time_cond_proj_dim"]),
        ({}, {"cross_attention_kwargs": {"gligen": 1}}, ["gligen", "scale"]),
        ({}, {"mid_block_additional_residual": seeded(2, 16, 4, 4)}, ["down_block_additional_residuals"]),
        ({}, {"down_block_additional_residuals": [seeded(2, 8, 8, 8)]}, ["mid_block_additional_residual"]),
        ({}, {**control(2), "down_block_additional_residuals": [seeded(2, 8, 8, 8)]}, ["1 entries", "4 skips"]),
        ({}, adapter((8, 8), (16, 4), (8, 8))(2), ["down_intrablock_additional_residuals", "1 entries more"]),
        ({}, {"sample": torch.ones(2, 4, 8, 8, dtype=torch.int64)}, ["sample", "int64"]),
        ({}, {"sample": seeded(4, 8, 8)}, ["sample", "(4, 8, 8)"]),
        ({}, {"encoder_attention_mask": torch.ones(3, 5)}, ["mask", "3 rows", "2"]),
        (
            {},
            {"down_block_additional_residuals": [seeded(2, 8, 4, 4)] * 4, "mid_block_additional_residual": 0},
            ["down_block_additional_residuals", "(2, 8, 4, 4)", "(2, 8, 8, 8)"],
        ),
        ({"time_cond_proj_dim": 4}, {"timestep_cond": seeded(3, 4)}, ["timestep_cond", "3 rows", "2"]),
        ({"num_class_embeds": 5}, {}, ["class_labels"]),
        ({"num_class_embeds": 5}, {"class_labels": torch.tensor([1, 2, 3])}, ["class_labels", "(3,)", "2"]),
        ({"num_class_embeds": 5}, {"class_labels": torch.tensor([1.0, 2.0])}, ["class_labels", "float32"]),
        ({"class_embed_type": "identity"}, {"class_labels": seeded(3, 32)}, ["class_labels", "3 entries", "2"]),
        (
            {"class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": 4},
            {"class_labels": seeded(2, 5)},
            ["class_labels", "(2, 5)", "4"],
        ),
        (
            SIZES,
            {"added_cond_kwargs": {"text_embeds": seeded(2, 6), "time_ids": seeded(1, 6)}},
            ["text_embeds", "(2, 6)", "time_ids", "(1, 6)"],
        ),
        (SIZES, {}, ["text_embeds", "time_ids", "added_cond_kwargs"]),
        (SIZES, {"added_cond_kwargs": {"text_embeds": seeded(2, 6)}}, ["time_ids"]),
        (SIZES, {"added_cond_kwargs": {"text_embeds": seeded(2, 6), "time_ids": seeded(2, 5)}}, ["26", "30"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict | list) else str(value),
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], inputs: dict[str, Any], words: list[str]) -> None:
    model = UNet2DConditionModel(**{**CROSS, **changes}).eval()
    given = {"sample": seeded(2, 4, 8, 8), "timestep": 1, "encoder_hidden_states": seeded(2, 5, 12), **inputs}
    with pytest.raises(ValueError) as caught, torch.no_grad():
        model(**given)
    for word in words:
        assert word in str(caught.value)


def test_blocks_that_only_double_say_which_sizes_they_take() -> None:
    model = UNet2DModel(**{**PLAIN, "upsample_type": "resnet", "up_block_types": ("AttnUpBlock2D",) * 2})
    with pytest.raises(ValueError, match="halved as often as it has levels"):
        model(seeded(1, 3, 9, 8), 1)


def test_lists_of_the_caller_are_left_alone() -> None:
    model = UNet2DConditionModel(**CROSS)
    inputs = {**control(2), **adapter((8, 8), (16, 4))(2)}
    before = copied(inputs)
    with torch.no_grad():
        model(seeded(2, 4, 8, 8), 1, seeded(2, 5, 12), **inputs)
    for name in ("down_block_additional_residuals", "down_intrablock_additional_residuals"):
        assert len(inputs[name]) == len(before[name])
        assert all(mine is given for mine, given in zip(inputs[name], before[name], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_matches(dtype: torch.dtype) -> None:
    theirs, ours = (model.to(dtype) for model in pair("UNet2DConditionModel", {**CROSS, **SIZES}))
    sample, text, added = seeded(2, 4, 8, 8).to(dtype), seeded(2, 5, 12).to(dtype), sizes(2)
    with torch.no_grad():
        got = ours(sample, 937.5, text, **added).sample
        expected = theirs(sample, 937.5, text, **added).sample
    assert got.dtype == dtype
    assert (got - expected).abs().max() <= 0.03


def test_channels_last_is_kept_and_changes_nothing() -> None:
    model = UNet2DConditionModel(**CROSS).to(memory_format=torch.channels_last).eval()
    lost = []

    def look(module: torch.nn.Module, _: Any, output: Any) -> None:
        maps = output[0] if isinstance(output, tuple) else output
        if isinstance(maps, torch.Tensor) and maps.dim() == 4:
            lost.append(not maps.is_contiguous(memory_format=torch.channels_last))

    for module in model.modules():
        module.register_forward_hook(look)
    sample, text = seeded(2, 4, 8, 8), seeded(2, 5, 12)
    with torch.no_grad():
        plain = model(sample, 5, text).sample
        lost.clear()
        last = model(sample.to(memory_format=torch.channels_last), 5, text).sample
    assert lost and not any(lost)
    assert (last - plain).abs().max() <= 1e-5


@pytest.mark.parametrize("case", ["text", "picture"])
def test_gradients_reach_every_parameter(case: str) -> None:
    if case == "text":
        model: torch.nn.Module = UNet2DConditionModel(**CROSS, dropout=0.1)
        model(seeded(2, 4, 8, 8), 5, seeded(2, 5, 12)).sample.square().mean().backward()
    else:
        model = UNet2DModel(**{**PLAIN, **SCORE})
        model(seeded(2, 3, 8, 8), 5.0).sample.square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def compiled_whole(model: torch.nn.Module) -> tuple[Any, list[Any]]:
    """The model compiled without graph breaks, through the tracing of its backward, and the graphs so far."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    return torch.compile(model, fullgraph=True, backend=backend), graphs


def test_one_compiled_graph_for_all_steps() -> None:
    model = UNet2DConditionModel(**{**CROSS, **SIZES}).eval()
    compiled, graphs = compiled_whole(model)
    sample, text, added = seeded(2, 4, 9, 8), seeded(2, 5, 12), sizes(2)
    with torch.no_grad():
        for timestep in (999.0, 500.0, 1.0):
            step = torch.tensor(timestep)
            difference = compiled(sample, step, text, **added).sample - model(sample, step, text, **added).sample
            assert difference.abs().max() <= 1e-5
    assert len(graphs) == 1


def test_one_compiled_graph_for_pictures() -> None:
    model = UNet2DModel(**{**PLAIN, **SCORE}).eval()
    compiled, graphs = compiled_whole(model)
    sample = seeded(1, 3, 8, 8)
    with torch.no_grad():
        for timestep in (0.5, 20.0):
            step = torch.tensor(timestep)
            assert (compiled(sample, step).sample - model(sample, step).sample).abs().max() <= 1e-5
    assert len(graphs) == 1


def count_python_calls(model: torch.nn.Module, *inputs: Any) -> int:
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with torch.no_grad():
        model(*inputs)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            model(*inputs)
        finally:
            sys.setprofile(before)
    return calls


def test_a_step_takes_half_the_python_calls_of_the_reference() -> None:
    config = {"block_out_channels": (8, 16, 16, 16), "norm_num_groups": 4, "cross_attention_dim": 12}
    theirs, ours = pair("UNet2DConditionModel", {**config, "attention_head_dim": 2})
    inputs = (seeded(1, 4, 16, 16), torch.tensor(5), seeded(1, 5, 12))
    assert count_python_calls(ours, *inputs) <= 0.5 * count_python_calls(theirs, *inputs)


def test_dropout_acts_in_training_only() -> None:
    model = UNet2DConditionModel(**CROSS, dropout=0.5)
    inputs = (seeded(1, 4, 8, 8), 5, seeded(1, 5, 12))
    assert all(block.dropout.p == 0.5 for block in model.modules() if isinstance(block, ResnetBlock2D))
    with torch.no_grad():
        assert not torch.equal(model(*inputs).sample, model(*inputs).sample)
        model.eval()
        assert torch.equal(model(*inputs).sample, model(*inputs).sample)


@pytest.mark.parametrize("size", [(8, 8), (12, 20), (9, 7)])
def test_freeu_matches_and_can_be_taken_back(size: tuple[int, int]) -> None:
    theirs, ours = pair("UNet2DConditionModel", CROSS)
    inputs = (seeded(2, 4, *size), 7, seeded(2, 5, 12))
    factors = {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}
    with torch.no_grad():
        plain = ours(*inputs).sample
        theirs.enable_freeu(**factors)
        ours.enable_freeu(**factors)
        weighed = ours(*inputs).sample
        assert (weighed - theirs(*inputs).sample).abs().max() <= 1e-5
        assert (weighed - plain).abs().max() > 1e-3
        ours.disable_freeu()
        assert torch.equal(ours(*inputs).sample, plain)


def test_freeu_works_in_half_precision_at_any_size() -> None:
    model = UNet2DConditionModel(**CROSS).to(torch.bfloat16).eval()
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    with torch.no_grad():
        sample = model(seeded(1, 4, 9, 7).bfloat16(), 5, seeded(1, 5, 12).bfloat16()).sample
    assert sample.dtype == torch.bfloat16 and sample.isfinite().all()


@pytest.mark.parametrize("name", ["UNet2DConditionModel", "UNet2DModel"])
def test_checkpoints_go_both_ways(name: str, tmp_path: Path) -> None:
    text = name == "UNet2DConditionModel"
    theirs, ours = pair(name, {**CROSS, **SIZES} if text else {**PLAIN, **SCORE})
    inputs = (seeded(2, 4, 8, 8), 7, seeded(2, 5, 12)) if text else (seeded(2, 3, 8, 8), 7)
    extra = sizes(2) if text else {}
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    ours.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        expected = theirs(*inputs, **extra).sample
        for made in (
            globals()[name].from_pretrained(tmp_path / "theirs"),
            getattr(diffusers, name).from_pretrained(tmp_path / "ours"),
        ):
            assert (made(*inputs, **extra).sample - expected).abs().max() <= 1e-5
