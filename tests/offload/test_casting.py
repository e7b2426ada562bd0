"""Layerwise casting: numbers, what is cast, what comes back, and what other code sees."""

import copy
import gc
import logging
import math
import weakref

import pytest
import torch
from torch import nn

from diffusion_core import UNet2DConditionModel
from diffusion_core.offload.cast_layers import CastLayer
from diffusion_core.offload.casting import apply_layerwise_casting, is_cast, remove_layerwise_casting
from diffusion_core.offload.encodings import Encoding, parse_encoding
from tests.offload.casting_models import IDS, TINY, Layers, run, tiny_unet, unet_inputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STORAGES = ["plain", "int8", "fp8_scaled"]


@pytest.fixture
def mapped_unet(tmp_path):
    """A UNet whose weights are a mapped file, and the folder."""
    tiny_unet().save_pretrained(tmp_path / "unet")
    return UNet2DConditionModel.from_pretrained(tmp_path / "unet")


def stored_names(module: nn.Module) -> set[str]:
    return {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if isinstance(part, CastLayer)
        for name in part._stored
    }


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# ---- the numbers are those of diffusers ----


@pytest.mark.parametrize("storage_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_casting_equals_diffusers_bit_for_bit(storage_dtype, dtype):
    import diffusers

    theirs, ours = diffusers.UNet2DConditionModel(**TINY).eval().to(dtype), tiny_unet().to(dtype)
    ours.load_state_dict(theirs.state_dict())
    theirs.enable_layerwise_casting(storage_dtype=storage_dtype, compute_dtype=dtype)
    ours.enable_layerwise_casting(storage_dtype=storage_dtype, compute_dtype=dtype)
    small = {name for name, tensor in theirs.named_parameters() if tensor.dtype == storage_dtype}
    assert {name for name, tensor in ours.named_parameters() if tensor.dtype == storage_dtype} == small
    inputs = unet_inputs(dtype)
    for _ in range(2):
        assert torch.equal(run(ours, **inputs), run(theirs, **inputs))


@pytest.mark.parametrize("pattern", ["auto", (), ("conv", "tied")], ids=["auto", "nothing", "several"])
@pytest.mark.parametrize("classes", [None, (nn.Linear,), (nn.Conv2d, nn.Embedding)], ids=str)
def test_the_same_layers_are_cast_as_by_diffusers(pattern, classes):
    from diffusers.hooks import apply_layerwise_casting as theirs

    expected, module = nn.Sequential(Layers()), nn.Sequential(Layers())
    for part in (expected, module):
        part.tied_apart = nn.Linear(2, 2)
        part.inner = nn.ModuleDict({"proj_in": nn.Linear(2, 2), "renorm": nn.Linear(2, 2)})
        part.proj_in = nn.Sequential(nn.Linear(2, 2))
        part[0].tied.weight = nn.Parameter(torch.zeros(6, 8))
    theirs(expected, E4M3, torch.float32, pattern, classes)
    apply_layerwise_casting(module, E4M3, torch.float32, pattern, classes)
    small = {name for name, tensor in expected.named_parameters() if tensor.dtype == E4M3}
    assert small
    assert {name for name, tensor in module.named_parameters() if tensor.dtype == E4M3} == small


@pytest.mark.parametrize("storage", STORAGES)
def test_every_layer_computes_with_the_decoded_weight(storage):
    module = Layers()
    apply_layerwise_casting(module, storage=storage)
    assert {"embedding.weight", "tied.weight", "linear.weight", "back3.weight"} <= stored_names(module)
    assert "norm.weight" not in stored_names(module)
    with torch.no_grad():
        result = module(IDS)
        expected = Layers()
        expected.load_state_dict(module.state_dict())
        assert torch.equal(result, expected(IDS))


# ---- 8 bits with a scale a row ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 96), (32, 8, 3, 3), (1, 5), (7, 1)])
def test_int8_is_off_by_half_a_step_at_most(dtype, shape):
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.03).to(dtype)
    encoding = parse_encoding("int8", None)
    stored, scale = encoding.encode(values)
    assert stored.dtype == torch.int8 and stored.shape == values.shape and scale.shape[0] == shape[0]
    decoded = encoding.decode(stored, scale, dtype)
    largest = values.float().flatten(1).abs().amax(1).view(scale.shape)
    # Half a step, and the rounding of the scale and of the product to the dtype.
    bound = largest / 127 * (0.5 + 2**-8) + largest * torch.finfo(dtype).eps
    assert decoded.dtype == dtype
    assert bool(((decoded.float() - values.float()).abs() <= bound).all())


