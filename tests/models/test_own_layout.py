"""In half precision, models of convolutions choose channels last by themselves, and say so."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_core.models import AutoencoderKL, UNet2DConditionModel

LAST = torch.channels_last
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "norm_num_groups": 4,
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
}
KL: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


def is_last(model: torch.nn.Module) -> bool:
    weight = model.conv_in.weight
    return weight.is_contiguous(memory_format=LAST) and not weight.is_contiguous()


def call(model: UNet2DConditionModel, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sample, text = (torch.randn(shape, generator=generator).to(dtype) for shape in ((1, 4, 8, 8), (1, 3, 8)))
    with torch.no_grad():
        return model(sample, 5, text).sample


def test_a_cast_to_half_precision_lays_weights_out(caplog: pytest.LogCaptureFixture) -> None:
    model = UNet2DConditionModel(**UNET)
    assert not is_last(model)
    with caplog.at_level(logging.INFO, logger="diffusion_core"):
        model.to(torch.bfloat16)
    assert is_last(model)
    assert caplog.text.count("channels last") == 1
    assert call(model, torch.bfloat16).shape == (1, 4, 8, 8)
    assert not is_last(model.to(memory_format=torch.contiguous_format))
    assert not is_last(UNet2DConditionModel(**UNET).to(torch.float64))


def test_a_load_with_a_cast_does_and_mapped_weights_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = UNet2DConditionModel(**UNET).eval()
    model.save_pretrained(tmp_path / "single")
    cast = UNet2DConditionModel.from_pretrained(tmp_path / "single", dtype=torch.bfloat16)
    assert is_last(cast)
    assert torch.equal(call(cast, torch.bfloat16), call(model.to(torch.bfloat16), torch.bfloat16))

    cast.save_pretrained(tmp_path / "half")
    mapped = UNet2DConditionModel.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    assert not is_last(mapped)  # this would be a copy
    assert all(torch.equal(mapped.state_dict()[name], weight) for name, weight in cast.state_dict().items())


def test_what_the_user_chose_is_kept(tmp_path: Path) -> None:
    model = UNet2DConditionModel(**UNET).to(torch.bfloat16).to(memory_format=LAST)
    model.save_pretrained(tmp_path)
    assert is_last(UNet2DConditionModel.from_pretrained(tmp_path, dtype=torch.bfloat16))


def test_an_autoencoder_works_in_channels_last_and_gives_back_what_it_got() -> None:
    torch.manual_seed(0)
    model = AutoencoderKL(**KL).eval()
    seen: list[bool] = []
    model.decoder.conv_in.register_forward_hook(lambda _, __, maps: seen.append(maps.is_contiguous(memory_format=LAST)))
    latents = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        plain = model.decode(latents).sample
        half = model.to(torch.bfloat16).decode(latents.bfloat16()).sample
        model.encode(half)
    assert seen == [False, True]
    assert half.is_contiguous()
    assert (half.float() - plain).abs().max() < 0.1
