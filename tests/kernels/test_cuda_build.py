"""Compiling and launching CUDA kernels, with stand-ins for NVRTC and the driver."""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nsa_plugin.kernels.cuda import build


class Status(IntEnum):
    OK = 0
    WRONG = 6


class Compiler(ModuleType):
    """`cuda.bindings.nvrtc`: the cubin is the source's length and the options."""

    def __init__(self, fails: bool = False):
        super().__init__("cuda.bindings.nvrtc")
        self.fails = fails
        self.programs: list[SimpleNamespace] = []

    def nvrtcVersion(self):
        return Status.OK, 13, 0

    def nvrtcCreateProgram(self, source, name, count, headers, names):
        assert count == len(headers) == len(names)
        self.programs.append(SimpleNamespace(source=source, headers=dict(zip(names, headers, strict=True))))
        return Status.OK, self.programs[-1]

    def nvrtcCompileProgram(self, program, count, options):
        assert count == len(options)
        program.options = options
        return (Status.WRONG,) if self.fails else (Status.OK,)

    def nvrtcGetProgramLogSize(self, program):
        return Status.OK, 4

    def nvrtcGetProgramLog(self, program, log):
        ctypes.memmove(log, b"oops", 4)
        return (Status.OK,)

    def nvrtcGetCUBINSize(self, program):
        return Status.OK, 8

    def nvrtcGetCUBIN(self, program, cubin):
        ctypes.memmove(cubin, f"{len(self.programs):08d}".encode(), 8)
        return (Status.OK,)

    def nvrtcDestroyProgram(self, program):
        return (Status.OK,)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Compiler:
    made = Compiler()
    package = ModuleType("cuda.bindings")
    package.nvrtc = made
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


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
    assert {b"sm90.cuh", b"sparse_mla_steps.cuh"} <= set(program.headers)


def test_a_changed_header_is_another_kernel(compiler, monkeypatch, tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cu").write_text("x")
    (sources / "b.cuh").write_text("y")
    monkeypatch.setattr(build, "_SOURCES", sources)
    first = build._cubin("a.cu", (), "sm_90a")
    (sources / "b.cuh").write_text("z")
    assert build._cubin("a.cu", (), "sm_90a") != first


def test_what_does_not_compile_says_what_the_compiler_said(compiler):
    compiler.fails = True
    with pytest.raises(build.KernelBuildError, match=r"topk.cu does not compile for sm_90a .*-DTHREADS=1.*\n *oops"):
        build._cubin("topk.cu", (("THREADS", 1),), "sm_90a")


def test_a_cache_that_cannot_be_written_is_done_without(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build._cubin("topk.cu", (), "sm_90a")
    assert build._cubin("topk.cu", (), "sm_90a")
    assert len(compiler.programs) == 2


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
    kernel = build.Kernel("attend", "handle")
    arguments = (tensor, None, ctypes.c_int32(-5), ctypes.c_float(0.5))
    kernel((1, 2, 3), (4, 5, 6), arguments, shared_bytes=9)
    assert seen["values"] == (tensor.data_ptr(), None, -5, 0.5)
    assert seen["rest"] == ([1, 2, 3, 4, 5, 6], 9, 77, 0)
    seen["status"] = Status.WRONG
    with pytest.raises(build.KernelBuildError, match=r"attend: launch of grid \(1, 2, 3\) failed: WRONG"):
        kernel((1, 2, 3), (4, 5, 6), arguments)
