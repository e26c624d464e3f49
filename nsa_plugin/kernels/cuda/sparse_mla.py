"""Sparse MLA for few heads, straight from the V3.2 or V4 fp8 cache, in CUDA C++ (`sparse_mla.cu`).

Ops `sparse_mla_prefill` and `sparse_mla_decode`; contract: `nsa_plugin.kernels.sparse_mla`. On SM90 the kernel copies
records in bulk and adds up a row's shares in a cluster of blocks; on SM80 to SM89 and SM120 it needs neither. It
takes bfloat16 queries, heads of (576, 512) elements with V3.2 records and (512, 512) with V4's, and both
caches of a call in one layout. It gathers the selected records once for every group of heads, so it pays
for few heads: where FlashMLA pads to 64, or where an fp8 cache would have to be copied to bfloat16 first.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from nsa_plugin.kernels.checks import check_tensor
from nsa_plugin.kernels.cuda.build import Argument, CudaKernel, load_kernel
from nsa_plugin.kernels.sparse_mla import Scope, SparseMlaCall, SparseMlaResult, decode_op, prefill_op
from nsa_plugin.kernels.triton.device import DeviceFacts, facts_of
from nsa_plugin.layouts import V4_FP8, V32_FP8, CacheLayout

SOURCE = "sparse_mla.cu"
LOG2_E = 1.4426950408889634
KEYS = 64  # entries that a share of a row has at least two times
WARPS = 8
THREADS = (32 * WARPS, 1, 1)  # of a block
D_V = 512
LAYOUTS = (V32_FP8, V4_FP8)
MAX_SPLITS = 16  # as many blocks as a cluster may have
HOPPER = 90  # the SM version with bulk copies and clusters
NOTHINGS = 1024  # records that stand for entries which do not count
NOT_COUNTED = -(2.0**-100)  # and their scales, with V3.2
NO_GATE, SHARING, NOT_SHARING = 0, 1, 2
"""`GATE` of gate.cuh: a kernel runs always, or if neighbouring query tokens share enough, or if they do not."""


class Cut(Protocol):
    """What `choose_variant` needs to know of a compiled form of a kernel."""

    @property
    def heads(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    def least_room(self, heads: int) -> int: ...


AnyVariant = TypeVar("AnyVariant", bound=Cut)


@dataclass(frozen=True)
class Variant:
    """A compiled form of the kernel.

    Attributes:
        tiles: tiles of 8 heads that a block of threads takes.
        blocks: blocks of threads resident on an SM.
        held: of a warp's 8 steps over the query's fp8-multiplied values, those whose fragments stay in registers;
            shared memory has the others.
        group: neighbouring query rows of a block, which share the tiles and the union of their entries.
        keys: entries that a block of threads attends at a time.
        stages: blocks of that many records in shared memory.
        sums: of S in shared memory: one for each of the four parts of a row's values, or for two.
        producers: warps that only copy, beside those that multiply; 0: these copy too.
        head_parts: in Q K^T, 1: a warp takes half of the keys and all heads; 2: all keys and half of the heads.
    """

    tiles: int
    blocks: int
    held: int
    group: int = 1
    keys: int = 64
    stages: int = 2
    sums: int = 4
    head_parts: int = 1
    producers: int = 0

    @property
    def threads(self) -> tuple[int, int, int]:
        """Of a block."""
        return (32 * (WARPS + self.producers), 1, 1)

    @property
    def heads(self) -> int:
        """Heads of a query row that a block takes."""
        return 8 * self.tiles // self.group

    @property
    def definitions(self) -> dict[str, int]:
        """Of the source's preprocessor."""
        return {
            "NT": self.tiles,
            "MIN_BLOCKS": self.blocks,
            "HELD": self.held,
            "GROUP": self.group,
            "STEP_KEYS": self.keys,
            "STEP_STAGES": self.stages,
            "SUMS": self.sums,
            "HEAD_PARTS": self.head_parts,
            "PRODUCERS": self.producers,
        }

    def least_room(self, heads: int) -> int:
        """Shares that the device has to have room for, for a call of so many heads to get it; 0: for the most."""
        return least_room(self.tiles, heads) if self.producers else 0

    def shared_bytes(self, layout: str) -> int:
        """Shared memory of a block, in bytes."""
        row, scales, p_copies = (656, 0, 1) if layout == V32_FP8.name else (592, 8, 2)
        columns = 8 * self.tiles
        validity = self.keys * (layout == V4_FP8.name)
        members = self.keys * (self.group > 1)
        kept = 4 * (8 - self.held + (layout == V32_FP8.name))
        parts = (
            self.stages * self.keys * row,  # records
            self.sums * columns * (self.keys + 4) * 4,  # S
            p_copies * columns * (self.keys + 8) * 2,  # P
            self.stages * (self.keys * scales + validity + members),
            2 * self.keys * 8 + 2 * 8,  # addresses of records, of zero records and of rows
            self.stages * (16 if self.producers else 8) + WARPS * 4,  # barriers, and a number a warp
            kept * 32 * 2 * self.tiles * 4,  # fragments of the query
            2 * columns * 4,  # factors of a head
            128,  # alignment
        )
        return sum(parts)


