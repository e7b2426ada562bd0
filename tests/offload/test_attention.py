"""Attention by every backend: how kernels are called, masks, what is refused, and where the choice holds."""

import copy
import importlib
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from diffusion_core.errors import MissingPackageError
from diffusion_core.offload import attention as dispatch
from diffusion_core.offload import attention_backends, attention_kernels, attention_masks
from diffusion_core.offload.attention import (
    DEFAULT,
    AttentionBackendName,
    AttentionSettings,
    attention,
    attention_backend,
)
from diffusion_core.offload.attention_backends import BACKENDS, Package, backend_named
from diffusion_core.offload.attention_masks import Call

from .fake_kernels import Calls, installed

HERE = ["native", "_native_flash", "_native_math", "flex", "chunked"]
OF_PACKAGES = sorted(name for name, backend in BACKENDS.items() if backend.package is not None)
# What the function of each is called, without a mask and with one of padding.
FUNCTIONS = {
    "flash": ("flash_attn_func", "flash_attn_varlen_func"),
    "flash_varlen": ("flash_attn_varlen_func", "flash_attn_varlen_func"),
    "flash_4": ("flash_attn_func", "flash_attn_func"),
    "aiter": ("flash_attn_func", "flash_attn_func"),
    "sage": ("sageattn", "sageattn"),
    "sage_varlen": ("sageattn_varlen", "sageattn_varlen"),
    "sage_blackwell": ("sageattn3_blackwell", "sageattn3_blackwell"),
    "xformers": ("memory_efficient_attention", "memory_efficient_attention"),
    "_native_npu": ("npu_fusion_attention", "npu_fusion_attention"),
    "_native_xla": ("flash_attention", "flash_attention"),
}


@pytest.fixture
def calls() -> Iterator[Calls]:
    with installed() as found:
        yield found


@pytest.fixture(autouse=True)
def _split_small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "_WORTH", 0)
    monkeypatch.setattr(dispatch, "_said", set[str]())


def tensors(queries: int = 6, keys: int = 6, batch: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(batch, tokens, 2, 8, generator=source).to(dtype) for tokens in (queries, keys, keys)]


def padding(lengths: list[int], keys: int = 6) -> torch.Tensor:
    return (torch.arange(keys) < torch.tensor(lengths)[:, None])[:, None, None]


def expected_functions(name: str) -> tuple[str, str]:
    if name.startswith("_sage"):
        return ("sageattn" + name.removeprefix("_sage"),) * 2
    family = name.removesuffix("_hub").replace("_3", "").replace("_flash", "flash")
    return FUNCTIONS[name if name in FUNCTIONS else "aiter" if "aiter" in name else family]


# ---- the registry ----


def test_every_name_of_the_reference_is_known() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName as Theirs

    assert {each.value for each in Theirs} | {"chunked"} == set(BACKENDS)
    assert {each.name: each.value for each in Theirs}.items() <= {
        each.name: each.value for each in AttentionBackendName
    }.items()
    assert backend_named(AttentionBackendName.FLASH) is BACKENDS["flash"]
    with pytest.raises(ValueError, match=r"no attention backend 'flsh'; choose of native, .*xformers"):
        backend_named("flsh")


def test_the_versions_that_are_asked_for_are_the_references() -> None:
    from diffusers.models import attention_dispatch as theirs

    for name in OF_PACKAGES:
        package = BACKENDS[name].package
        assert package is not None
        with pytest.raises(RuntimeError) as refused, theirs.attention_backend(name):
            pass
        assert (package.name or package.module).split("_interface")[0].replace("_", "-").split("-attn")[0] in str(
            refused.value
        ).replace("_", "-")
        if ">=" in str(refused.value):
            assert f">={package.minimum}" in str(refused.value)


@pytest.mark.parametrize("name", OF_PACKAGES)
def test_a_missing_package_is_named_with_its_remedy(name: str) -> None:
    backend = BACKENDS[name]
    package = backend.package
    assert package is not None
    with pytest.raises(MissingPackageError) as refused:
        backend.require_package()
    text = str(refused.value)
    assert f"'{name}'" in text and f"{package.name or package.module} is not installed" in text
    assert package.install in text
    assert isinstance(refused.value, ImportError) and isinstance(refused.value, RuntimeError)