@pytest.mark.parametrize("storage_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-6, 0.02, 3e4])
def test_scaled_fp8_keeps_the_bits_of_its_dtype_whatever_the_size_of_the_weights(storage_dtype, size):
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * size
    encoding = parse_encoding("fp8_scaled", storage_dtype)
    stored, scale = encoding.encode(values)
    decoded = encoding.decode(stored, scale, torch.float32)
    finest = torch.finfo(storage_dtype)
    error = (decoded - values).abs()
    bound = torch.maximum(values.abs() * finest.eps / 2, scale.float() * finest.smallest_normal * finest.eps)
    assert bool((error <= bound).all())
    assert bool((torch.frexp(scale.float()).mantissa == 0.5).all()), "scales are powers of two"


def test_scales_help_where_weights_are_small():
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.005

    def error(encoding: Encoding) -> float:
        return float((encoding.decode(*encoding.encode(values), torch.float32) - values).norm() / values.norm())

    plain, scaled, int8 = (error(parse_encoding(name, None)) for name in ("plain", "fp8_scaled", "int8"))
    assert int8 < 0.009 and scaled < 0.027 and plain > 0.05


@pytest.mark.parametrize("storage_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_finite_8_bit_float_is_decoded_as_torch_does(storage_dtype, dtype):
    every = torch.arange(256, dtype=torch.uint8).view(storage_dtype)
    every = every[every.float().isfinite()]
    expected = every.to(dtype)
    decoded = Encoding("plain", storage_dtype).decode(every, None, dtype)
    assert torch.equal(decoded, expected) and torch.equal(decoded.signbit(), expected.signbit())


def test_large_weights_are_encoded_by_blocks_of_rows(monkeypatch):
    values = torch.randn(33, 10, 2)
    encoding = parse_encoding("int8", None)
    expected = encoding.encode(values)
    monkeypatch.setattr("diffusion_core.offload.encodings._BLOCK", 64)
    for a, b in zip(encoding.encode(values), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("storage", ["int8", "fp8_scaled"])
def test_rows_of_zeros_and_encoding_again_change_nothing(storage):
    encoding = parse_encoding(storage, None)
    values = torch.randn(4, 6) * torch.tensor([[1.0], [0.0], [1e-30], [100.0]])
    once = encoding.decode(*encoding.encode(values), torch.float32)
    assert torch.equal(encoding.decode(*encoding.encode(once), torch.float32), once)
    assert not once[1].any() and once.isfinite().all()


@pytest.mark.parametrize("storage", STORAGES)
def test_error_of_a_whole_model(storage):
    model, inputs = tiny_unet(), unet_inputs()
    before = run(model, **inputs)
    model.enable_layerwise_casting(storage=storage)
    error = float((run(model, **inputs) - before).norm() / before.norm())
    assert 0 < error < {"plain": 0.12, "int8": 0.02, "fp8_scaled": 0.12}[storage]


def test_scaled_storage_takes_the_matrices_of_adaptive_norms_too():
    """Case 94: for "norm" in their names, a quarter of a large transformer stays in 16 bits."""

    class AdaptiveNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 48), nn.LayerNorm(8)

    def block() -> nn.Module:
        module = nn.Module()
        module.norm1, module.ff, module.pos_embed = AdaptiveNorm(), nn.Linear(8, 8), nn.Linear(8, 8)
        return module

    plain, scaled = block(), block()
    apply_layerwise_casting(plain)
    apply_layerwise_casting(scaled, storage="int8")
    assert stored_names(plain) == {"ff.weight", "ff.bias"}
    assert stored_names(scaled) == {"ff.weight", "norm1.linear.weight"}


# ---- what stays ----


def test_skipping_by_class_name_and_fragment():
    """Guide row 17 gives "norm" for `skip_modules_classes`, a TypeError in diffusers."""

    class FancyNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Conv2d(2, 2, 1), FancyNorm(), nn.ModuleList([nn.Conv1d(2, 2, 1)]))

    for given, expected in {
        "norm": {"0", "1", "3.0"},
        ("norm", "conv"): {"0"},
        ("Linear", FancyNorm): {"1", "3.0"},
        nn.Conv2d: {"0", "2.inner", "3.0"},
        ("modulelist",): {"0", "1", "2.inner"},
    }.items():
        part = module()
        given = [given] if given == "norm" else given
        apply_layerwise_casting(part, skip_modules_pattern=None, skip_modules_classes=given, non_blocking=True)
        assert {name.rpartition(".")[0] for name in stored_names(part)} == expected, given


def test_classes_say_what_stays_wherever_they_are():
    class Careful(nn.Module):
        _skip_layerwise_casting_patterns = ("^first$",)
        _keep_in_fp32_modules = ("gate",)

        def __init__(self):
            super().__init__()
            self.first, self.gate, self.gateway, self.last = (nn.Linear(2, 2) for _ in range(4))

    module = nn.ModuleDict({"first": nn.Linear(2, 2), "careful": Careful()})
    apply_layerwise_casting(module, skip_modules_pattern=None)
    layers = {name.rpartition(".")[0] for name in stored_names(module)}
    assert layers == {"first", "careful.gateway", "careful.last"}


def test_adapters_of_peft_stay():
    module = nn.ModuleDict({"to_q": nn.ModuleDict({"base": nn.Linear(2, 2), "lora_A": nn.Linear(2, 1)})})
    apply_layerwise_casting(module)
    assert stored_names(module) == {"to_q.base.weight", "to_q.base.bias"}


def test_a_shared_weight_is_stored_once_and_stays_shared():
    module = Layers()
    weight = module.embedding.weight
    apply_layerwise_casting(module, storage="int8")
    assert module._modules["tied"]._parameters["weight"] is module._modules["embedding"]._parameters["weight"] is weight
    state = module.state_dict()
    assert state["tied.weight"] is state["embedding.weight"]
    remove_layerwise_casting(module)
    assert module.tied.weight is module.embedding.weight is weight and weight.requires_grad


def test_a_weight_shared_with_a_layer_that_stays_is_not_cast():
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "norm": nn.Linear(4, 4)})
    module["norm"].weight = module["a"].weight
    apply_layerwise_casting(module)
    assert stored_names(module) == {"a.bias"} and module["norm"].weight.dtype == torch.float32


