"""Workloads of the head/token all-to-all: attention alone, and attention with the indexer.

The baselines, in the same run, are the engine's kernels: FlashMLA with padded heads, and for the indexer DeepGEMM's
logits with SGLang's top-k. If that library is not installed, the plugin's selection replaces it, and the record's
`baseline` says so.

The KV cache, the indices and the indexer's inputs are the same on every rank; q has the rank's own heads. Every query
sees every key, so a rank's share of the rows is its share of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nsa_plugin.decision.token_shard import CHUNKS, in_chunks
from nsa_plugin.kernels.indexer import reference_logits
from nsa_plugin.kernels.kv_cache import PagedCache
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.libraries.registry import REFERENCE
from nsa_plugin.parallel.partition import Partition, by_count
from nsa_plugin.parallel.token_shard import TokenShard
from nsa_plugin.tools.bench import floors, inputs, judges, stock
from nsa_plugin.tools.bench.cases import BenchCase, Suite, case
from nsa_plugin.tools.bench.group.group import on_all_ranks
from nsa_plugin.tools.bench.judges import Attended
from nsa_plugin.tools.bench.suites.sparse_mla import D_V, PADDED, PAGE_SIZE, bf16_rows, gather
from nsa_plugin.tools.bench.workload import Contender, Context, TimedCall, Workload

ATTENTION, LAYER = "token_shard_attention", "token_shard_layer"
ALL_HEADS = 128  # of the model, over the ranks, if nothing else is asked for
FEW_HEADS = 32  # up to this many of the model the plugin's CUDA kernel pads least
SHARDED = "token_shard"
IN_PLACE = " decode kernel"  # after a library's name: it reads the fp8 pages of a prefill and needs no bf16 rows
TOP_K = "sgl_kernel.fast_topk_v2"
DECODES = (512, 256, 128)  # sequences; the others use a part of the first one's cache
SAMPLED_ROWS = 24
LAYOUT = "v32_fp8"

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(q [n, heads, d_qk], indices [n, topk]) -> out [n, heads, d_v]."""

Exact = dict[tuple[BenchCase, str], bool]
"""Whether a contender's sampled rows equal those of the same kernel without the exchange bit by bit, on this rank."""


@dataclass(frozen=True)
class GroupSuite(Suite):
    """A suite whose judges also note what is `Exact`."""

    exact: Exact = field(default_factory=dict)

    def build(self) -> Callable[[BenchCase, Context], Workload]:
        return partial(workload, exact=self.exact)


def suite(ranks: int, all_heads: int = ALL_HEADS) -> GroupSuite:
    """The cases of a group of `ranks` ranks, which share `all_heads` heads."""
    heads = all_heads // ranks

    def of(op: str, heads: int, **fields: int) -> BenchCase:
        return case(op, heads=heads, **fields, layout=LAYOUT, tp=ranks)

    def prefill(op: str, q: int, kv: int, **fields: int) -> BenchCase:
        return of(op, heads, q=q, kv=kv, topk=2048, **fields)

    shapes = ((8192, 65536), (8192, 131072), (2048, 8192))
    indexer = {"index_heads": 64, "budget_mib": 2048}
    return GroupSuite(
        f"token-shard-tp{ranks}" + ("" if all_heads == ALL_HEADS else f"-{all_heads}heads"),
        "all heads for a share of the rows; baseline: a share of the heads for all rows",
        f"{__name__}:workload",
        (
            *(prefill(ATTENTION, q, kv) for q, kv in shapes),
            *(of(ATTENTION, heads, batch=batch, s_q=1, kv=8192, topk=2048) for batch in DECODES),
            *(prefill(LAYER, q, kv, **indexer) for q, kv in shapes),
        ),
        (
            of(ATTENTION, 2, q=7, kv=96, topk=16),
            of(ATTENTION, 2, batch=5, s_q=1, kv=64, topk=16),
            of(LAYER, 2, q=7, kv=96, topk=16, index_heads=4, budget_mib=1),
        ),
    )


def workload(case: BenchCase, context: Context, exact: Exact) -> Workload:
    made = Inputs(case, context, exact)
    return _layer(made) if case.op == LAYER else _attention(made)


class Layered(NamedTuple):
    """The result of a layer: out [rows, h, d_v], and the indices of the rows from `first` on."""

    out: torch.Tensor
    indices: torch.Tensor
    first: int


