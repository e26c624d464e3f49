"""GPU architectures: the shared memory that one block may request.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", row "Maximum amount of
shared memory per thread block".
"""

from __future__ import annotations

from types import MappingProxyType

KIB = 1 << 10

SHARED_MEMORY_PER_BLOCK = MappingProxyType(
    {
        80: 163 * KIB,
        86: 99 * KIB,
        87: 163 * KIB,
        89: 99 * KIB,
        90: 227 * KIB,
        100: 227 * KIB,
        103: 227 * KIB,
        110: 227 * KIB,
        120: 99 * KIB,
        121: 99 * KIB,
    }
)
"""Bytes by SM version (compute capability 9.0 is 90). `probe` reads the device itself where torch reports it."""

FIRST_WITH_FP8 = 89
"""The first SM version that converts e4m3 by an instruction."""

EMULATED = 86
"""The GPU that `portable` = on and `bench --portable` emulate, by SM version."""

# Every CUDA device grants a block this much without opting in.
_WITHOUT_OPT_IN = 48 * KIB


def shared_memory_per_block(sm: int) -> int:
    """Bytes of shared memory that a block may request on an SM version; 0 on a CPU (SM version 0)."""
    return SHARED_MEMORY_PER_BLOCK.get(sm, _WITHOUT_OPT_IN) if sm else 0


def name_of(sm: int) -> str:
    """The architecture in a sentence: "SM90" or "a CPU"."""
    return f"SM{sm}" if sm else "a CPU"
