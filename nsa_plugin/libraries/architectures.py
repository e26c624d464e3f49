"""GPU architectures: the shared memory that one block may request, and how the plugin was tested for each.

Source of the shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", row "Maximum
amount of shared memory per thread block".
"""

from __future__ import annotations

from dataclasses import dataclass
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

TENSOR_OPERATIONS = MappingProxyType({80: 2048, 86: 1024, 89: 1024, 90: 4096, 120: 1024})
"""Float16 operations with float32 sums that an SM's tensor cores do in a clock at most, by SM version: of an A100 (312
TFLOPS, 108 SMs, 1.41 GHz), A40 (149.7, 84, 1.74), L40S (362, 142, 2.52), H100 (989.4, 132, 1.83) and RTX PRO 6000
(503.8, 188, 2.62). GeForce GPUs do half of that. Source: NVIDIA's data sheets, without sparsity."""

FIRST_WITH_FP8 = 89
"""The first SM version that converts e4m3 by an instruction."""

EMULATED = 86
"""The GPU that `portable` = on and `bench --portable` emulate, by SM version."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How the plugin was tested for an architecture; tests compare it with what they compile and with the records.

    Attributes:
        gpus: some of its GPUs.
        compiled: which of the plugin's kernels the tests compile for it.
        emulated: how another GPU acted as it; "" if none did.
        run: its GPUs that have served with the plugin; "" if none has.
    """

    gpus: str
    compiled: str = "Triton and CUDA kernels"
    emulated: str = ""
    run: str = ""


EVIDENCE = MappingProxyType(
    {
        80: Evidence(gpus="A100, A30", emulated="as SM86, which has less shared memory"),
        86: Evidence(
            gpus="A40, A10, RTX 3090",
            emulated="by an H100 and an H200: SGLang with GLM-5 and V3.2, vLLM with GLM-5 and V3.2",
        ),
        89: Evidence(gpus="L40S, L4, RTX 4090", emulated="by an H100 in the GPU tests, not in a server"),
        90: Evidence(gpus="H100, H200", run="H100 and H200"),
        100: Evidence(gpus="B200, GB200", compiled="Triton kernels"),
        120: Evidence(gpus="RTX PRO 6000, RTX 5090"),
    }
)
"""By SM version. Nothing was tested for any other."""


def evidence(sm: int, *, brief: bool = False) -> str:
    """What was tested for an SM version, in one sentence for a terminal; "" for a CPU (SM version 0).

    Args:
        brief: one line of 70 columns, without which kernels and by what GPU.
    """
    if not sm:
        return ""
    found = EVIDENCE.get(sm)
    if found is None:
        return f"{name_of(sm)}: not compiled for, not emulated, not run"
    parts = [f"{name_of(sm)}: {'' if brief else f'{found.compiled} '}compiled in the tests"]
    if not found.run:
        emulated = "emulated" if brief else f"emulated {found.emulated}"
        parts.append(emulated if found.emulated else "not emulated")
    parts.append(f"run on {found.run}" if found.run else "not run on such a GPU")
    return "; ".join(parts)


# Every CUDA device grants a block this much without opting in.
_WITHOUT_OPT_IN = 48 * KIB


def shared_memory_per_block(sm: int) -> int:
    """Bytes of shared memory that a block may request on an SM version; 0 on a CPU (SM version 0)."""
    return SHARED_MEMORY_PER_BLOCK.get(sm, _WITHOUT_OPT_IN) if sm else 0


def resident_blocks(needed: int, limit: int) -> int:
    """Blocks that the shared memory of an SM suffices for: it has 1 KiB more than a block may request, and keeps 1 KiB
    of it for each block.

    Args:
        needed: bytes that a block needs.
        limit: most bytes that a block may request.
    """
    return (limit + KIB) // (needed + KIB)


def padded_shared_memory(needed: int, *, emulated: int, real: int) -> int:
    """Bytes of shared memory to give a block, so that an SM holds no more blocks than an emulated GPU's would.

    Args:
        needed: bytes that the block needs. More than the emulated GPU has stay as they are.
        emulated, real: most bytes that a block may request there and here.
    """
    if needed > emulated:
        return needed
    one_more = resident_blocks(needed, emulated) + 1
    return max(needed, (real + KIB) // one_more + 1 - KIB)


def is_sm120(sm: int) -> bool:
    """Whether an SM version is of the SM120 family: SM120 or SM121."""
    return sm // 10 == 12


def name_of(sm: int) -> str:
    """The architecture in a sentence: "SM90" or "a CPU"."""
    return f"SM{sm}" if sm else "a CPU"