def test_layers_that_compute_or_change_their_weight_stay():
    module = nn.ModuleDict(
        {
            "normed": torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "renormed": nn.Embedding(4, 4, max_norm=1.0),
            "plain": nn.Linear(4, 4, bias=False),
        }
    )
    apply_layerwise_casting(module, skip_modules_pattern=None)
    assert stored_names(module) == {"plain.weight"}
    assert module["normed"](torch.ones(1, 4)).isfinite().all()


def test_attention_of_torch_reads_a_cast_projection():
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 3, 8)
    with torch.no_grad():
        before, _ = module(x, x, x)
        apply_layerwise_casting(module)
        after, _ = module(x, x, x)
    assert stored_names(module) == {"out_proj.weight", "out_proj.bias"}
    assert torch.allclose(before, after, atol=0.05)


# ---- dtypes ----


@pytest.mark.parametrize("storage", STORAGES)
def test_the_model_says_the_dtype_that_it_computes_in(storage):
    """Case 86, and case 97 on the memory."""
    model = tiny_unet().to(torch.bfloat16)
    before = model.get_memory_footprint()
    model.enable_layerwise_casting(storage=storage)
    assert model.dtype == torch.bfloat16 and run(model).dtype == torch.bfloat16
    assert {tensor.element_size() for tensor in model.conv_in._parameters.values()} <= {1, 2}
    assert model.get_memory_footprint() < 0.56 * before
    assert model.num_parameters() == tiny_unet().num_parameters()
    alone = nn.Sequential(nn.Linear(4, 4)).to(torch.bfloat16)
    apply_layerwise_casting(alone)
    apply_layerwise_casting(alone, storage_dtype=E5M2)
    assert alone[0].weight.dtype == torch.bfloat16 and alone[0]._parameters["weight"].dtype == E5M2


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to(torch.float64)])
def test_to_a_dtype_changes_what_is_computed_in_not_what_is_stored(storage, convert):
    """Case 91: in diffusers the storage is undone, and the forward raises."""
    model = tiny_unet()
    model.enable_layerwise_casting(storage=storage)
    stored = {name: tensor.clone() for name, tensor in model.named_parameters() if tensor.element_size() == 1}
    convert(model)
    dtype = convert(torch.zeros(1)).dtype
    assert model.dtype == dtype and run(model).dtype == dtype
    now = dict(model.named_parameters())
    for name, tensor in stored.items():
        assert now[name].dtype == tensor.dtype and torch.equal(now[name].view(torch.uint8), tensor.view(torch.uint8))
    model.disable_layerwise_casting()
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}


