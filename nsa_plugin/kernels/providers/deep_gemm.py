"""The indexer over DeepGEMM's fp8 logits: SM90 with every build, SM100 with those before sgl-deep-gemm 0.2.5 and vLLM
0.33's copy, SM120 with sgl-deep-gemm from 0.2.3.post2 on and vLLM 0.33's copy (not run on SM120 here).

`topk` and `paged_topk` have the signatures and results of `nsa_plugin.kernels.indexer`'s references. The library
allocates the float32 logits of a chunk of rows with PyTorch's allocator (it takes no buffer). A selector reads them,
and they are freed before the next chunk, which then gets the same memory.

The library's requirements, from its sources, and how they are met:

- fp8 q and k, contiguous and aligned to 16 bytes; ranges with ke >= ks. Ranges are clamped on the device.
- the number of rows is an argument of its kernels, so no row count compiles one anew. Only its scheduling kernel is
  compiled for every 32 requests, and has a limit; `paged_metadata` replaces it on SM90.
- with `max_seqlen_k` the columns count from each row's ks, in a buffer of that width. A chunk of several requests uses
  this, so that no request is scored against another's keys. The kernel does not stop at the width, so ranges do.
- the paged kernel of SM90 takes 1 or 2 query rows a request and pages of 64; more rows become several requests.
  A request without keys is scored as if it had one, which the selector ignores.
- vLLM 0.33's copy and sgl-deep-gemm 0.2.5 have no `clean_logits`, and their columns always count from each row's ks
  (see `_Interface`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch

from nsa_plugin.kernels.checks import FP8_DTYPE, require
from nsa_plugin.kernels.indexer_args import check_limits, check_ragged, paged_limits
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.selector import default_selector
from nsa_plugin.kernels.topk import Request, Selector, new_output, row_chunks, uncovered_rows
from nsa_plugin.libraries.capabilities import alternatives

HEADS = {9: (32, 64), 10: (8, 16, 32, 64), 12: (32, 64)}
"""Supported head counts, by the major version of the SM."""

HEAD_DIMS = {9: (32, 64, 128), 10: (32, 64, 128), 12: (128,)}
"""Supported elements of a head, by the same."""

PAGE_SIZE = 64
ALIGNMENT = 16
# Below every known limit of the library's own scheduling kernel (12288 requests before 0.1.4, 29040 on SM100).
LIBRARY_SCHEDULE_REQUESTS = 8192


def topk(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    *,
    rows_per_chunk: int | None = None,
    out: torch.Tensor | None = None,
    requests: Sequence[Request] | None = None,
    max_key_span: int | None = None,
    selector: Selector | None = None,
    shared: dict[str, Any] | None = None,
) -> torch.Tensor:
    """int32 [rows, topk] positions relative to ks, -1 behind them; see `nsa_plugin.kernels.indexer.reference_topk`.

    Args:
        q, k: float8_e4m3fn.
        requests, max_key_span, selector: as `nsa_plugin.kernels.triton.indexer.topk`. With `requests`, a row's
            range lies in its request's keys.
        shared: kept by the caller for calls with the same ks, ke, number of keys, rows_per_chunk, requests and
            max_key_span, such as a batch's layers: the ranges are made in the first.

    Raises:
        KernelArgumentError: a shape or dtype is wrong, or the library does not take the heads.
    """
    op = "indexer_topk"
    check_ragged(op, q, k, k_scale, weights, ks, ke, dtypes=(FP8_DTYPE,))
    rows, heads, dim = q.shape
    keys = k.shape[0]
    _check_heads(op, q.device, heads, dim)
    result = new_output(op, rows, topk, out, q.device)
    import deep_gemm

    library = _interface(deep_gemm)
    parts: Parts | None = None if shared is None else shared.get("parts")
    if parts is None:
        parts = cut(ks, ke, keys, rows_per_chunk, requests, max_key_span)
        parts = parts.from_row_start() if library.from_row_start else parts
        if shared is not None:
            shared["parts"] = parts
    for gap in parts.gaps:
        result[gap].fill_(-1)
    selector = selector or default_selector(q.device, topk)
    q, k, weights = _aligned(q), _aligned(k), _aligned(weights)
    scale = torch.ones(keys, dtype=torch.float32, device=q.device) if k_scale is None else _aligned(k_scale)
    whole = slice(0, rows)
    score = library.kernel("mqa_logits")
    for part in parts.parts:
        some_q, some_weights = (q, weights) if part.rows == whole else (q[part.rows], weights[part.rows])
        scored = (k, scale) if part.keys is None else (k[part.keys], scale[part.keys])
        of_span = {} if part.span is None else {"max_seqlen_k": part.span}
        logits = score(some_q, scored, some_weights, part.ks, part.ke, **of_span)
        selector(logits, part.starts, part.ends, topk, out=result[part.rows])
        del logits
    return result


@dataclass(frozen=True)
class LogitsPart:
    """Query rows whose logits are computed at once.

    Attributes:
        rows: the rows.
        keys: the scored keys, one column each; None: all keys, and the columns count from each row's ks.
        span: number of columns that count from ks; None: they count from the first key.
        ks, ke: int32, each row's range of keys, for the library.
        starts, ends: int32, each row's range of columns, for a selector.
    """

    rows: slice
    keys: slice | None
    span: int | None
    ks: torch.Tensor
    ke: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    def from_row_start(self) -> LogitsPart:
        """The same logits with columns that count from each row's ks."""
        if self.keys is None:
            return self
        span = self.keys.stop - self.keys.start
        return replace(self, span=span, starts=torch.zeros_like(self.ks), ends=self.ke - self.ks)


