"""Switches of how models compute: attention in slices and by kernel, fused projections, compilation by block."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diffusion_core
import diffusion_core.models as models
from diffusion_core.errors import MissingPackageError, PlacementError, UnsupportedError
from diffusion_core.models.attention_processor import AttnProcessor, AttnProcessor2_0, SlicedAttnProcessor
from diffusion_core.models.base import Model
from diffusion_core.models.layers.attention import Attention
from diffusion_core.models.layers.joint_attention import JointAttention
from diffusion_core.offload import attention as dispatch
from diffusion_core.offload.attention import DEFAULT, AttentionSettings, attention
from diffusion_core.offload.attention_backends import BACKENDS
from tests.offload.fake_kernels import installed
from tests.pipelines import tiny

SLICES = ["auto", "max", 1, 2, 3, 100]


@pytest.fixture
def unet() -> Any:
    return tiny.unet(diffusion_core)


@pytest.fixture(scope="module")
def inputs() -> tuple[Any, ...]:
    source = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 8, 8, generator=source), torch.tensor(7), torch.randn(2, 9, 32, generator=source)


def run(model: Any, inputs: tuple[Any, ...], **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*inputs, **options).sample


# ---- slices ----


@pytest.mark.parametrize("slice_size", SLICES)
@pytest.mark.parametrize("mask", [None, (1, 5), (2, 1, 1, 5), (2, 4, 3, 5), (4, 1, 5)])
def test_slices_give_the_same_numbers(slice_size: Any, mask: tuple[int, ...] | None) -> None:
    source = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, tokens, 4, 8, generator=source) for tokens in (3, 5, 5))
    options: dict[str, Any] = {"attn_mask": None if mask is None else torch.randn(mask, generator=source)}
    whole = attention(query, key, value, **options)
    found = attention(query, key, value, **options, settings=AttentionSettings(slice_size=slice_size))
    assert torch.allclose(found, whole, atol=1e-6)
    assert found.shape == whole.shape == (2, 3, 4, 8)


@pytest.mark.parametrize("slice_size", SLICES)
def test_a_model_computes_the_same_in_slices(unet: Any, inputs: tuple[Any, ...], slice_size: Any) -> None:
    whole, masked = run(unet, inputs), torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    with_mask = run(unet, inputs, encoder_attention_mask=masked)
    unet.set_attention_slice(slice_size)
    assert torch.allclose(run(unet, inputs), whole, atol=1e-6)
    assert torch.allclose(run(unet, inputs, encoder_attention_mask=masked), with_mask, atol=1e-6)
    unet.set_attention_slice(None)
    assert torch.equal(run(unet, inputs), whole)


def test_slices_bound_the_memory_of_plain_attention() -> None:
    """Without a fused kernel the scores of all heads lie in memory; in slices, those of one."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, torch.Tensor):
                    self.numel = max(self.numel, each.numel())
            return out

    parts = [torch.randn(2, 64, 4, 8) for _ in range(3)]
    peaks = {}
    for size in (None, 1):
        with Largest() as mode:
            attention(*parts, settings=AttentionSettings("_native_math", size))
        peaks[size] = mode.numel
    assert peaks[None] == 2 * 4 * 64 * 64
    assert peaks[1] == 64 * 64


@pytest.mark.parametrize("size", [0, -1, "half", 1.5, True])
def test_wrong_slice_sizes_are_refused(unet: Any, size: Any) -> None:
    with pytest.raises(ValueError, match="slice_size="):
        unet.set_attention_slice(size)
    assert set(unet.attn_processors.values()) == {DEFAULT}


# ---- kernels ----


