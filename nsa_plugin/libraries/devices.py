"""The device profile: one device, and the kernels of each installed library that run on it.

`probe.probe` makes the profile of this machine; `synthetic` describes another, for `explain` and for tests. Both read
the manifest. Nothing here imports torch or an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nsa_plugin.libraries.architectures import name_of, shared_memory_per_block
from nsa_plugin.libraries.capabilities import Capability, KernelLibrary, Op, spans
from nsa_plugin.libraries.manifest import MANIFEST

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class InstalledLibrary:
    """A kernel library on one machine.

    Attributes:
        name: its name in the manifest.
        available: it is installed, loads, and has kernels for this device.
        distribution, version: the distribution that installed it; "" if there is none.
        module: dotted name of the module with its kernels; "" if there is none.
        reason: why it is not available; "" if it is.
        capabilities: its kernels for this device; empty if it is not available.
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
        kind: "cuda", "cpu", or "unknown" if torch is not installed.
        name: the device's name, as its driver reports it; why it is unknown.
        sm: SM version (compute capability 9.0 is 90); 0 for a CPU.
        memory_total, memory_free: bytes. Free is a reading at the time of the probe: an adapter replaces
            it (`dataclasses.replace`) once the engine has allocated its cache.
        smem_per_block: bytes of shared memory that a block may request; 0 for a CPU.
        nvlink: NVLink connects the device to another GPU of the machine.
        libraries: every library of the manifest, by name.
    """

    kind: str
    name: str
    libraries: Mapping[str, InstalledLibrary]
    sm: int = 0
    memory_total: int = 0
    memory_free: int = 0
    smem_per_block: int = 0
    nvlink: bool = False

    def capability(self, library: str, op: Op, layout: str | None = None) -> Capability | None:
        """The library's kernel for an operation on a KV layout, or None if it has none here."""
        entry = self.libraries.get(library)
        if entry is None or not entry.available:
            return None
        return next((kernel for kernel in entry.capabilities if kernel.serves(op, layout)), None)

    def has(self, library: str, op: Op, layout: str | None = None) -> bool:
        return self.capability(library, op, layout) is not None

    def providers(self, op: Op) -> tuple[str, ...]:
        """Names of the available libraries that provide an operation."""
        return tuple(name for name in self.libraries if self.has(name, op))

    def keeping(self, kept: Callable[[str, Capability], bool]) -> DeviceProfile:
        """The profile reduced to the kernels for which `kept(library, capability)` is true."""

        def reduced(library: InstalledLibrary) -> InstalledLibrary:
            capabilities = tuple(capability for capability in library.capabilities if kept(library.name, capability))
            return replace(library, capabilities=capabilities)

        return replace(self, libraries={name: reduced(library) for name, library in self.libraries.items()})

    @property
    def where(self) -> str:
        """The device in a sentence: "SM90", "a CPU" or "an unknown device"."""
        return "an unknown device" if self.kind == "unknown" else name_of(self.sm)

    def describe(self) -> str:
        """The device and its libraries in one line, for a report."""
        if self.kind == "unknown":
            return self.name
        names = [f"{lib.name} {lib.version}".strip() for lib in self.libraries.values() if lib.available]
        size = f"{self.memory_free / GIB:.1f} of {self.memory_total / GIB:.1f} GiB free"
        sm = f" (SM{self.sm})" if self.kind == "cuda" else ""
        return f"{self.name}{sm}, {size}, kernels: {', '.join(names) or 'none'}"

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain data, for JSON."""
        data = asdict(replace(self, libraries={}))
        data["libraries"] = {name: asdict(library) for name, library in self.libraries.items()}
        return data


def on_device(
    library: KernelLibrary,
    build: tuple[str, str, str],
    sm: int,
    smem_per_block: int,
    more: tuple[Capability, ...] = (),
) -> InstalledLibrary:
    """An installed build of a library on a device.

    Args:
        build: its distribution, version and module.
        more: kernels in addition to the manifest's.
    """
    distribution, version, module = build
    usable = library.kernels_on(
        sm, distribution=distribution, version=version, smem_per_block=smem_per_block, more=more
    )
    reason = f"its kernels are built for {spans((*library.kernels, *more))}; this device is {name_of(sm)}"
    if any(kernel.sm_min <= sm <= kernel.sm_max for kernel in library.kernels):
        reason = f"{distribution} {version} has no kernels for {name_of(sm)}; other versions have"
    return InstalledLibrary(
        name=library.name,
        available=bool(usable),
        distribution=distribution,
        version=version,
        module=module,
        reason="" if usable else reason,
        capabilities=usable,
    )


def emulating(profile: DeviceProfile, sm: int) -> DeviceProfile:
    """The profile with the kernels and the shared memory of an older GPU, to test the portable path on this one.

    Raises:
        ValueError: the device is not a GPU, or is older than SM version `sm`.
    """
    if profile.kind != "cuda" or profile.sm < sm:
        raise ValueError(f"{profile.where} cannot emulate {name_of(sm)}")
    smem = shared_memory_per_block(sm)

    def emulated(name: str, found: InstalledLibrary) -> InstalledLibrary:
        build = found.distribution, found.version, found.module
        without_kernels = on_device(MANIFEST[name], build, profile.sm, profile.smem_per_block).reason
        # A library that fails for another reason, as its import may, fails for it here, too.
        if found.available or found.reason == without_kernels:
            return on_device(MANIFEST[name], build, sm, smem)
        return found

    libraries = {name: emulated(name, found) for name, found in profile.libraries.items()}
    name = f"{profile.name} emulating {name_of(sm)}"
    return replace(profile, name=name, sm=sm, smem_per_block=smem, libraries=libraries)


def without_gpu(library: KernelLibrary, sm: int) -> InstalledLibrary | None:
    """The library as unavailable where the device is a CPU and it has no kernel for one; otherwise None."""
    if sm or library.runs_on_cpu:
        return None
    return InstalledLibrary(name=library.name, available=False, reason="needs an NVIDIA GPU; this device is a CPU")


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
    """The profile of a described machine, without the hardware.

    Args:
        sm: SM version; 0 for a CPU.
        libraries: names of the installed libraries; every library of the manifest if None. `reference` is always
            installed.
        versions: (distribution, version) by library; the manifest's `assumed` for the others.
        kernels: kernels of a library in addition to the manifest's, by library.
        memory_total, memory_free: bytes; half of the memory is free if `memory_free` is None.
        smem_per_block: bytes; what the SM version grants if None.

    Raises:
        ValueError: a library is not in the manifest.
    """
    installed = set(MANIFEST if libraries is None else libraries) | {"reference"}
    unknown = sorted((installed | set(versions or ()) | set(kernels or ())) - set(MANIFEST))
    if unknown:
        raise ValueError(f"unknown library {', '.join(unknown)}; allowed: {', '.join(MANIFEST)}")
    if smem_per_block is None:
        smem_per_block = shared_memory_per_block(sm)
    described = {}
    for name, library in MANIFEST.items():
        if name not in installed:
            described[name] = InstalledLibrary(name=name, available=False, reason="not installed")
            continue
        build = (*(versions or {}).get(name, library.assumed), library.hosts[0].module)
        more = (kernels or {}).get(name, ())
        described[name] = without_gpu(library, sm) or on_device(library, build, sm, smem_per_block, more)
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