# `held` as measured: 4 leaves 16 heads the registers that they lack.
VARIANTS = (Variant(tiles=1, blocks=2, held=8), Variant(tiles=2, blocks=2, held=4), Variant(tiles=4, blocks=1, held=8))
PORTABLE_VARIANTS = (
    Variant(tiles=1, blocks=2, held=8),
    Variant(tiles=2, blocks=2, held=7, sums=2),
    Variant(tiles=4, blocks=2, held=1, keys=32),
    Variant(tiles=8, blocks=1, held=8, keys=32, head_parts=2),
)
"""For other GPUs than SM90: what 99 KiB of shared memory suffice for. The fastest of those tried on an H100 as SM86."""


ALONE = (
    Variant(tiles=1, blocks=1, held=8, stages=4, producers=4),
    Variant(tiles=2, blocks=1, held=8, stages=4, producers=4),
)
"""For SM90, where a call gives no SM more than one block."""


def least_room(tiles: int, heads: int) -> int:
    """Shares for which a device with a block an SM has to have room, for so many tiles a block to be the fastest.

    As measured: a second group of heads reads the same records again.
    """
    return 8 if heads > 8 * tiles and tiles == 1 else 2


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


def variants_of(facts: DeviceFacts) -> tuple[Variant, ...]:
    """All variants for a device, in ascending order."""
    return VARIANTS if facts.architecture == HOPPER else PORTABLE_VARIANTS


@functools.cache
def possible_variants(heads: int, layout: str, facts: DeviceFacts) -> tuple[Variant, ...]:
    """Those that calls with this many query heads may use on a device, first those of blocks that have an SM alone."""
    return tuple(
        variant
        for known in ((ALONE if facts.architecture == HOPPER else ()), variants_of(facts))
        for variant in up_to(heads, [one for one in known if one.shared_bytes(layout) <= facts.shared_memory])
    )


def up_to(heads: int, variants: Sequence[AnyVariant]) -> Sequence[AnyVariant]:
    """Of variants in ascending order, those up to the first that takes all heads of a row."""
    last = next((number for number, variant in enumerate(variants) if variant.heads >= heads), len(variants) - 1)
    return variants[: last + 1]


