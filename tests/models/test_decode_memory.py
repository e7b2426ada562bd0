"""Decodes take little memory: widest tensors are overwritten, freed and made in strips, and no bit changes."""

from typing import Any

import diffusers
import pytest
import torch

from benchmarks.meters import peak_activations
from diffusion_core.models import AutoencoderKL
from diffusion_core.models.layers.resnet import DoublingConv2d

KL: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


def decoder_like_sd(kind: Any) -> Any:
    """Stable Diffusion's autoencoder, in its own width, without values."""
    with torch.device("meta"):
        model = kind(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
        )
    return model.to(torch.bfloat16).eval()


def test_a_decode_holds_a_third_less_than_the_reference() -> None:
    latents = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16, device="meta")
    ours, theirs = decoder_like_sd(AutoencoderKL), decoder_like_sd(diffusers.AutoencoderKL)
    with torch.no_grad():
        peak = peak_activations(lambda: ours.decode(latents))
        assert peak <= 0.75 * peak_activations(lambda: theirs.decode(latents))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strips_and_overwriting_change_no_bit(
    layout: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoencoderKL(
        block_out_channels=(8, 16, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
    ).eval()
    model.to(dtype).to(memory_format=layout)
    latents = torch.randn(2, 4, 17, 23).to(dtype)
    before = latents.clone()
    plain = model.decode(latents).sample.detach()  # gradients are recorded: each step has memory of its own
    monkeypatch.setattr(DoublingConv2d, "LARGE", 1)
    with torch.no_grad():
        found = model.decode(latents).sample
    assert torch.equal(found, plain)
    assert found.stride() == plain.stride()
    assert torch.equal(latents, before)


def test_gradients_pass_through_a_decode() -> None:
    model = AutoencoderKL(**KL)
    latents = torch.randn(1, 4, 4, 4, requires_grad=True)
    model.decode(latents).sample.square().sum().backward()
    assert latents.grad is not None and float(latents.grad.abs().sum()) > 0