@dataclass
class Inputs:
    """A case's tensors and kernels, and the partition of its rows."""

    case: BenchCase
    context: Context
    exact: Exact

    def __post_init__(self) -> None:
        number, device = self.case.number, self.context.device
        self.decode = "batch" in self.case.as_dict()
        self.rows = number("batch" if self.decode else "q")
        self.heads, self.topk, self.kv = number("heads"), number("topk"), number("kv")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.partition: Partition = by_count(self.rows, self.ranks)
        owners = DECODES[0] if self.rows in DECODES else self.rows
        slots = self.kv * (owners if self.decode else 1)
        self.cache: PagedCache = self.context.shared(
            ("cache", slots), lambda: inputs.filled_cache(device, LAYOUT, slots, PAGE_SIZE, 1)
        )
        self.scale = self.cache.dim**-0.5
        self.q = self.q_of(self.rank)
        self.sample = inputs.sample(device, self.rows, SAMPLED_ROWS)
        few = self.heads * self.ranks <= FEW_HEADS
        self.sharded_by = ("cuda" if few else "flash_mla") if device.type == "cuda" else REFERENCE

    def q_of(self, rank: int) -> torch.Tensor:
        return inputs.normal(self.context.device, 3 + rank, self.rows, self.heads, self.cache.dim)

    @cached_property
    def indices(self) -> torch.Tensor:
        """[rows, topk] slots; a decode row selects from its own sequence's."""
        chosen = inputs.selection(self.context.device, self.rows, self.kv, self.topk, 2)
        if not self.decode:
            return chosen
        first = torch.arange(self.rows, device=chosen.device, dtype=torch.int32).unsqueeze(1) * self.kv
        return torch.where(chosen < 0, -1, chosen + first)

    @property
    def bf16(self) -> torch.Tensor:
        """The cache as bf16 rows, the input of FlashMLA's prefill."""
        return self.context.shared(("rows", self.kv), lambda: bf16_rows(self.cache))

    def attend_by(self, name: str) -> Attend:
        """A provider, with or without IN_PLACE, as a function of q and indices.

        Raises:
            NoProviderError: it does not support the case.
        """
        one_by_one = self.decode or name.endswith(IN_PLACE)  # to the kernel every row is a sequence
        name = name.removesuffix(IN_PLACE)
        reads_bf16 = name == "flash_mla" and not one_by_one
        op = "sparse_mla_decode" if one_by_one else "sparse_mla_prefill"
        function = self.context.registry.load(op, name, sm=self.context.sm)
        if not one_by_one:
            kv = self.bf16 if reads_bf16 else self.cache
            return lambda q, indices: function(q, kv, indices, scale=self.scale).out
        # Made once, as an engine makes it once for all layers.
        schedule = {"metadata": import_module("flash_mla").get_mla_metadata()[0]} if name == "flash_mla" else {}

        def decode(q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            result = function(q.unsqueeze(1), self.cache, indices.unsqueeze(1), scale=self.scale, **schedule)
            return result.out.squeeze(1)  # type: ignore[no-any-return]

        return decode

    def bind(self, name: str) -> TimedCall:
        """A call of attention of this rank's heads: by a provider, or PADDED, the engine's.

        Raises:
            NoProviderError, ImportError: it does not support the case.
        """
        if name != PADDED:
            attend = self.attend_by(name)
            return lambda: attend(self.q, self.indices)
        if not self.decode:
            whole = stock.flash_mla_prefill(self.q, self.bf16, self.indices, self.scale)
            return lambda: whole().out
        step = stock.flash_mla_decode(self.q.unsqueeze(1), self.cache, self.indices.unsqueeze(1), self.scale)
        return lambda: step().out.squeeze(1)

    @cached_property
    def shard(self) -> TokenShard:
        return TokenShard(
            None,
            heads=self.heads,
            d_qk=self.cache.dim,
            d_v=D_V,
            dtype=self.q.dtype,
            device=self.context.device,
            max_tokens=self.rows,
            max_rows=max(1, self.partition.max_count),
        )

    def names(self) -> list[str]:
        """The measured kernels of the plugin for few heads."""
        return sorted(self.context.wanted)

    def expected(self, indices: torch.Tensor) -> Any:
        """The float32 reference of the sampled rows with these indices [samples, topk]."""
        rows = self.q[self.sample]
        return reference_prefill(rows, self.cache, indices, scale=self.scale, out_dtype=torch.float32)

    def unsharded(self, kernel: str, indices: torch.Tensor) -> torch.Tensor:
        """This rank's heads of the sampled rows, from a resharded contender's kernel over all heads.

        How a decode kernel and the plugin's split a row's keys depends on all rows of a call, so they get one share
        after the other.

        Args:
            indices: of the sampled rows; those kernels use the case's own, if the case selects nothing itself.
        """
        own = slice(self.rank * self.heads, (self.rank + 1) * self.heads)
        if not (self.decode or kernel.endswith(IN_PLACE) or kernel == "cuda"):
            q = torch.cat([self.q_of(rank)[self.sample] for rank in range(self.ranks)], dim=1)
            return self.attend_by(kernel)(q, indices)[:, own]
        q = torch.cat([self.q_of(rank) for rank in range(self.ranks)], dim=1)
        parts = [self.partition.rows(rank) for rank in range(self.ranks)]
        outs = [self.attend_by(kernel)(q[part], self.indices[part])[:, own] for part in parts]
        return torch.cat(outs)[self.sample]

    def note(self, name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Note whether the sampled rows of a resharded result equal the unsharded ones bit by bit on this rank."""
        same = torch.equal(out[self.sample], expected)
        self.exact[self.case, name] = same and self.exact.get((self.case, name), True)

    def work(self) -> floors.Work:
        """Attention of this rank's share of the rows."""
        share = -(-self.rows // self.ranks)
        rows = self.indices[self.partition.rows(self.rank)]
        return floors.sparse_mla(
            rows=share,
            heads=self.heads * self.ranks,
            d_qk=self.cache.dim,
            d_v=D_V,
            gathers=[gather(rows, self.cache)],
        )


def chunked(chunks: int, kernel: str) -> str:
    """How a record names resharding around a kernel."""
    return in_chunks(f"{SHARDED} {kernel}", chunks)


def _attention(made: Inputs) -> Workload:
    q, indices = made.q, made.indices
    tolerance = judges.DECODE_OUT if made.decode else judges.PREFILL_OUT
    whole = judges.attention(made.sample, cache(lambda: made.expected(indices[made.sample])), tolerance)
    unsharded = cache(lambda kernel: made.unsharded(kernel, indices[made.sample]))

    def plain(name: str) -> Callable[[], TimedCall]:
        def load() -> TimedCall:
            attend = made.bind(name)
            return lambda: Attended(attend(), None)

        return load

    def sharded(kernel: str, chunks: int) -> Callable[[], TimedCall]:
        def load() -> TimedCall:
            attend, shard = made.attend_by(kernel), made.shard

            def attend_rows(q_rows: torch.Tensor, rows: slice) -> torch.Tensor:
                return attend(q_rows, indices[rows])

            return lambda: Attended(shard.attend(q, made.partition, attend_rows, chunks=chunks), None)

        return load

    def exactly(name: str, kernel: str) -> Callable[[Any], float]:
        def judge(result: Attended) -> float:
            made.note(name, result.out, unsharded(kernel))
            return whole(result)

        return on_all_ranks(judge)

    ways = [(made.sharded_by, chunks) for chunks in ((1,) if made.decode else CHUNKS)]
    if not made.decode and made.sharded_by != "cuda":
        ways.append((made.sharded_by + IN_PLACE, 1))
    resharded = {chunked(chunks, kernel): (kernel, chunks) for kernel, chunks in ways}
    return Workload(
        work=made.work(),
        contenders=(
            *(Contender(name, plain(name)) for name in (PADDED, *made.names())),
            *(Contender(name, sharded(*way), exactly(name, way[0])) for name, way in resharded.items()),
        ),
        judge=on_all_ranks(whole),
        baselines=(PADDED,),
        graph=made.decode,
    )


def _layer(made: Inputs) -> Workload:
    """The indexer's selection, and attention to it."""
    device, rows, keys, topk = made.context.device, made.rows, made.kv, made.topk
    index_heads = made.case.number("index_heads")
    index = inputs.indexer(device, 91, rows, keys, index_heads)
    step = inputs.budgeted_rows(made.case.number("budget_mib"), keys, topk)
    own = made.partition.rows(made.rank)

    def select_by(name: str, part: slice) -> TimedCall:
        score = made.context.registry.load("indexer_topk", name, sm=made.context.sm)
        given = index.rows(part)
        return lambda: score(*given, topk, rows_per_chunk=step)

    def stock_selection() -> TimedCall:
        parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        calls = []
        for part in parts:
            logits = stock.deep_gemm_logits(*index.rows(part))
            calls.append((part, logits, stock.LibraryTopK(TOP_K, part.stop - part.start, keys, topk, device)))

        def select() -> torch.Tensor:
            chosen = torch.empty(rows, topk, dtype=torch.int32, device=device)
            for part, logits, select in calls:
                chosen[part] = select(logits())
            return chosen

        return select

    def plain(make_select: Callable[[], TimedCall], name: str) -> Callable[[], TimedCall]:
        def load() -> TimedCall:
            select, attend = make_select(), padded if name == PADDED else made.attend_by(name)

            def call() -> Layered:
                chosen = select()
                return Layered(attend(made.q, chosen), chosen, 0)

            return call

        return load

    def padded(q: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return stock.flash_mla_prefill(q, made.bf16, chosen, made.scale)().out  # type: ignore[no-any-return]

    indexer = "deep_gemm" if device.type == "cuda" else REFERENCE

    def sharded(chunks: int) -> Callable[[], TimedCall]:
        def load() -> TimedCall:
            select = select_by(indexer, own)
            attend, shard = made.attend_by(made.sharded_by), made.shard

            def call() -> Layered:
                chosen = select()

                def attend_rows(q_rows: torch.Tensor, part: slice) -> torch.Tensor:
                    return attend(q_rows, chosen[part.start - own.start : part.stop - own.start])

                return Layered(shard.attend(made.q, made.partition, attend_rows, chunks=chunks), chosen, own.start)

            return call

        return load

    positions = torch.arange(len(made.sample), device=device)
    sample = made.sample
    chosen_right = judges.selected(positions, lambda: reference_logits(*index.rows(sample)), topk)

    def judge_of(name: str) -> Callable[[Any], float]:
        def judge(result: Layered) -> float:
            chosen = _sampled(result, sample, topk)
            chosen_right(chosen)
            if name.startswith(SHARDED) and made.sharded_by != "cuda":
                made.note(name, result.out, made.unsharded(made.sharded_by, chosen))
            attended = judges.attention(sample, lambda: made.expected(chosen), judges.PREFILL_OUT)
            return attended(Attended(result.out, None))

        return on_all_ranks(judge)

    baselines = f"deep_gemm, {TOP_K}, {PADDED}", f"{indexer}, {PADDED}"
    ways = {baselines[0]: plain(stock_selection, PADDED)}
    for name in (PADDED, *made.names()):
        ways[f"{indexer}, {name}"] = plain(partial(select_by, indexer, slice(0, rows)), name)
    ways |= {chunked(chunks, f"{indexer}, {made.sharded_by}"): sharded(chunks) for chunks in CHUNKS}
    share = -(-rows // made.ranks)
    attention = made.work()
    scoring = floors.indexer_topk(
        rows=share, keys=keys, heads=index_heads, dim=inputs.INDEX_DIM, topk=topk, scored=share * keys
    )
    return Workload(
        # A bf16 operation takes as long as two of fp8.
        work=floors.Work(bytes=attention.bytes + scoring.bytes, flops=2 * attention.flops + scoring.flops, fp8=True),
        contenders=tuple(Contender(name, load, judge_of(name)) for name, load in ways.items()),
        judge=judge_of(""),
        baselines=baselines,
    )


def _sampled(result: Layered, sample: torch.Tensor, topk: int) -> torch.Tensor:
    """[samples, topk]: the selection of the sampled rows, from whichever rank has them."""
    chosen = torch.full((len(sample), topk), torch.iinfo(torch.int32).min, dtype=torch.int32, device=sample.device)
    own = (sample >= result.first) & (sample < result.first + len(result.indices))
    chosen[own] = result.indices[sample[own] - result.first]
    dist.all_reduce(chosen, op=dist.ReduceOp.MAX)
    return chosen
