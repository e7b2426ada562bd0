"""Models of this library in every placement: transformers larger than any device, ControlNet, and what is saved."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from diffusion_core import ControlNetModel, FluxTransformer2DModel, StableDiffusionSafetyChecker
from diffusion_core.hooks import apply_group_offloading, apply_layerwise_casting
from diffusion_core.offload.engine import apply_plan
from diffusion_core.offload.simulator import simulator, unavailable
from diffusion_core.offload.stores import is_mapped
from diffusion_core.offload.strategies import Settings, by_map, whole

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
FLUX = {
    "in_channels": 8,
    "num_layers": 4,
    "num_single_layers": 8,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 12,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}
CONTROLNET = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "conditioning_embedding_out_channels": (4, 6, 8),
}
PLACES = {
    "on the device": lambda model: model.to("sim:0"),
    "whole": lambda model: apply_plan(model, whole(Settings(torch.device("sim:0"), return_outputs=True))),
    "map": lambda model: apply_plan(
        model, by_map(Settings(torch.device("sim:0")), {"": "sim:0", last_block(model): "sim:1"})
    ),
    "leaf": lambda model: apply_group_offloading(model, "sim:0", offload_type="leaf_level"),
    "block": lambda model: apply_group_offloading(model, "sim:0"),
    "three blocks": lambda model: apply_group_offloading(model, "sim:0", num_blocks_per_group=3, non_blocking=True),
    "leaf, streams": lambda model: apply_group_offloading(model, "sim:1", offload_type="leaf_level", use_stream=True),
    "block, recorded": lambda model: apply_group_offloading(model, "sim:0", use_stream=True, record_stream=True),
    "buffers": lambda model: apply_group_offloading(model, "sim:0", use_stream=True, low_cpu_mem_usage=True),
    "disk": lambda model: apply_group_offloading(model, "sim:0", offload_to_disk_path=mkdtemp()),
}
places = pytest.mark.parametrize("place", PLACES)


def last_block(model) -> str:
    return next(name for name, _ in reversed(list(model.named_modules())) if name.endswith(".0"))


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flux_inputs() -> dict[str, torch.Tensor]:
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    return {
        "hidden_states": seeded(1, 6, 8),
        "encoder_hidden_states": seeded(1, 5, 12, seed=1),
        "pooled_projections": seeded(1, 10, seed=2),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.cat([torch.zeros(6, 1), grid], dim=1),
        "txt_ids": torch.zeros(5, 3),
    }


def run(model, **inputs: torch.Tensor):
    """The results of a call, on the CPU."""
    device = next(model.parameters()).device if not hasattr(model, "device") else model.device
    with torch.no_grad():
        found = model(**{name: value.to(device) for name, value in inputs.items()}, return_dict=False)
    tensors = [*found[0], found[1]] if isinstance(found[0], list | tuple) else [found[0]]
    return [tensor.cpu() for tensor in tensors]


def equal(found, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- larger than any device ----


@cache
def saved() -> Path:
    torch.manual_seed(0)
    folder = Path(mkdtemp())
    FluxTransformer2DModel(**FLUX).save_pretrained(folder)
    return folder


def load(**options) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(saved(), **options)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
@pytest.mark.parametrize("share", [0.62, 0.5])
def test_a_transformer_larger_than_any_device_is_split_over_two(device_map, share) -> None:
    """At a half, it is twice as large as any device: some blocks come in from the CPU, and each keeps its cap."""
    model = load()
    expected, size = run(model, **flux_inputs()), model.get_memory_footprint()
    with simulator(devices=2, capacity=int(share * size)) as sim:
        limit = int((share - 0.08) * size)
        split = load(device_map=device_map, max_memory={0: limit, 1: limit})
        used = set(split.hf_device_map.values())
        assert used == ({0, 1} if share > 0.6 else {0, 1, "cpu"})
        for _ in range(3):
            assert equal(run(split, **flux_inputs()), expected)
        assert all(sim.statistics(index).peak <= sim.statistics(index).capacity for index in (0, 1))


# ---- the same numbers, and the same files ----


def controlnet() -> ControlNetModel:
    torch.manual_seed(0)
    model = ControlNetModel(**CONTROLNET).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # its last layers begin with zeros, which would hide everything
    return model


@places
def test_controlnet_in_every_placement(place) -> None:
    inputs = {
        "sample": seeded(2, 4, 8, 8),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": seeded(2, 5, 12),
        "controlnet_cond": seeded(2, 3, 32, 32),
    }
    expected = run(controlnet(), **inputs)
    assert len(expected) > 2 and all(tensor.abs().max() > 0 for tensor in expected)
    with simulator(devices=2):
        model = controlnet()
        PLACES[place](model)
        for _ in range(3):
            assert equal(run(model, **inputs), expected)


def checker() -> StableDiffusionSafetyChecker:
    from transformers import CLIPConfig

    torch.manual_seed(0)
    layers = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=layers, vision_config={**layers, "image_size": 16, "patch_size": 8}, projection_dim=6
    )
    made = StableDiffusionSafetyChecker(config).eval()
    with torch.no_grad():
        for name in ("concept_embeds", "special_care_embeds"):
            getattr(made, name).normal_(generator=torch.Generator().manual_seed(1))
        made.visual_projection.weight.normal_(generator=torch.Generator().manual_seed(2))
        made.concept_embeds_weights.fill_(0.8)
        made.special_care_embeds_weights.fill_(0.8)
    return made


@places
def test_the_safety_checker_in_every_placement(place) -> None:
    """It is called with pictures on the host beside its own input, and some of its weights are bare parameters."""

    def judge(model) -> tuple[torch.Tensor, list[bool]]:
        device = next(model.parameters()).device if place == "on the device" else torch.device("cpu")
        with torch.no_grad():
            pictures, found = model(clip_input=seeded(6, 3, 16, 16).to(device), images=torch.ones(6, 4, 4, 3))
        return pictures.cpu(), found

    expected = judge(checker())
    assert 0 < sum(expected[1]) < 6
    with simulator(devices=2):
        model = checker()
        PLACES[place](model)
        for _ in range(3):
            pictures, found = judge(model)
            assert found == expected[1] and torch.equal(pictures, expected[0])


@places
@pytest.mark.parametrize("storage", [None, "plain", "int8"])
def test_what_is_saved_is_the_same_bit_by_bit(place, storage, tmp_path) -> None:
    """Under casting too, since the home of what was loaded is the mapped file."""
    with simulator(devices=2):
        model, plain = load(dtype="auto"), load(dtype="auto")
        assert all(is_mapped(parameter) for parameter in model.parameters())
        if storage:
            apply_layerwise_casting(model, storage=storage)
            apply_layerwise_casting(plain, storage=storage)
        PLACES[place](model)
        assert equal(run(model, **flux_inputs()), run(plain, **flux_inputs()))
        state, right = model.state_dict(), load(dtype="auto").state_dict()
        assert state.keys() == right.keys()
        assert all(torch.equal(state[name].cpu(), tensor) for name, tensor in right.items())
        model.save_pretrained(tmp_path)
    for path in saved().iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes() or path.suffix == ".json"
