"""The lightning indexer in Triton: fp8 logits of ragged or paged keys, and the top-k of each row.

`topk` and `paged_topk` have the signatures and results of `nsa_plugin.kernels.indexer`'s references, with
a few keywords that keep the host out of the device's values: logits go to a float32 buffer of
[rows of a chunk, keys that one row may see] whose columns count from the row's own first key, so requests
with different keys share a chunk without a Σq x Σk buffer. Where the reference checks ranges by reading them, these
clamp them on the device. Nothing waits for the device, so a call can be captured in a CUDA graph.

A product of fp8 values is summed in float32 by the tensor cores; logits differ from the reference's by
rounding, and only members of what is nearly a tie may be selected differently.

`paged_metadata` computes the work split that DeepGEMM's paged logits kernel reads on SM90, for any number of rows.
"""

# Triton types a kernel's parameters, not Python.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from nsa_plugin.kernels.checks import FLOAT_DTYPES, FP8_DTYPE, INDEX_DTYPES, check_tensor, require
from nsa_plugin.kernels.indexer_args import check_limits, check_ragged, paged_limits
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.selector import default_selector
from nsa_plugin.kernels.topk import Request, Selector, new_output, row_chunks, uncovered_rows
from nsa_plugin.kernels.triton.device import facts_of
from nsa_plugin.kernels.triton.kv_cache_kernels import decode_fp8, decode_fp8_packed
from nsa_plugin.kernels.triton.sizes import ceil_div, power_of_2
from nsa_plugin.kernels.triton.tiles import STREAMS, LogitsTile, tiles_of