@pytest.mark.parametrize(("version", "is_enough"), [("2.6.2", False), ("2.6.3", True), ("2.10", True), ("2.6", False)])
def test_versions_are_compared_by_number(monkeypatch: pytest.MonkeyPatch, version: str, is_enough: bool) -> None:
    module = ModuleType("flash_attn")
    module.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    if is_enough:
        BACKENDS["flash"].require_package()
    else:
        with pytest.raises(MissingPackageError, match=rf"flash-attn {version} is installed, but 2\.6\.3 or newer"):
            BACKENDS["flash"].require_package()


def test_the_version_of_an_installed_package_is_found() -> None:
    assert Package("safetensors", "0.1", "").problem() is None
    assert "or newer is needed" in str(Package("tqdm", "9999", "").problem())


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "options", "reason"),
    [
        ("flash", (1, 4, 2, 64), torch.bfloat16, {}, "it runs on cuda, not on cpu"),
        ("_native_xla", (1, 4, 2, 64), torch.bfloat16, {}, "it runs on xla, not on cpu"),
        ("flash", (1, 4, 2, 64), torch.float32, {"devices": ()}, "it takes float16 and bfloat16, not float32"),
        ("flash", (1, 4, 2, 320), torch.float16, {"devices": ()}, "it takes heads of up to 256, not 320"),
        ("sage", (1, 4, 2, 160), torch.float16, {"devices": ()}, "it takes heads of up to 128, not 160"),
    ],
)
def test_what_cannot_be_taken_is_known(name: str, shape: Any, dtype: Any, options: Any, reason: str) -> None:
    """Case 152: limits of heads, and the like."""
    query = torch.zeros(shape, dtype=dtype)
    assert replace(BACKENDS[name], **options).refuses(Call(query, query, query)) == reason


@pytest.mark.parametrize(
    ("name", "found", "works"),
    [
        ("flash", (7, 5), False),
        ("flash", (9, 0), True),
        ("_flash_3", (8, 0), False),
        ("_sage_qk_int8_pv_fp8_cuda", (8, 6), False),
        ("_sage_qk_int8_pv_fp8_cuda", (8, 9), True),
        ("_sage_qk_int8_pv_fp8_cuda_sm90", (9, 0), True),
        ("_sage_qk_int8_pv_fp8_cuda_sm90", (10, 0), False),
        ("sage_blackwell_hub", (9, 0), False),
        ("xformers", (7, 0), True),
    ],
)
def test_gpus_that_are_too_old_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, found: tuple[int, int], works: bool
) -> None:
    monkeypatch.setattr(attention_backends, "_capability", lambda device: found)
    reason = BACKENDS[name].refuses_device(torch.device("cuda:0"))
    assert (reason is None) == works
    if not works:
        assert f"this one has {found[0]}.{found[1]}" in str(reason)


def test_the_simulated_device_stands_for_any() -> None:
    class Simulated:
        type = "sim"

    assert all(backend.refuses_device(Simulated()) is None for backend in BACKENDS.values())  # type: ignore[arg-type]


# ---- numbers ----

MASKS: dict[str, Any] = {
    "none": None,
    "padding": padding([6, 2, 4]),
    "padding, two alike": padding([4, 2, 4]),
    "padding, holes": torch.tensor([[1, 0, 1, 1, 0, 1]] * 2 + [[0, 1, 0, 0, 0, 1]]).bool()[:, None, None],
    "padding, none left": padding([0, 6, 3]),
    "padding, all the same": padding([5, 5, 5]),
    "padding, nothing hidden": padding([6, 6, 6]),
    "padding, for all samples": padding([4]),
    "padding, without axes": padding([4])[0, 0],
    "bool": torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.3,
    "added": torch.randn(3, 1, 1, 6, generator=torch.Generator().manual_seed(2)),
    "added, for each": torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [*HERE, *OF_PACKAGES])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_every_backend_gives_the_numbers_of_torch(calls: Calls, name: str, mask: str) -> None:
    parts = tensors()
    whole = attention(*parts, attn_mask=MASKS[mask])
    found = attention(*parts, attn_mask=MASKS[mask], settings=AttentionSettings(name))
    assert torch.allclose(found, whole, atol=1e-5)
    if name in OF_PACKAGES and mask in ("none", "padding"):
        used = [each for each in calls.names if each != "get_kernel"]
        assert set(used) == {expected_functions(name)[mask == "padding"]}