def test_another_compute_dtype_counts_for_all_layers(mapped_unet):
    """Case 92: in diffusers the layers that are skipped stay in float32, and the first of them raises."""
    model, exact = mapped_unet, tiny_unet()
    model.enable_layerwise_casting(compute_dtype=torch.bfloat16, skip_modules_pattern=("to_q", "norm"))
    assert model.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in model.parameters()} == {E4M3, torch.bfloat16}
    assert run(model, **unet_inputs(torch.bfloat16)).isfinite().all()
    model.disable_layerwise_casting()
    assert model.dtype == torch.float32 and same(model, exact)


def test_what_a_class_keeps_in_float32_stays_so():
    class Kept(UNet2DConditionModel):
        _keep_in_fp32_modules = ("conv_norm_out",)

    model = Kept(**TINY)
    model.enable_layerwise_casting(compute_dtype=torch.bfloat16)
    assert model.conv_norm_out.weight.dtype == torch.float32 and model.dtype == torch.bfloat16


def test_weights_that_are_8_bit_floats_already_are_taken_as_they_are(tmp_path):
    small = tiny_unet()
    small.enable_layerwise_casting()
    expected = run(small)
    tensors = {name: tensor.data for name, tensor in small.named_parameters()}
    from diffusion_core.offload.saving import save_tensors

    save_tensors(tensors, tmp_path)
    small.save_config(tmp_path)
    model = UNet2DConditionModel.from_pretrained(tmp_path, dtype="auto")
    pointers = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    model.enable_layerwise_casting(compute_dtype=torch.float32)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == pointers
    assert torch.equal(run(model), expected)


# ---- taking it back ----


@pytest.mark.parametrize("storage", STORAGES)
def test_a_mapped_model_gets_its_exact_weights_back(mapped_unet, storage):
    model = mapped_unet
    before, parameters = run(model), dict(model.named_parameters())
    pointers = {name: tensor.data_ptr() for name, tensor in parameters.items()}
    classes = [type(part) for part in model.modules()]
    buffers = [name for name, _ in model.named_buffers()]
    model.enable_layerwise_casting(storage=storage)
    assert not torch.equal(run(model), before)
    assert all(tensor is parameters[name] for name, tensor in model.named_parameters())
    model.disable_layerwise_casting()
    assert torch.equal(run(model), before)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == pointers
    assert all(tensor is parameters[name] and tensor.requires_grad for name, tensor in model.named_parameters())
    assert [type(part) for part in model.modules()] == classes
    assert [name for name, _ in model.named_buffers()] == buffers and not is_cast(model)
    for part in model.modules():
        assert not {"_stored", "_before_casting"} & part.__dict__.keys()
    model.disable_layerwise_casting()


