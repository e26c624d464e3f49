"""Sparse prefill kernels for few heads that the engines install but do not use by default on SM90.

They are called as the engine calls them, over bfloat16 rows that are there already; making these from an fp8 cache is
not in their time. Every function imports its engine when the call is made. An engine that is missing refuses with
ImportError, and so does one whose module raises anything else while it is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from nsa_plugin.kernels.checks import KernelArgumentError
from nsa_plugin.libraries.architectures import EMULATED, shared_memory_per_block
from nsa_plugin.tools.bench.judges import Attended
from nsa_plugin.tools.bench.workload import TimedCall

D_V = 512
UNIONS = (0, 2, 4)
"""Neighbouring query tokens whose selections SGLang's kernel gathers together; 0: none."""
_UNION_ROWS = (16, 32)  # query rows of a union: tokens times heads, a power of two
SMALL_TILES = {16: 64, 32: 32, 64: 16}
"""Most query rows of a block: the keys that SGLang's kernel takes a step where a block has no more than `SMALL` bytes
of shared memory. It is the largest of SGLang's own steps that fits, as Triton 3.9 compiles them for SM86. On an H100
they ran with Triton 3.8, which SGLang 0.5.23 brings. Nothing fits with more rows."""
SMALL = shared_memory_per_block(EMULATED)
_WARPS, _STAGES = 8, 2  # of such a block

SGLANG_MODULE = "sglang.kernels.ops.attention.dsa.triton_sparse_mla_prefill"
VLLM_MODULE = "vllm.v1.attention.ops.xpu_mla_sparse"


def sglang_name(union: int) -> str:
    return "SGLang triton_sparse_mla" + (f", unions of {union}" if union else "")


VLLM_NAME = "vLLM triton_bf16_mla_sparse"
RIVALS = frozenset({VLLM_NAME, *map(sglang_name, UNIONS)})


def sglang_triton(
    q: torch.Tensor,
    rows: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    *,
    union: int,
    shared_memory: int | None = None,
) -> TimedCall:
    """`sparse_mla_prefill` of SGLang 0.5.23 (--dsa-prefill-backend triton_sparse_mla, --dsa-triton-union).

    Lengths of the rows are made once for all layers, as in SGLang, and are not in the call. SGLang takes smaller tiles
    on a GPU that cannot launch its first choice. An emulated one can, so its tile is chosen here.

    Args:
        q: [tokens, heads, 576] bfloat16.
        rows: [s_kv, 576] bfloat16.
        indices: [tokens, topk] int32.
        shared_memory: bytes that a block may have; None leaves the tile to SGLang.

    Raises:
        KernelArgumentError: SGLang refuses this union at these heads, would fall back without saying so, or has no tile
            for the shared memory.
    """
    needs_cuda(q)
    attend: Any = _module(SGLANG_MODULE).sparse_mla_prefill
    heads, topk = q.shape[1], indices.shape[1]
    if union and heads * union not in _UNION_ROWS:
        raise KernelArgumentError(
            f"triton_sparse_mla: heads is {heads} with unions of {union}; their product must be 16 or 32"
        )
    if union and topk & (topk - 1):
        raise KernelArgumentError(f"triton_sparse_mla: topk is {topk}; unions need a power of two")
    tile = {}
    if shared_memory is not None and shared_memory <= SMALL:
        tile = {"union_config" if union else "config": _small_tile(heads * (union or 1))}
    last = torch.arange(1, topk + 1, dtype=torch.int32, device=indices.device)
    lengths = torch.where(indices >= 0, last, 0).amax(1).int()
    return lambda: Attended(attend(q, rows, indices, scale, D_V, topk_length=lengths, union=union, **tile), None)


def _small_tile(query_rows: int) -> tuple[int, int, int]:
    """(keys a step, warps, stages)."""
    for most, keys in SMALL_TILES.items():
        if query_rows <= most:
            return keys, _WARPS, _STAGES
    raise KernelArgumentError(
        f"triton_sparse_mla: heads is {query_rows}; no tile of SGLang's fits {SMALL >> 10} KiB of shared memory"
    )


def vllm_triton(q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, scale: float) -> TimedCall:
    """`triton_bf16_mla_sparse_interface` of vLLM 0.33, which takes heads as they are; vLLM runs it on XPU.

    vLLM 0.33 installs no few-head kernel for SM90: vllm-project/vllm #57673 is open.

    Args:
        q: [tokens, heads, 576] bfloat16.
        rows: [s_kv, 576] bfloat16.
        indices: [tokens, topk] int32.
    """
    needs_cuda(q)
    attend: Any = _module(VLLM_MODULE).triton_bf16_mla_sparse_interface
    if indices.shape[1] % 16:
        raise KernelArgumentError(f"triton_bf16_mla_sparse: topk is {indices.shape[1]}; it must be a multiple of 16")
    kv, selected = rows.unsqueeze(1), indices.unsqueeze(1)
    # Its statistics have another base and are not judged.
    return lambda: Attended(attend(q, kv, selected, scale, D_V)[0], None)


def needs_cuda(q: torch.Tensor) -> None:
    """Refuse other devices: an engine's CPU build has these modules, too, but no Triton that runs them."""
    if not q.is_cuda:
        raise KernelArgumentError(f"q is on {q.device}; the engines' Triton kernels (SGLang, vLLM) need a CUDA device")


def _module(name: str) -> Any:
    engine = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{engine} is not installed with {name}: {error}") from error
    except Exception as error:  # an engine's own start-up code, which a bench does not depend on
        raise ImportError(f"{engine} cannot be imported: {type(error).__name__}: {error}") from error
