"""FlashInfer's trtllm-gen kernels behind the contracts of dense attention and sparse MLA, on SM100.

Not run on SM100 hardware. `ci.flashinfer_contract` checks the calls below against the signatures and assertions of
every flashinfer-python from 0.6.8 to 0.7.2. The installed function's signature decides where versions differ.

`mha` is `flashinfer.prefill.trtllm_ragged_attention_deepseek`. `decode` and `prefill` (extend) are both
`flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla` with `sparse_mla_top_k`: each query token is one row of the
batch with q_len 1 and its own indices. The function attends the first `seq_lens` entries of a row, at least one.
Valid entries are therefore moved to the front. A row without any gets slot 0, and its output is set to 0 afterwards.

Limits:
- `mha`: bfloat16; (192, 128), (128, 128) and, since 0.6.12, (256, 256) values a head; a causal request with queries
  and keys has at least as many keys as queries. The lengths of the requests are needed on the host: without
  `seqlens_q` and `seqlens_k` they are read, which waits for the device.
- `prefill`, `decode`: rows of 576 values in bfloat16, or in float8_e4m3fn with one scale for all; pages of 32 or 64
  rows, or memory that can be viewed as such; 1 to 64 or 128 heads; no sink and no second cache. max_logits are NaN.
  lse is NaN unless `return_lse` (since 0.6.12), which costs 2 KiB of workspace a head and row.

Sources: FlashInfer `prefill.py`, `mla/_core.py`, `csrc/trtllm_fmha_kernel_launcher.cu` (lse is log2 of the sum
in every version, `lse.cuh`); SGLang `_forward_trtllm`; vLLM `FlashInferMLASparseTRTLLMBackend`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from packaging.version import Version

from nsa_plugin.errors import NsaPluginError
from nsa_plugin.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, KernelArgumentError, check_tensor, require
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.mha import OP, MhaCall, MhaOutput, mha_op
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, decode_op, prefill_op
from nsa_plugin.kernels.triton.compact import compact
from nsa_plugin.kernels.workspace import SHARED, Workspace
from nsa_plugin.layouts import FP8_E4M3_MAX, PlainLayout

KV_LORA_RANK = 512
ROPE_DIM = 64
ROW = KV_LORA_RANK + ROPE_DIM
PAGE_SIZES = (64, 32)
FP8_ROWS = PlainLayout(name="fp8", dims=(ROW,), value_bytes=1)

# (query, value) values of a head, and the first version that takes them.
MHA_DIMS = {(192, 128): "0.6.8", (128, 128): "0.6.8", (256, 256): "0.6.12"}

# Rows of a call at most: the semaphores of 0.6.8 are laid out for 8192 rows of 256 heads.
MAX_ROWS = 8192
# Columns of the page table; the kernels read indices in vectors, and both engines' top-k are multiples.
TOPK_MULTIPLE = 128

# Both engines give these kernels 384 MiB or more. With lse, softmax statistics come on top: 8 bytes a head and row,
# rows rounded up to 256 a sequence, and a guard.
BASE_WORKSPACE = 384 << 20
STATISTICS_BYTES = 8
STATISTICS_ROWS = 256
STATISTICS_GUARD = 1 << 20

LN_2 = math.log(2.0)


class LibraryContractError(NsaPluginError, RuntimeError):
    """The installed FlashInfer's function does not take what this provider has to pass."""


class Keywords(NamedTuple):
    """Arguments of a library function, all passed by name.

    always: it must have them; if_known: passed where it has them; since: optional arguments and the first version
    that has them.
    """

    always: frozenset[str]
    if_known: frozenset[str] = frozenset()
    since: Mapping[str, str] = {}


MHA_FUNCTION = ("flashinfer.prefill", "trtllm_ragged_attention_deepseek")
MLA_FUNCTION = ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache_mla")
MHA_ALWAYS = (
    "query", "key", "value", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale",
    "o_sf_scale", "batch_size", "window_left", "cum_seq_lens_q", "cum_seq_lens_kv", "enable_pdl", "is_causal",
    "return_lse", "out",
)  # fmt: skip
MLA_ALWAYS = (
    "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "block_tables",
    "seq_lens", "max_seq_len", "sparse_mla_top_k", "out", "bmm1_scale", "bmm2_scale", "backend",
)  # fmt: skip
CALLS: Mapping[tuple[str, str], Keywords] = {
    # Since 0.6.18 it takes lengths on the host, and does not look for empty requests on the device.
    MHA_FUNCTION: Keywords(always=frozenset(MHA_ALWAYS), if_known=frozenset({"q_seq_lens_cpu", "kv_seq_lens_cpu"})),
    MLA_FUNCTION: Keywords(always=frozenset(MLA_ALWAYS), since={"return_lse": "0.6.12"}),
}