@pytest.mark.parametrize("name", [*HERE, *OF_PACKAGES])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_scales_causality_and_other_lengths(calls: Calls, name: str) -> None:
    settings = AttentionSettings(name)
    for options in ({"scale": 0.3}, {"is_causal": True}, {"is_causal": True, "scale": 0.3}):
        parts = tensors()
        whole = attention(*parts, **options)
        assert torch.allclose(attention(*parts, **options, settings=settings), whole, atol=1e-5)
    for options in ({}, {"is_causal": True}, {"attn_mask": padding([9, 1, 5], 9)}):
        parts = tensors(queries=4, keys=9)
        whole = attention(*parts, **options)
        assert torch.allclose(attention(*parts, **options, settings=settings), whole, atol=1e-5)


def test_a_packed_call_has_what_the_kernel_wants(calls: Calls) -> None:
    query, key, value = tensors(queries=4, keys=6)
    attention(query, key, value, attn_mask=padding([6, 2, 4]), scale=0.5, settings=AttentionSettings("flash"))
    [(name, arguments)] = calls
    assert name == "flash_attn_varlen_func"
    assert arguments["cu_seqlens_q"].tolist() == [0, 4, 8, 12]
    assert arguments["cu_seqlens_k"].tolist() == [0, 6, 8, 12]
    assert arguments["cu_seqlens_k"].dtype == torch.int32
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"]) == (4, 6)
    assert arguments["softmax_scale"] == 0.5
    assert torch.equal(arguments["q"], query.flatten(0, 1))
    assert torch.equal(arguments["k"], torch.cat([key[0], key[1, :2], key[2, :4]]))


def test_a_kernel_without_masks_gets_the_samples_of_each_length(calls: Calls) -> None:
    attention(*tensors(), attn_mask=padding([4, 2, 4]), settings=AttentionSettings("sage"))
    assert [len(arguments["q"]) for _, arguments in calls] == [1, 2]
    calls.clear()
    attention(*tensors(), attn_mask=padding([6, 6, 6]), settings=AttentionSettings("sage"))
    assert [len(arguments["q"]) for _, arguments in calls] == [3]


def test_many_small_calls_are_left_to_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_masks, "_WORTH", 2**19)
    mask = padding([4, 2, 6])
    attention(*tensors(), attn_mask=mask, settings=AttentionSettings("sage"))
    assert calls.names == []
    attention(*tensors(), attn_mask=mask, settings=AttentionSettings("sage", strict=True))
    assert calls.names == ["sageattn"] * 3
    calls.clear()
    attention(*tensors(), attn_mask=padding([3]), settings=AttentionSettings("sage"))
    assert calls.names == ["sageattn"]