METADATA = STREAMS["indexer_metadata"]
# Programs that fill a GPU many times over; each goes over several blocks of keys if there are more.
PROGRAMS = 4096
# Without a product of fp8 values ragged keys and queries are converted once and not by every program that reads them.
# Most keys and query rows of a launch then: 16 MiB of keys of 128 values, 32 MiB of queries with 64 heads.
CONVERTED_KEYS = 65536
CONVERTED_ROWS = 2048


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
) -> torch.Tensor:
    """int32 [rows, topk] positions relative to ks, -1 behind them; see `nsa_plugin.kernels.indexer.reference_topk`.

    Args:
        requests: (first row, end row, first key, end key) of each request, known to the host: the logits of
            a chunk are no wider than its longest request. Rows of no request are -1. None: a chunk's logits are as
            wide as all keys.
        max_key_span: most keys that a row sees, known to the host; logits are no wider. What a row would see
            beyond that many is left out.
        selector: the `topk_rows` to use; None: the device's best.
    """
    op = "indexer_topk"
    check_ragged(op, q, k, k_scale, weights, ks, ke)
    rows, heads, _ = q.shape
    keys = k.shape[0]
    result = new_output(op, rows, topk, out, q.device)
    check_limits(op, rows_per_chunk, max_key_span)
    chunks = list(row_chunks(rows, keys, rows_per_chunk=rows_per_chunk, requests=requests))
    for gap in uncovered_rows(chunks, rows):
        result[gap].fill_(-1)
    if not chunks:
        return result
    selector = selector or default_selector(q.device, topk)
    spans = [chunk.span if max_key_span is None else min(chunk.span, max_key_span) for chunk in chunks]
    buffer = torch.empty(
        max(chunk.num_rows * span for chunk, span in zip(chunks, spans, strict=True)),
        dtype=torch.float32,
        device=q.device,
    )
    lengths = (ke.clamp(max=keys) - ks.clamp(min=0)).int()
    zeros = torch.zeros_like(lengths)
    tile = tiles_of(facts_of(q.device).architecture).logits
    block_q = _row_block(tile, heads)
    converts = _is_fp8(q, k) and not facts_of(q.device).native_fp8
    most_keys, most_rows = (CONVERTED_KEYS, CONVERTED_ROWS) if converts else (keys, rows)
    for chunk, span in zip(chunks, spans, strict=True):
        logits = buffer[: chunk.num_rows * span].view(chunk.num_rows, span)
        for key_part in _pieces(chunk.keys if converts else slice(0, keys), most_keys):
            some_k = _converted(k[key_part], tile.block_n) if converts else _bytes(k)
            for part in _pieces(chunk.rows, most_rows):
                some_q = q[part].half() if converts else _bytes(q[part])
                num_rows, first_row = part.stop - part.start, part.start - chunk.rows.start
                row_blocks = ceil_div(num_rows, block_q)
                with torch.cuda.device_of(q):
                    _ragged_logits[(row_blocks, _key_programs(tile, row_blocks, span))](
                        some_q,
                        some_k,
                        k_scale,
                        weights[part],
                        ks[part],
                        ke[part],
                        logits[first_row : first_row + num_rows],
                        num_rows,
                        key_part.start,
                        key_part.stop,
                        span,
                        *some_q.stride(),
                        *some_k.stride(),
                        0 if k_scale is None else k_scale.stride(0),
                        *weights.stride(),
                        ks.stride(0),
                        ke.stride(0),
                        PADDED=converts,
                        **_options(tile, some_q, some_k, block_q),
                    )
                del some_q  # before the next piece takes memory
            del some_k
        selector(logits, zeros[chunk.rows], lengths[chunk.rows], topk, out=result[chunk.rows])
    return result


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
) -> torch.Tensor:
    """int32 [batch * next_n, topk] logical positions; see `nsa_plugin.kernels.indexer.reference_paged_topk`.

    A seen key on a page that the cache does not have counts as the least.

    Args:
        rows_per_chunk: query rows whose logits are held at once; None: all.
        max_len: most keys that a row sees, known to the host; None: what the page table can hold. Keys
            behind that are left out.
        selector: the `topk_rows` to use; None: the device's best.
    """
    op = "indexer_topk_paged"
    limits, max_len = paged_limits(op, q, cache, weights, seq_lens, page_table, max_len)
    batch, next_n, heads, dim = q.shape
    result = new_output(op, batch * next_n, topk, out, q.device)
    check_limits(op, rows_per_chunk, None)
    if batch * next_n == 0:
        return result
    if max_len == 0:
        return result.fill_(-1)
    selector = selector or default_selector(q.device, topk)
    # Requests of `group` rows; where not even one fits a chunk, each row stands for itself.
    group = next_n if rows_per_chunk is None or rows_per_chunk >= next_n else 1
    q = q.reshape(batch * next_n // group, group, heads, dim)
    requests = q.shape[0]
    step = requests if rows_per_chunk is None else rows_per_chunk // group
    limits = limits.reshape(-1)
    zeros = torch.zeros_like(limits)
    buffer = torch.empty((min(step, requests) * group, max_len), dtype=torch.float32, device=q.device)
    tile = tiles_of(facts_of(q.device).architecture).paged_logits
    block_q = _row_block(tile, heads, group)
    blocks = ceil_div(group, block_q)
    for first in range(0, requests, step):
        end = min(first + step, requests)
        rows = slice(first * group, end * group)
        logits = buffer[: (end - first) * group]
        row_blocks = (end - first) * blocks
        with torch.cuda.device_of(q):
            _paged_logits[(row_blocks, _key_programs(tile, row_blocks, max_len))](
                _bytes(q[first:end]),
                cache.data,
                weights[rows],
                limits[rows],
                page_table,
                logits,
                first,
                group,
                next_n // group,
                cache.num_pages,
                cache.data.stride(0),
                *q.stride(),
                *weights.stride(),
                *page_table.stride(),
                max_len,
                PAGE_SIZE=cache.page_size,
                **_options(tile, q, cache.data, block_q),
            )
        selector(logits, zeros[rows], limits[rows], topk, out=result[rows])
    return result


def paged_metadata(context_lens: torch.Tensor, num_sms: int, *, split: int = 256) -> torch.Tensor:
    """int32 [num_sms + 1, 2]: the start of each multiprocessor in DeepGEMM's paged logits on SM90.

    The keys of all requests, in splits of `split`, are assigned in order: an entry is (index of the first block
    of queries, split of its keys), the last one the end of all. Two query rows of a request are one block, an odd
    one out is a block of its own, and every block of a request takes as many splits as its last row. Surplus splits
    go to the last multiprocessors, so that an idle one starts inside the batch. DeepGEMM from
    0.1.4 on (`sm90_paged_mqa_logits_metadata`) computes the same in shared memory, which bounds its rows.

    Args:
        context_lens: [requests] or [requests, next_n] int32 or int64, each at least 1.
        num_sms: multiprocessors that the logits kernel is launched on.
    """
    op = "indexer_metadata"
    shape = ("requests", "next_n") if context_lens.dim() == 2 else ("requests",)
    check_tensor(op, "context_lens", context_lens, shape, dtypes=INDEX_DTYPES)
    require(num_sms > 0, op, f"num_sms is {num_sms}; there is at least 1")
    last = context_lens[:, -1] if context_lens.dim() == 2 else context_lens
    next_n = context_lens.shape[1] if context_lens.dim() == 2 else 1
    schedule = torch.empty((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)
    with torch.cuda.device_of(schedule):
        _paged_metadata[(1,)](
            last,
            schedule,
            last.shape[0],
            last.stride(0),
            num_sms,
            QUERY_BLOCKS=ceil_div(next_n, 2),
            SPLIT=split,
            BLOCK=METADATA.block,
            SMS_PADDED=power_of_2(num_sms + 1),
            num_warps=METADATA.num_warps,
        )
    return schedule


def _row_block(tile: LogitsTile, heads: int, rows: int | None = None) -> int:
    """Query rows of a block, a power of two, as the heads are padded to."""
    heads_padded = power_of_2(heads)
    most = max(1, tile.block_m // heads_padded)
    if rows is not None:
        most = min(most, power_of_2(rows))
    # Tensor cores take 16 columns or more.
    return max(most, 16 // heads_padded, 1)


def _key_programs(tile: LogitsTile, row_blocks: int, keys: int) -> int:
    return max(1, min(ceil_div(keys, tile.block_n), ceil_div(PROGRAMS, row_blocks)))


def _pieces(whole: slice, most: int) -> Iterator[slice]:
    """`whole` in slices of at most `most`."""
    for start in range(whole.start, whole.stop, max(1, most)):
        yield slice(start, min(start + most, whole.stop))


def _converted(keys: torch.Tensor, multiple: int) -> torch.Tensor:
    """Keys as float16, in front of as much memory as the last of `multiple` keys take together."""
    count, dim = keys.shape
    room = torch.empty((ceil_div(count, multiple) * multiple, dim), dtype=torch.float16, device=keys.device)
    room[:count].copy_(keys)
    return room


def _is_fp8(*tensors: torch.Tensor) -> bool:
    """Whether all are fp8 values, as such or, in caches, as bytes."""
    return all(values.dtype not in FLOAT_DTYPES for values in tensors)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8) if values.dtype == FP8_DTYPE else values


def _options(tile: LogitsTile, q: torch.Tensor, k: torch.Tensor, block_q: int) -> dict[str, Any]:
    """What both kernels of logits are compiled for: sizes, and the types in which the product is taken.

    That is float8 itself where both sides are and the GPU multiplies it, and float16, which holds every fp8 value
    exactly, where both sides are that or become it.
    """
    *_, heads, dim = q.shape
    fp8 = [_is_fp8(values) for values in (q, k)]
    native = facts_of(q.device).native_fp8
    dtype = tl.float32
    if all(fp8) and q.is_cuda:
        dtype = tl.float8e4nv if native else tl.float16
    elif q.dtype == k.dtype == torch.float16:
        dtype = tl.float16
    return {
        "HEADS": heads,
        "HEADS_PADDED": power_of_2(heads),
        "DIM": dim,
        "DIM_PADDED": max(32, power_of_2(dim)),
        "BLOCK_Q": block_q,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "Q_IS_FP8": fp8[0],
        "K_IS_FP8": fp8[1],
        "NATIVE_FP8": native,
        "DOT_DTYPE": dtype,
    }


@triton.jit
def _operand(values, IS_FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """A loaded tile in the type of the product; every one of them holds an fp8 value exactly."""
    if IS_FP8:
        if DTYPE == tl.float8e4nv:  # noqa: SIM300 - a type on the right is how Triton compares them
            return values.to(tl.float8e4nv, bitcast=True)
        elif DTYPE == tl.float16:  # noqa: SIM300
            return decode_fp8_packed(values)
        else:
            return decode_fp8(values, NATIVE_FP8).to(DTYPE)
    else:
        return values.to(DTYPE)


@triton.jit
def _scores(keys, queries, weights, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS_PADDED: tl.constexpr):
    """float32 [BLOCK_N, BLOCK_Q] logits without the keys' scales, of keys [BLOCK_N, dim] and queries [pairs, dim]."""
    products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    # A NaN has to stay one.
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    return tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_Q, HEADS_PADDED)), axis=2)


# Below, what changes from batch to batch is not specialised: a batch must not compile a kernel while the engine serves.
# Alignment of bounds and of page tables would gain nothing: their int32 values are read one by one.


@triton.jit(
    do_not_specialize=["rows", "first_key", "end_key", "span"],
    do_not_specialize_on_alignment=["ks_ptr", "ke_ptr"],  # a chunk may start at any row
)
def _ragged_logits(
    q_ptr,
    k_ptr,
    k_scale_ptr,
    weights_ptr,
    ks_ptr,
    ke_ptr,
    logits_ptr,
    rows,
    first_key,
    end_key,
    span,
    q_row_stride,
    q_head_stride,
    q_dim_stride,
    k_row_stride,
    k_dim_stride,
    k_scale_stride,
    weights_row_stride,
    weights_head_stride,
    ks_stride,
    ke_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_IS_FP8: tl.constexpr,
    K_IS_FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Logits of BLOCK_Q rows for the keys from `first_key` on, of which `k_ptr` is the first, up to `end_key`.

    Column j of a row is key ks + j. Only keys that one of the rows sees are read.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    ks = tl.maximum(tl.load(ks_ptr + row * ks_stride, mask=row < rows, other=0).to(tl.int64), 0)
    ke = tl.load(ke_ptr + row * ke_stride, mask=row < rows, other=0).to(tl.int64)
    ke = tl.minimum(tl.minimum(ke, end_key), ks + span)
    seen = ke > tl.maximum(ks, first_key)
    first = tl.min(tl.where(seen, tl.maximum(ks, first_key), end_key), 0).to(tl.int32)
    first -= (first - first_key) % BLOCK_N  # whole blocks, which the memory behind converted keys has room for
    last = tl.max(tl.where(seen, ke, first_key), 0).to(tl.int32)
    row_ptr = logits_ptr + row * span - ks
    ks, ke = ks.to(tl.int32), ke.to(tl.int32)

    pair = tl.arange(0, BLOCK_Q * HEADS_PADDED)
    pair_row = tl.program_id(0).to(tl.int64) * BLOCK_Q + pair // HEADS_PADDED
    head = pair % HEADS_PADDED
    real = (pair_row < rows) & (head < HEADS)
    dim = tl.arange(0, DIM_PADDED)
    queries = tl.load(
        q_ptr + (pair_row * q_row_stride + head * q_head_stride)[:, None] + dim[None, :] * q_dim_stride,
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0,
    )
    queries = _operand(queries, Q_IS_FP8, NATIVE_FP8, DOT_DTYPE)
    weights = tl.load(weights_ptr + pair_row * weights_row_stride + head * weights_head_stride, mask=real, other=0.0)
    for base in range(first + tl.program_id(1) * BLOCK_N, last, tl.num_programs(1) * BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        inside = key < last
        if PADDED:  # few enough for 32 bits, and what is read behind the last key is not stored
            block = tl.load(
                k_ptr + ((key - first_key) * DIM)[:, None] + dim[None, :], mask=(dim < DIM)[None, :], other=0
            )
        else:
            block = tl.load(
                k_ptr + ((key - first_key).to(tl.int64) * k_row_stride)[:, None] + dim[None, :] * k_dim_stride,
                mask=inside[:, None] & (dim < DIM)[None, :],
                other=0,
            )
        scores = _scores(
            _operand(block, K_IS_FP8, NATIVE_FP8, DOT_DTYPE), queries, weights, BLOCK_N, BLOCK_Q, HEADS_PADDED
        )
        if k_scale_ptr is not None:
            scores *= tl.load(k_scale_ptr + key * k_scale_stride, mask=inside, other=0.0)[:, None]
        tl.store(
            row_ptr[None, :] + key[:, None],
            scores,
            mask=(key[:, None] >= ks[None, :]) & (key[:, None] < ke[None, :]),
        )


@triton.jit(
    # A page table is as wide as the batch needs: one page or a multiple of 16 would be variants of their own.
    do_not_specialize=[
        *("first_request", "rows_per_request", "requests_per_table_row", "num_pages", "table_row_stride", "max_len")
    ],
    do_not_specialize_on_alignment=["limits_ptr", "table_ptr"],  # they may be slices from any row on
)
def _paged_logits(
    q_ptr,
    cache_ptr,
    weights_ptr,
    limits_ptr,
    table_ptr,
    logits_ptr,
    first_request,
    rows_per_request,
    requests_per_table_row,
    num_pages,
    page_stride,
    q_request_stride,
    q_row_stride,
    q_head_stride,
    q_dim_stride,
    weights_row_stride,
    weights_head_stride,
    table_row_stride,
    table_page_stride,
    max_len,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_IS_FP8: tl.constexpr,
    K_IS_FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Logits of up to BLOCK_Q rows of one request, straight from its pages."""
    row_blocks = tl.cdiv(rows_per_request, BLOCK_Q)
    request = (tl.program_id(0) // row_blocks).to(tl.int64)
    first_row = tl.program_id(0) % row_blocks * BLOCK_Q
    row = first_row + tl.arange(0, BLOCK_Q)
    # Rows of the chunk: `limits`, `weights` and `logits` start with its first.
    chunk_row = request * rows_per_request + row
    limit = tl.load(limits_ptr + chunk_row, mask=row < rows_per_request, other=0)
    last = tl.max(limit, 0)

    pair = tl.arange(0, BLOCK_Q * HEADS_PADDED)
    pair_row = first_row + pair // HEADS_PADDED
    head = pair % HEADS_PADDED
    real = (pair_row < rows_per_request) & (head < HEADS)
    dim = tl.arange(0, DIM_PADDED)
    q_offset = request * q_request_stride + pair_row.to(tl.int64) * q_row_stride + head * q_head_stride
    queries = tl.load(
        q_ptr + q_offset[:, None] + dim[None, :] * q_dim_stride,
        mask=real[:, None] & (dim < DIM)[None, :],
        other=0,
    )
    queries = _operand(queries, Q_IS_FP8, NATIVE_FP8, DOT_DTYPE)
    weights_row = request * rows_per_request + pair_row
    weights = tl.load(weights_ptr + weights_row * weights_row_stride + head * weights_head_stride, mask=real, other=0.0)
    table_row = table_ptr + ((first_request + request) // requests_per_table_row) * table_row_stride
    for base in range(tl.program_id(1) * BLOCK_N, last, tl.num_programs(1) * BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        page_index = (key // PAGE_SIZE).to(tl.int64)
        page = tl.load(table_row + page_index * table_page_stride, mask=key < last, other=-1).to(tl.int64)
        held = (page >= 0) & (page < num_pages)
        record = cache_ptr + tl.where(held, page, 0) * page_stride
        in_page = key % PAGE_SIZE
        block = tl.load(
            record[:, None] + in_page[:, None] * DIM + dim[None, :],
            mask=held[:, None] & (dim < DIM)[None, :],
            other=0,
        )
        scores = _scores(
            _operand(block, K_IS_FP8, NATIVE_FP8, DOT_DTYPE), queries, weights, BLOCK_N, BLOCK_Q, HEADS_PADDED
        )
        # A page may start at any byte, so the float32 scale is put together from its bytes.
        scale_ptr = record + PAGE_SIZE * DIM + in_page * 4
        bits = tl.load(scale_ptr, mask=held, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            bits |= tl.load(scale_ptr + byte, mask=held, other=0).to(tl.int32) << (8 * byte)
        scale = bits.to(tl.float32, bitcast=True)
        scores = tl.where(held[:, None], scores * scale[:, None], float("-inf"))
        tl.store(
            logits_ptr + (chunk_row * max_len)[None, :] + key[:, None],
            scores,
            mask=(key[:, None] < limit[None, :]) & (row < rows_per_request)[None, :],
        )


@triton.jit(do_not_specialize=["requests", "num_sms"])
def _paged_metadata(
    lens_ptr,
    schedule_ptr,
    requests,
    lens_stride,
    num_sms,
    QUERY_BLOCKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SMS_PADDED: tl.constexpr,
):
    total = 0
    for base in range(0, requests, BLOCK):
        request = base + tl.arange(0, BLOCK)
        length = tl.load(lens_ptr + request.to(tl.int64) * lens_stride, mask=request < requests, other=0).to(tl.int32)
        total += tl.sum((length + SPLIT - 1) // SPLIT, 0)
    work = total * QUERY_BLOCKS
    share = work // num_sms
    sm = tl.arange(0, SMS_PADDED)
    start = sm * share + tl.maximum(sm - (num_sms - work % num_sms), 0)

    # Of each multiprocessor's first request: how many lie before it, and the splits before and through it.
    index = tl.zeros([SMS_PADDED], tl.int32)
    before = tl.zeros([SMS_PADDED], tl.int32)
    through = tl.full([SMS_PADDED], 2147483647, tl.int32)
    done = 0
    for base in range(0, requests, BLOCK):
        request = base + tl.arange(0, BLOCK)
        length = tl.load(lens_ptr + request.to(tl.int64) * lens_stride, mask=request < requests, other=0).to(tl.int32)
        splits = (length + SPLIT - 1) // SPLIT
        prefix = done + tl.cumsum(splits, 0)
        done += tl.sum(splits, 0)
        passed = (prefix * QUERY_BLOCKS)[None, :] <= start[:, None]
        inside = (request < requests)[None, :]
        index += tl.sum((passed & inside).to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed & inside, prefix[None, :], 0), 1))
        ahead = tl.where(inside & (passed == 0), prefix[None, :], 2147483647)
        through = tl.minimum(through, tl.min(ahead, 1))
    offset = start - before * QUERY_BLOCKS
    count = tl.where(index < requests, through - before, 1)
    at_end = (sm >= num_sms) | (index >= requests)
    block = tl.where(at_end, requests * QUERY_BLOCKS, index * QUERY_BLOCKS + offset // count)
    split = tl.where(at_end, 0, offset % count)
    tl.store(schedule_ptr + sm * 2, block, mask=sm <= num_sms)
    tl.store(schedule_ptr + sm * 2 + 1, split, mask=sm <= num_sms)