def test_a_kernel_belongs_to_the_model(unet: Any, inputs: tuple[Any, ...]) -> None:
    """Case 146: with the reference, other models change too, and stay so after the reset."""
    other = tiny.unet(diffusion_core)
    whole = run(unet, inputs)
    unet.set_attention_backend("_native_math")
    assert {each.backend for each in unet.attn_processors.values()} == {"_native_math"}
    assert set(other.attn_processors.values()) == {DEFAULT}
    assert torch.allclose(run(unet, inputs), whole, atol=1e-5)
    unet.set_attention_slice(1)
    unet.reset_attention_backend()
    assert set(unet.attn_processors.values()) == {AttentionSettings(slice_size=1)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("native2", "no attention backend 'native2'; choose of native, "),
        ("_native_cudnn", "'_native_cudnn' cannot compute this model: it runs on cuda, not on cpu"),
        ("flash", "'flash': flash-attn is not installed; install it with `pip install flash-attn`"),
        ("sage", "'sage': sageattention is not installed"),
        ("flash_hub", "'flash_hub': kernels is not installed"),
    ],
)
def test_what_does_not_work_is_refused_when_it_is_set(unet: Any, name: str, message: str) -> None:
    """Case 151: with the reference, some of these surface in the middle of a run."""
    with pytest.raises((ValueError, MissingPackageError), match=re.escape(message)):
        unet.set_attention_backend(name)
    assert set(unet.attn_processors.values()) == {DEFAULT}


