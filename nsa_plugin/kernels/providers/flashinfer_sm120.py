"""FlashInfer's sparse MLA for SM120 behind the contracts of sparse prefill and decode.

Not run on SM120 hardware here. `ci.flashinfer_contract` checks the call below against the signatures and checks of
every flashinfer-python from 0.7.1 on. vLLM's backend FLASHINFER_MLA_SPARSE_SM120 makes the same call.

Both ops are `flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla` with `backend="sparse"`: each query token is one
row of the batch with q_len 1 and its own indices, -1 where there is none. FlashInfer runs its decode kernel for up to
64 rows and its prefill kernel for more.

Limits, as its sources check them (`mla/_core.py`, `csrc/sparse_mla_sm120/attention_resolve.cu`):
- the 656-byte records of `v32_fp8`, 16-byte aligned, without gaps between pages (the prefill kernel's rule);
- bfloat16 queries of 576 values; the prefill kernel has 8, 16, 32, 64 and 128 heads, so others are padded;
- rows of indices in multiples of 64 (the prefill kernel's rule), so they are padded with -1;
- no sink and no second cache. max_logits are NaN.

The scales of a record are passed as any float32 (`arbitrary_fp32`). `pow2_fp32` reads the exponent alone, and an older
vLLM writes other scales.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from importlib import import_module

import torch

from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.providers.trtllm import MLA_FUNCTION, Keywords, arguments_of
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, decode_op, prefill_op
from nsa_plugin.kernels.triton.sparse_mla_indices import masked_rows
from nsa_plugin.kernels.workspace import SHARED, Workspace
from nsa_plugin.layouts import V32_FP8

HEADS = (8, 16, 32, 64, 128)
TOPK_MULTIPLE = 64
PAGE_SIZE = 64
ALIGNMENT = 16
KV_LORA_RANK, ROPE_DIM = 512, 64
SCALES = "arbitrary_fp32"

# The decode kernel's partial results are most of it: at most 64 rows of 128 heads and 32 parts of 512 bfloat16 values.
WORKSPACE = 384 << 20

CALLS: Mapping[tuple[str, str], Keywords] = {
    MLA_FUNCTION: Keywords(
        always=frozenset(
            {
                "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim",
                "block_tables", "seq_lens", "max_seq_len", "sparse_mla_top_k", "out", "bmm1_scale", "bmm2_scale",
                "backend", "lse", "return_lse", "return_lse_base", "kv_scale_format",
            }
        )
    )
}  # fmt: skip


def attend(call: SparseMlaCall, *, workspace: Workspace = SHARED) -> SparseMlaResult:
    """Attend with FlashInfer's SM120 kernels, within the module's limits.

    Args:
        workspace: where the kernel's scratch memory comes from.

    Raises:
        KernelArgumentError: this kernel does not support an argument.
        LibraryContractError: the installed FlashInfer's function has changed.
    """
    q, heads, rows = call.q, call.heads, call.rows
    call.require(call.attn_sink is None, "attn_sink is given; provider flashinfer_sm120 has no sink here")
    call.require(len(call.scopes) == 1, "an extra cache is given; provider flashinfer_sm120 reads one")
    call.require(call.d_v == KV_LORA_RANK, f"d_v is {call.d_v}; provider flashinfer_sm120 takes {KV_LORA_RANK}")
    wide = q.shape[-1] == KV_LORA_RANK + ROPE_DIM
    call.require(wide, f"q has {q.shape[-1]} values a head; provider flashinfer_sm120 takes {KV_LORA_RANK + ROPE_DIM}")
    call.require(q.dtype == torch.bfloat16, f"q has dtype {q.dtype}; provider flashinfer_sm120 takes bfloat16")
    call.require(heads <= HEADS[-1], f"q has {heads} heads; provider flashinfer_sm120 takes up to {HEADS[-1]}")
    scope = call.scopes[0]
    pages = _pages(call, scope.cache)
    if call.is_empty:
        return call.empty_result()
    padded = next(count for count in HEADS if heads <= count)
    flat_q = q.reshape(rows, 1, heads, q.shape[-1])
    if padded != heads:
        # Heads are independent; zeros keep the added ones finite.
        flat_q = torch.nn.functional.pad(flat_q, (0, 0, 0, padded - heads))
    width = max(1, math.ceil(scope.topk / TOPK_MULTIPLE)) * TOPK_MULTIPLE
    entries, _ = masked_rows(scope.indices, scope.cache.num_slots, scope.length, width)
    entries = entries.view(rows, 1, width)
    out = q.new_empty((rows, 1, padded, KV_LORA_RANK))
    lse = torch.empty((rows, padded), dtype=torch.float32, device=q.device)
    function = getattr(import_module(MLA_FUNCTION[0]), MLA_FUNCTION[1])
    values = {
        "query": flat_q.contiguous(),
        "kv_cache": pages,
        "workspace_buffer": workspace.get("flashinfer_sm120", (WORKSPACE,), torch.uint8, q.device),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "block_tables": entries,
        "seq_lens": None,
        "max_seq_len": width,
        "sparse_mla_top_k": width,
        "out": out,
        "bmm1_scale": float(call.scale),
        "bmm2_scale": 1.0,
        "backend": "sparse",
        "lse": lse,
        "return_lse": True,
        "return_lse_base": "basee",
        "kv_scale_format": SCALES,
    }
    version = str(import_module("flashinfer").__version__)
    function(**arguments_of(MLA_FUNCTION, inspect.signature(function).parameters, version, values, CALLS))
    # The contract's values of a row without a valid entry, whatever the kernel gives there.
    is_empty = (entries < 0).all(-1)
    found = out[:, 0, :heads].masked_fill(is_empty.unsqueeze(-1), 0.0)
    sums = lse[:, :heads].masked_fill(is_empty, math.inf)
    return SparseMlaResult(call.deliver(found), sums, sums.new_full((), math.nan).expand(sums.shape))


prefill, decode = prefill_op(attend), decode_op(attend)


def _pages(call: SparseMlaCall, cache: PagedCache) -> torch.Tensor:
    """The records as [pages, 1, 64, 656] uint8; a slot keeps its number. A view."""
    data, record = cache.data, V32_FP8.row_bytes
    named = cache.layout.name == V32_FP8.name
    call.require(named, f"cache has layout {cache.layout.name}; provider flashinfer_sm120 reads {V32_FP8.name}")
    gapless = data.is_contiguous() and data.data_ptr() % ALIGNMENT == 0
    call.require(
        gapless,
        f"cache has pages every {data.stride(0)} bytes at {data.data_ptr():#x}; provider flashinfer_sm120 takes pages "
        f"without gaps, aligned to {ALIGNMENT} bytes",
    )
    size = cache.page_size
    if cache.num_slots % PAGE_SIZE == 0:
        size = PAGE_SIZE
    return data.view(torch.uint8).view(-1, 1, size, record)
