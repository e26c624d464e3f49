"""Device properties that the Triton kernels use: processors, architecture and shared memory.

`emulate` makes every kernel act as on an older GPU, so that one GPU can test the portable path.
"""

from __future__ import annotations

import functools
import os
from functools import lru_cache
from typing import NamedTuple

import torch

from nsa_plugin.libraries.architectures import FIRST_WITH_FP8, padded_shared_memory, shared_memory_per_block


class DeviceFacts(NamedTuple):
    """A device.

    Attributes:
        sms: processors.
        architecture: SM version (90 for SM90); 0 for Triton's interpreter.
        shared_memory: bytes that a block may request.
        l2_cache: bytes; the device's own, also while another GPU is emulated.
    """

    sms: int
    architecture: int
    shared_memory: int
    l2_cache: int = 0

    @property
    def native_fp8(self) -> bool:
        """Whether the GPU converts e4m3 by an instruction; the interpreter does not."""
        return self.architecture >= FIRST_WITH_FP8


INTERPRETER = DeviceFacts(sms=32, architecture=0, shared_memory=shared_memory_per_block(90))

WITHOUT_WGMMA = "DISABLE_MMA_V3"
"""Triton's variable that has it compile products for SM90 without warpgroup instructions, which no other GPU has."""

_emulated: int | None = None
_set_before: str | None = None  # the variable's value without emulation
_PADS = "pads_shared_memory"  # marks what `_pad_triton_kernels` has put in place


def emulate(sm: int | None) -> None:
    """Make the kernels of this process act as on a GPU of SM version `sm`, or (None) as on the real one.

    Call it before the first kernel runs: what Triton has loaded stays. Processors are the device's own. Other Triton
    kernels of the process have no warpgroup instructions and no more blocks on a processor either; those of processes
    that it starts have no warpgroup instructions.
    """
    global _emulated, _set_before
    if _emulated is None:
        _set_before = os.environ.get(WITHOUT_WGMMA)
        _pad_triton_kernels()
    _emulated = sm
    value = _set_before if sm is None else "1"
    if value is None:
        os.environ.pop(WITHOUT_WGMMA, None)
    else:
        os.environ[WITHOUT_WGMMA] = value


def is_emulating() -> bool:
    """Whether the kernels of this process act as on another GPU than the real one."""
    return _emulated is not None


def facts_of(device: torch.device) -> DeviceFacts:
    """Return a device's properties; for a CPU, those of Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    found = _probed(device)
    if _emulated is None:
        return found
    return found._replace(architecture=_emulated, shared_memory=shared_memory_per_block(_emulated))


def launched_shared_memory(needed: int) -> int:
    """Return the bytes of shared memory to launch a block of the current GPU with: more than it needs while emulating.

    See `padded_shared_memory`.
    """
    if _emulated is None or not needed:
        return needed
    real = _probed(torch.device("cuda", torch.cuda.current_device())).shared_memory
    return padded_shared_memory(needed, emulated=shared_memory_per_block(_emulated), real=real)


def _pad_triton_kernels() -> None:
    """Have Triton launch each kernel that it loads from now on with `launched_shared_memory`."""
    from triton.compiler.compiler import CompiledKernel, make_backend  # not needed for kernels in CUDA C++

    load = CompiledKernel._init_handles
    if getattr(load, _PADS, False):
        return

    @functools.wraps(load)
    def padded(self: CompiledKernel) -> None:
        if self.module is None:
            self.metadata = self.metadata._replace(shared=launched_shared_memory(self.metadata.shared))
            self.packed_metadata = make_backend(self.metadata.target).pack_metadata(self.metadata)
        load(self)

    setattr(padded, _PADS, True)
    CompiledKernel._init_handles = padded


@lru_cache
def _probed(device: torch.device) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(device)
    architecture = 10 * properties.major + properties.minor
    return DeviceFacts(
        sms=properties.multi_processor_count,
        architecture=architecture,
        shared_memory=int(properties.shared_memory_per_block_optin),
        l2_cache=int(properties.L2_cache_size),
    )