def test_a_mask_is_read_once_for_all_layers(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    mask, settings = padding([6, 2, 4])[:, 0, 0], AttentionSettings("flash")
    for _ in range(3):
        attention(*tensors(), attn_mask=mask[:, None, None], settings=settings)
    assert len(reads) == 1
    mask[0, 3:] = False
    parts = tensors()
    changed = attention(*parts, attn_mask=mask[:, None, None], settings=settings)
    assert len(reads) == 2 and calls[-1][1]["cu_seqlens_k"].tolist() == [0, 3, 5, 9]
    assert torch.allclose(changed, attention(*parts, attn_mask=mask[:, None, None]), atol=1e-6)
    others = [padding([length, 2, 4]) for length in range(1, 7)]
    reads.clear()
    for other in others[:4] * 3:
        attention(*parts, attn_mask=other, settings=settings)
    assert len(reads) == 4
    for other in others:
        attention(*parts, attn_mask=other, settings=settings)
    assert len(reads) == 6 and len(attention_masks._read.lengths) == 4
    with torch.inference_mode():
        hidden = padding([1, 2, 3])
        for length in (1, 5):
            hidden[0, ..., :length] = True
            attention(*parts, attn_mask=hidden, settings=settings)
            assert calls[-1][1]["cu_seqlens_k"].tolist()[1] == length


def test_no_mask_is_kept(calls: Calls) -> None:
    mask = padding([6, 2, 4])
    gone = weakref.ref(mask)
    attention(*tensors(), attn_mask=mask, settings=AttentionSettings("flash"))
    calls.clear()
    del mask
    assert gone() is None


def test_kernels_of_the_hub_are_fetched_by_name_and_version_and_only_when_used(calls: Calls) -> None:
    import diffusers.models.attention_dispatch as theirs

    parts = tensors()
    for name in (name for name in OF_PACKAGES if name.endswith("_hub")):
        settings = AttentionSettings(name)
        assert calls.names == []
        for _ in range(2):
            attention(*parts, settings=settings)
        wanted = next(config for each, config in theirs._HUB_KERNELS_REGISTRY.items() if each.value == name)
        fetched = [arguments for each, arguments in calls if each == "get_kernel"]
        assert fetched == [{"repo_id": wanted.repo_id, "version": wanted.version}]
        attention_kernels.hub_kernel.cache_clear()
        calls.clear()


# ---- what cannot be taken ----


def test_a_call_that_cannot_be_taken_is_for_torch_and_said_once(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    parts, mask = tensors(), MASKS["added"]
    settings = AttentionSettings("sage")
    with caplog.at_level("WARNING"):
        for _ in range(3):
            found = attention(*parts, attn_mask=mask, settings=settings)
    assert torch.equal(found, attention(*parts, attn_mask=mask))
    assert calls.names == []
    [record] = caplog.records
    assert "'sage' cannot take masked attention of float32 with heads of 8 on cpu" in record.getMessage()
    assert "no masks but those of padding. torch computes such calls" in record.getMessage()


def test_strict_raises_with_the_remedy(calls: Calls) -> None:
    for name, options in [
        ("sage", {"attn_mask": MASKS["added"]}),
        ("flash", {"attn_mask": MASKS["bool"]}),
        ("sage_blackwell_hub", {"scale": 0.1}),
        ("_native_npu", {"attn_mask": MASKS["added"]}),
        ("_native_npu", {"is_causal": True}),
    ]:
        with pytest.raises(ValueError, match=rf"'{name}' cannot take .*: it takes .*set_attention_backend\('native'\)"):
            attention(*tensors(), **options, settings=AttentionSettings(name, strict=True))
    assert [name for name in calls.names if name != "get_kernel"] == []


def test_a_kernel_of_torch_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere = replace(BACKENDS["_native_cudnn"], devices=())
    monkeypatch.setitem(BACKENDS, "_native_cudnn", anywhere)
    parts = tensors()
    assert torch.equal(attention(*parts, settings=AttentionSettings("_native_cudnn")), attention(*parts))
    with pytest.raises(ValueError, match=r"'_native_cudnn' cannot take .*torch has no such kernel"):
        attention(*parts, settings=AttentionSettings("_native_cudnn", strict=True))


def test_errors_of_kernels_pass(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attention(*tensors(), settings=AttentionSettings("flash"))


def test_threads_that_force_kernels_leave_torchs_choice_as_it_was() -> None:
    """torch keeps its choice for the process: unguarded, one thread would put back what another has set."""
    parts, failed = tensors(), list[BaseException]()

    def many(name: str) -> None:
        try:
            for _ in range(50):
                attention(*parts, settings=AttentionSettings(name, strict=True))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=many, args=(name,)) for name in ("_native_flash", "_native_math") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    switches = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled)
    assert all(switch() for switch in (*switches, torch.backends.cuda.mem_efficient_sdp_enabled))


# ---- where the choice holds ----


def test_a_context_holds_for_what_has_no_backend_of_its_own(calls: Calls) -> None:
    parts = tensors()
    whole = attention(*parts)
    with attention_backend("flash"):
        attention(*parts)
        attention(*parts, settings=AttentionSettings(slice_size=1))
        assert calls.names == ["flash_attn_func"] * (1 + 3 * 2)
        calls.clear()
        attention(*parts, settings=AttentionSettings("native"))
        assert calls.names == []
        with attention_backend("sage"):
            attention(*parts)
        with attention_backend(AttentionBackendName.NATIVE):
            attention(*parts)
        assert calls.names == ["sageattn"]
        attention(*parts)
        assert calls.names == ["sageattn", "flash_attn_func"]
    calls.clear()
    assert torch.equal(attention(*parts), whole)
    assert calls.names == [] and dispatch._changed == ()


def test_a_context_is_left_after_an_error_and_concerns_one_thread(calls: Calls) -> None:
    def elsewhere() -> None:
        attention(*tensors())

    with pytest.raises(ZeroDivisionError), attention_backend("flash"):
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        raise ZeroDivisionError
    attention(*tensors())
    assert calls.names == []
    with pytest.raises(ValueError, match="no attention backend 'bogus'"), attention_backend("bogus"):
        pass
    assert dispatch._changed == ()


def test_a_context_without_its_package_is_an_error() -> None:
    with pytest.raises(MissingPackageError, match="flash-attn is not installed"), attention_backend("flash"):
        pass
    assert dispatch._changed == ()


@pytest.mark.parametrize("variable", dispatch.VARIABLES)
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "_native_math")
    assert dispatch._of_environment() == AttentionSettings("_native_math")
    monkeypatch.setenv(variable, "flash")
    with pytest.raises(MissingPackageError, match=rf"{variable}=flash: .*flash-attn is not installed"):
        dispatch._of_environment()
    monkeypatch.setenv(variable, "flsh")
    with pytest.raises(ValueError, match=rf"{variable}=flsh: there is no attention backend 'flsh'"):
        dispatch._of_environment()
    monkeypatch.setenv(variable, "")
    assert dispatch._of_environment() is DEFAULT