@pytest.mark.parametrize("storage", STORAGES)
def test_a_model_in_memory_is_encoded_in_place_and_the_log_says_so_once(storage, caplog):
    model = tiny_unet()
    old = [weakref.ref(model.conv_in.weight.data.untyped_storage()), model.conv_in.weight.data_ptr()]
    with caplog.at_level(logging.WARNING):
        model.enable_layerwise_casting(storage=storage)
    assert len([record for record in caplog.records if "in memory only" in record.getMessage()]) == 1
    gc.collect()
    assert old[0]() is None
    rounded = run(model)
    model.disable_layerwise_casting()
    assert torch.equal(run(model), rounded) and {tensor.dtype for tensor in model.parameters()} == {torch.float32}


def test_enabling_again_replaces(mapped_unet):
    model, expected = mapped_unet, tiny_unet()
    expected.enable_layerwise_casting(storage="int8", skip_modules_pattern=["conv"])
    model.enable_layerwise_casting(storage_dtype=E5M2)
    model.enable_layerwise_casting()
    model.enable_layerwise_casting(storage="int8", skip_modules_pattern=["conv"])
    assert stored_names(model) == stored_names(expected)
    assert torch.equal(run(model), run(expected))
    assert model.conv_in.weight.dtype == torch.float32 and "conv_in.weight_scale" not in dict(model.named_buffers())


