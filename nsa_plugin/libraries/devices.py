"""What this machine has: the device, and each installed kernel library with its limits.

`probe` looks once; `synthetic` describes a machine that is not here, for `explain` and for tests.
Both read the tables of `capabilities`. Nothing here imports torch or an engine when it is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from nsa_plugin.libraries.capabilities import KERNELS, Capability, Op, kernels_of, spans

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Library:
    """A kernel library on this machine.

    Attributes:
        name: the name that plans and settings use.
        available: it is installed, loads, and has kernels for this device.
        distribution, version: the installed distribution that carries it; "" if there is none.
        module: dotted name of the module that carries it; "" if there is none.
        reason: why it is not available, in words; "" when it is.
        capabilities: its kernels for this device; empty when it is not available.
    """

    name: str
    available: bool
    distribution: str = ""
    version: str = ""
    module: str = ""
    reason: str = ""
    capabilities: tuple[Capability, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A device and what is installed for it.

    Attributes:
        kind: "cuda" or "cpu".
        name: the device's own name.
        sm: SM version (compute capability 9.0 is 90); 0 for a CPU.
        memory_total, memory_free: bytes. Free is a reading at the time of the probe: an adapter replaces
            it (`dataclasses.replace`) once the engine has allocated its cache.
        smem_per_block: most shared memory that a block may ask for, in bytes; 0 for a CPU.
        nvlink: another GPU of the machine is reached over NVLink.
        libraries: every library of `LIBRARIES`, by name.
    """

    kind: str
    name: str
    sm: int
    memory_total: int
    memory_free: int
    smem_per_block: int
    nvlink: bool
    libraries: Mapping[str, Library]

    def capability(self, library: str, op: Op, layout: str | None = None) -> Capability | None:
        """The library's kernel for an operation on a KV layout, or None if it has none here."""
        entry = self.libraries.get(library)
        if entry is None or not entry.available:
            return None
        for capability in entry.capabilities:
            if capability.op == op and (layout is None or not capability.layouts or layout in capability.layouts):
                return capability
        return None

    def has(self, library: str, op: Op, layout: str | None = None) -> bool:
        return self.capability(library, op, layout) is not None

    def providers(self, op: Op) -> tuple[str, ...]:
        """Names of the available libraries that provide an operation."""
        return tuple(name for name in self.libraries if self.has(name, op))

    def keeping(self, kept: Callable[[str, Capability], bool]) -> DeviceProfile:
        """The profile with those kernels alone for which `kept(library, capability)` holds."""

        def reduced(library: Library) -> Library:
            capabilities = tuple(capability for capability in library.capabilities if kept(library.name, capability))
            return replace(library, capabilities=capabilities)

        return replace(self, libraries={name: reduced(library) for name, library in self.libraries.items()})

    @property
    def where(self) -> str:
        """The device in a sentence: "SM90" or "a CPU"."""
        return _where(self.sm)

    def describe(self) -> str:
        """The device and its libraries in one line, for a report."""
        there = [f"{lib.name} {lib.version}".strip() for lib in self.libraries.values() if lib.available]
        size = f"{self.memory_free / GIB:.1f} of {self.memory_total / GIB:.1f} GiB free"
        sm = f" (SM{self.sm})" if self.kind == "cuda" else ""
        return f"{self.name}{sm}, {size}, kernels: {', '.join(there) or 'none'}"

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain data, for JSON."""
        data = asdict(replace(self, libraries={}))
        data["libraries"] = {name: asdict(library) for name, library in self.libraries.items()}
        return data


@dataclass(frozen=True)
class _Host:
    """A module that carries a library, and the distributions that it may come from."""

    module: str
    distributions: tuple[str, ...]


# Where each library may be found; the first host that is installed and loads is taken.
_HOSTS: Mapping[str, tuple[_Host, ...]] = {
    # Upstream's own `flash_mla` distribution is not listed: since its release of 2026-09-30 it has no
    # SM90 kernels and reads neither the V3.2 nor the V4 cache. SGLang's fork keeps both.
    "flash_mla": (
        _Host("flash_mla", ("sgl-flash-mla",)),
        _Host("sgl_kernel.flash_mla", ("sglang-kernel", "sgl-kernel")),
        _Host("vllm._flashmla_C", ("vllm",)),
    ),
    "deep_gemm": (
        _Host("deep_gemm", ("sgl-deep-gemm", "deep-gemm")),
        _Host("vllm.third_party.deep_gemm", ("vllm",)),
    ),
    "fa3": (
        _Host("sgl_kernel.flash_attn", ("sglang-kernel", "sgl-kernel")),
        _Host("vllm.vllm_flash_attn._vllm_fa3_C", ("vllm",)),
    ),
    "trtllm": (_Host("flashinfer", ("flashinfer-python",)),),
    # The plugin's own kernels: what compiles and starts them. cuda-bindings brings the module along since 12.9.1.
    "cuda": (_Host("cuda.pathfinder", ("cuda-bindings",)),),
    "triton": (_Host("triton", ("triton", "pytorch-triton")),),
    "reference": (_Host("torch", ("torch",)),),
}
LIBRARIES = tuple(_HOSTS)

_NEEDS_GPU = "needs an NVIDIA GPU; this device is a CPU"


def _describe(
    name: str,
    *,
    distribution: str,
    version: str,
    module: str,
    sm: int,
    smem_per_block: int,
    more: Iterable[Capability] = (),
) -> Library:
    """An installed library as it stands on a device; `more` are kernels besides those of the table."""
    found = Library(name=name, available=False, distribution=distribution, version=version, module=module)
    kernels = (*KERNELS[name], *more)
    if not kernels:
        return replace(found, reason="this installation of nsa-plugin has no kernels of its own for it")
    usable = kernels_of(name, kernels, distribution=distribution, version=version, sm=sm, smem_per_block=smem_per_block)
    if not usable:
        return replace(found, reason=f"its kernels are built for {spans(kernels)}; this device is {_where(sm)}")
    return replace(found, available=True, capabilities=usable)


def _where(sm: int) -> str:
    return f"SM{sm}" if sm else "a CPU"


# ---------------------------------------------------------------------------------------------------
# Probing


def _locate(module: str) -> bool:
    """Whether a module is installed, without importing any part of it.

    `importlib.util.find_spec("a.b")` would import `a`, and `a` may be an engine.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    if not rest:
        return True
    *package, name = rest
    for root in spec.submodule_search_locations or ():
        folder = Path(root, *package)
        if (folder / name / "__init__.py").is_file() or (folder / f"{name}.py").is_file():
            return True
        if any(folder.glob(f"{name}.*so")):
            return True
    return False