def test_familiar_paths() -> None:
    for path in ("models.attention_dispatch", "models"):
        module = importlib.import_module(f"diffusion_core.{path}")
        assert module.attention_backend is attention_backend
        assert module.AttentionBackendName is AttentionBackendName
    from diffusion_core.models.attention_dispatch import dispatch_attention_fn

    parts = tensors()
    mask = padding([6, 2, 4])
    for backend in (None, "native", AttentionBackendName._NATIVE_MATH):
        found = dispatch_attention_fn(*parts, attn_mask=mask, backend=backend)
        assert torch.allclose(found, attention(*parts, attn_mask=mask), atol=1e-5)
    with pytest.raises(ValueError, match=r"dropout_p=0\.1"):
        dispatch_attention_fn(*parts, dropout_p=0.1)
    # Keys for half of the heads.
    query, key, value = parts
    few = dispatch_attention_fn(query, key[:, :, :1], value[:, :, :1], enable_gqa=True)
    assert torch.allclose(few, attention(query, key[:, :, [0, 0]], value[:, :, [0, 0]]), atol=1e-6)


def test_settings_are_checked_and_never_copied() -> None:
    with pytest.raises(ValueError, match="max_bytes=0 must be"):
        AttentionSettings(max_bytes=0)
    with pytest.raises(ValueError, match="no attention backend 'x'"):
        AttentionSettings("x")
    assert copy.deepcopy(DEFAULT) is DEFAULT
    assert AttentionSettings(AttentionBackendName.FLASH).backend == "flash"
    assert pickle.loads(pickle.dumps(AttentionSettings("flash", 2))) == AttentionSettings("flash", 2)


# ---- compiled ----


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    settings: AttentionSettings = DEFAULT

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return attention(query, key, value, attn_mask=mask, settings=self.settings) * 2


@pytest.mark.parametrize("name", ["native", "_native_math", "_native_flash", "chunked", "flash", "sage", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_every_backend_is_one_graph(calls: Calls, fresh: None, name: str) -> None:
    layer = Layer()
    layer.settings = AttentionSettings(name, strict=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for mask in (None, padding([6, 2, 4])):
        parts = tensors()
        with torch.no_grad():
            assert torch.allclose(compiled(*parts, mask), 2 * attention(*parts, attn_mask=mask), atol=1e-5)


def test_compiled_code_follows_the_context(calls: Calls, fresh: None) -> None:
    compiled = torch.compile(Layer(), backend="eager", fullgraph=True)
    parts = tensors()
    compiled(*parts)
    with attention_backend("flash"):
        compiled(*parts)
        assert calls.names == ["flash_attn_func"]
    compiled(*parts)
    with attention_backend("sage"):
        compiled(*parts)
    assert calls.names == ["flash_attn_func", "sageattn"]


def test_compiled_code_follows_the_settings(calls: Calls, fresh: None) -> None:
    layer = Layer()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    parts = tensors()
    for name, used in (
        ("flash", ["flash_attn_func"]),
        ("sage", ["sageattn"]),
        ("native", []),
        ("flash", ["flash_attn_func"]),
    ):
        layer.settings = AttentionSettings(name)
        assert torch.allclose(compiled(*parts), 2 * attention(*parts), atol=1e-5)
        assert calls.names == used
        calls.clear()


def test_the_operators_are_sound() -> None:
    parts = tensors()
    torch.library.opcheck(dispatch._opaque, (*parts, False, None, 2**20, "chunked", False))
    mask = padding([6, 2, 4])
    torch.library.opcheck(dispatch._opaque_with_mask, (*parts, mask, False, 0.5, 2**20, "chunked", False))
