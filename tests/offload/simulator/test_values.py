"""Simulated devices compute what the CPU computes, bit by bit, and refuse what a GPU refuses."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = [pytest.mark.simulator, pytest.mark.usefixtures("simulated_devices")]

OPERATORS = {
    "arithmetic": lambda x: (x * 2 + 1) / (x.abs() + 0.5) - x.pow(2),
    "in place": lambda x: x.clone().mul_(3).add_(x, alpha=0.5).clamp_(-1, 1),
    "slice assignment": lambda x: _assign(x),
    "scalar on the host": lambda x: x * torch.tensor(1.5),
    "matmul": lambda x: x.flatten(1) @ x.flatten(1).T,
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "linear": lambda x: F.linear(x.flatten(1), x.flatten(1)[:, :1].expand(2, 192).contiguous()),
    "conv": lambda x: F.conv2d(x, x.transpose(0, 1)[:3, :1].expand(3, 3, 8, 8)[..., :3, :3].contiguous(), padding=1),
    "conv transposed": lambda x: F.conv_transpose2d(x, x[:1, :, :3, :3].expand(3, 3, 3, 3).contiguous(), stride=2),
    "conv 3d": lambda x: F.conv3d(x[None], x[:1, :1, :3, :3].expand(4, 2, 2, 3, 3).contiguous()),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "masked attention": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x[..., :8] > 0),
    "layer norm": lambda x: F.layer_norm(x, (8,), x[0, 0, 0], x[0, 0, 1]),
    "group norm": lambda x: F.group_norm(x, 3),
    "rms norm": lambda x: F.rms_norm(x, (8,)),
    "batch norm": lambda x: F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 0].abs()),
    "softmax": lambda x: x.softmax(-1),
    "activations": lambda x: F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + torch.tanh(x),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, size=(5, 11), mode="bilinear", antialias=True),
    "pooling": lambda x: F.avg_pool2d(x, 2) + F.max_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 4),
    "padding": lambda x: F.pad(F.pad(x, (1, 1, 2, 0), mode="replicate"), (0, 1, 0, 1)),
    "views": lambda x: x.permute(0, 2, 3, 1).reshape(2, -1).unflatten(1, (8, 24)).transpose(1, 2)[:, ::2],
    "complex view": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(2, 3, 8, 4, 2)) * 1j),
    "bits": lambda x: ((x.view(torch.uint8) & 15) << 2) | (x.view(torch.uint8) >> 4) ^ 3,
    "dtype view": lambda x: x.view(torch.int32) + 1,
    "chunks": lambda x: torch.cat([c + i for i, c in enumerate(x.chunk(2, dim=-1))], dim=1),
    "stack": lambda x: torch.stack(x.unbind(0), dim=-1),
    "index": lambda x: x[:, [2, 0]][torch.tensor([1])],
    "mask": lambda x: x[x > 0],
    "gather": lambda x: x.gather(-1, x.argsort(-1)),
    "embedding": lambda x: F.embedding((x[0, 0].abs() * 2).long(), x[0, 0]),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "reductions": lambda x: torch.stack([x.sum(), x.mean(), x.std(), x.amax(), x.norm()]),
    "order": lambda x: torch.topk(x.flatten(), 5).values + x.flatten().sort().values[:5] + x.flatten().cumsum(0)[:5],
    "quantile": lambda x: torch.quantile(x, 0.9),
    "fourier": lambda x: torch.fft.ifftn(torch.fft.fftn(x)).real,
    "factories": lambda x: (
        torch.arange(8, device=x.device) * torch.ones_like(x) + torch.full((8,), 2.0, device=x.device)
    ),
    "casts": lambda x: x.to(torch.bfloat16).float() + x.half().float() + x.to(torch.float8_e4m3fn).float(),
    "bfloat16": lambda x: F.layer_norm(F.conv2d(x.bfloat16(), x[:, :, :3, :3].bfloat16()), (6,)),
    "channels last": lambda x: F.conv2d(x.to(memory_format=torch.channels_last), x[:, :, :3, :3]),
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "out of the right size": lambda x: torch.mul(x, x, out=torch.empty_like(x)),
    "foreach": lambda x: torch.stack(torch._foreach_add([x, x + 1], 1.0)),
    "triangle": lambda x: torch.tril(x) + torch.triu(x, 1).flip(-1).roll(1, 0),
    "solve": lambda x: torch.linalg.inv(x[0] + 10 * torch.eye(8, device=x.device)),
    "repeat": lambda x: x.repeat(1, 2, 1, 1).repeat_interleave(2, 0),
}


def _assign(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[:, 1, ::2] = 0
    out[0] += out[1]
    return out


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_the_cpu(name):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = OPERATORS[name](x)
    result = OPERATORS[name](x.to("sim:0"))
    assert result.device == torch.device("sim:0")
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    assert torch.equal(result.cpu(), expected)


def test_random_numbers_come_from_the_cpu_generator():
    torch.manual_seed(3)
    expected = torch.randn(5), torch.rand(4), torch.randint(9, (3,)), torch.empty(4).uniform_()
    torch.manual_seed(3)
    device = torch.device("sim:0")
    result = (
        torch.randn(5, device=device),
        torch.rand(4, device=device),
        torch.randint(9, (3,), device=device),
        torch.empty(4, device=device).uniform_(),
    )
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a.cpu(), b)


def test_a_generator_of_the_host_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator but found 'cpu'"):
        torch.randn(3, device="sim:0", generator=torch.Generator())


@pytest.mark.simulated_devices(devices=2)
def test_tensors_of_two_devices_do_not_mix():
    a, b, c = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1"), torch.ones(3)
    for left, right in ((a, b), (a, c), (c, a)):
        with pytest.raises(RuntimeError, match="found at least two devices"):
            left + right
    with pytest.raises(RuntimeError, match="found at least two devices"):
        c.add_(a)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        F.linear(a, torch.ones(2, 3))
    assert torch.equal((a + b.to(a.device)).cpu(), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="There is no device sim:2"):
        torch.ones(3, device="sim:2")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_are_stored_but_not_computed_with(dtype):
    x = torch.randn(4, 4).to("sim:0").to(dtype)
    assert torch.equal(
        torch.cat([x.clone(), x.T])[2:6, 1].float().cpu(), torch.cat([x.cpu(), x.cpu().T])[2:6, 1].float()
    )
    for compute in (lambda: x + x, lambda: x * 2.0, lambda: x @ x, lambda: F.linear(x.float(), x), lambda: x.sum()):
        with pytest.raises(NotImplementedError, match="cast to a wider dtype"):
            compute()


def test_autocast_off_keeps_dtypes():
    x = torch.randn(2, 2, device="sim:0")
    with torch.autocast("cpu", enabled=False), torch.inference_mode():
        assert (x @ x).dtype == torch.float32


def test_modules_keep_parameters_ties_and_references():
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    tied.register_buffer("count", torch.arange(3))
    weight, before = tied[0].weight, copy.deepcopy(tied.state_dict())
    assert tied.to("sim:0") is tied
    assert tied[0].weight is tied[1].weight is weight
    assert weight.device == torch.device("sim:0") and weight.requires_grad and isinstance(weight, nn.Parameter)
    for name, value in tied.state_dict().items():
        assert value.device.type == "sim" and torch.equal(value.cpu(), before[name])
    other = copy.deepcopy(tied)
    assert other[0].weight is other[1].weight is not weight and other.count.device.type == "sim"
    tied.load_state_dict({name: value + 1 for name, value in before.items()})
    tied.to("cpu")
    assert tied[0].weight is tied[1].weight is weight and weight.device.type == "cpu"
    assert torch.equal(weight, before["0.weight"] + 1)
    assert torch.equal(other[0].weight.cpu(), before["0.weight"])


def test_data_moves_a_parameter_and_back():
    parameter = nn.Parameter(torch.randn(3))
    home = parameter.data
    parameter.data = home.to("sim:0")
    assert parameter.device.type == "sim" and parameter.requires_grad and parameter.is_leaf
    parameter.data = home
    assert parameter.device.type == "cpu" and parameter.data_ptr() == home.data_ptr()


def test_data_keeps_inference_and_gradient_flags_as_torch_does():
    layer = nn.Linear(3, 3)
    home = {name: parameter.data for name, parameter in layer.named_parameters()}
    with torch.inference_mode():
        for name, parameter in layer.named_parameters():
            parameter.data = home[name].to("sim:0")
            assert parameter.requires_grad and parameter.is_inference()
        assert layer(torch.ones(1, 3, device="sim:0")).device.type == "sim"
        for name, parameter in layer.named_parameters():
            parameter.data = home[name]
    assert layer(torch.ones(1, 3)).requires_grad and not layer.weight.is_inference()


def test_gradients_are_refused_with_a_message():
    layer = torch.nn.Linear(2, 2).to("sim:0")
    loss = layer(torch.ones(1, 2, device="sim:0")).sum()
    for run in (loss.backward, lambda: loss.cpu().backward(), lambda: torch.autograd.grad(loss, [layer.weight])):
        with pytest.raises(RuntimeError, match="forward direction only"):
            run()


def test_saved_tensors_come_back_on_the_cpu(tmp_path):
    layer = nn.Linear(3, 3).to("sim:0")
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert {value.device.type for value in loaded.values()} == {"cpu"}
    assert torch.equal(loaded["weight"], layer.weight.cpu())


def test_host_conversions():
    x = torch.arange(4.0).to("sim:0")
    assert x.tolist() == [0, 1, 2, 3] and x[2].item() == 2 and str(x) == "tensor([0., 1., 2., 3.], device='sim:0')"
    with pytest.raises(TypeError, match="host memory"):
        x.numpy()
    with pytest.raises(RuntimeError, match="clone its tensor"):
        x.untyped_storage().clone()
    grown = x.clone().resize_(2, 3)
    assert grown.shape == (2, 3) and grown.flatten()[:4].tolist() == [0, 1, 2, 3]
