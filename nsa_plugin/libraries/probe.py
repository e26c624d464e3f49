"""The profile of this machine: its device, and which kernel libraries are installed and load."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from nsa_plugin.libraries.architectures import shared_memory_per_block
from nsa_plugin.libraries.capabilities import HostModule, KernelLibrary, alternatives
from nsa_plugin.libraries.devices import DeviceProfile, InstalledLibrary, on_device, without_gpu
from nsa_plugin.libraries.host import cpu_memory, has_nvlink
from nsa_plugin.libraries.manifest import MANIFEST


@functools.cache
def probe() -> DeviceProfile:
    """The profile of this process's current device. Probed once; cached.

    A machine whose torch finds no CUDA device has the profile of a CPU. Without torch the device is unknown. No library
    raises: one that is missing or does not load is listed with the reason.
    """
    try:
        import torch
    except ImportError:
        reason = "torch is not installed, so the device is unknown"
        missing = {name: InstalledLibrary(name=name, available=False, reason=reason) for name in MANIFEST}
        return DeviceProfile(kind="unknown", name=reason, libraries=missing)
    if torch.version.cuda is None or not torch.cuda.is_available():
        total, available = cpu_memory()
        found = {name: _find(library, 0, 0) for name, library in MANIFEST.items()}
        return DeviceProfile(kind="cpu", name="CPU", libraries=found, memory_total=total, memory_free=available)
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    sm = 10 * properties.major + properties.minor
    # Older releases of torch do not report it.
    smem = getattr(properties, "shared_memory_per_block_optin", 0) or shared_memory_per_block(sm)
    free, total = torch.cuda.mem_get_info(index)
    return DeviceProfile(
        kind="cuda",
        name=properties.name,
        sm=sm,
        memory_total=total,
        memory_free=free,
        smem_per_block=smem,
        nvlink=has_nvlink(f"GPU-{properties.uuid}"),
        libraries={name: _find(library, sm, smem) for name, library in MANIFEST.items()},
    )


def _find(library: KernelLibrary, sm: int, smem_per_block: int) -> InstalledLibrary:
    """A library on this machine, from the first host that loads and has kernels for the device."""
    if unavailable := without_gpu(library, sm):
        return unavailable
    refused: list[InstalledLibrary] = []
    for host in library.hosts:
        if not _locate(host.module):
            continue
        distribution, version = _distribution(host.distributions)
        if not distribution:
            reason = f"the installed {host.module} is not from {alternatives(host.distributions)}"
            refused.append(InstalledLibrary(name=library.name, available=False, module=host.module, reason=reason))
            continue
        found = on_device(library, (distribution, version, host.module), sm, smem_per_block)
        if found.available and (problem := _load_problem(host)):
            found = replace(found, available=False, capabilities=(), reason=problem)
        if found.available:
            return found
        refused.append(found)
    if refused:
        return replace(refused[0], reason="; ".join(found.reason for found in refused))
    wanted = dict.fromkeys(name for host in library.hosts for name in host.distributions)
    return InstalledLibrary(
        name=library.name, available=False, reason=f"not installed (looked for {', '.join(wanted)})"
    )


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
    """(name, version) of the first of these distributions that is installed; ("", "") if none is."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def _load_problem(host: HostModule) -> str:
    """Why a module's kernels cannot be used, or ""."""
    if not host.imports:
        return ""
    try:
        loaded = importlib.import_module(host.module)
    except Exception as error:  # e.g. OSError for a missing libcuda.so.1, AssertionError for no CUDA toolkit
        return f"{host.module} is installed but does not load: {type(error).__name__}: {error}"
    problem = host.problem(loaded) if host.problem else ""
    return f"{host.module} is installed, but {problem}" if problem else ""
