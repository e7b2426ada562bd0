"""The ControlNet against the reference with the same weights, and as a guide of the UNet."""

import inspect
import json
from typing import Any

import diffusers
import pytest
import torch

from diffusion_core import ControlNetModel, UNet2DConditionModel
from tests.support import hub_config

HALF = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}
TINY = {**HALF, "conditioning_embedding_out_channels": (4, 6, 8)}
SIZES = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 30,
    "use_linear_projection": True,
}


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(**changes: Any) -> dict[str, Any]:
    given = {"sample": seeded(2, 4, 8, 8), "timestep": 7, "encoder_hidden_states": seeded(2, 5, 12)}
    return {**given, "controlnet_cond": seeded(2, 3, 32, 32), **changes}


def pair(config: dict[str, Any]) -> tuple[torch.nn.Module, ControlNetModel]:
    torch.manual_seed(0)
    theirs = diffusers.ControlNetModel(**config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ours = ControlNetModel(**config).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def added() -> dict[str, Any]:
    return {"added_cond_kwargs": {"text_embeds": seeded(2, 6), "time_ids": 100 * seeded(2, 6)}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sd1": ({}, {}),
    "strength": ({}, {"conditioning_scale": 0.5}),
    "guess": ({}, {"guess_mode": True, "conditioning_scale": 0.5}),
    "pooled": ({"global_pool_conditions": True}, {"guess_mode": True}),
    "bgr": ({"controlnet_conditioning_channel_order": "bgr"}, {}),
    "sdxl": ({**SIZES, "transformer_layers_per_block": (1, 2)}, added()),
    "classes": ({"num_class_embeds": 3}, {"class_labels": torch.tensor([0, 2])}),
    "grey": ({"conditioning_channels": 1}, {"controlnet_cond": seeded(2, 1, 32, 32)}),
    "text projection": ({"encoder_hid_dim": 6}, {}),
    "pooled text": ({"addition_embed_type": "text", "addition_embed_type_num_heads": 4}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_matches(case: str) -> None:
    config, extra = CASES[case]
    theirs, ours = pair({**TINY, **config})
    with torch.no_grad():
        expected, got = theirs(**inputs(**extra)), ours(**inputs(**extra))
        downs, mid = ours(**inputs(**extra), return_dict=False)
    assert len(got.down_block_res_samples) == len(expected.down_block_res_samples) == len(downs)
    for mine, right in zip(
        [*got.down_block_res_samples, got.mid_block_res_sample, mid],
        [*expected.down_block_res_samples, expected.mid_block_res_sample, expected.mid_block_res_sample],
        strict=True,
    ):
        assert mine.shape == right.shape
        assert (mine - right).abs().max() <= 1e-5


def test_real_config() -> None:
    config = json.loads(hub_config("lllyasviel/control_v11p_sd15_canny/config.json").read_text())
    with torch.device("meta"):
        ours, theirs = ControlNetModel.from_config(config), diffusers.ControlNetModel.from_config(config)
    mine = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert mine == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert round(sum(parameter.numel() for parameter in ours.parameters()) / 1e6, 2) == 361.28


def test_config_keys_and_defaults_equal_the_reference() -> None:
    theirs = inspect.signature(diffusers.ControlNetModel.__init__).parameters
    ours = inspect.signature(ControlNetModel.__init__).parameters
    assert {key: entry.default for key, entry in ours.items()} == {key: entry.default for key, entry in theirs.items()}
    for method in ("forward", "from_unet"):
        theirs = inspect.signature(getattr(diffusers.ControlNetModel, method)).parameters
        assert list(inspect.signature(getattr(ControlNetModel, method)).parameters) == list(theirs)


def test_made_from_a_unet_it_copies_the_weights_and_steers_nothing() -> None:
    unet = UNet2DConditionModel(**HALF, **SIZES, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")).eval()
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 6, 8)).eval()
    theirs = unet.state_dict()
    shared = [name for name in net.state_dict() if not name.startswith("controlnet_")]
    assert shared and all(torch.equal(net.state_dict()[name], theirs[name]) for name in shared)
    given = inputs(**added())
    with torch.no_grad():
        downs, mid = net(**given, return_dict=False)
        assert all(not features.any() for features in [*downs, mid])
        given.pop("controlnet_cond")
        steered = unet(**given, down_block_additional_residuals=downs, mid_block_additional_residual=mid)
        assert torch.equal(steered.sample, unet(**given).sample)
    untouched = ControlNetModel.from_unet(unet, load_weights_from_unet=False)
    assert not torch.equal(untouched.conv_in.weight, unet.conv_in.weight)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"controlnet_conditioning_channel_order": "xyz"}, ["xyz", "rgb"]),
        ({"mid_block_type": None}, ["mid_block_type"]),
        ({"conditioning_embedding_out_channels": None}, ["conditioning_embedding_out_channels"]),
        ({"transformer_layers_per_block": (1,)}, ["transformer_layers_per_block", "1 entries", "2"]),
        ({"down_block_types": ("Other", "DownBlock2D")}, ["Other"]),
        ({"down_block_types": ("SkipDownBlock2D", "DownBlock2D")}, ["SkipDownBlock2D"]),
        ({"addition_embed_type": "text_image"}, ["text_image"]),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ControlNetModel(**{**TINY, **config})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"controlnet_cond": seeded(2, 3, 64, 64)}, ["controlnet_cond", "(2, 3, 64, 64)", "(2, 3, 32, 32)"]),
        ({"controlnet_cond": seeded(2, 1, 32, 32)}, ["(2, 3, 32, 32)"]),
        ({"controlnet_cond": seeded(3, 3, 32, 32)}, ["(3, 3, 32, 32)"]),
        ({"sample": seeded(2, 9, 8, 8)}, ["9", "in_channels=4"]),
        ({"timestep_cond": seeded(2, 4)}, ["time_cond_proj_dim"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught, torch.no_grad():
        ControlNetModel(**TINY)(**inputs(**changes))
    for word in words:
        assert word in str(caught.value)


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    _, net = pair(TINY)
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    given = inputs(timestep=torch.tensor(7), guess_mode=True)
    with torch.no_grad():
        assert (compiled(**given).mid_block_res_sample - net(**given).mid_block_res_sample).abs().max() <= 1e-5