def attend_dense(
    call: MhaCall,
    *,
    seqlens_q: Sequence[int] | None = None,
    seqlens_k: Sequence[int] | None = None,
    workspace: Workspace = SHARED,
) -> MhaOutput:
    """Attend with `trtllm_ragged_attention_deepseek`, within the module's limits.

    Args:
        seqlens_q, seqlens_k: queries and keys of each request, on the host; must agree with the boundaries.
            `max_seqlen_q` and `max_seqlen_k` follow from them.
        workspace: where the kernel's scratch memory comes from.

    Raises:
        KernelArgumentError: this kernel does not support an argument.
        LibraryContractError: the installed FlashInfer's function has changed.
    """
    q, k, v, out, scale, causal = call.q, call.k, call.v, call.out, call.scale, call.causal
    (tokens, heads, d_qk), d_v = q.shape, v.shape[-1]
    cu_seqlens_q, cu_seqlens_k, return_lse = call.cu_seqlens_q, call.cu_seqlens_k, call.return_lse
    known = ", ".join(map(str, MHA_DIMS))
    takes_dims = (d_qk, d_v) in MHA_DIMS
    call.require(takes_dims, f"q and v have heads of {d_qk} and {d_v} values; provider trtllm takes {known}")
    q_lens = _lengths("seqlens_q", seqlens_q, "cu_seqlens_q", cu_seqlens_q, tokens)
    k_lens = _lengths("seqlens_k", seqlens_k, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if causal:
        for request, (sq, sk) in enumerate(zip(q_lens, k_lens, strict=True)):
            fits = not 0 < sk < sq
            call.require(fits, f"request {request} has {sq} queries and {sk} keys; provider trtllm takes no fewer keys")
    active = [i for i, (sq, sk) in enumerate(zip(q_lens, k_lens, strict=True)) if sq and sk]
    if not active or heads == 0:
        return call.empty_output()

    lse = call.statistics(math.inf) if return_lse else None
    function, version = _load(MHA_FUNCTION)
    since = MHA_DIMS[d_qk, d_v]
    call.require(version >= Version(since), f"heads of {d_qk} and {d_v} values need flashinfer {since}, not {version}")
    q_starts, k_starts = [0, *accumulate(q_lens)], [0, *accumulate(k_lens)]
    q_parts = [slice(q_starts[i], q_starts[i + 1]) for i in active]
    k_parts = [slice(k_starts[i], k_starts[i + 1]) for i in active]
    is_whole = len(active) == len(q_lens)
    if is_whole:
        q_part, k_part, v_part = q[: q_starts[-1]], k[: k_starts[-1]], v[: k_starts[-1]]
        bounds_q, bounds_k = cu_seqlens_q.int(), cu_seqlens_k.int()
    else:
        # The kernels do not support empty requests.
        q_part = torch.cat([q[part] for part in q_parts])
        k_part, v_part = (torch.cat([tensor[part] for part in k_parts]) for tensor in (k, v))
        q_lens, k_lens = [q_lens[i] for i in active], [k_lens[i] for i in active]
        bounds_q, bounds_k = (
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=q.device) for lens in (q_lens, k_lens)
        )
    direct = is_whole and out.dtype == q.dtype and out.is_contiguous()
    given = out[: len(q_part)] if direct else q.new_empty((len(q_part), heads, d_v))
    statistics = STATISTICS_BYTES * heads * len(active) * (-(-max(q_lens) // STATISTICS_ROWS) * STATISTICS_ROWS)
    # 0.6.8 keeps them with and without lse, by token.
    nbytes = BASE_WORKSPACE + statistics + STATISTICS_GUARD
    result = function(
        **arguments_of(
            MHA_FUNCTION,
            inspect.signature(function).parameters,
            str(version),
            {
                "query": q_part.contiguous(),
                "key": k_part if k_part.stride(-1) == 1 else k_part.contiguous(),
                "value": v_part if v_part.stride(-1) == 1 else v_part.contiguous(),
                "workspace_buffer": workspace.get("trtllm_mha", (nbytes,), torch.uint8, q.device, zeroed=True),
                "seq_lens": bounds_k[1:] - bounds_k[:-1],
                "max_q_len": max(q_lens),
                "max_kv_len": max(k_lens),
                "bmm1_scale": scale,
                "bmm2_scale": 1.0,
                "o_sf_scale": 1.0,
                "batch_size": len(active),
                "window_left": -1,
                "cum_seq_lens_q": bounds_q,
                "cum_seq_lens_kv": bounds_k,
                "enable_pdl": False,
                "is_causal": causal,
                "return_lse": return_lse,
                "out": given,
                "q_seq_lens_cpu": torch.tensor(q_lens, dtype=torch.int32),
                "kv_seq_lens_cpu": torch.tensor(k_lens, dtype=torch.int32),
            },
        )
    )
    if direct:
        out[len(q_part) :] = 0
    else:
        out.zero_()
        for rows, piece in zip(q_parts, given.split(q_lens), strict=True):
            out[rows] = piece
    if lse is not None:
        natural = result[1] * LN_2
        natural.masked_fill_(natural == -math.inf, math.inf)
        for rows, piece in zip(q_parts, natural.split(q_lens), strict=True):
            lse[rows] = piece
    return MhaOutput(out, lse)


mha = mha_op(attend_dense, (torch.bfloat16,))


def open_fp8_cache(data: torch.Tensor) -> PagedCache:
    """Open a cache of plain fp8 rows: data [num_pages, page_size, 576] or [num_pages, page_size, 1, 576], no copy."""
    data = data.squeeze(2) if data.dim() == 4 else data
    check_tensor("open_fp8_cache", "data", data, ("num_pages", "page_size", ROW), dtypes=(FP8_DTYPE,))
    return PagedCache(data, FP8_ROWS, int(data.shape[1]))


def arguments_of(
    target: tuple[str, str],
    parameters: Mapping[str, inspect.Parameter],
    version: str,
    values: Mapping[str, Any],
    calls: Mapping[tuple[str, str], Keywords] = CALLS,
) -> dict[str, Any]:
    """Select the `values` that the installed function takes.

    Args:
        calls: the arguments of each target.

    Raises:
        LibraryContractError: it lacks a parameter that must be passed, or requires one that is not known.
    """
    name, keywords = ".".join(target), calls[target]
    for missing in sorted((values.keys() - keywords.if_known) - parameters.keys()):
        since = f", which it has since {keywords.since[missing]}" if missing in keywords.since else ""
        raise LibraryContractError(f"{name} of flashinfer {version} has no parameter {missing}{since}")
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in values:
            raise LibraryContractError(f"{name} of flashinfer {version} requires {parameter.name}, which is not known")
    return {key: value for key, value in values.items() if key in parameters}


def attend(
    call: SparseMlaCall,
    *,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    return_lse: bool = False,
    workspace: Workspace = SHARED,
) -> SparseMlaResult:
    """Attend with trtllm-gen, within the module's limits.

    q is bfloat16; over an fp8 cache, as `open_fp8_cache` gives it, q may be float8_e4m3fn too, or is quantised with
    `q_scale`.

    Args:
        q_scale, k_scale: value of a code of 1.0 in q and in the cache; fp8 only.
        return_lse: also compute lse; NaN otherwise. max_logits are always NaN.
        workspace: where the kernel's scratch memory comes from.

    Raises:
        KernelArgumentError: this kernel does not support an argument.
        LibraryContractError: the installed FlashInfer's function has changed.
    """
    call.require(call.attn_sink is None, "attn_sink is given; provider trtllm has no sink here")
    call.require(len(call.scopes) == 1, "an extra cache is given; provider trtllm reads one")
    call.require(call.d_v == KV_LORA_RANK, f"d_v is {call.d_v}; provider trtllm takes {KV_LORA_RANK}")
    heads, scope, q = call.heads, call.scopes[0], call.q
    call.require(heads <= 64 or heads == 128, f"q has {heads} heads; provider trtllm takes 1 to 64, or 128")
    pages = _pages(call.op, scope.cache)
    is_fp8 = pages.dtype == FP8_DTYPE
    check_tensor(call.op, "q", q, q.shape, dtypes=(torch.bfloat16, FP8_DTYPE) if is_fp8 else (torch.bfloat16,))
    unscaled = is_fp8 or q_scale == k_scale == 1.0
    call.require(unscaled, f"q_scale and k_scale are {q_scale} and {k_scale}; they belong to an fp8 cache")
    out, lse = call.output(), call.statistics(math.inf if return_lse else math.nan)
    result = SparseMlaResult(out, lse, lse.new_full((), math.nan).expand(lse.shape))
    if call.is_empty:
        out.zero_()
        return result

    function, version = _load(MLA_FUNCTION)
    if is_fp8 and q.dtype != FP8_DTYPE:
        q = (q.float() / q_scale).clamp_(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(FP8_DTYPE)
    flat_q = q.reshape(call.rows, 1, heads, ROW).contiguous()
    packed = compact(scope.indices, scope.length, scope.cache.num_slots, fill=-1, empty_index=0, multiple=TOPK_MULTIPLE)
    width = packed.indices.shape[1]
    direct = out.dtype == torch.bfloat16 and out.is_contiguous()
    flat_shape = (call.rows, 1, heads, call.d_v)
    flat_out = out.view(flat_shape) if direct else q.new_empty(flat_shape, dtype=torch.bfloat16)
    lengths = packed.counts.clamp(min=1)
    statistics = STATISTICS_BYTES * STATISTICS_ROWS * heads * min(call.rows, MAX_ROWS) + STATISTICS_GUARD
    nbytes = BASE_WORKSPACE + (statistics if return_lse else 0)
    buffer = workspace.get("trtllm_mla", (nbytes,), torch.uint8, q.device, zeroed=True)
    for start in range(0, call.rows, MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        values = {
            "query": flat_q[rows],
            "kv_cache": pages,
            "workspace_buffer": buffer,
            "qk_nope_head_dim": 128,
            "kv_lora_rank": KV_LORA_RANK,
            "qk_rope_head_dim": ROPE_DIM,
            "block_tables": packed.indices[rows].unsqueeze(1),
            "seq_lens": lengths[rows],
            "max_seq_len": width,
            "sparse_mla_top_k": width,
            "out": flat_out[rows],
            "bmm1_scale": call.scale * q_scale * k_scale,
            "bmm2_scale": k_scale,
            "backend": "trtllm-gen",
        }
        if return_lse:
            values["return_lse"] = True
        arguments = arguments_of(MLA_FUNCTION, inspect.signature(function).parameters, str(version), values)
        computed = function(**arguments)
        if return_lse:
            lse[rows] = computed[1].reshape(-1, heads) * LN_2
    is_empty = packed.counts == 0
    flat_out.masked_fill_(is_empty.view(-1, 1, 1, 1), 0.0)
    if not direct:
        out.copy_(flat_out.view(out.shape))
    if return_lse:
        lse.masked_fill_(is_empty.unsqueeze(1), math.inf)
    return result


QUERY_DTYPES = (*FLOAT_DTYPES, FP8_DTYPE)
prefill, decode = prefill_op(attend, QUERY_DTYPES), decode_op(attend, QUERY_DTYPES)


def _pages(op: str, cache: PagedCache) -> torch.Tensor:
    """View the cache as [pages, 32 or 64, 576]; a slot keeps its number."""
    data = cache.data
    plain = isinstance(cache.layout, PlainLayout) and data.dtype in (torch.bfloat16, FP8_DTYPE)
    name = str(data.dtype).removeprefix("torch.")
    require(plain, op, f"cache has layout {cache.layout.name} of {name}; provider trtllm reads plain bf16 or fp8 rows")
    require(data.shape[-1] == ROW, op, f"cache has rows of {data.shape[-1]} values; provider trtllm takes {ROW}")
    require(data.is_contiguous(), op, f"cache has strides {data.stride()}; provider trtllm takes contiguous pages")
    if cache.page_size in PAGE_SIZES:
        return data
    for page_size in PAGE_SIZES:
        if cache.num_slots % page_size == 0:
            return data.view(-1, page_size, ROW)
    raise KernelArgumentError(
        f"{op}: cache has {cache.num_slots} rows in pages of {cache.page_size}; provider trtllm takes "
        "pages of 32 or 64, or a multiple of 32 rows"
    )


def _lengths(name: str, given: Sequence[int] | None, bounds_name: str, bounds: torch.Tensor, tokens: int) -> list[int]:
    if given is None:
        ends: list[int] = bounds.tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        name, starts_at_zero = bounds_name, ends[:1] == [0]
    else:
        lengths, starts_at_zero = [int(length) for length in given], True
        same = len(lengths) == len(bounds) - 1
        require(same, OP, f"{name} has {len(lengths)} entries; {bounds_name} has {len(bounds) - 1} requests")
    fits = starts_at_zero and all(length >= 0 for length in lengths) and sum(lengths) <= tokens
    require(fits, OP, f"{name} gives requests of {lengths} tokens; they must add up to at most {tokens}")
    return lengths


def _load(target: tuple[str, str]) -> tuple[Callable[..., Any], Version]:
    """A function of the installed FlashInfer, and its version."""
    module, name = target
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function, Version(import_module("flashinfer").__version__)
