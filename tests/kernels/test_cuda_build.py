"""Compiling and launching CUDA kernels, with stand-ins for NVRTC and the driver."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from enum import IntEnum
from shutil import which
from types import ModuleType, SimpleNamespace

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from nsa_plugin.kernels.cuda import build, nvrtc, sparse_mla, sparse_mla_launch
from nsa_plugin.kernels.triton import device
from nsa_plugin.libraries.architectures import padded_shared_memory

ATTRIBUTES = ("MAX_DYNAMIC_SHARED_SIZE_BYTES", "NON_PORTABLE_CLUSTER_SIZE_ALLOWED")


class Status(IntEnum):
    OK = 0
    WRONG = 6


class Compiler:
    """The library of NVRTC: the cubin is the number of programs so far."""

    def __init__(self) -> None:
        self.fails = False
        self.status = 0
        self.programs: list[SimpleNamespace] = []
        self.destroyed = 0
        self.together: threading.Barrier | None = None
        self._lock = threading.Lock()

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcGetErrorString(self, status):
        return {5: b"NVRTC_ERROR_INVALID_OPTION"}[status]

    def nvrtcCreateProgram(self, program, source, name, count, headers, names):
        assert count == len(headers) == len(names)
        with self._lock:
            program._obj.value = len(self.programs) + 1
            self.programs.append(SimpleNamespace(source=source, headers=dict(zip(names, headers, strict=True))))
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        assert count == len(options)
        self.programs[program.value - 1].options = list(options)
        if self.together is not None:
            self.together.wait()
        return 6 if self.fails else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = 5
        return 0

    def nvrtcGetProgramLog(self, program, log):
        ctypes.memmove(log, b"oops\0", 5)
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = 8
        return self.status

    def nvrtcGetCUBIN(self, program, cubin):
        ctypes.memmove(cubin, f"{program.value:08d}".encode(), 8)
        return 0

    def nvrtcDestroyProgram(self, program):
        self.destroyed += 1
        return 0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(nvrtc, "_library", lambda: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


class Driver:
    """Loads any cubin on an SM90 device."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.attributes: list[tuple[str, int]] = []
        self.CUfunction_attribute = IntEnum("Attribute", [f"CU_FUNC_ATTRIBUTE_{name}" for name in ATTRIBUTES])
        self.CUfunction = int

    def cuLibraryLoadData(self, cubin, *rest):
        self.loaded.append(cubin)
        return Status.OK, len(self.loaded)

    def cuLibraryGetKernel(self, library, name):
        return Status.OK, library

    def cuDeviceGet(self, index):
        return Status.OK, index

    def cuKernelSetAttribute(self, attribute, value, kernel, device):
        self.attributes.append((attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), value))
        return (Status.OK,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made, package = Driver(), ModuleType("cuda.bindings")
    package.driver = made
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(build, "_COMPILED", {})
    build._load.cache_clear()
    build._library.cache_clear()
    yield made
    build._load.cache_clear()
    build._library.cache_clear()


def test_a_source_is_compiled_once_for_each_set_of_definitions(compiler, tmp_path):
    first = build._cubin("sparse_mla.cu", (("NT", 2),), "sm_90a")
    assert build._cubin("sparse_mla.cu", (("NT", 2),), "sm_90a") == first
    assert len(compiler.programs) == 1
    others = [(("NT", 1),), "sm_90a"], [(("NT", 2),), "sm_80"]
    assert len({first, *(build._cubin("sparse_mla.cu", *other) for other in others)}) == 3
    assert len(list((tmp_path / "nsa_plugin").glob("sparse_mla-*.cubin"))) == 3
    assert not list((tmp_path / "nsa_plugin").glob("*.tmp"))
    program = compiler.programs[0]
    assert b"--gpu-architecture=sm_90a" in program.options
    assert b"-DNT=2" in program.options
    assert b"extern" in program.source
    assert {b"instructions.cuh", b"sparse_mla_steps.cuh"} <= set(program.headers)


def test_a_changed_header_is_another_kernel(compiler, monkeypatch, tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cu").write_text("x")
    (sources / "b.cuh").write_text("y")
    monkeypatch.setattr(build, "_SOURCES", sources)
    first = build._cubin("a.cu", (), "sm_90a")
    (sources / "b.cuh").write_text("z")
    assert build._cubin("a.cu", (), "sm_90a") != first


def test_a_compile_error_quotes_the_compiler(compiler):
    compiler.fails = True
    with pytest.raises(build.KernelBuildError, match=r"topk.cu does not compile \(.*=sm_90a .*-DTHREADS=1\):\noops$"):
        build._cubin("topk.cu", (("THREADS", 1),), "sm_90a")
    assert len(compiler.programs) == compiler.destroyed == 1


def test_what_nvrtc_refuses_is_said_in_its_words(compiler):
    compiler.status = 5
    with pytest.raises(build.KernelBuildError, match=r"compiling topk\.cu failed: NVRTC_ERROR_INVALID_OPTION"):
        build._cubin("topk.cu", (), "sm_90a")
    assert compiler.destroyed == 1


@pytest.mark.parametrize("kept", [True, False])
def test_sets_of_definitions_are_compiled_side_by_side_and_once(compiler, driver, monkeypatch, tmp_path, kept):
    if not kept:
        no_folder(monkeypatch, tmp_path)
    sets = [{"NT": 1}, {"NT": 2, "HELD": 8}, {"HELD": 8, "NT": 2}, {"NT": 4}]
    compiler.together = threading.Barrier(3, timeout=30)  # it breaks if they are compiled one after the other
    for _ in range(2):
        build.compile_together("sparse_mla.cu", sets)
    compiler.together = None
    monkeypatch.setattr(build, "_LISTENERS", [])
    named: list[str] = []
    build.when_loaded(named.append)
    for defines in sets:
        for name in ("attend", "combine_4"):
            build.load_kernel("sparse_mla.cu", name, defines=defines)
    assert named == ["sparse_mla.cu:attend", "sparse_mla.cu:combine_4"] * 3  # once for each set
    assert len(compiler.programs) == 3
    assert sorted(driver.loaded) == [b"00000001", b"00000002", b"00000003"]  # once for all kernels of a set


def test_an_error_of_sets_compiled_side_by_side_is_the_compilers(compiler, driver):
    compiler.fails = True
    with pytest.raises(build.KernelBuildError, match=r"sparse_mla.cu does not compile .*:\noops$"):
        build.compile_together("sparse_mla.cu", [{"NT": 1}, {"NT": 2}])
    compiler.fails = False
    build.compile_together("sparse_mla.cu", [{"NT": 1}, {"NT": 2}])


def test_the_variants_of_a_call_are_compiled_together(compiler, driver):
    variants = tuple((one, 0) for one in sparse_mla.PORTABLE_VARIANTS)
    compiler.together = threading.Barrier(len(variants), timeout=30)
    sparse_mla_launch.kernels.__wrapped__(sparse_mla.SOURCE, "attend", variants, (("LAYOUT", 0),), None)
    assert len(compiler.programs) == len(variants)


def no_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def no_lookup(monkeypatch, tmp_path):
    """Even looking for a file fails, as in a folder that the user may not enter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300)))


def no_home(monkeypatch, tmp_path):
    """A container that runs as a user ID without an account."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 17)


def others_may_write(monkeypatch, tmp_path):
    folder = tmp_path / "nsa_plugin"
    folder.mkdir()
    folder.chmod(0o777)


def group_may_write(monkeypatch, tmp_path):
    folder = tmp_path / "nsa_plugin"
    folder.mkdir()
    folder.chmod(0o770)


def of_another_user(monkeypatch, tmp_path):
    folder = tmp_path / "nsa_plugin"
    folder.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr("os.getuid", lambda: os.stat(folder).st_uid + 1)


@pytest.mark.parametrize("broken", [no_folder, no_lookup, no_home, others_may_write, group_may_write, of_another_user])
def test_a_cache_that_cannot_be_used_is_done_without(compiler, monkeypatch, tmp_path, caplog, broken):
    broken(monkeypatch, tmp_path)
    build._say_unkept.cache_clear()
    assert build._cubin("topk.cu", (), "sm_90a")
    assert build._cubin("topk.cu", (), "sm_90a")
    assert len(compiler.programs) == 2
    assert caplog.text.count("every start compiles them again") == 1


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_kernel_that_others_may_have_written_is_neither_loaded_nor_replaced(compiler, tmp_path, caplog, mode):
    first = build._cubin("topk.cu", (), "sm_90a")
    (kept,) = (tmp_path / "nsa_plugin").iterdir()
    kept.write_bytes(b"another's")
    kept.parent.chmod(mode)
    build._say_unkept.cache_clear()
    assert build._cubin("topk.cu", (), "sm_90a") != b"another's" != first
    assert kept.read_bytes() == b"another's"
    assert "chmod go-w" in caplog.text
    kept.parent.chmod(0o700)
    assert build._cubin("topk.cu", (), "sm_90a") == b"another's", "a folder of one's own is trusted"


def test_a_launch_passes_pointers_and_numbers_by_address(monkeypatch):
    seen: dict[str, object] = {}

    def launch(handle, *rest):
        *sizes, shared, stream, parameters, extra = rest
        pointers = (ctypes.c_void_p * 4).from_address(parameters)
        seen["values"] = (
            ctypes.c_void_p.from_address(pointers[0]).value,
            ctypes.c_void_p.from_address(pointers[1]).value,
            ctypes.c_int32.from_address(pointers[2]).value,
            ctypes.c_float.from_address(pointers[3]).value,
        )
        seen["rest"] = (sizes, shared, stream, extra)
        return (seen.get("status", Status.OK),)

    package = ModuleType("cuda.bindings")
    package.driver = SimpleNamespace(cuLaunchKernel=launch)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    tensor = torch.zeros(3)
    kernel = build.CudaKernel("attend", "handle")
    arguments = (tensor, None, ctypes.c_int32(-5), ctypes.c_float(0.5))
    kernel((1, 2, 3), (4, 5, 6), arguments, shared_bytes=9)
    assert seen["values"] == (tensor.data_ptr(), None, -5, 0.5)
    assert seen["rest"] == ([1, 2, 3, 4, 5, 6], 9, 77, 0)
    seen["status"] = Status.WRONG
    with pytest.raises(build.KernelBuildError, match=r"attend: launch of grid \(1, 2, 3\) failed: WRONG"):
        kernel((1, 2, 3), (4, 5, 6), arguments)


H100 = device.DeviceFacts(sms=132, architecture=90, shared_memory=227 << 10)


@pytest.fixture(params=[None, 86], ids=["native", "as SM86"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Bytes of shared memory with which an H100 launches a block that needs some, natively and as an SM86 GPU."""
    monkeypatch.setattr(device, "_emulated", request.param)
    monkeypatch.setattr(device, "_probed", lambda of: H100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if request.param is None:
        return lambda needed: needed
    return lambda needed: padded_shared_memory(needed, emulated=99 << 10, real=H100.shared_memory) if needed else 0


@pytest.mark.parametrize("needed", [0, 40 << 10, 95 << 10])
def test_a_launch_and_the_load_ask_for_the_shared_memory_of_the_emulated_gpu(
    needed: int, launched: Callable[[int], int], compiler: Compiler, driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []

    def launch(handle, *rest):
        asked.append(rest[6])
        return (Status.OK,)

    driver.cuLaunchKernel = launch
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    kernel = build.load_kernel("topk.cu", "topk_rows", max_dynamic_shared=needed)
    kernel((1, 1, 1), (32, 1, 1), (), shared_bytes=needed)
    most = [value for name, value in driver.attributes if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES"]
    assert asked == [launched(needed)]
    assert most == ([launched(needed)] if needed else [])


@pytest.mark.parametrize("needed", [0, 40 << 10, 95 << 10, 200 << 10])
def test_triton_launches_its_kernels_so_too(
    needed: int, launched: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []

    def load(self: CompiledKernel) -> None:
        if self.module is None:
            self.module = object()
            loaded.append(self.metadata.shared)

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    for _ in range(2):
        device._pad_triton_kernels()
    kernel = CompiledKernel.__new__(CompiledKernel)
    metadata = {"num_warps": 4, "num_ctas": 1, "cluster_dims": (1, 1, 1), "shared": needed}
    metadata["target"] = GPUTarget("cuda", 90, 32)
    kernel.metadata, kernel.module = namedtuple("Metadata", metadata)(**metadata), None
    for _ in range(2):
        kernel._init_handles()
    kernel.module = None  # nothing is loaded that could be unloaded
    # An engine's kernel that the emulated GPU could not run stays as it is.
    wanted = needed if needed > 99 << 10 else launched(needed)
    assert loaded == [kernel.metadata.shared] == [wanted]
    assert wanted in kernel.packed_metadata


REAL = """
int nvrtcVersion(int *major, int *minor) { *major = 99; *minor = 1; return 0; }
const char *nvrtcGetErrorString(int status) { return ""; }
"""
STAND_IN = """
void abort(void);
int nvrtcVersion(int *major, int *minor) { abort(); }
"""
ASKS = """
import ctypes, sys, types
finder = types.ModuleType("cuda.pathfinder")
finder.load_nvidia_dynamic_lib = lambda name: types.SimpleNamespace(abs_path=sys.argv[1])
sys.modules |= {"cuda": types.ModuleType("cuda"), "cuda.pathfinder": finder}
ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)
from nsa_plugin.kernels.cuda import nvrtc
print(nvrtc.version())
"""


@pytest.mark.skipif(which("cc") is None, reason="needs a C compiler")
def test_what_another_library_calls_nvrtcs_functions_is_not_called(tmp_path):
    """TileLang 0.1.8's functions of these names end the process."""
    for name, text in (("nvrtc", REAL), ("stand_in", STAND_IN)):
        (tmp_path / f"{name}.c").write_text(text)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / f"{name}.so", tmp_path / f"{name}.c"], check=True)
    command = [sys.executable, "-c", ASKS, tmp_path / "nvrtc.so", tmp_path / "stand_in.so"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "(99, 1)"


@pytest.mark.parametrize(
    ("found", "why"), [(None, "its file is not known"), ("/nowhere/libnvrtc.so", "/nowhere/libnvrtc.so: cannot open")]
)
def test_without_nvrtc_the_error_says_so(found: str | None, why: str, monkeypatch: pytest.MonkeyPatch):
    finder = ModuleType("cuda.pathfinder")
    finder.load_nvidia_dynamic_lib = lambda name: SimpleNamespace(abs_path=found)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    nvrtc._library.cache_clear()
    with pytest.raises(build.KernelBuildError, match=f"Could not load NVRTC with cuda.pathfinder .*{why}"):
        nvrtc.version()