def _distribution(names: Iterable[str]) -> tuple[str, str]:
    """(name, version) of the first installed distribution of these; ("", "") if there is none."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def _load_error(module: str) -> str:
    """Why a module does not load, or "". An engine's own modules are left for the engine to load."""
    if module.split(".")[0] == "vllm":
        return ""
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # e.g. OSError for a missing libcuda.so.1, AssertionError for no CUDA toolkit
        return f"{module} is installed and does not load: {type(error).__name__}: {error}"
    # sgl_kernel.flash_mla keeps its extension's error for the first call.
    if failure := getattr(loaded, "_flashmla_import_error", None):
        return f"{module} is installed and its extension does not load: {failure}"
    # Builds without the function are older than the split that it tells of, and have the kernels.
    if module == "flash_mla" and not getattr(loaded, "has_legacy", lambda: True)():
        return "flash_mla does not have the kernels for the V3.2 and V4 caches (`has_legacy()` is false)"
    return ""


def _find(name: str, sm: int, smem_per_block: int) -> Library:
    """A library on this machine; the first host that loads and has kernels for the device."""
    if sm == 0 and name != "reference":
        return Library(name=name, available=False, reason=_NEEDS_GPU)
    refused: list[Library] = []
    for host in _HOSTS[name]:
        if not _locate(host.module):
            continue
        distribution, version = _distribution(host.distributions)
        if not distribution:
            reason = f"the installed {host.module} is not from {' or '.join(host.distributions)}"
            refused.append(Library(name=name, available=False, module=host.module, reason=reason))
            continue
        found = _describe(
            name,
            distribution=distribution,
            version=version,
            module=host.module,
            sm=sm,
            smem_per_block=smem_per_block,
        )
        if found.available and (error := _load_error(host.module)):
            found = replace(found, available=False, capabilities=(), reason=error)
        if found.available:
            return found
        refused.append(found)
    if refused:
        return replace(refused[0], reason="; ".join(library.reason for library in refused))
    wanted = dict.fromkeys(name for host in _HOSTS[name] for name in host.distributions)
    return Library(name=name, available=False, reason=f"not installed (looked for {', '.join(wanted)})")


