"""Checkpoints of every model of Stable Diffusion and of DDPM go to the reference and come from it: same outputs."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import diffusion_core

BLOCKS = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
TEXT = {
    **BLOCKS,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
}
TINY = {f"{part}_block_out_channels": (8, 8) for part in ("encoder", "decoder")}
CONFIGS: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {**TEXT, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "sample_size": 8},
    "UNet2DModel": {
        **BLOCKS,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "sample_size": 8,
    },
    "ControlNetModel": {**TEXT, "conditioning_embedding_out_channels": (4, 8)},
    "AutoencoderKL": {
        **BLOCKS,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "AsymmetricAutoencoderKL": {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "down_block_out_channels": (8, 16),
        "up_block_out_channels": (8, 16),
        "norm_num_groups": 4,
    },
    "AutoencoderTiny": {**TINY, "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shards": {"max_shard_size": "10KB"},
    "half": {"variant": "fp16"},
    "half in shards": {"variant": "fp16", "max_shard_size": "10KB"},
}


def made(library: Any, name: str) -> Any:
    torch.manual_seed(0)
    return getattr(library, name)(**CONFIGS[name]).eval()


def output(model: Any) -> torch.Tensor:
    """The model's result for inputs that depend on its class alone."""
    name, source = type(model).__name__, torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(model.dtype)

    with torch.no_grad():
        if name == "UNet2DModel":
            return model(drawn(1, 3, 8, 8), 3).sample
        if name == "UNet2DConditionModel":
            return model(drawn(1, 4, 8, 8), 3, drawn(1, 5, 12)).sample
        if name == "ControlNetModel":
            # Two sizes of the picture are one of the latents here: one halving in the embedding of the condition.
            down, mid = model(drawn(1, 4, 8, 8), 3, drawn(1, 5, 12), drawn(1, 3, 16, 16), return_dict=False)
            return torch.cat([each.flatten() for each in (*down, mid)])
        return model(drawn(1, 3, 16, 16)).sample


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoints_go_both_ways(name: str, form: str, tmp_path: Path) -> None:
    options, half = FORMS[form], "half" in form
    reading = {"variant": "fp16", "torch_dtype": torch.float16} if half else {}
    theirs = made(diffusers, name)
    if name == "ControlNetModel":
        with torch.no_grad():
            # As made, its outputs are zero.
            for parameter in theirs.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.05)
    theirs = theirs.half() if half else theirs
    theirs.save_pretrained(tmp_path / "there", **options)
    ours = getattr(diffusion_core, name).from_pretrained(tmp_path / "there", **reading)
    ours.save_pretrained(tmp_path / "here", **options)
    again = getattr(diffusers, name).from_pretrained(tmp_path / "here", **reading)
    files = {path.name for path in (tmp_path / "here").glob("*.safetensors")}
    assert (len(files) > 1) is ("shards" in form) and all(("fp16" in file) is half for file in files)
    expected, found, back = output(theirs.float()), output(ours.float()), output(again.float())
    assert expected.abs().max() > 1e-3
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert torch.equal(back, expected)
    configs = [json.loads(each.to_json_string()) for each in (again, theirs)]
    plain = [{key: value for key, value in each.items() if not key.startswith("_")} for each in configs]
    assert {key: plain[0].get(key) for key in plain[1]} == plain[1]
