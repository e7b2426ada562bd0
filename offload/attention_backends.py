"""The backends of attention by the reference's names, with what each can do."""

import functools
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend

from diffusion_core.errors import MissingPackageError

from . import attention_kernels as kernels
from .attention_chunked import chunked
from .attention_kernels import Kernel
from .attention_masks import Call

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Package:
    """What has to be installed.

    Args:
        module: what is imported.
        minimum: the least version, or "" for any.
        install: the command or sentence that gets it.
        name: of the distribution, where it differs from the module's.
    """

    module: str
    minimum: str
    install: str
    name: str = ""

    def __str__(self) -> str:
        return (self.name or self.module) + (f" {self.minimum}" if self.minimum else "")

    def problem(self) -> str | None:
        """Why it cannot be used, or None if it can."""
        if self.module not in sys.modules and importlib.util.find_spec(self.module) is None:
            return f"{self.name or self.module} is not installed"
        found = self._version()
        if self.minimum and found is not None and _numbers(found) < _numbers(self.minimum):
            return f"{self.name or self.module} {found} is installed, but {self.minimum} or newer is needed"
        return None

    def _version(self) -> str | None:
        if self.module in sys.modules:
            return getattr(sys.modules[self.module], "__version__", None)
        try:
            return importlib.metadata.version(self.name or self.module)
        except importlib.metadata.PackageNotFoundError:
            return None


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Args:
        name: by which it is set.
        summary: what it is, in a few words.
        kernel: what computes.
        any_mask: whether it takes masks of any kind. Where not, tokens of padding are left out: of one call if the
            kernel takes samples of unlike lengths, else there is a call for each length.
        varlen: whether calls without a mask take the function for unlike lengths too.
        devices: types of devices, or none for all.
        dtypes: those of queries, keys and values, or none for all.
        head_sizes: the largest head, or 0 for any.
        causal: whether queries can be kept from later keys.
        scales: whether scores can have another factor than 1 / sqrt(head size).
        exact: False for those that compute with fewer bits than the dtype has.
        package: what has to be installed, besides torch.
        capability: the least CUDA compute capability.
        only_capability: whether no higher one works.
        inline: whether torch's compiler sees through it.
        probes: whether a trial says more than all this, and costs nothing.
    """

    name: str
    summary: str
    kernel: Kernel
    any_mask: bool = False
    varlen: bool = False
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    head_sizes: int = 0
    causal: bool = True
    scales: bool = True
    exact: bool = True
    package: Package | None = None
    capability: tuple[int, int] | None = None
    only_capability: bool = False
    inline: bool = False
    probes: bool = False

    def require_package(self) -> None:
        """Check what has to be installed.

        Raises:
            MissingPackageError: if it is not there, or too old.
        """
        problem = None if self.package is None else self.package.problem()
        if problem is not None:
            assert self.package is not None
            raise MissingPackageError(f"attention backend {self.name!r}: {problem}; {self.package.install}")

    def refuses_device(self, device: torch.device) -> str | None:
        """Why it does not work on a device, or None if it does."""
        # The simulated device stands for a GPU of any kind.
        if self.devices and device.type not in (*self.devices, "sim"):
            return f"it runs on {' and '.join(self.devices)}, not on {device.type}"
        if self.capability is not None and device.type == "cuda":
            found = _capability(device)
            if found < self.capability or (self.only_capability and found != self.capability):
                needed = f"{_dotted(self.capability)}{'' if self.only_capability else ' or more'}"
                return f"it needs a GPU of compute capability {needed}, and this one has {_dotted(found)}"
        return None

    def refuses_dtype(self, dtype: torch.dtype) -> str | None:
        """Why it does not take values of a dtype, or None if it does."""
        if self.dtypes and dtype not in self.dtypes:
            return f"it takes {' and '.join(_short(each) for each in self.dtypes)}, not {_short(dtype)}"
        return None

    def refuses_head(self, size: int) -> str | None:
        """Why it does not take heads of a size, or None if it does."""
        return f"it takes heads of up to {self.head_sizes}, not {size}" if 0 < self.head_sizes < size else None

    def refuses(self, call: Call) -> str | None:
        """Why it cannot take a call, or None if it can."""
        query, key = call.query, call.key
        reason = self.refuses_device(query.device) or self.refuses_dtype(query.dtype)
        reason = reason or self.refuses_head(max(query.shape[-1], call.value.shape[-1]))
        if reason is not None:
            return reason
        if not self.any_mask and call.mask is not None and not call.masks_padding:
            return "it takes no masks but those of padding"
        # Kernels differ in which keys the first query sees where there are more keys than queries.
        if call.is_causal and not (self.causal and query.shape[1] == key.shape[1]):
            return "it takes no causal attention of this kind"
        if not self.scales and call.scale not in (None, query.shape[-1] ** -0.5):
            return f"it takes no scale={call.scale}"
        if self.name == "_native_npu" and call.mask is not None and call.mask.dtype != torch.bool:
            return "it takes no masks that are added to the scores"
        return None

    @property
    def masks(self) -> str:
        """Which masks it takes, in words."""
        if self.any_mask:
            return "any"
        return "padding, packed" if self.kernel.packed is not None else "padding, split"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


_FLASH_2 = Package("flash_attn", "2.6.3", "install it with `pip install flash-attn`", "flash-attn")
_FLASH_3 = Package("flash_attn_interface", "", "build it from the folder `hopper` of the FlashAttention repository")
_SAGE = Package("sageattention", "2.1.1", "install it from the SageAttention repository")
_XFORMERS = Package("xformers", "0.0.29", "install it with `pip install xformers`")
_HUB = Package("kernels", "0.12", "install it with `pip install kernels`; it gets the kernel from the Hub")
_HUB_4 = Package("kernels", "0.12.3", "install it with `pip install -U kernels`; it gets the kernel from the Hub")
_NPU = Package("torch_npu", "", "install it as Ascend's guide for your device says")
_XLA = Package("torch_xla", "2.2", "install it with `pip install torch_xla`")


def _torch(name: str, summary: str, kind: SDPBackend, devices: tuple[str, ...] = ()) -> Backend:
    return Backend(name, summary, Kernel(kernels.forced(kind)), any_mask=True, devices=devices, probes=True)


def _of_flash(name: str, summary: str, kernel: Kernel, package: Package, least: tuple[int, int] = (8, 0)) -> Backend:
    return Backend(
        name,
        summary,
        kernel,
        devices=("cuda",),
        dtypes=HALF,
        head_sizes=256,
        package=package,
        capability=least,
        varlen="varlen" in name,
    )


def _of_sage(name: str, summary: str, kernel: Kernel, package: Package, least: tuple[int, int] = (8, 0)) -> Backend:
    return replace(_of_flash(name, summary, kernel, package, least), head_sizes=128, exact=False)


_flash_2, _flash_3 = kernels.flash(kernels.module("flash_attn")), kernels.flash(kernels.module("flash_attn_interface"))
_flash_2_hub = kernels.flash(kernels.from_hub("kernels-community/flash-attn2", 3))
_flash_3_hub = kernels.flash(kernels.from_hub("kernels-community/flash-attn3", 1))
_flash_4_hub = kernels.flash(kernels.from_hub("kernels-community/flash-attn4", 0), packed=None)
_aiter_hub = kernels.flash(kernels.from_hub("kernels-community/aiter-flash-attn-ck", 1), packed=None)
_sage_hub = kernels.sage(kernels.from_hub("SageAttention/sage-attention", 3))
_blackwell_hub = kernels.sage_blackwell(kernels.from_hub("SageAttention/sage-blackwell", 1))
_sage = functools.partial(kernels.sage, kernels.module("sageattention"))
_xformers = kernels.xformers(kernels.module("xformers.ops"))
_npu = kernels.npu(kernels.module("torch_npu"))
_xla = kernels.xla(kernels.module("torch_xla.experimental.custom_kernel"))

_ALL = (
    Backend("native", "the kernel that torch chooses", Kernel(kernels.native), any_mask=True, inline=True),
    _torch("_native_cudnn", "torch's cuDNN kernel", SDPBackend.CUDNN_ATTENTION, ("cuda",)),
    _torch("_native_efficient", "torch's memory-efficient kernel", SDPBackend.EFFICIENT_ATTENTION, ("cuda", "xpu")),
    replace(_torch("_native_flash", "torch's FlashAttention", SDPBackend.FLASH_ATTENTION), any_mask=False),
    Backend("_native_math", "matrix products and a softmax", Kernel(kernels.plain), any_mask=True),
    Backend("flex", "torch's FlexAttention", Kernel(kernels.flex), any_mask=True, inline=True),
    Backend("chunked", "exact, in blocks within `max_bytes`", Kernel(chunked), any_mask=True),
    _of_flash("flash", "FlashAttention 2", _flash_2, _FLASH_2),
    _of_flash("flash_varlen", "FlashAttention 2", _flash_2, _FLASH_2),
    _of_flash("flash_hub", "FlashAttention 2 from the Hub", _flash_2_hub, _HUB),
    _of_flash("flash_varlen_hub", "FlashAttention 2 from the Hub", _flash_2_hub, _HUB),
    _of_flash("_flash_3", "FlashAttention 3", _flash_3, _FLASH_3, (9, 0)),
    _of_flash("_flash_varlen_3", "FlashAttention 3", _flash_3, _FLASH_3, (9, 0)),
    _of_flash("_flash_3_hub", "FlashAttention 3 from the Hub", _flash_3_hub, _HUB),
    _of_flash("_flash_3_varlen_hub", "FlashAttention 3 from the Hub", _flash_3_hub, _HUB),
    replace(_of_flash("flash_4_hub", "FlashAttention 4 from the Hub", _flash_4_hub, _HUB_4, (9, 0)), head_sizes=128),
    replace(_of_flash("aiter_fa2_hub", "AITER's for ROCm, from the Hub", _aiter_hub, _HUB), capability=None),
    _of_sage("sage", "SageAttention, its choice of kernel", _sage(), _SAGE),
    _of_sage("sage_varlen", "SageAttention", _sage(packed="sageattn_varlen"), _SAGE),
    _of_sage("sage_hub", "SageAttention from the Hub", _sage_hub, _HUB),
    replace(
        _of_sage("sage_blackwell_hub", "SageAttention 3, 4 bits, from the Hub", _blackwell_hub, _HUB, (10, 0)),
        scales=False,
    ),
    _of_sage(
        "_sage_qk_int8_pv_fp8_cuda",
        "scores of int8, values of fp8",
        _sage("sageattn_qk_int8_pv_fp8_cuda"),
        _SAGE,
        (8, 9),
    ),
    replace(
        _of_sage(
            "_sage_qk_int8_pv_fp8_cuda_sm90",
            "the same for Hopper",
            _sage("sageattn_qk_int8_pv_fp8_cuda_sm90"),
            _SAGE,
            (9, 0),
        ),
        only_capability=True,
    ),
    _of_sage(
        "_sage_qk_int8_pv_fp16_cuda", "scores of int8, values of fp16", _sage("sageattn_qk_int8_pv_fp16_cuda"), _SAGE
    ),
    _of_sage("_sage_qk_int8_pv_fp16_triton", "the same in Triton", _sage("sageattn_qk_int8_pv_fp16_triton"), _SAGE),
    Backend(
        "xformers",
        "the memory-efficient attention of xFormers",
        _xformers,
        any_mask=True,
        devices=("cuda",),
        dtypes=(*HALF, torch.float32),
        package=_XFORMERS,
    ),
    Backend(
        "_native_npu",
        "the fused attention of Ascend NPUs",
        _npu,
        any_mask=True,
        devices=("npu",),
        dtypes=HALF,
        causal=False,
        package=_NPU,
    ),
    Backend("_native_xla", "the FlashAttention of torch_xla", _xla, devices=("xla",), package=_XLA),
)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _ALL}


def backend_named(name: str) -> Backend:
    """The backend of a name, or of an entry of `AttentionBackendName`.

    Raises:
        ValueError: if there is none; the message lists them.
    """
    found = BACKENDS.get(getattr(name, "value", name))
    if found is None:
        raise ValueError(f"there is no attention backend {name!r}; choose of {', '.join(BACKENDS)}")
    return found


def capability_table() -> str:
    """What every backend can do, as a table in Markdown: that of docs/attention.md."""
    head = ["backend", "what it is", "needs", "device", "dtypes", "heads up to", "masks", "causal", "exact"]
    rows = [
        [
            f"`{backend.name}`",
            backend.summary,
            str(backend.package or "torch"),
            _devices(backend),
            ", ".join(_short(dtype) for dtype in backend.dtypes) or "any",
            str(backend.head_sizes or "any"),
            backend.masks,
            "yes" if backend.causal else "no",
            "yes" if backend.exact else "no",
        ]
        for backend in BACKENDS.values()
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _devices(backend: Backend) -> str:
    names = ", ".join(backend.devices) or "any"
    if backend.capability is None:
        return names
    return f"{names} {_dotted(backend.capability)}{'' if backend.only_capability else '+'}"