@dataclass(frozen=True)
class Parts:
    """A batch's rows: the scored ones, and the gaps between them, which are rows without a key."""

    parts: tuple[LogitsPart, ...]
    gaps: tuple[slice, ...]

    def from_row_start(self) -> Parts:
        """The same rows, with columns of the logits that count from each row's ks."""
        return replace(self, parts=tuple(part.from_row_start() for part in self.parts))


def cut(
    ks: torch.Tensor,
    ke: torch.Tensor,
    keys: int,
    rows_per_chunk: int | None = None,
    requests: Sequence[Request] | None = None,
    max_key_span: int | None = None,
) -> Parts:
    """Cut a batch into the parts that `topk` scores at once. Arguments as `topk`'s.

    Raises:
        KernelArgumentError: a number is below 1, or requests are out of order or reach past rows or keys.
    """
    check_limits("indexer_topk", rows_per_chunk, max_key_span)
    rows = ks.shape[0]
    chunks = list(row_chunks(rows, keys, rows_per_chunk=rows_per_chunk, requests=requests))
    ks = ks.clamp(0, keys).int()
    ke = torch.maximum(ke.clamp(max=keys).int(), ks)
    parts: list[LogitsPart] = []
    zeros = None
    for chunk in chunks:
        some = chunk.rows
        span = chunk.span if max_key_span is None else min(chunk.span, max_key_span)
        if chunk.shares_keys and span == chunk.span:
            # The scales' address has to be aligned too: the keys start up to three early.
            base = chunk.keys.start // 4 * 4
            starts = ks[some].clamp(chunk.keys.start, chunk.keys.stop) - base
            ends = torch.maximum(ke[some].clamp(max=chunk.keys.stop) - base, starts)
            parts.append(LogitsPart(some, slice(base, chunk.keys.stop), None, starts, ends, starts, ends))
        else:
            ends = torch.minimum(ke[some], ks[some] + span)
            zeros = torch.zeros_like(ks) if zeros is None else zeros
            parts.append(LogitsPart(some, None, span, ks[some], ends, zeros[some], ends - ks[some]))
    return Parts(tuple(parts), tuple(uncovered_rows(chunks, rows)))