@pytest.mark.parametrize("storage", STORAGES)
def test_enabling_the_same_again_loses_nothing(storage):
    model = tiny_unet()
    model.enable_layerwise_casting(storage=storage)
    before = run(model)
    model.enable_layerwise_casting(storage=storage)
    assert torch.equal(run(model), before)
    model.enable_layerwise_casting(storage=storage, compute_dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_part_of_a_model_can_be_cast(mapped_unet):
    exact = run(mapped_unet)
    apply_layerwise_casting(mapped_unet.down_blocks[0], storage="int8")
    assert all(name.startswith("down_blocks.0") for name in stored_names(mapped_unet))
    assert mapped_unet.dtype == torch.float32
    mapped_unet.enable_layerwise_casting()
    mapped_unet.disable_layerwise_casting()
    assert torch.equal(run(mapped_unet), exact)


# ---- saving and loading ----


@pytest.mark.parametrize("storage", STORAGES)
def test_state_dict_of_a_mapped_model_is_exact(mapped_unet, storage, tmp_path):
    expected = tiny_unet()
    mapped_unet.enable_layerwise_casting(storage=storage)
    assert same(mapped_unet, expected)
    mapped_unet.save_pretrained(tmp_path / "again")
    assert same(UNet2DConditionModel.from_pretrained(tmp_path / "again"), expected)
    # Over the very files that it is mapped from.
    mapped_unet.save_pretrained(tmp_path / "unet")
    assert same(UNet2DConditionModel.from_pretrained(tmp_path / "unet"), expected)


@pytest.mark.parametrize("storage", STORAGES)
def test_state_dict_of_a_model_in_memory_is_what_it_computes_with(storage, tmp_path):
    model = tiny_unet()
    model.enable_layerwise_casting(storage=storage)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert set(model.state_dict()) == set(tiny_unet().state_dict())
    model.save_pretrained(tmp_path)
    plain = UNet2DConditionModel.from_pretrained(tmp_path)
    assert torch.equal(run(plain), run(model))
    model.enable_layerwise_casting(storage=storage, compute_dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_encodes_what_comes_in(storage, assign):
    other = tiny_unet()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model = tiny_unet()
    model.enable_layerwise_casting(storage=storage)
    assert not any(model.load_state_dict(other.state_dict(), assign=assign))
    other.enable_layerwise_casting(storage=storage)
    assert torch.equal(run(model), run(other))
    with pytest.raises(RuntimeError, match=r"Missing key.*conv_in\.weight"):
        model.load_state_dict({key: value for key, value in model.state_dict().items() if key != "conv_in.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for conv_in\.weight"):
        model.load_state_dict({**model.state_dict(), "conv_in.weight": torch.zeros(1)})


@pytest.mark.parametrize("storage", STORAGES)
def test_copies_and_pickles_are_cast_too(storage, tmp_path):
    model = tiny_unet()
    model.enable_layerwise_casting(storage=storage)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(run(other), run(model)) and other.dtype == model.dtype
        before = run(model)
        with torch.no_grad():
            other.conv_in.weight.zero_()
        assert torch.equal(run(model), before) and not torch.equal(run(other), before)


# ---- what other code sees of a weight ----


def edits():
    delta = torch.full((8, 8), 0.25)

    def data(layer):
        layer.weight.data += delta

    def method(layer):
        with torch.no_grad():
            layer.weight.add_(delta)

    def replace(layer):
        layer.weight.data = layer.weight.data.clone() + delta

    def parameter(layer):
        layer.weight = nn.Parameter(layer.weight + delta)

    def rows(layer):
        for i in range(8):
            layer.weight.data[i] = layer.weight.data[i] + delta[i]

    def view(layer):
        flat, rest = layer.weight.detach().view(-1)[:32], layer.weight.data[4:]
        flat.add_(0.25)
        rest += 0.25

    def out(layer):
        torch.add(layer.weight, delta, out=layer.weight)

    def copied(layer):
        layer.weight.data.copy_(layer.weight + delta)

    return [data, method, replace, parameter, rows, view, out, copied]


@pytest.mark.parametrize("edit", edits(), ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("mapped", [True, False])
def test_changes_in_place_are_stored_and_reach_the_master(edit, storage, mapped, tmp_path, monkeypatch):
    """Cases 70 and 89: merging a LoRA into a cast model, as PEFT does it."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    weight = layer.weight.detach().clone()
    if mapped:
        torch.save(weight, tmp_path / "weight.pt")
        layer.weight.data = torch.load(tmp_path / "weight.pt", mmap=True)
    apply_layerwise_casting(layer, storage=storage)
    start = weight if mapped else layer.weight.clone()
    edit(layer)
    encoding = parse_encoding(storage, None)
    # Where nothing but 8 bits is kept, row by row and half by half each change is rounded anew.
    exactly = mapped or edit.__name__ not in {"rows", "view"}
    expected = encoding.decode(*encoding.encode(start + 0.25), torch.float32)
    x = torch.eye(8)
    with torch.no_grad():
        assert torch.allclose(layer(x).T, expected, atol=0 if exactly else 0.04)
    remove_layerwise_casting(layer)
    final = layer.weight.detach()
    assert torch.equal(final, start + 0.25) if mapped else torch.allclose(final, expected, atol=0.04)


def test_a_weight_looks_like_a_tensor_of_the_compute_dtype():
    layer = nn.Linear(6, 4).to(torch.bfloat16)
    apply_layerwise_casting(layer)
    weight = layer.weight
    assert isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16 and weight.is_floating_point()
    assert weight.shape == (4, 6) and weight.numel() == 24 and len(weight) == 4 and weight.device.type == "cpu"
    assert weight.element_size() == 2 and weight.ndim == 2 and not weight.requires_grad
    assert torch.equal(weight.float() * 2, (weight * 2).float()) and "bfloat16" in repr(weight)
    assert torch.equal(torch.cat([weight, weight])[4:], weight.clone()) and weight.tolist() == weight.clone().tolist()
    assert type(weight.clone()) is torch.Tensor and type(weight @ weight.T) is torch.Tensor
    assert weight.mean().isfinite() and math.isfinite(weight[0, 0].item())
    copied = nn.Linear(6, 4)
    copied.weight.data.copy_(weight)
    assert torch.equal(copied.weight, weight.float())
    with pytest.raises(TypeError, match="cannot assign"):
        copied.weight = weight
    with pytest.raises(ValueError, match="shape"):
        layer.weight.data = torch.zeros(2, 2)


def test_another_parameter_in_place_of_a_stored_one_is_plain():
    layer = nn.Linear(4, 4)
    apply_layerwise_casting(layer, storage="int8")
    layer.weight = nn.Parameter(torch.ones(2, 4))
    layer.bias = None
    assert torch.equal(layer(torch.ones(1, 4)), torch.full((1, 2), 4.0))
    assert not dict(layer.named_buffers())
    remove_layerwise_casting(layer)
    assert type(layer) is nn.Linear


def test_an_adapter_made_for_a_cast_layer_is_in_the_compute_dtype():
    """Case 88: in diffusers adapters come in 8 bits, and the forward dies."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False).to(base.weight.device, base.weight.dtype)
            self.up = nn.Linear(2, base.out_features, bias=False).to(base.weight.device, base.weight.dtype)

        def forward(self, x, *args, **kwargs):
            return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype)))

    model = tiny_unet().to(torch.bfloat16)
    model.enable_layerwise_casting()
    attention = model.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    attention.to_q = Adapted(attention.to_q)
    before = run(model)
    adapter = attention.to_q
    with torch.no_grad():
        delta = adapter.up.weight @ adapter.down.weight
    adapter.base.weight.data += delta
    attention.to_q = adapter.base
    assert torch.allclose(run(model).float(), before.float(), atol=0.1)
    model.disable_layerwise_casting()
    assert adapter.base.weight.dtype == torch.bfloat16


def test_a_subclass_with_its_own_forward_works():
    class Doubled(nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.to(x.dtype) * 2, self.bias)

    class ScaledEmbedding(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 3

    double, scaled = Doubled(4, 4), ScaledEmbedding(4, 4)
    for storage in STORAGES:
        apply_layerwise_casting(double, storage=storage)
        apply_layerwise_casting(scaled, storage=storage)
        with torch.no_grad():
            assert torch.equal(double(torch.eye(4)), (double.weight * 2).T + double.bias)
            assert torch.equal(scaled(torch.arange(4)), scaled.weight * 3)
    assert type(double).__name__ == "Doubled" and isinstance(double, Doubled)


# ---- models of transformers ----


def tiny_encoders():
    import transformers

    clip = transformers.CLIPTextConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    t5 = transformers.T5Config(
        vocab_size=40, d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    ids = {"input_ids": torch.tensor([[3, 7, 1, 39]])}
    yield transformers.CLIPTextModel, clip, ids
    yield transformers.CLIPTextModelWithProjection, clip, ids
    yield transformers.T5EncoderModel, t5, ids
    yield transformers.CLIPVisionModelWithProjection, vision, {"pixel_values": torch.rand(1, 3, 16, 16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", range(4), ids=["clip", "clip-projection", "t5", "clip-vision"])
def test_encoders_of_transformers(case, storage, dtype, tmp_path):
    cls, config, inputs = list(tiny_encoders())[case]
    torch.manual_seed(0)
    model = cls(config).eval().to(dtype)
    with torch.no_grad():
        before = model(**inputs)[0]
        apply_layerwise_casting(model, storage=storage)
        assert stored_names(model)
        after = model(**inputs)[0]
        assert model.dtype == dtype == after.dtype and type(model).__name__ == cls.__name__
        assert isinstance(model, cls)
        assert float((after - before).float().norm() / before.float().norm()) < 0.2
        model.save_pretrained(tmp_path)
        again = cls.from_pretrained(tmp_path, dtype=dtype).eval()
        assert torch.equal(again(**inputs)[0], after)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(**inputs)[0], after) and copied.dtype == dtype
        remove_layerwise_casting(model)
        assert type(model) is cls and model.dtype == dtype
        assert torch.equal(model(**inputs)[0], after)


def test_new_tokens_go_into_a_cast_table():
    """As textual inversion does it."""
    cls, config, _ = next(tiny_encoders())
    model = cls(config)
    apply_layerwise_casting(model, skip_modules_pattern=None)
    model.get_input_embeddings().weight.data[39] = torch.full((16,), 0.5)
    with torch.no_grad():
        row = model.get_input_embeddings()(torch.tensor([39]))
    assert torch.equal(row, torch.full((1, 16), 0.5))


# ---- compiled ----


def test_a_model_compiles_as_one_graph():
    model = tiny_unet()
    model.enable_layerwise_casting(storage="int8")
    expected = run(model)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(**unet_inputs()).sample, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("storage", STORAGES)
def test_layers_and_blocks_compile_as_one_graph(storage):
    module = Layers()
    apply_layerwise_casting(module, storage=storage)
    with torch.no_grad():
        expected = module(IDS)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(IDS), expected)
        for part in module.children():
            if isinstance(part, CastLayer):
                part.compile(fullgraph=True, backend="eager")
        assert torch.equal(module(IDS), expected)
    torch._dynamo.reset()


def test_compiled_graphs_decode_in_the_graph_and_build_no_parameters():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    apply_layerwise_casting(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        compiled(torch.ones(2, 4))
        compiled(torch.ones(2, 4))
    assert len(graphs) == 1
    placeholders = [node for node in graphs[0].graph.nodes if node.op == "placeholder"]
    assert sum(node.meta["example_value"].dtype == E4M3 for node in placeholders) == 4
    assert not any("Parameter" in str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function")
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_compiled_by_inductor(storage):
    module = Layers()
    apply_layerwise_casting(module, storage=storage)
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(module, fullgraph=True)(IDS)
        assert torch.allclose(result, module(IDS), atol=1e-5)


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"storage_dtype": torch.int8}, ValueError, "storage='int8'"),
        ({"storage_dtype": "float8"}, TypeError, "storage_dtype"),
        ({"storage": "int4"}, ValueError, "choose 'plain', 'int8' or 'fp8_scaled'"),
        ({"storage": "int8", "storage_dtype": E5M2}, ValueError, "leave out storage_dtype"),
        ({"storage": "fp8_scaled", "storage_dtype": torch.bfloat16}, ValueError, "float8_e4m3fn"),
        ({"storage_dtype": torch.float64}, ValueError, "more memory"),
        ({"compute_dtype": torch.float8_e4m3fn}, ValueError, "compute_dtype"),
        ({"compute_dtype": torch.int32}, ValueError, "compute_dtype"),
        ({"compute_dtype": "bfloat16"}, TypeError, "compute_dtype"),
        ({"skip_modules_pattern": ["("]}, ValueError, "no regular expression"),
        ({"skip_modules_pattern": [nn.Linear]}, TypeError, "skip_modules_pattern"),
        ({"skip_modules_classes": [3]}, TypeError, "skip_modules_classes"),
        ({"skip_modules_classes": [""]}, ValueError, "skip_modules_classes"),
        ({"skip_modules_classes": [int]}, TypeError, "skip_modules_classes"),
    ],
)
def test_bad_arguments_change_nothing(arguments, error, message):
    model = tiny_unet()
    before = run(model)
    with pytest.raises(error, match=message):
        model.enable_layerwise_casting(**arguments)
    assert torch.equal(run(model), before) and not is_cast(model)


def test_weights_too_large_for_a_plain_cast_are_refused_before_anything_changes():
    """A cast of 1000 to e4m3 is NaN, and so would be the picture."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight.data[2, 2] = 1000.0
    with pytest.raises(ValueError, match=r"1\.weight.*fp8_scaled"):
        apply_layerwise_casting(module)
    assert not is_cast(module) and module[0].weight.dtype == torch.float32
    apply_layerwise_casting(module, storage="fp8_scaled")
    with torch.no_grad():
        assert module(torch.ones(1, 4)).isfinite().all()
    with pytest.raises(ValueError, match="no form"):
        module[1].weight.data.mul_(float("inf"))
    plain = nn.Linear(4, 4)
    plain.bias.data[0] = 1000.0
    apply_layerwise_casting(plain)
    assert stored_names(plain) == {"weight"} and plain.bias[0] == 1000.0
    with pytest.raises(ValueError, match="no form"):
        plain.weight.data.fill_(1000.0)
    assert plain.weight.abs().max() < 1


def test_nothing_keeps_a_cast_model_alive():
    model = tiny_unet()
    model.enable_layerwise_casting(storage="int8")
    run(model)
    references = [weakref.ref(model), weakref.ref(model.conv_in._parameters["weight"])]
    view = weakref.ref(model.conv_in)
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None] and view() is None
