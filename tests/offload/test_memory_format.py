"""Channels last by tensor, kept through saving, loading, casting and placing."""

import pytest
import torch
from torch import nn

from diffusion_core import UNet2DConditionModel
from diffusion_core.models.base import Model
from diffusion_core.offload.memory_format import to_memory_format
from tests.offload.casting_models import run, tiny_unet, unet_inputs

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


class Video(Model):
    """Weights of 2, 3, 4 and 5 axes, as a video autoencoder has them."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.frames = nn.Conv3d(channels, channels, 3, padding=1)
        self.picture = nn.Conv2d(channels, channels, 3, padding=1)
        self.signal = nn.Conv1d(channels, channels, 3, padding=1)
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.picture(self.frames(x).mean(dim=2))
        return self.linear(self.signal(x.flatten(2)).transpose(1, 2))


def is_last(module: nn.Module) -> bool:
    return all(
        tensor.is_contiguous(memory_format={4: LAST, 5: LAST_3D}.get(tensor.dim(), torch.contiguous_format))
        for tensor in module.state_dict().values()
    )


@pytest.mark.parametrize("given", [LAST, LAST_3D, "auto"])
def test_each_tensor_gets_the_layout_that_fits_it(given):
    """Case 43: torch raises for weights of 5 axes, having converted those before them."""
    torch.manual_seed(0)
    model, x = Video(), torch.randn(1, 4, 2, 6, 6)
    with torch.no_grad():
        expected = model(x)
    with pytest.raises(RuntimeError, match="rank"):
        nn.Module.to(Video(), memory_format=LAST)
    parameters = list(model.parameters())
    assert model.to(memory_format=given) is model and is_last(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.frames.weight.stride() == (108, 1, 36, 12, 4)
    assert model.picture.weight.stride() == (36, 1, 12, 4)
    with torch.no_grad():
        assert torch.allclose(model(x), expected, atol=1e-6)
    model.to(memory_format=torch.contiguous_format)
    assert all(tensor.is_contiguous() for tensor in model.parameters())


def test_any_module_and_other_arguments_at_once():
    module = to_memory_format(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv3d(4, 4, 3)))
    assert is_last(module)
    model = Video().to(torch.bfloat16, memory_format=LAST)
    assert is_last(model) and model.dtype == torch.bfloat16


def test_the_guide_example_shows_the_stride():
    """Guide row 18."""
    model = tiny_unet()
    model.to(memory_format=torch.channels_last)
    assert model.conv_out.weight.stride() == (144, 1, 48, 16)


def test_the_layout_is_kept_through_saving_and_loading(tmp_path):
    model = tiny_unet().to(memory_format=LAST)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert is_last(UNet2DConditionModel.from_pretrained(tmp_path, dtype=dtype))
    again = UNet2DConditionModel.from_pretrained(tmp_path)
    again.to(memory_format=torch.contiguous_format).save_pretrained(tmp_path)
    assert all(tensor.is_contiguous() for tensor in UNet2DConditionModel.from_pretrained(tmp_path).parameters())


@pytest.mark.parametrize("storage", ["plain", "int8", "fp8_scaled"])
@pytest.mark.parametrize("layout_first", [True, False])
def test_the_layout_is_kept_through_casting(storage, layout_first):
    model, plain = tiny_unet(), tiny_unet()
    plain.enable_layerwise_casting(storage=storage)
    if layout_first:
        model.to(memory_format=LAST)
    model.enable_layerwise_casting(storage=storage)
    if not layout_first:
        model.to(memory_format=LAST)
    assert all(tensor.is_contiguous(memory_format=LAST) for tensor in model.parameters() if tensor.dim() == 4)
    from diffusion_core.offload.cast_layers import decoded

    assert decoded(model.conv_in, "weight").is_contiguous(memory_format=LAST) and is_last(model)
    assert model.conv_in.weight.is_contiguous(memory_format=LAST) and model.conv_in.weight.stride()[1] == 1
    assert torch.allclose(run(model, **unet_inputs()), run(plain, **unet_inputs()), atol=1e-5)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    model.to(torch.bfloat16)
    assert is_last(model)
    model.disable_layerwise_casting()
    assert is_last(model)


@pytest.mark.parametrize("wrong", ["channels_last", 3, None.__class__])
def test_what_is_no_layout_is_refused(wrong):
    model = Video()
    with pytest.raises((TypeError, ValueError), match="memory_format"):
        model.to(memory_format=wrong)
    assert all(tensor.is_contiguous() for tensor in model.parameters())
