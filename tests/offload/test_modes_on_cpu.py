"""The memory modes of pipelines on a machine without accelerator, and 8-bit weights in counts of bytes."""

import pytest
import torch

import diffusion_core
from diffusion_core.errors import PlacementError
from diffusion_core.hub import find_weights
from diffusion_core.offload.checkpoint import Checkpoint
from diffusion_core.offload.engine import placement_of
from diffusion_core.offload.saving import save_tensors
from tests.offload.drawing import draw, expected, load, undo

MODES = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
    "block": lambda pipe: pipe.enable_group_offload("cpu"),
    "leaf": lambda pipe: pipe.enable_group_offload("cpu", offload_type="leaf_level", non_blocking=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_runs_on_the_cpu(mode, tmp_path):
    """Case 85."""
    pipe = load()
    MODES[mode](pipe)
    assert pipe.device == torch.device("cpu") and placement_of(pipe.unet) is not None
    for _ in range(2):
        assert torch.equal(draw(pipe), expected())
    undo(pipe)
    assert placement_of(pipe.unet) is None and torch.equal(draw(pipe), expected())


def test_disk_on_the_cpu_leaves_no_file(tmp_path):
    pipe = load()
    pipe.enable_group_offload("cpu", offload_to_disk_path=str(tmp_path))
    assert torch.equal(draw(pipe), expected())
    pipe.disable_group_offload()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_accelerator_and_device_the_remedy_is_named():
    pipe = load()
    for enable in (pipe.enable_model_cpu_offload, pipe.enable_sequential_cpu_offload):
        with pytest.raises(PlacementError, match=r"no accelerator here.*device='cpu'"):
            enable()
    assert placement_of(pipe.unet) is None


def test_eight_bit_weights_take_one_byte_in_shards_and_reports(tmp_path):
    """Case 97."""
    weights = {f"w{index}": torch.ones(1000, 100).to(torch.float8_e4m3fn) for index in range(4)}
    save_tensors(weights, tmp_path, max_shard_size=210_000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    with Checkpoint(find_weights(tmp_path)) as checkpoint:
        assert all(checkpoint[name].dtype == torch.float8_e4m3fn for name in weights)
        assert sum(info.end - info.begin for info in checkpoint.infos.values()) == 400_000
    model = diffusion_core.AutoencoderTiny()
    whole, convolutions = model.get_memory_footprint(), 0
    model.enable_layerwise_casting(skip_modules_pattern=())
    for layer in model.modules():
        convolutions += layer.weight.numel() if isinstance(layer, torch.nn.Conv2d) else 0
    assert whole - model.get_memory_footprint() == pytest.approx(3 * convolutions, rel=0.02)