def test_heads_and_dtypes_are_checked_when_it_is_set(unet: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Case 148."""
    sizes = {layer.dim_head for layer in unet._attending().values()}
    with installed(), pytest.MonkeyPatch.context() as patch:
        flash = BACKENDS["flash"]

        def only(**limits: Any) -> None:
            patch.setitem(BACKENDS, "flash", replace(flash, **limits))

        only(dtypes=(torch.float16, torch.bfloat16))
        with pytest.raises(ValueError, match="cannot compute this model: it takes float16 and bfloat16, not float32"):
            unet.set_attention_backend("flash")
        only(head_sizes=min(sizes) - 1)
        with pytest.raises(ValueError, match=f"it takes heads of up to {min(sizes) - 1}, not"):
            unet.set_attention_backend("flash")
        assert set(unet.attn_processors.values()) == {DEFAULT}
        unet.mid_block.attentions[0].transformer_blocks[0].attn1.dim_head = 99
        only(head_sizes=98)
        with pytest.raises(ValueError, match=r"cannot compute heads of 99 .*strict=False"):
            unet.set_attention_backend("flash", strict=True)
        with caplog.at_level("WARNING"):
            unet.set_attention_backend("flash")
    assert "cannot compute heads of 99 in UNet2DConditionModel: torch does" in caplog.text


def test_what_is_left_to_torch_is_said_once_for_each_choice(
    unet: Any, inputs: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    bias = torch.zeros(2, 1, 9)
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn2
    tokens, text = torch.randn(2, 4, layer.to_q.in_features), inputs[2]
    with installed(), caplog.at_level("WARNING"):
        for times in (1, 2):
            unet.set_attention_backend("sage")
            for _ in range(3):
                layer(tokens, text, bias)
            assert caplog.text.count("'sage' cannot take masked attention") == times


def test_a_device_that_the_model_may_move_to_will_do(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_is_there", lambda device: device == "cuda")
    unet.set_attention_backend("_native_efficient")
    assert {each.backend for each in unet.attn_processors.values()} == {"_native_efficient"}


def test_a_copy_attends_as_the_model_does_and_then_by_itself(unet: Any) -> None:
    unet.set_attention_backend("chunked", max_bytes=12345)
    other = copy.deepcopy(unet)
    unet.reset_attention_backend()
    assert {(each.backend, each.max_bytes) for each in other.attn_processors.values()} == {("chunked", 12345)}
    with pytest.raises(ValueError, match="max_bytes=-1"):
        unet.set_attention_backend("chunked", max_bytes=-1)


def test_xformers_is_used_where_it_is_there(unet: Any, inputs: tuple[Any, ...]) -> None:
    whole = run(unet, inputs)
    unet.enable_xformers_memory_efficient_attention()
    assert torch.equal(run(unet, inputs), whole)
    unet.disable_xformers_memory_efficient_attention()
    with pytest.raises(ValueError, match="attention_op"):
        unet.enable_xformers_memory_efficient_attention(attention_op=object())
    with installed() as calls:
        unet.enable_xformers_memory_efficient_attention()
        assert torch.allclose(run(unet, inputs), whole, atol=1e-5)
        assert set(calls.names) == {"memory_efficient_attention"}
        unet.disable_xformers_memory_efficient_attention()
        assert torch.equal(run(unet, inputs), whole)


def test_masks_of_prompts_are_packed_by_every_model_that_takes_them(unet: Any, inputs: tuple[Any, ...]) -> None:
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    whole = run(unet, inputs, encoder_attention_mask=mask)
    with installed() as calls:
        unet.set_attention_backend("flash", strict=True)
        assert torch.allclose(run(unet, inputs, encoder_attention_mask=mask), whole, atol=1e-5)
        packed = [arguments for name, arguments in calls if name == "flash_attn_varlen_func"]
        assert packed and all(each["cu_seqlens_k"].tolist() == [0, 9, 13] for each in packed)


# ---- processors ----


def test_processors_by_the_references_names(unet: Any, inputs: tuple[Any, ...]) -> None:
    import diffusers

    assert unet.attn_processors.keys() == tiny.unet(diffusers).attn_processors.keys()
    whole = run(unet, inputs)
    for processor in (AttnProcessor(), AttnProcessor2_0(), SlicedAttnProcessor(1)):
        unet.set_attn_processor(processor)
        assert all(type(each) is type(processor) for each in unet.attn_processors.values())
        assert torch.allclose(run(unet, inputs), whole, atol=1e-5)
    one = {name: AttnProcessor() if "attn2" in name else DEFAULT for name in unet.attn_processors}
    unet.set_attn_processor(one)
    assert unet.attn_processors == one
    unet.set_default_attn_processor()
    assert set(unet.attn_processors.values()) == {DEFAULT}


def test_processors_of_other_kinds_are_refused(unet: Any) -> None:
    with pytest.raises(TypeError, match="processors with code of their own are not called"):
        unet.set_attn_processor(lambda attn, hidden_states: hidden_states)
    name = next(iter(unet.attn_processors))
    with pytest.raises(ValueError, match="one entry for each layer"):
        unet.set_attn_processor({name: AttnProcessor()})
    with pytest.raises(TypeError, match="str is no attention setting"):
        unet.set_attn_processor({**unet.attn_processors, name: "flash"})
    assert set(unet.attn_processors.values()) == {DEFAULT}


# ---- fused projections ----


def test_fused_projections_compute_the_same_and_do_not_show(unet: Any, inputs: tuple[Any, ...], tmp_path: Any) -> None:
    whole, before = run(unet, inputs), {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    unet.fuse_qkv_projections()
    unet.fuse_qkv_projections()
    names = dict(unet.named_parameters())
    assert any("to_qkv" in name for name in names) and any("to_kv" in name for name in names)
    assert not any(name.endswith("to_k.weight") for name in names)
    assert torch.allclose(run(unet, inputs), whole, atol=1e-5)
    assert unet.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in unet.state_dict().items())
    unet.save_pretrained(tmp_path)
    again = diffusion_core.UNet2DConditionModel.from_pretrained(tmp_path)
    assert torch.equal(run(again, inputs), whole)
    unet.load_state_dict({name: tensor * 0.9 for name, tensor in before.items()})
    assert torch.allclose(unet.state_dict()["mid_block.attentions.0.transformer_blocks.0.attn1.to_v.weight"],
                          before["mid_block.attentions.0.transformer_blocks.0.attn1.to_v.weight"] * 0.9)  # fmt: skip
    unet.load_state_dict(before)
    unet.unfuse_qkv_projections()
    assert dict(unet.named_parameters()).keys() == before.keys()
    assert torch.equal(run(unet, inputs), whole)


def test_fused_projections_take_a_context(inputs: tuple[Any, ...]) -> None:
    layer = Attention(8, heads=2, dim_head=4, bias=True)
    tokens, context = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    expected = layer(tokens), layer(tokens, context)
    layer.fuse_projections()
    for found, wanted in zip((layer(tokens), layer(tokens, context)), expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_weights_that_are_placed_or_cast_are_not_fused(unet: Any) -> None:
    unet.enable_group_offload("cpu", offload_type="leaf_level")
    with pytest.raises(PlacementError, match=r"call disable_group_offload\(\) first"):
        unet.fuse_qkv_projections()
    unet.disable_group_offload()
    unet.enable_layerwise_casting()
    with pytest.raises(PlacementError, match="disable_layerwise_casting"):
        unet.fuse_qkv_projections()
    unet.unfuse_qkv_projections()
    assert "to_qkv" not in str(unet.state_dict().keys())


def test_projections_that_are_something_else_are_not_fused(unet: Any) -> None:
    class Wrapped(nn.Linear):
        pass

    last = list(unet._attending().values())[-1]
    last.to_v = Wrapped(last.to_v.in_features, last.to_v.out_features, bias=False)
    with pytest.raises(ValueError, match="fused before they become Wrapped"):
        unet.fuse_qkv_projections()
    last.to_v = nn.Linear(last.to_v.in_features, last.to_v.out_features, bias=False, dtype=torch.float16)
    with pytest.raises(ValueError, match="to_k, to_v differ in dtype"):
        unet.fuse_qkv_projections()
    assert "to_qkv" not in str([name for name, _ in unet.named_modules()])


def test_fused_weights_can_be_placed(unet: Any, inputs: tuple[Any, ...]) -> None:
    unet.fuse_qkv_projections()
    whole, names = run(unet, inputs), unet.state_dict().keys()
    unet.enable_group_offload("cpu", offload_type="leaf_level")
    assert torch.equal(run(unet, inputs), whole)
    assert unet.state_dict().keys() == names
    unet.disable_group_offload()
    assert torch.equal(run(unet, inputs), whole)


def test_a_model_without_such_layers_says_so() -> None:
    with pytest.raises(ValueError, match="AutoencoderTiny has no attention layers"):
        diffusion_core.AutoencoderTiny().fuse_qkv_projections()


# ---- compilation ----


def test_repeated_blocks_are_compiled_in_place(unet: Any, inputs: tuple[Any, ...]) -> None:
    whole = run(unet, inputs)
    seen: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        seen.append(graph)
        return graph.forward

    names = unet.state_dict().keys()
    unet.compile_repeated_blocks(backend=backend, fullgraph=True)
    assert torch.allclose(run(unet, inputs), whole, atol=1e-5)
    assert seen and unet.state_dict().keys() == names


def test_a_model_without_repeated_blocks_says_so() -> None:
    class Plain(Model):
        def __init__(self, width: int = 2) -> None:
            super().__init__()

    with pytest.raises(ValueError, match=r"Plain has no repeated blocks; .*torch\.compile"):
        Plain().compile_repeated_blocks()


@pytest.mark.parametrize("settings", [AttentionSettings(slice_size=1), AttentionSettings("_native_math")])
def test_settings_go_with_one_graph(unet: Any, inputs: tuple[Any, ...], settings: AttentionSettings) -> None:
    unet.set_attn_processor(settings)
    compiled = torch.compile(unet, backend="eager", fullgraph=True)
    assert torch.allclose(run(compiled, inputs), run(unet, inputs), atol=1e-6)


# ---- every layer takes part ----


def test_joint_attention_follows_its_settings() -> None:
    layer = JointAttention(8, heads=2, dim_head=4, context_dim=8)
    image, text = torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    whole = layer(image, text)
    layer.attention_settings = AttentionSettings("_native_math", 1)
    for found, wanted in zip(layer(image, text), whole, strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_every_layer_that_attends_hands_on_its_settings() -> None:
    callers = 0
    for path in Path(models.__path__[0]).rglob("*.py"):
        text = path.read_text()
        if "offload.attention import" in text and path.name != "attention_dispatch.py":
            for call in re.findall(r"[= ]attention\(\*?\w[^\n]*", text):
                callers += 1
                assert "settings=self.attention_settings" in call, (path.name, call)
    assert callers >= 3


# ---- what is not here ----


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("load_lora_adapter", "merge"),
        ("enable_gradient_checkpointing", "does not train"),
        ("enable_parallelism", "device_map"),
    ],
)
def test_what_is_not_here_says_what_to_do(unet: nn.Module, name: str, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"(?i)UNet2DConditionModel\.{name}\(\) is not supported: .*{remedy}"):
        getattr(unet, name)("x")


def test_files_of_whole_pipelines_are_refused_by_the_class() -> None:
    with pytest.raises(UnsupportedError, match=r"StableDiffusionPipeline\.from_single_file.*Convert the file once"):
        diffusion_core.StableDiffusionPipeline.from_single_file("model.safetensors")