def _cpu_memory() -> tuple[int, int]:
    """(total, available) bytes of main memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return total, page * os.sysconf("SC_AVPHYS_PAGES")
    # SC_AVPHYS_PAGES leaves out what the page cache would give back; MemAvailable counts it.
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return total, int(available) * 1024 if available else page * os.sysconf("SC_AVPHYS_PAGES")


def _has_nvlink(uuid: str) -> bool:
    """Whether another GPU of this machine is reached over NVLink; False where NVML cannot be asked."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # pynvml may be missing, and so may the driver's library
        return False
    try:
        own = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return any(
            _nvlink_between(nvml, own, nvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(nvml.nvmlDeviceGetCount())
            if index != nvml.nvmlDeviceGetIndex(own)
        )
    except nvml.NVMLError:
        return False
    finally:
        nvml.nvmlShutdown()


def _nvlink_between(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


# Opt-in shared memory of a block, where torch is too old to report it (CUDA C++ Programming Guide,
# technical specifications per compute capability).
_SMEM_OPT_IN = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_SMEM_DEFAULT = 48 << 10


def _cpu_profile(name: str) -> DeviceProfile:
    total, available = _cpu_memory()
    return DeviceProfile(
        kind="cpu",
        name=name,
        sm=0,
        memory_total=total,
        memory_free=available,
        smem_per_block=0,
        nvlink=False,
        libraries={library: _find(library, 0, 0) for library in LIBRARIES},
    )


@functools.cache
def probe() -> DeviceProfile:
    """This process's current device and what is installed for it; looked at once.

    A machine without torch, or whose torch sees no CUDA device, is a CPU. Never raises for a library:
    one that is missing or does not load is listed with the reason.
    """
    try:
        import torch
    except ImportError:
        return _cpu_profile("CPU (torch is not installed)")
    if torch.version.cuda is None or not torch.cuda.is_available():
        return _cpu_profile("CPU")
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    sm = 10 * properties.major + properties.minor
    smem = getattr(properties, "shared_memory_per_block_optin", 0) or _SMEM_OPT_IN.get(sm, _SMEM_DEFAULT)
    free, total = torch.cuda.mem_get_info(index)
    return DeviceProfile(
        kind="cuda",
        name=properties.name,
        sm=sm,
        memory_total=total,
        memory_free=free,
        smem_per_block=smem,
        nvlink=_has_nvlink(f"GPU-{properties.uuid}"),
        libraries={library: _find(library, sm, smem) for library in LIBRARIES},
    )


# Versions that `synthetic` assumes where it is not told: those that sglang 0.5.23 pins.
_ASSUMED_VERSIONS = {
    "flash_mla": ("sgl-flash-mla", "1.0.0"),
    "deep_gemm": ("sgl-deep-gemm", "0.2.3.post2"),
    "fa3": ("sglang-kernel", "0.4.10"),
    "trtllm": ("flashinfer-python", "0.7.2"),
    "cuda": ("cuda-bindings", "13.0.3"),
    "triton": ("triton", "3.9.0"),
    "reference": ("torch", "2.14.1"),
}


def synthetic(
    sm: int = 90,
    *,
    libraries: Iterable[str] | None = None,
    versions: Mapping[str, tuple[str, str]] | None = None,
    kernels: Mapping[str, tuple[Capability, ...]] | None = None,
    memory_total: int = 141 * GIB,
    memory_free: int | None = None,
    smem_per_block: int | None = None,
    nvlink: bool = True,
) -> DeviceProfile:
    """A machine that is described rather than probed; the same tables without the hardware.

    Args:
        sm: SM version; 0 for a CPU.
        libraries: names of the installed libraries (of `LIBRARIES`); all of them if None.
            `reference` is always there.
        versions: (distribution, version) by library, where it is not the assumed one.
        kernels: kernels that a library has besides those of the table, for what a later release adds.
        memory_total, memory_free: bytes; half of the memory is free if it is not said.
        smem_per_block: bytes; what the SM version grants if None.

    Raises:
        ValueError: a library is not one of `LIBRARIES`.
    """
    installed = set(LIBRARIES if libraries is None else libraries) | {"reference"}
    unknown = sorted((installed | set(versions or ()) | set(kernels or ())) - set(LIBRARIES))
    if unknown:
        raise ValueError(f"unknown library {', '.join(unknown)}; allowed: {', '.join(LIBRARIES)}")
    if smem_per_block is None:
        smem_per_block = _SMEM_OPT_IN.get(sm, _SMEM_DEFAULT) if sm else 0
    described = {}
    for name in LIBRARIES:
        if name not in installed:
            described[name] = Library(name=name, available=False, reason="not installed")
        elif sm == 0 and name != "reference":
            described[name] = Library(name=name, available=False, reason=_NEEDS_GPU)
        else:
            distribution, version = (versions or {}).get(name, _ASSUMED_VERSIONS[name])
            described[name] = _describe(
                name,
                distribution=distribution,
                version=version,
                module=_HOSTS[name][0].module,
                sm=sm,
                smem_per_block=smem_per_block,
                more=(kernels or {}).get(name, ()),
            )
    return DeviceProfile(
        kind="cuda" if sm else "cpu",
        name=f"synthetic SM{sm}" if sm else "synthetic CPU",
        sm=sm,
        memory_total=memory_total,
        memory_free=memory_total // 2 if memory_free is None else memory_free,
        smem_per_block=smem_per_block,
        nvlink=nvlink and sm > 0,
        libraries=described,
    )