def choose_variant(
    rows: int,
    heads: int,
    topk: int,
    sms: int,
    variants: Sequence[AnyVariant],
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
        variants: the possible ones: those of one block an SM in ascending order, then the others.
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


def definitions(
    layout: str, facts: DeviceFacts, *, has_extra: bool = False, is_flat: bool = False, out_float32: bool = False
) -> dict[str, int]:
    """What the source's preprocessor needs to know besides the variant.

    Args:
        layout: of the caches.
        facts: of the device.
        has_extra: there is a second cache.
        is_flat: pages and their records follow each other without a gap (V3.2 only).
        out_float32: the output is float32, not bfloat16.
    """
    return {
        "LAYOUT": int(layout == V4_FP8.name),
        "OUT_FLOAT32": int(out_float32),
        "HAS_EXTRA": int(has_extra),
        "FLAT": int(is_flat),
        "HOPPER": int(facts.architecture == HOPPER),
        "NATIVE_FP8": int(facts.native_fp8),
    }


def new_result(call: SparseMlaCall) -> SparseMlaResult:
    """The call's output, and lse and max_logits [query tokens, heads] float32, to write."""
    lse, max_logits = torch.empty((2, call.rows, call.heads), dtype=torch.float32, device=call.q.device).unbind()
    return SparseMlaResult(call.output(), lse, max_logits)


def attend(
    call: SparseMlaCall,
    *,
    splits: int | None = None,
    variant: Variant | None = None,
    gate: torch.Tensor | None = None,
    result: SparseMlaResult | None = None,
) -> SparseMlaResult:
    """Attend with the CUDA kernel, within the module's limits.

    Args:
        splits: shares of a token's entries that are attended apart and then added up.
        variant: of the kernel. None for either: `choose_variant`.
        gate: [2] int32, see `sparse_mla_neighbours`: attend, in one share, only if neighbours do not share enough.
        result: to write; None: a new one.

    Raises:
        KernelArgumentError: the kernel does not support a shape, dtype, layout or device.
        KernelBuildError: the kernel does not compile or launch.
    """
    q = call.q.flatten(0, 1)
    rows, heads, _ = q.shape
    check_tensor(call.op, "q", call.q, call.q.shape, dtypes=(torch.bfloat16,))
    call.require(call.d_v == D_V, f"d_v is {call.d_v}; this kernel has values of {D_V}")
    layout = call.scopes[0].cache.layout
    scopes = [cuda_scope(call, scope, layout) for scope in call.scopes]
    call.require(q.is_cuda, f"q is on {q.device}; the CUDA kernel needs a CUDA device")
    result = result or new_result(call)
    _, lse, max_logits = result
    if not q.numel():
        return result
    first, second = scopes if len(scopes) == 2 else (scopes[0], CudaScope(lengths_divisor=1, page_size=1))
    most = f"splits is {splits}; this kernel adds up 1 to {MAX_SPLITS}"
    call.require(splits is None or 1 <= splits <= MAX_SPLITS, most)
    q = readable_queries(q)
    out = writable_rows(result.out)
    facts = facts_of(q.device)
    variants = possible_variants(heads, layout.name, facts) if variant is None else (variant,)
    defines = definitions(
        layout.name,
        facts,
        has_extra=second.topk > 0,
        is_flat=all(scope.is_flat for scope in scopes),
        out_float32=out.dtype == torch.float32,
    )
    if gate is not None:
        defines["GATE"], splits = NOT_SHARING, 1
    with torch.cuda.device_of(q):
        kernels = _kernels(variants, layout.name, tuple(defines.items()), q.device.index)

        def resident(variant: Variant, splits: int) -> int:
            return clusters(kernels[variant][0], variant.shared_bytes(layout.name), variant.threads, splits)

        hopper = facts.architecture == HOPPER
        topk = first.topk + second.topk
        chosen, shares = choose_variant(rows, heads, topk, facts.sms, variants, resident if hopper else None)
        launch_shares(
            call,
            kernels[chosen],
            (q, first, second, nothings(q.device, layout.name)),
            SparseMlaResult(out, lse, max_logits),
            shared=chosen.shared_bytes(layout.name),
            groups=-(-heads // chosen.heads),
            splits=shares if splits is None else splits,
            threads=chosen.threads,
            gate=gate,
        )
    if out.data_ptr() != result.out.data_ptr():
        result.out.copy_(out.view(result.out.shape))
    return result


def launch_shares(
    call: SparseMlaCall,
    kernels: tuple[CudaKernel, CudaKernel],
    inputs: tuple[torch.Tensor, *tuple[Argument, ...]],
    result: SparseMlaResult,
    *,
    shared: int,
    groups: int,
    splits: int,
    threads: tuple[int, int, int] = THREADS,
    gate: torch.Tensor | None = None,
) -> None:
    """Launch an attending kernel and, if its shares are not added up in a cluster, `combine`.

    Args:
        kernels: the attending one, and `combine`.
        inputs: q [rows, heads, d_qk], and what the kernel takes between the heads and the sink.
        result: out [rows, heads, d_v], lse and max_logits [rows, heads], to write.
        shared: bytes of shared memory of a block.
        groups: groups of heads, a block each.
        splits: shares of a row's entries.
        threads: of a block of the attending kernel.
        gate: of a kernel that was compiled with one.
    """
    (run, combine), (q, *scopes) = kernels, inputs
    rows, heads, _ = q.shape
    out, lse, max_logits = result
    size, int64 = ctypes.c_int, ctypes.c_int64
    sink = None if call.attn_sink is None else call.attn_sink.contiguous()
    results = out, int64(out.stride(0)), int64(out.stride(1)), lse, max_logits
    # The shares of a row as a cluster, which adds up in shared memory; if all clusters run at once.
    hopper = facts_of(q.device).architecture == HOPPER
    is_cluster = hopper and splits > 1 and clusters(run, shared, threads, splits) >= rows * groups
    parts: tuple[Argument, Argument] = (None, None)
    if splits > 1 and not is_cluster:
        parts = (
            torch.empty((splits, rows, heads, D_V), dtype=torch.float32, device=q.device),
            torch.empty((splits, rows, heads, 2), dtype=torch.float32, device=q.device),
        )
    run(
        (rows, groups, splits),
        threads,
        (
            *(q, int64(q.stride(0)), int64(q.stride(1)), size(heads)),
            *(*scopes, sink, ctypes.c_float(call.scale * LOG2_E)),
            *(*results, *parts, *(() if gate is None else (gate,))),
        ),
        shared_bytes=shared,
        cluster=(1, 1, splits) if is_cluster else None,
    )
    if parts[0] is not None:
        combine((rows, heads, 1), (128, 1, 1), (*parts, size(splits), size(rows), size(heads), sink, *results))


prefill, decode = prefill_op(attend), decode_op(attend)


@functools.cache
def _kernels(
    variants: tuple[Variant, ...], layout: str, defines: tuple[tuple[str, int], ...], device: int | None
) -> dict[Variant, tuple[CudaKernel, CudaKernel]]:
    """`attend` and `combine` of every variant: which one a batch takes depends on its size, and none may be compiled
    while an engine serves."""
    built = {}
    for variant in variants:
        options = dict(defines) | variant.definitions
        shared = variant.shared_bytes(layout)
        built[variant] = (
            load_kernel(SOURCE, "attend", defines=options, max_dynamic_shared=shared),
            load_kernel(SOURCE, "combine", defines=options),
        )
    return built


@functools.cache
def clusters(attend: CudaKernel, shared: int, threads: tuple[int, int, int], splits: int) -> int:
    """Clusters of so many shares that run at once on the current device."""
    return attend.resident_clusters(threads, (1, 1, splits), shared_bytes=shared)


def readable_queries(q: torch.Tensor) -> torch.Tensor:
    """q [rows, heads, d_qk] itself, or a copy where the kernel cannot read four values of it at a time."""
    aligned = q.data_ptr() % 8 == 0 and q.stride(0) % 4 == 0 and q.stride(1) % 4 == 0 and q.stride(2) == 1
    return q if aligned else q.clone(memory_format=torch.contiguous_format)


@functools.cache
def nothings(device: torch.device, layout: str) -> torch.Tensor:
    """The records that stand for entries which do not count: zeros, but for V3.2's scales, which mark them."""
    if layout == V4_FP8.name:
        return torch.zeros((NOTHINGS, V4_FP8.data_stride), dtype=torch.uint8, device=device)
    records = torch.zeros((NOTHINGS, V32_FP8.row_bytes), dtype=torch.uint8, device=device)
    records[:, V32_FP8.fp8_dim : V32_FP8.fp8_dim + 16].view(torch.float32).fill_(NOT_COUNTED)
    return records


def require_hopper(call: SparseMlaCall) -> tuple[Scope, DeviceFacts]:
    """The cache of a call and its device, for a kernel of SM90 that reads one cache of V3.2 records.

    Raises:
        KernelArgumentError: the call has something else.
    """
    check_tensor(call.op, "q", call.q, call.q.shape, dtypes=(torch.bfloat16,))
    call.require(call.d_v == D_V, f"d_v is {call.d_v}; this kernel has values of {D_V}")
    call.require(len(call.scopes) == 1, "an extra cache is given; this kernel reads one")
    (given,) = call.scopes
    layout = given.cache.layout
    call.require(layout is V32_FP8, f"{given.name} has layout {layout.name}; this kernel reads {V32_FP8.name}")
    call.require(call.q.is_cuda, f"q is on {call.q.device}; the CUDA kernel needs a CUDA device")
    facts = facts_of(call.q.device)
    call.require(facts.architecture == HOPPER, f"the device is SM{facts.architecture}; this kernel needs SM{HOPPER}")
    return given, facts


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
    stride = cache.data.stride(0) * cache.data.element_size() if cache.num_pages > 1 else 0
    aligned = cache.data.data_ptr() % 16 == 0 and stride % 16 == 0
    call.require(aligned, f"{name} starts or strides ({stride} B) off a multiple of 16 B")
    indices = _int32(indices.flatten(0, 1))
    indices = indices if indices.stride(1) == 1 else indices.contiguous()
    divisor = 1
    if lengths is not None:
        # A length of each sequence comes as one that is repeated for its query tokens.
        if lengths.stride(1) == 0:
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
    scope.is_flat = record_bytes is not None and stride in (0, size * record_bytes)
    scope.kept = (indices, lengths)
    return scope


def _int32(entries: torch.Tensor) -> torch.Tensor:
    """The same entries in int32; what does not fit stays invalid."""
    return entries if entries.dtype == torch.int32 else entries.clamp(-1, 2**31 - 1).int()


def writable_rows(out: torch.Tensor) -> torch.Tensor:
    """[rows, heads, d_v] for the kernel to write: the output itself where it can be, else one to be copied from."""
    one_stride = out.shape[1] == 1 or out.stride(0) == out.shape[1] * out.stride(1)
    # Four values are written at a time.
    aligned = out.data_ptr() % 16 == 0 and out.stride(1) % 4 == 0 and out.stride(2) % 4 == 0
    if out.dtype in (torch.bfloat16, torch.float32) and out.stride(3) == 1 and one_stride and aligned:
        return out.flatten(0, 1)
    shape = (out.shape[0] * out.shape[1], *out.shape[2:])
    return torch.empty(shape, dtype=torch.float32, device=out.device)
