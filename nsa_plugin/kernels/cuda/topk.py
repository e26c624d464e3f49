"""`topk_rows` in CUDA: one pass over the logits, one block a row (topk.cu).

On data without long ties the logits are read once, plus a sample of a 32nd of them; 2048 of 131072 columns
need 72 KiB of shared memory a block, so three rows share a multiprocessor. Rows that defeat the sampled
threshold are read a second time. A bitmap in shared memory puts positions in ascending order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from nsa_plugin.kernels.checks import require
from nsa_plugin.kernels.topk import CUDA_MAX_TOPK, OP, check_topk_rows

THREADS = 512
# Entries of the candidate buffer: room for topk, for the spread of a sampled threshold, and for a piece of
# 4 * THREADS more. 10240 still fits the 99 KiB that a block of SM86, SM89 and SM120 gets.
CAPACITY, CAPACITY_ABOVE_2048 = 8192, 10240
BINS = 2048
WORD_BYTES = 4


def topk_rows(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, topk: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `nsa_plugin.kernels.topk.reference_topk_rows`, on a CUDA device of SM80 or later.

    Ranges are clamped to the columns on the device. Does not wait for the device. Logits whose rows are not
    contiguous are copied; row strides are free.

    Raises:
        KernelArgumentError: a shape, dtype or device is wrong, or topk is over 4096.
    """
    out = check_topk_rows(logits, starts, ends, topk, out)
    require(topk <= CUDA_MAX_TOPK, OP, f"topk is {topk}; the CUDA kernel selects at most {CUDA_MAX_TOPK}")
    require(logits.is_cuda, OP, f"logits is on {logits.device}; the CUDA kernel needs a CUDA device")
    rows, columns = logits.shape
    if rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 or columns <= 1 else logits.contiguous()
    target = out if out.stride(1) == 1 or topk == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(logits):
        launch(
            "topk_rows",
            rows,
            (
                *(logits, ctypes.c_int64(logits.stride(0)), starts.int().contiguous(), ends.int().contiguous()),
                *(target, ctypes.c_int64(target.stride(0))),
                *map(ctypes.c_int32, (columns, topk, capacity_of(topk))),
            ),
            shared_bytes(topk),
            shared_bytes(CUDA_MAX_TOPK),
        )
    return out if target is out else out.copy_(target)


def launch(name: str, rows: int, args: Sequence[Any], shared: int, most_shared: int) -> None:
    """Launch a kernel of topk.cu on the current device, a block a row.

    Args:
        shared, most_shared: dynamic shared memory of a block in bytes, and the most that any launch asks for.
    """
    from nsa_plugin.kernels.cuda.build import load_kernel

    kernel = load_kernel("topk.cu", name, defines={"THREADS": THREADS}, max_dynamic_shared=most_shared)
    kernel(grid=(rows, 1, 1), block=(THREADS, 1, 1), args=args, shared_bytes=shared)


def capacity_of(topk: int) -> int:
    """Entries of the candidate buffer of `topk_rows` and `topk_entries`."""
    return CAPACITY if topk <= 2048 else CAPACITY_ABOVE_2048


def shared_bytes(topk: int) -> int:
    """Dynamic shared memory of a block of `topk_rows` and `topk_entries`, in bytes."""
    return WORD_BYTES * (2 * capacity_of(topk) + max(BINS, topk))
