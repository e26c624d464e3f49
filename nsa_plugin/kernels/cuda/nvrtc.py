"""NVRTC, called by the handle of the library itself.

`cuda.bindings.nvrtc` takes NVRTC's functions from the process's global symbols where it finds any (since 13.3).
TileLang 0.1.8, which SGLang 0.5.12 to 0.5.14 pin, leaves functions of these names there that end the process where no
NVRTC is among the global symbols (its `src/target/stubs/nvrtc.cc`). NVIDIA's own finder says which file NVRTC is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_plugin.errors import NsaPluginError


class KernelBuildError(NsaPluginError, RuntimeError):
    """A CUDA kernel does not compile, load or launch; the message quotes the compiler or driver."""


def version() -> tuple[int, int]:
    """NVRTC's version, such as (13, 0).

    Raises:
        KernelBuildError: there is none, or it does not answer.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "asking NVRTC for its version")
    return major.value, minor.value


def compiled(text: bytes, name: str, headers: Mapping[bytes, bytes], options: Sequence[str]) -> bytes:
    """The cubin of a CUDA source.

    Args:
        text: the source.
        name: what messages call it.
        headers: texts of what it may include, by name.
        options: NVRTC's, an architecture among them.

    Raises:
        KernelBuildError: there is no NVRTC, or the source does not compile; the message has NVRTC's log.
    """
    library, program = _library(), ctypes.c_void_p()
    contents, names = _strings(list(headers.values())), _strings(list(headers))
    created = library.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), len(headers), contents, names)
    _checked(created, f"reading {name}")
    try:
        if library.nvrtcCompileProgram(program, len(options), _strings([option.encode() for option in options])):
            log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program, "reading NVRTC's log")
            raise KernelBuildError(
                f"{name} does not compile ({' '.join(options)}):\n{log.rstrip(bytes(1)).decode(errors='replace')}"
            )
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program, f"compiling {name}")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _library() -> Any:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        if path is None:  # which ctypes would take for the global symbols
            raise OSError("it is loaded, and its file is not known")
        library = ctypes.CDLL(path)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise KernelBuildError(f"Could not load NVRTC with cuda.pathfinder (of cuda-bindings): {error}") from error


def _read(size_of: Any, read: Any, program: ctypes.c_void_p, doing: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(size_of(program, ctypes.byref(size)), doing)
    buffer = ctypes.create_string_buffer(size.value)
    _checked(read(program, buffer), doing)
    return buffer.raw


def _strings(values: Sequence[bytes]) -> Any:
    return (ctypes.c_char_p * len(values))(*values)


def _checked(status: int, doing: str) -> None:
    if status:
        raise KernelBuildError(f"{doing} failed: {_library().nvrtcGetErrorString(status).decode()}")
