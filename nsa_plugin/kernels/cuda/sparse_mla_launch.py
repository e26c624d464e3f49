"""What the launchers of the sparse MLA kernels share: a call's checks, its tensors as they take them, and shares.

The kernels of few heads (`sparse_mla`, `sparse_mla_rows`) cut a row's entries into shares: `attend_in_shares` chooses
how many and with which variant, and launches them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from nsa_plugin.kernels.checks import check_tensor
from nsa_plugin.kernels.cuda.build import Argument, CudaKernel, compile_together, load_kernel
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import Scope, SparseMlaCall, SparseMlaResult
from nsa_plugin.kernels.triton.device import DeviceFacts, facts_of
from nsa_plugin.layouts import V4_FP8, V32_FP8, CacheLayout

LOG2_E = 1.4426950408889634
KEYS = 64  # entries that a share of a row has at least two times
MOST_IN_TURN = 8  # query rows of a block
D_V = 512
LAYOUTS = (V32_FP8, V4_FP8)
MAX_SPLITS = 16  # as many blocks as a cluster may have
HOPPER = 90  # the SM version with bulk copies and clusters
NOTHINGS = 1024  # records that stand for entries which do not count
NOT_COUNTED = -(2.0**-100)  # and their scales, with V3.2
PARTIAL_BYTES = D_V * 2 + D_V // 64 * 4  # of a share's output of a head: `Partial` of the source
COMBINES = {2: 1, 4: 1, 8: 1, 16: 2}
"""Kernel `combine_N` adds up to N shares of a head, with so many warps."""
COMBINING = 4  # warps of a block of it
NO_GATE, UNLESS_NEGATIVE, IF_NEGATIVE = 0, 1, 2
"""`GATE` of gate.cuh: a kernel runs always, or by the sign of a number on the GPU: unless or if it is negative."""


@dataclass(frozen=True, kw_only=True)
class FewHeadsVariant:
    """A compiled form of a kernel of few heads.

    Attributes:
        tiles: tiles of 8 heads that a block of threads takes.
        blocks: blocks of threads resident on an SM.
        keys: entries that a block attends at a time: a step.
        stages: steps in shared memory.
        warps: of a block, that multiply.
        producers: warps that only copy, beside those that multiply; 0: these copy too.
        eager: a call gets it as soon as the device has room for `least_room` shares.
        in_turn: a block attends several query rows in turn, and `producers` copy for the next one meanwhile.
    """

    tiles: int
    blocks: int
    keys: int = 64
    stages: int = 2
    warps: int = 8
    producers: int = 0
    eager: bool = False
    in_turn: bool = False

    @property
    def threads(self) -> tuple[int, int, int]:
        """Of a block."""
        return (32 * (self.warps + self.producers), 1, 1)

    @property
    def heads(self) -> int:
        """Heads of a query row that a block takes."""
        return 8 * self.tiles

    @property
    def definitions(self) -> dict[str, int]:
        """Of the source's preprocessor."""
        sizes = {"NT": self.tiles, "MIN_BLOCKS": self.blocks, "KEYS": self.keys, "STAGES": self.stages}
        return sizes | {"WARPS": self.warps, "PRODUCERS": self.producers, "IN_TURN": int(self.in_turn)}

    def blocks_of(self, rows: int, room: int) -> int:
        """Blocks that attend so many query rows, a group of heads and a share of each.

        With `in_turn` as few as keep all SMs at work to the end, of up to `MOST_IN_TURN` rows each: so others begin
        where one is done early, or where another kernel has an SM.

        Args:
            room: blocks that run at once on the device.
        """
        if not self.in_turn:
            return rows
        each = min(range(MOST_IN_TURN, 0, -1), key=lambda each: -(-rows // each // room) * each)
        return -(-rows // each)

    def least_room(self, heads: int) -> int:
        """Shares that the device has to have room for, for a call of so many heads to get it; 0: for the most.

        As measured on SM90, where a block has an SM alone: a second group of heads reads the same records again.
        """
        if not self.eager:
            return 0
        return 8 if heads > self.heads and self.tiles == 1 else 2


AnyVariant = TypeVar("AnyVariant", bound=FewHeadsVariant)


class CudaScope(ctypes.Structure):
    """`CudaScope` of the source, with data that only the host uses.

    Attributes:
        is_flat: the record of slot s lies s records from the start.
        kept: tensors that have to live until the launch.
    """

    is_flat: bool
    kept: tuple[torch.Tensor | None, ...]

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("indices", ctypes.c_void_p),
        ("indices_stride", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("lengths_divisor", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("page_shift", ctypes.c_int),
        ("num_slots", ctypes.c_int),
        ("topk", ctypes.c_int),
    )


@dataclass(frozen=True)
class Launch:
    """The tensors of a call as the kernels take them.

    Attributes:
        q: [rows, heads, d_qk], whose values can be read eight at a time.
        out: [rows, heads, d_v], to write: the result's output, or what `finish` copies to it.
        result: of the call; the kernels write lse and max_logits, float32 [rows, heads], in place.
        sink: [heads] float32, contiguous, or None.
        facts: of the device.
    """

    q: torch.Tensor
    out: torch.Tensor
    result: SparseMlaResult
    sink: torch.Tensor | None
    facts: DeviceFacts

    @property
    def outputs(self) -> tuple[Argument, ...]:
        """`out` with its strides, lse and max_logits, in the order of the kernels' parameters."""
        strides = (ctypes.c_int64(stride) for stride in self.out.stride()[:2])
        return self.out, *strides, self.result.lse, self.result.max_logits

    @property
    def queries(self) -> tuple[Argument, ...]:
        """`q` with its strides, and the heads of a row."""
        strides = (ctypes.c_int64(stride) for stride in self.q.stride()[:2])
        return self.q, *strides, ctypes.c_int(self.q.shape[1])

    def finish(self) -> SparseMlaResult:
        """The result, once the kernels are launched."""
        if self.out.data_ptr() != self.result.out.data_ptr():
            self.result.out.copy_(self.out.view(self.result.out.shape))
        return self.result


def check_queries(call: SparseMlaCall) -> None:
    """Check what every kernel requires of the queries.

    Raises:
        KernelArgumentError: they are not bfloat16, or the values have another width.
    """
    check_tensor(call.op, "q", call.q, call.q.shape, dtypes=(torch.bfloat16,))
    call.require(call.d_v == D_V, f"d_v is {call.d_v}; this kernel has values of {D_V}")


def new_result(call: SparseMlaCall) -> SparseMlaResult:
    """The call's output, and lse and max_logits [query tokens, heads] float32, to write."""
    lse, max_logits = torch.empty((2, call.rows, call.heads), dtype=torch.float32, device=call.q.device).unbind()
    return SparseMlaResult(call.output(), lse, max_logits)


def prepare(
    call: SparseMlaCall,
    out_dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    *,
    result: SparseMlaResult | None = None,
) -> Launch:
    """Bring the tensors of a call on a CUDA device into a form that the kernels support.

    Args:
        result: to write; None: a new one.
        out_dtypes: what the kernel writes. An output that it cannot write is copied from one of the last.

    Raises:
        KernelArgumentError: the call is not on a CUDA device.
    """
    call.require(call.q.is_cuda, f"q is on {call.q.device}; the CUDA kernel needs a CUDA device")
    result = result or new_result(call)
    sink = None if call.attn_sink is None else call.attn_sink.contiguous()
    out = writable_rows(result.out, out_dtypes)
    return Launch(readable_queries(call.q.flatten(0, 1)), out, result, sink, facts_of(call.q.device))


def up_to(heads: int, variants: Sequence[AnyVariant]) -> Sequence[AnyVariant]:
    """Of variants in ascending order, those up to the first that takes all heads of a row."""
    last = next((number for number, variant in enumerate(variants) if variant.heads >= heads), len(variants) - 1)
    return variants[: last + 1]


def choose_variant(
    rows: int,
    heads: int,
    topk: int,
    sms: int,
    variants: Iterable[AnyVariant],
    resident: Callable[[AnyVariant, int], int] | None = None,
) -> tuple[AnyVariant, int]:
    """How a call is cut: the variant, and shares of each row's entries.

    While all blocks of threads run at once, more of them are faster, even where several groups of heads read the same
    records: then it is the smallest variant with the most shares, of two steps each, and first of those that have an SM
    for each block. Otherwise it is the largest possible, with as many shares as fill the device once. Shares whose
    clusters do not run at once are added up by another kernel, which takes longer than fewer shares do.

    Args:
        rows: query rows.
        heads: query heads of a row.
        topk: entries of a row, both caches together.
        sms: SMs of the device.
        variants: the possible ones, in ascending order of their heads; on SM90 first those of one block an SM.
        resident: clusters of so many shares that run at once, with a variant; None: there are no clusters.
    """
    steps = -(-topk // KEYS)
    most = max(1, min(steps // 2, MAX_SPLITS))
    for variant in variants:
        groups = -(-heads // variant.heads)
        room = sms * variant.blocks // max(1, rows * groups)
        if room >= (variant.least_room(heads) or most):
            break
    splits = max(1, min(room, most))
    while splits > 2 and resident is not None and resident(variant, splits) < rows * groups:
        splits -= 1
    # As few shares as have no more steps each.
    return variant, max(1, -(-steps // -(-steps // splits))) if steps else 1


@functools.cache
def kernels(
    source: str,
    name: str,
    variants: tuple[tuple[AnyVariant, int], ...],
    defines: tuple[tuple[str, int], ...],
    device: int | None,
) -> dict[AnyVariant, tuple[CudaKernel, dict[int, CudaKernel]]]:
    """The kernel and `COMBINES` of every variant: which one a batch takes depends on its size, and none may be compiled
    while an engine serves."""
    options = {variant: dict(defines) | variant.definitions for variant, _ in variants}
    compile_together(source, options.values())
    built = {}
    for variant, shared in variants:
        attend = load_kernel(source, name, defines=options[variant], max_dynamic_shared=shared)
        combines = {reach: load_kernel(source, f"combine_{reach}", defines=options[variant]) for reach in COMBINES}
        built[variant] = attend, combines
    return built


def attend_in_shares(
    call: SparseMlaCall,
    launch: Launch,
    inputs: Sequence[Argument],
    *,
    kernel: tuple[str, str],
    variants: Mapping[AnyVariant, int],
    defines: Mapping[str, int],
    topk: int,
    splits: int | None,
    gate: torch.Tensor | None = None,
) -> SparseMlaResult:
    """Attend with a kernel of few heads and, if its shares are not added up in a cluster, with `combine_N`.

    Args:
        inputs: what the kernel takes between the heads and the sink.
        kernel: its source and name.
        variants: the possible ones and the shared memory of a block in bytes, in the order of `choose_variant`.
        defines: of the preprocessor, but for the variant's.
        topk: entries of a row, all caches together.
        splits: shares of a row's entries; None: `choose_variant`.
        gate: of a kernel that was compiled with one.

    Raises:
        KernelArgumentError: there are too many shares.
        KernelBuildError: a kernel does not compile or launch.
    """
    most = f"splits is {splits}; this kernel adds up 1 to {MAX_SPLITS}"
    call.require(splits is None or 1 <= splits <= MAX_SPLITS, most)
    rows, heads, _ = launch.q.shape
    size, device, hopper = ctypes.c_int, launch.q.device, launch.facts.architecture == HOPPER
    with torch.cuda.device_of(launch.q):
        built = kernels(*kernel, tuple(variants.items()), tuple(defines.items()), device.index)

        def resident(variant: AnyVariant, splits: int) -> int:
            return clusters(built[variant][0], variants[variant], variant.threads, splits)

        variant, shares = choose_variant(rows, heads, topk, launch.facts.sms, variants, resident if hopper else None)
        splits, groups = shares if splits is None else splits, -(-heads // variant.heads)
        # The shares of a row as a cluster, which adds up in shared memory; if all clusters run at once.
        is_cluster = hopper and splits > 1 and resident(variant, splits) >= rows * groups
        parts: tuple[Argument, Argument] = (None, None)
        if splits > 1 and not is_cluster:
            parts = (
                torch.empty((splits, rows, heads, PARTIAL_BYTES), dtype=torch.uint8, device=device),
                torch.empty((splits, rows, heads, 2), dtype=torch.float32, device=device),
            )
        attend, combines = built[variant]
        turns = (size(rows),) if variant.in_turn else ()
        gates = () if gate is None else (gate,)
        blocks = variant.blocks_of(rows, max(1, launch.facts.sms * variant.blocks // (groups * splits)))
        attend(
            (blocks, groups, splits),
            variant.threads,
            (
                *launch.queries,
                *inputs,
                launch.sink,
                ctypes.c_float(call.scale * LOG2_E),
                *launch.outputs,
                *parts,
                *turns,
                *gates,
            ),
            shared_bytes=variants[variant],
            cluster=(1, 1, splits) if is_cluster else None,
        )
        if parts[0] is not None:
            sizes = size(splits), size(rows), size(heads)
            reach = next(reach for reach in COMBINES if splits <= reach)
            blocks = -(-rows * heads * COMBINES[reach] // COMBINING)
            combines[reach]((blocks, 1, 1), (32 * COMBINING, 1, 1), (*parts, *sizes, launch.sink, *launch.outputs))
    return launch.finish()


@functools.cache
def clusters(attend: CudaKernel, shared: int, threads: tuple[int, int, int], splits: int) -> int:
    """Clusters of so many shares that run at once on the current device."""
    return attend.resident_clusters(threads, (1, 1, splits), shared_bytes=shared)


@contextmanager
def result_of_either(result: SparseMlaResult) -> Iterator[SparseMlaResult]:
    """The result to be written by two kernels of which one ends at once.

    Both write where they can; neither may copy from where only the other has written.
    """
    written = writable_rows(result.out).view(result.out.shape)
    yield SparseMlaResult(written, result.lse, result.max_logits)
    if written.data_ptr() != result.out.data_ptr():
        result.out.copy_(written)


def readable_queries(q: torch.Tensor) -> torch.Tensor:
    """q [rows, heads, d_qk] itself, or a copy where the kernel cannot read eight values of it at a time."""
    aligned = q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0 and q.stride(2) == 1
    return q if aligned else q.clone(memory_format=torch.contiguous_format)


@functools.cache
def nothings(device: torch.device, layout: str) -> torch.Tensor:
    """The records that stand for entries which do not count: zeros, but for V3.2's scales, which mark them."""
    if layout == V4_FP8.name:
        return torch.zeros((NOTHINGS, V4_FP8.data_stride), dtype=torch.uint8, device=device)
    records = torch.zeros((NOTHINGS, V32_FP8.row_bytes), dtype=torch.uint8, device=device)
    records[:, V32_FP8.fp8_dim : V32_FP8.fp8_dim + 16].view(torch.float32).fill_(NOT_COUNTED)
    return records


def only_scope(call: SparseMlaCall) -> Scope:
    """The cache of a call, for a kernel that reads one.

    Raises:
        KernelArgumentError: the call has two.
    """
    call.require(len(call.scopes) == 1, "an extra cache is given; this kernel reads one")
    return call.scopes[0]


def suits_records(call: SparseMlaCall) -> bool:
    """Whether a call is for a kernel that reads one cache of V3.2 records and writes bfloat16."""
    return (
        call.q.is_cuda
        and len(call.scopes) == 1
        and call.scopes[0].cache.layout is V32_FP8
        and call.d_v == D_V
        and call.out_dtype == torch.bfloat16
    )


def suits_hopper(call: SparseMlaCall) -> bool:
    """Whether a call that `suits_records` is on a device of SM90."""
    return suits_records(call) and facts_of(call.q.device).architecture == HOPPER


def require_records(call: SparseMlaCall) -> Scope:
    """The cache of a call, for a kernel that reads one cache of V3.2 records.

    Raises:
        KernelArgumentError: the call has something else.
    """
    check_queries(call)
    given = only_scope(call)
    layout = given.cache.layout
    call.require(layout is V32_FP8, f"{given.name} has layout {layout.name}; this kernel reads {V32_FP8.name}")
    call.require(call.q.is_cuda, f"q is on {call.q.device}; the CUDA kernel needs a CUDA device")
    return given


def require_hopper(call: SparseMlaCall) -> Scope:
    """The cache of a call, for a kernel of SM90 that reads one cache of V3.2 records.

    Raises:
        KernelArgumentError: the call has something else, or the device is another.
    """
    given = require_records(call)
    architecture = facts_of(call.q.device).architecture
    call.require(architecture == HOPPER, f"the device is SM{architecture}; this kernel needs SM{HOPPER}")
    return given


def cuda_scope(call: SparseMlaCall, given: Scope, layout: CacheLayout) -> CudaScope:
    """The kernel's view of one cache of records and its entries, checked against what it can read."""
    name, cache = given.name, given.cache
    reads = ", ".join(one.name for one in LAYOUTS)
    call.require(cache.layout in LAYOUTS, f"{name} has layout {cache.layout.name}; this kernel reads {reads}")
    call.require(cache.layout is layout, f"{name} has layout {cache.layout.name}; a call reads one, {layout.name}")
    return paged_scope(call, given, V32_FP8.row_bytes if layout is V32_FP8 else None)


def paged_scope(call: SparseMlaCall, given: Scope, record_bytes: int | None) -> CudaScope:
    """A kernel's view of one cache and its entries.

    Args:
        record_bytes: of a record, if those of a page follow each other without a gap.

    Raises:
        KernelArgumentError: the cache has more slots or another alignment than a kernel can address.
    """
    name, cache, indices, lengths = given
    size = cache.page_size
    call.require(cache.num_slots < 2**31, f"{name} has {cache.num_slots} slots; this kernel counts them in int32")
    stride = page_stride(cache)
    aligned = cache.data.data_ptr() % 16 == 0 and stride % 16 == 0
    call.require(aligned, f"{name} starts or strides ({stride} B) off a multiple of 16 B")
    indices = _int32(indices.flatten(0, 1))
    indices = indices if indices.stride(1) == 1 else indices.contiguous()
    divisor = 1
    if lengths is not None:
        # A length of each sequence comes as one that is repeated for its query tokens.
        if lengths.stride(1) == 0 and lengths.numel():
            lengths, divisor = lengths[:, 0], lengths.shape[1]
        lengths = _int32(lengths).flatten().contiguous()
    scope = CudaScope(
        data=cache.data.data_ptr(),
        page_stride=stride,
        indices=indices.data_ptr(),
        indices_stride=indices.stride(0),
        lengths=lengths.data_ptr() if lengths is not None else 0,
        lengths_divisor=divisor,
        page_size=size,
        page_shift=size.bit_length() - 1 if size & (size - 1) == 0 else -1,
        num_slots=cache.num_slots,
        topk=given.topk,
    )
    scope.is_flat = record_bytes is not None and is_flat(cache, record_bytes)
    scope.kept = (indices, lengths)
    return scope


def page_stride(cache: PagedCache) -> int:
    """Bytes between pages; 0 if there is one."""
    return cache.data.stride(0) * cache.data.element_size() if cache.num_pages > 1 else 0


def is_flat(cache: PagedCache, record_bytes: int) -> bool:
    """Whether slot s lies s records from the start, if the records of a page follow each other without a gap."""
    return page_stride(cache) in (0, cache.page_size * record_bytes)


def _int32(entries: torch.Tensor) -> torch.Tensor:
    """The same entries in int32; what does not fit stays invalid."""
    return entries if entries.dtype == torch.int32 else entries.clamp(-1, 2**31 - 1).int()


def writable_rows(out: torch.Tensor, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)) -> torch.Tensor:
    """[rows, heads, d_v] for the kernel to write: the output itself where it can be, else one to be copied from, of the
    last of `dtypes`."""
    one_stride = out.shape[1] == 1 or out.stride(0) == out.shape[1] * out.stride(1)
    # Four values are written at a time.
    row_stride = out.stride(0 if out.shape[1] == 1 else 1)
    aligned = out.data_ptr() % 16 == 0 and row_stride % 4 == 0 and out.stride(2) % 4 == 0
    if out.dtype in dtypes and out.stride(3) == 1 and one_stride and aligned:
        return out.flatten(0, 1)
    shape = (out.shape[0] * out.shape[1], *out.shape[2:])
    return torch.empty(shape, dtype=dtypes[-1], device=out.device)
