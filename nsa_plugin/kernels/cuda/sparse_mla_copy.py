"""Sparse MLA of a prefill with many heads, over a bfloat16 copy of the fp8 records that it selects, in CUDA C++.

Op `sparse_mla_prefill`; contract: `nsa_plugin.kernels.sparse_mla`. For GPUs without warpgroup products. There the
kernel that reads fp8 records (`sparse_mla`) converts a record again for each query token that selects it. Here each
page that a prefill selects from is converted once (`sparse_mla_copy.cu`), and `sparse_mla_rows` attends the copy.

The copy is bounded: 72 MiB for 65,536 slots, and less only where the cache has fewer. Beside it the selection takes
memory again, 64 MiB for 8192 query tokens and a top-k of 2048. The host does not wait to learn whether all pages fit: a
kernel counts them, and of the two that follow, over the copy and over the records, one ends at once (`gate.cuh`).

Over the copy values are rounded to bfloat16, as FlashMLA's are. Equal calls give equal bits; a query token's bits
depend on whether the pages of its whole batch fit. It takes V3.2 records and one cache.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from nsa_plugin.kernels.cuda import sparse_mla, sparse_mla_rows
from nsa_plugin.kernels.cuda.build import CudaKernel, compile_together, load_kernel
from nsa_plugin.kernels.cuda.sparse_mla_launch import (
    HOPPER,
    IF_NEGATIVE,
    UNLESS_NEGATIVE,
    CudaScope,
    attend_in_shares,
    cuda_scope,
    is_flat,
    kernels,
    new_result,
    prepare,
    require_records,
    result_of_either,
    suits_records,
)
from nsa_plugin.kernels.sparse_mla import SparseMlaCall, SparseMlaResult, prefill_op
from nsa_plugin.kernels.triton.device import DeviceFacts, facts_of
from nsa_plugin.layouts import V32_FP8

SOURCE = "sparse_mla_copy.cu"
THREADS = (256, 1, 1)
BLOCKS_PER_SM = 8  # of the kernels that make a copy
MOST_ROWS = 65536  # of a copy
MOST_PAGES = 2**18  # of a cache: a block has a bit for each in shared memory
COPY_TO_L2 = 2
"""A copy is at most so many times as large as the L2 cache. A copied row has 1.76 times the bytes of a record, so where
rows come from memory a copy may be slower: with 6 MiB (A10, A40, RTX 3090) there is none. Not measured on any GPU but
an H200."""
LEAST_HEADS = 33
"""With up to 32 heads a copy gained nothing where it was tried by hand, on an H200 that emulates SM86."""
LEAST_TOKENS = 512
"""Fewest query tokens of a batch. A copy of 65,536 rows takes as long whatever the batch, and gains little or nothing
for 512 query tokens; one of 8,192 rows gains for these, too."""


def suits(call: SparseMlaCall) -> bool:
    """Whether a call is of many heads, has what these kernels read and write, and is on a GPU that they are for."""
    if call.heads < LEAST_HEADS or not suits_records(call) or not call.scopes[0].topk:
        return False
    facts = facts_of(call.q.device)
    is_cached = COPY_TO_L2 * facts.l2_cache >= MOST_ROWS * sparse_mla_rows.ROW_BYTES
    return facts.architecture != HOPPER and is_cached and bool(capacity(call))


def is_long(call: SparseMlaCall) -> bool:
    """Whether a call that `suits` has enough query tokens."""
    return call.rows >= LEAST_TOKENS


def capacity(call: SparseMlaCall, most_rows: int = MOST_ROWS) -> int:
    """Pages of a copy of so many rows; 0 if there can be no copy."""
    cache = call.scopes[0].cache
    return min(most_rows // cache.page_size, cache.num_pages) if cache.num_pages <= MOST_PAGES else 0


def over_copy(heads: int, facts: DeviceFacts) -> sparse_mla_rows.RowsVariant:
    """The form that attends a copy."""
    return [*sparse_mla_rows.possible_variants(heads, facts)][-1]


def over_records(heads: int, facts: DeviceFacts) -> sparse_mla.Variant:
    """The form that attends records if a copy has too few pages."""
    return [*sparse_mla.possible_variants(heads, V32_FP8.name, facts)][-1]


def load(call: SparseMlaCall) -> None:
    """Compile the kernels that `attend` launches for calls such as this one, unless they are.

    That is for caches whose pages follow each other as in this one, and for outputs that the kernels can write.

    Raises:
        KernelBuildError: one does not compile.
    """
    with torch.cuda.device_of(call.q):
        _load(call.heads, is_flat(call.scopes[0].cache, V32_FP8.row_bytes), call.q.device)


@functools.cache
def _load(heads: int, flat: bool, device: torch.device) -> None:
    facts = facts_of(device)
    compile_together(SOURCE, [{}])
    copy_kernels()
    variant = over_copy(heads, facts)
    options = tuple(row_definitions(facts).items())
    kernels(sparse_mla_rows.SOURCE, "attend_rows", ((variant, variant.shared_bytes),), options, device.index)
    defines = sparse_mla.definitions(V32_FP8.name, facts, is_flat=flat) | {"GATE": IF_NEGATIVE}
    sparse_mla.load(over_records(heads, facts), V32_FP8.name, defines, device.index)
    sparse_mla_rows.zeros(device)


def copy_kernels() -> tuple[CudaKernel, CudaKernel, CudaKernel, CudaKernel]:
    """The kernels that make a copy, in their order, compiled unless they are, on torch's current device."""
    mark = load_kernel(SOURCE, "mark_pages", max_dynamic_shared=MOST_PAGES // 8)
    number, copy, remap = (load_kernel(SOURCE, name) for name in ("number_pages", "copy_pages", "remap_indices"))
    return mark, number, copy, remap


def row_definitions(facts: DeviceFacts, *, out_float32: bool = False) -> dict[str, int]:
    """What the preprocessor needs to know for the kernel that attends a copy, besides the variant."""
    return sparse_mla_rows.definitions(facts, is_flat=True, out_float32=out_float32) | {"GATE": UNLESS_NEGATIVE}


def attend(call: SparseMlaCall, *, most_rows: int = MOST_ROWS) -> SparseMlaResult:
    """Attend a bfloat16 copy of the pages that the query tokens select from, or the records if the pages are too many.

    Args:
        most_rows: of the copy.

    Raises:
        KernelArgumentError: a kernel does not support a shape, dtype, layout or device.
        KernelBuildError: a kernel does not compile or launch.
    """
    given, facts = require_records(call), facts_of(call.q.device)
    call.require(facts.architecture != HOPPER, f"the device is SM{HOPPER}; this kernel is for other GPUs")
    pages, cache = capacity(call, most_rows), given.cache
    call.require(
        pages > 0 or not cache.num_pages,
        f"{given.name} has {cache.num_pages} pages of {cache.page_size}; a copy is of up to {MOST_PAGES} pages in "
        f"the cache, and of up to {most_rows} rows",
    )
    result = new_result(call)
    if not call.q.numel():
        return result
    scope, free_pages = copy_pages(call, cuda_scope(call, given, V32_FP8), pages, facts)
    with result_of_either(result) as own:
        _attend_copy(call, scope, free_pages, own)
        sparse_mla.attend(call, variant=over_records(call.heads, facts), gate=free_pages, result=own)
    return result


def copy_pages(call: SparseMlaCall, scope: CudaScope, pages: int, facts: DeviceFacts) -> tuple[CudaScope, torch.Tensor]:
    """Copy the pages that the query tokens select from.

    Args:
        scope: the cache of records.
        pages: of the copy.

    Returns:
        The copy with the indices into it; and [1] int32 on the device, the free pages of the copy. If they are
        negative there were too few, and nothing was copied.
    """
    device, size, rows = call.q.device, ctypes.c_int, call.rows
    num_pages = call.scopes[0].cache.num_pages
    words = -(-num_pages // 32)
    with torch.cuda.device_of(call.q):
        mark, number, copy, remap = copy_kernels()
        marks = torch.zeros(words, dtype=torch.int32, device=device)
        numbers, numbered, free = (torch.empty(n, dtype=torch.int32, device=device) for n in (num_pages, pages, 1))
        values = torch.empty((pages * scope.page_size, sparse_mla_rows.DIM), dtype=torch.bfloat16, device=device)
        remapped = torch.empty((rows, scope.topk), dtype=torch.int32, device=device)
        blocks = (min(rows, BLOCKS_PER_SM * facts.sms), 1, 1)
        mark(blocks, THREADS, (scope, size(rows), size(words), marks), shared_bytes=4 * words)
        number((1, 1, 1), THREADS, (marks, size(words), size(pages), numbers, numbered, free))
        copy((BLOCKS_PER_SM * facts.sms, 1, 1), THREADS, (scope, numbered, free, size(pages), values))
        remap(blocks, THREADS, (scope, size(rows), numbers, free, remapped))
    made = CudaScope.from_buffer_copy(scope)
    made.data, made.page_stride = values.data_ptr(), scope.page_size * sparse_mla_rows.ROW_BYTES
    made.indices, made.indices_stride, made.num_slots = remapped.data_ptr(), scope.topk, values.shape[0]
    made.is_flat, made.kept = True, (values, remapped, *scope.kept)
    return made, free


def _attend_copy(call: SparseMlaCall, scope: CudaScope, free_pages: torch.Tensor, result: SparseMlaResult) -> None:
    launch = prepare(call, result=result)
    variant = over_copy(call.heads, launch.facts)
    attend_in_shares(
        call,
        launch,
        (scope, sparse_mla_rows.zeros(call.q.device)),
        kernel=(sparse_mla_rows.SOURCE, "attend_rows"),
        variants={variant: variant.shared_bytes},
        defines=row_definitions(launch.facts, out_float32=launch.out.dtype == torch.float32),
        topk=scope.topk,
        splits=1,
        gate=free_pages,
    )


prefill = prefill_op(attend)
