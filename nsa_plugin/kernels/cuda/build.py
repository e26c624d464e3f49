"""Compiling and launching the plugin's CUDA kernels: NVRTC at first use, then a cache on disk.

The sources (`*.cu` beside this file) include only `*.cuh` beside them, so that a CUDA toolkit is not needed:
the driver is reached through `cuda.bindings` and NVRTC through `cuda.pathfinder`, which PyTorch's CUDA builds for Linux
bring along. Cubins are kept in `$XDG_CACHE_HOME/nsa_plugin` (`~/.cache/nsa_plugin`), named after everything they
depend on. Whoever can write there runs code on the GPU: a folder that others may write to is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nsa_plugin.kernels.cuda import nvrtc
from nsa_plugin.kernels.cuda.nvrtc import KernelBuildError
from nsa_plugin.kernels.triton.device import launched_shared_memory

logger = logging.getLogger("nsa_plugin")

_SOURCES = Path(__file__).parent
_BUILD_LOCK = threading.Lock()

Defines: TypeAlias = tuple[tuple[str, int], ...]
"""Preprocessor definitions, sorted by name."""
_COMPILED: dict[tuple[str, Defines, str], bytes] = {}
"""Cubins that were compiled together, by source, definitions and architecture; guarded by `_BUILD_LOCK`."""
_LISTENERS: list[Callable[[str], None]] = []

# A tensor, None, or a ctypes value or structure, whose base classes ctypes does not publish.
Argument: TypeAlias = Any


class CudaKernel:
    """A compiled kernel of the current device."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: Sequence[int] | None = None,
    ) -> None:
        """Launch on torch's current stream.

        Args:
            grid, block: three numbers each.
            args: in the kernel's order. A tensor is passed as its data pointer, None as a null pointer;
                numbers are ctypes values of the width that the kernel declares.
            shared_bytes: dynamic shared memory of a block. While another GPU is emulated, `launched_shared_memory`.
            cluster: blocks of a cluster, three numbers.

        Raises:
            KernelBuildError: the driver refuses the launch.
        """
        from cuda.bindings import driver

        shared_bytes = launched_shared_memory(shared_bytes)
        values = values_of(args)
        pointers = pointers_to(values)
        stream = torch.cuda.current_stream().cuda_stream
        if cluster is not None:
            config = _clustered(grid, block, cluster, shared_bytes, stream)
            (error,) = driver.cuLaunchKernelEx(config, self._handle, ctypes.addressof(pointers), 0)
        else:
            (error,) = driver.cuLaunchKernel(
                self._handle, *grid, *block, shared_bytes, stream, ctypes.addressof(pointers), 0
            )
        if error:
            raise KernelBuildError(f"{self.name}: launch of grid {tuple(grid)} failed: {error.name}")

    def resident_clusters(self, block: Sequence[int], cluster: Sequence[int], *, shared_bytes: int = 0) -> int:
        """Clusters that the current device runs at a time, 0 for a size that it cannot run.

        Args:
            block, cluster, shared_bytes: as in a launch.
        """
        from cuda.bindings import driver

        config = _clustered(cluster, block, cluster, shared_bytes, 0)
        error, clusters = driver.cuOccupancyMaxActiveClusters(self._handle, config)
        return 0 if error else int(clusters)


def values_of(args: Sequence[Argument]) -> list[Any]:
    """A launch's arguments as ctypes values."""
    return [
        ctypes.c_void_p(arg.data_ptr() if arg is not None else 0)
        if arg is None or isinstance(arg, torch.Tensor)
        else arg
        for arg in args
    ]


def pointers_to(values: Sequence[Any]) -> ctypes.Array[ctypes.c_void_p]:
    """Where the values lie, for as long as they live."""
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))


def _clustered(
    grid: Sequence[int], block: Sequence[int], cluster: Sequence[int], shared_bytes: int, stream: int
) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = cluster
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = shared_bytes, driver.CUstream(stream)
    config.attrs, config.numAttrs = [attribute], 1
    return config


def load_kernel(
    source: str, name: str, *, defines: Mapping[str, int] | None = None, max_dynamic_shared: int = 0
) -> CudaKernel:
    """A kernel for torch's current device, compiled unless it already is.

    Args:
        source: file beside this module, such as "topk.cu".
        name: an `extern "C"` kernel of it.
        defines: preprocessor definitions; each set compiles a separate kernel.
        max_dynamic_shared: most dynamic shared memory that a launch asks for, in bytes.

    Raises:
        KernelBuildError: it does not compile or load; the message has the log.
    """
    shared = launched_shared_memory(max_dynamic_shared)
    return _load(source, name, _sorted(defines or {}), shared, torch.cuda.current_device())