def paged_topk(
    q: torch.Tensor,
    cache: PagedCache,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    topk: int,
    *,
    rows_per_chunk: int | None = None,
    out: torch.Tensor | None = None,
    max_len: int | None = None,
    selector: Selector | None = None,
    metadata_provider: str | None = None,
) -> torch.Tensor:
    """int32 [batch * next_n, topk] logical positions; see `nsa_plugin.kernels.indexer.reference_paged_topk`.

    Args:
        q: [batch, next_n, heads, dim] float8_e4m3fn.
        cache: an `indexer_fp8` cache with pages of 64.
        rows_per_chunk, max_len, selector: as `nsa_plugin.kernels.triton.indexer.paged_topk`.
        metadata_provider: "deep_gemm", or "triton" (SM90 only, and not for vLLM 0.33's copy), which schedules any
            number of rows in one chunk. None: "triton" where it is supported.

    Raises:
        KernelArgumentError: a shape, dtype or page size is wrong, or the library does not take the heads.
    """
    op = "indexer_topk_paged"
    limits, max_len = paged_limits(op, q, cache, weights, seq_lens, page_table, max_len, dtypes=(FP8_DTYPE,))
    batch, next_n, heads, dim = q.shape
    major = _check_heads(op, q.device, heads, dim)
    require(cache.page_size == PAGE_SIZE, op, f"cache has pages of {cache.page_size}; deep_gemm reads {PAGE_SIZE}")
    import deep_gemm

    library = _interface(deep_gemm)
    schedulers = (None, "deep_gemm", "triton") if major == 9 and library.takes_any_schedule else (None, "deep_gemm")
    known = metadata_provider in schedulers
    require(known, op, f"metadata_provider is {metadata_provider!r}; for this build on SM{major}x: {schedulers}")
    result = new_output(op, batch * next_n, topk, out, q.device)
    check_limits(op, rows_per_chunk, None)
    if batch * next_n == 0:
        return result
    if max_len == 0:
        return result.fill_(-1)

    selector = selector or default_selector(q.device, topk)
    by_triton = "triton" in schedulers and metadata_provider != "deep_gemm"
    num_sms = deep_gemm.get_num_sms()
    if by_triton:
        from nsa_plugin.kernels.triton.indexer import paged_metadata

    # Requests of one or two query rows: two in one chunk read each key once.
    pair = 2 if next_n % 2 == 0 and rows_per_chunk != 1 else 1
    repeats = next_n // pair
    q = _aligned(q).view(batch * repeats, pair, heads, dim)
    weights = _aligned(weights)
    table = page_table.int().contiguous()
    table = table if repeats == 1 else table.repeat_interleave(repeats, dim=0)
    context = limits.view(-1, pair).amax(1, keepdim=True).clamp(min=1).expand(-1, pair).contiguous()
    limits = limits.view(-1)
    zeros = torch.zeros_like(limits)
    count = batch * repeats
    step = count if rows_per_chunk is None else max(1, rows_per_chunk // pair)
    step = step if by_triton else min(step, LIBRARY_SCHEDULE_REQUESTS)
    score = library.kernel("paged_mqa_logits")
    for first in range(0, count, step):
        some = slice(first, min(first + step, count))
        rows, lengths = slice(some.start * pair, some.stop * pair), context[some]
        if by_triton:
            schedule = paged_metadata(lengths, num_sms)
        else:
            schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE_SIZE, num_sms)
        logits = score(q[some], cache.as_records(), weights[rows], lengths, table[some], schedule, max_len)
        selector(logits, zeros[rows], limits[rows], topk, out=result[rows])
        del logits
    return result


@dataclass(frozen=True)
class _Interface:
    """The installed DeepGEMM and its calling convention.

    Attributes:
        library: its module.
        from_row_start: the columns of ragged logits always count from each row's ks, and there is no `clean_logits`
            (vLLM 0.33's copy). It does not write outside a row's keys, as the others without `clean_logits`.
    """

    library: ModuleType
    from_row_start: bool

    @property
    def takes_any_schedule(self) -> bool:
        """Whether its paged logits read the format of `paged_metadata`."""
        return not self.from_row_start

    def kernel(self, name: str) -> Callable[..., torch.Tensor]:
        """The fp8 logits kernel, or the one for fp8 and fp4 that replaced it.

        The unified kernel, the only one in vLLM's copies from 0.33 on, expects q as (values, scales); fp8 values have
        no scales.
        """
        separate: Callable[..., torch.Tensor] | None = getattr(self.library, f"fp8_{name}", None)
        unclean = {} if self.from_row_start else {"clean_logits": False}
        if separate is not None:
            return partial(separate, **unclean)
        unified = getattr(self.library, f"fp8_fp4_{name}")
        return lambda q, *args, **kwargs: unified((q, None), *args, **unclean, **kwargs)


@lru_cache(maxsize=1)
def _interface(deep_gemm: ModuleType) -> _Interface:
    kernel = getattr(deep_gemm, "fp8_mqa_logits", None) or deep_gemm.fp8_fp4_mqa_logits
    try:
        known = "clean_logits" in inspect.signature(kernel).parameters
    except ValueError:  # compiled, as in every release that has the argument
        known = True
    return _Interface(deep_gemm, from_row_start=not known)


def _check_heads(op: str, device: torch.device, heads: int, dim: int) -> int:
    """Check that the library supports the heads on a device; return the major version of its SM."""
    major = _sm_major(device)
    require(major in HEADS, op, f"q is on {device}, SM{major}x; deep_gemm has these kernels for SM90, SM100 and SM120")
    allowed = alternatives(HEADS[major])
    require(heads in HEADS[major], op, f"q has {heads} heads; deep_gemm takes {allowed} on SM{major}x")
    dims = HEAD_DIMS[major]
    require(dim in dims, op, f"q has {dim} values a head; deep_gemm takes {alternatives(dims)} on SM{major}x")
    return major


def _sm_major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _aligned(values: torch.Tensor) -> torch.Tensor:
    """Contiguous values at an address that the library's tensor maps support; copied only if needed."""
    values = values.contiguous()
    return values if values.data_ptr() % ALIGNMENT == 0 else values.clone()