def when_loaded(listener: Callable[[str], None]) -> None:
    """Call `listener` with the name of each kernel that this process loads from now on."""
    _LISTENERS.append(listener)


def compile_together(source: str, sets: Iterable[Mapping[str, int]]) -> None:
    """Compile a source for torch's current device with several sets of definitions, each in a thread.

    `load_kernel` then finds the cubins, which the process keeps: a cache on disk may not be writable.
    NVRTC takes one to two seconds a set, and runs in several threads at once.

    Raises:
        KernelBuildError: one does not compile; the message has the log.
    """
    arch = _architecture(torch.cuda.current_device())
    with _BUILD_LOCK:
        missing = [one for one in dict.fromkeys(map(_sorted, sets)) if (source, one, arch) not in _COMPILED]
        if not missing:
            return
        nvrtc.version()  # loads the library before the threads need it

        def compile_one(defines: Defines) -> None:
            _COMPILED[source, defines, arch] = _cubin(source, defines, arch)

        with ThreadPoolExecutor(len(missing)) as threads:
            list(threads.map(compile_one, missing))


def _sorted(defines: Mapping[str, int]) -> Defines:
    return tuple(sorted(defines.items()))


def _architecture(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    # The "a" target has wgmma and the like; it exists from SM90 on and runs on that one architecture only.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.cache
def _library(source: str, defines: Defines, shared: int, device: int) -> Any:
    """A source's kernels with one limit of dynamic shared memory, which is an attribute of a loaded kernel."""
    from cuda.bindings import driver

    arch = _architecture(device)
    with _BUILD_LOCK:
        cubin = _COMPILED.get((source, defines, arch)) or _cubin(source, defines, arch)
    return _checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"loading {source}")


@functools.cache
def _load(source: str, name: str, defines: Defines, shared: int, device: int) -> CudaKernel:
    from cuda.bindings import driver

    what = f"{source}:{name}"
    library = _library(source, defines, shared, device)
    kernel = _checked(driver.cuLibraryGetKernel(library, name.encode()), f"finding {what}")
    attributes = driver.CUfunction_attribute
    wanted = {attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared} if shared else {}
    if torch.cuda.get_device_capability(device)[0] >= 9:
        wanted[attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
    handle = _checked(driver.cuDeviceGet(device), "finding the device")
    for attribute, value in wanted.items():
        _checked(driver.cuKernelSetAttribute(attribute, value, kernel, handle), f"{what}: {attribute.name} {value}")
    for listener in _LISTENERS:
        listener(what)
    return CudaKernel(name, driver.CUfunction(int(kernel)))


def _cubin(source: str, defines: Defines, arch: str) -> bytes:
    text = (_SOURCES / source).read_bytes()
    headers = {path.name.encode(): path.read_bytes() for path in sorted(_SOURCES.glob("*.cuh"))}
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "-lineinfo"]
    options += [f"-D{key}={value}" for key, value in defines]
    key = hashlib.sha256(repr((text, headers, options, nvrtc.version())).encode()).hexdigest()[:32]
    name = f"{Path(source).stem}-{arch}-{key}.cubin"
    with contextlib.suppress(OSError, RuntimeError):  # it is not there, or cannot be read or trusted: compile
        return (_own(_cache()) / name).read_bytes()
    cubin = nvrtc.compiled(text, source, headers, options)
    try:
        _keep(_cache(), name, cubin)
    except (OSError, RuntimeError) as error:
        _say_unkept(str(error))
    return cubin


def _own(folder: Path) -> Path:
    """The folder, if it is this user's (or root's) and nobody else may write to it.

    Raises:
        OSError: it is another's, or is not there.
    """
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{folder} belongs to user {found.st_uid}; set XDG_CACHE_HOME to a folder of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {folder}: chmod go-w {folder}")
    return folder


def _keep(folder: Path, name: str, cubin: bytes) -> None:
    """Write the cubin for the next process.

    Raises:
        OSError: it cannot be written, or the folder is not this user's alone.
    """
    path = folder / name
    partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _own(folder)
        partial.write_bytes(cubin)
        # Several ranks compile at once: the rename is atomic and either cubin is the same.
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


@functools.cache
def _say_unkept(error: str) -> None:
    logger.warning("compiled CUDA kernels cannot be kept, so every start compiles them again: %s", error)


def _cache() -> Path:
    """Return the folder of cubins.

    Raises:
        RuntimeError: the user has no home directory, as in a container with a user ID of its own.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsa_plugin"


def _checked(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a call of cuda.bindings, which returns (status, value)."""
    status, *values = result
    if status:
        raise KernelBuildError(f"{doing} failed: {status.name}")
    return values[0] if values else None
