"""What is measured: suites and their cases, as data. Nothing here imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

from nsa_plugin.errors import NsaPluginError

if TYPE_CHECKING:
    from nsa_plugin.tools.bench.workload import Context, Workload

Value = int | str


class BenchError(NsaPluginError):
    """A measurement is not possible here, or a record cannot be read; the message says why."""


@dataclass(frozen=True)
class BenchCase:
    """One shape of one op. `fields` are the record's `case`, in its order."""

    op: str
    fields: tuple[tuple[str, Value], ...]

    def number(self, name: str) -> int:
        return int(self.as_dict()[name])

    def numbers(self, *names: str) -> tuple[int, ...]:
        return tuple(map(self.number, names))

    def text(self, name: str) -> str:
        return str(self.as_dict()[name])

    def as_dict(self) -> dict[str, Value]:
        return dict(self.fields)

    def __str__(self) -> str:
        return f"{self.op} {describe_fields(self.as_dict())}"


def case(op: str, **fields: Value) -> BenchCase:
    return BenchCase(op, tuple(fields.items()))


@dataclass(frozen=True)
class Suite:
    """Cases that belong in one record.

    Attributes:
        name: of the suite and of its record.
        about: what it measures and the baseline, in one line.
        target: "module:function", (BenchCase, Context) -> Workload; imported when the suite runs.
        cases: in the order in which they are measured, so that neighbours share their inputs.
        tiny: cases of every op in it, small enough for a CPU and the references.
    """

    name: str
    about: str
    target: str
    cases: tuple[BenchCase, ...]
    tiny: tuple[BenchCase, ...]

    def build(self) -> Callable[[BenchCase, Context], Workload]:
        module, _, function = self.target.partition(":")
        built: Callable[[BenchCase, Context], Workload] = getattr(import_module(module), function)
        return built


_SUITES = "nsa_plugin.tools.bench.suites"
RANDOM = "random"
_OVERLAPS = ("overlap 95%", "overlap 80%")  # selections of `tools/bench/selections.py`
_HEADS = (16, 8, 32, 64, 128)
# Query tokens of a V4 prefill by context, the most telling first: a chunk is not longer than its request.
_V4_CHUNKS = {
    4096: (4096, 2048, 512),
    16384: (8192, 16384, 2048, 512),
    131072: (8192, 32768, 2048, 16384, 512),
    393216: (32768, 8192, 2048, 16384, 512),
}


def _prefill(heads: int, q: int, kv: int, topk: int, selection: str = RANDOM, layout: str = "v32_fp8") -> BenchCase:
    return case("sparse_mla_prefill", heads=heads, q=q, kv=kv, topk=topk, layout=layout, selection=selection)


def _decode(
    heads: int, batch: int, s_q: int, kv: int, topk: int, selection: str = RANDOM, layout: str = "v32_fp8"
) -> BenchCase:
    shape: dict[str, Value] = {"heads": heads, "batch": batch, "s_q": s_q, "kv": kv, "topk": topk}
    return case("sparse_mla_decode", **shape, layout=layout, selection=selection)


def _v4(heads: int, q: int, kv: int, page_size: int, topk: int = 512, window: int = 128) -> BenchCase:
    selected = {"topk": topk, "window": window, "page_size": page_size}
    return case("v4_prefill_route", heads=heads, q=q, kv=kv, **selected, layout="v4_fp8")


def _v4_decode(heads: int, batch: int, kv: int, topk: int = 512, window: int = 128, page_size: int = 256) -> BenchCase:
    selected = {"topk": topk, "window": window, "page_size": page_size}
    return case("sparse_mla_decode", heads=heads, batch=batch, s_q=1, kv=kv, **selected, layout="v4_fp8")


def _indexer(q: int, kv: int, heads: int, topk: int, budget_mib: int) -> BenchCase:
    return case("indexer_topk", heads=heads, q=q, kv=kv, topk=topk, budget_mib=budget_mib)


def _indexer_paged(batch: int, kv: int, heads: int, topk: int) -> BenchCase:
    return case("indexer_topk_paged", heads=heads, batch=batch, s_q=1, kv=kv, topk=topk)


def _topk(q: int, kv: int, topk: int) -> BenchCase:
    return case("topk_rows", q=q, kv=kv, topk=topk)


def _mha(heads: int, q: int, topk: int) -> BenchCase:
    return case("mha_one_shot", heads=heads, q=q, kv=q, topk=topk)


def _cache(rows: int, kv: int, layout: str, page_size: int) -> tuple[BenchCase, BenchCase]:
    fields: dict[str, Value] = {"q": rows, "kv": kv, "layout": layout, "page_size": page_size}
    return case("kv_cache_write", **fields), case("kv_cache_read", **fields)


def _index_ops(rows: int, kv: int, topk: int, batch: int) -> tuple[BenchCase, ...]:
    ops = ("index_transform_paged", "index_transform_ragged")
    return (
        *(case(op, q=rows, kv=kv, topk=topk, batch=batch) for op in ops),
        case("swa_window_indices", q=rows, kv=kv, window=min(128, topk), batch=batch),
    )


_ALL = (
    Suite(
        "sparse-mla-prefill",
        "sparse prefill from the V3.2 fp8 cache; baseline: FlashMLA with padded heads on bf16 rows",
        f"{_SUITES}.sparse_mla:prefill",
        (
            *(_prefill(heads, q, kv, 2048) for q, kv in product((4096, 512), (65536, 8192)) for heads in _HEADS),
            *(
                _prefill(heads, 4096, kv, 2048, selection)
                for selection, kv in product(_OVERLAPS, (65536, 8192))
                for heads in _HEADS
            ),
            # From so many query tokens on, unions may be taken on other GPUs than SM90.
            *(
                _prefill(heads, 1024, 65536, 2048, selection)
                for selection in (RANDOM, _OVERLAPS[0])
                for heads in (16, 8, 32)
            ),
        ),
        (_prefill(3, 5, 70, 20), _prefill(3, 5, 70, 20, _OVERLAPS[1])),
    ),
    Suite(
        "sparse-mla-decode",
        "sparse decode from the V3.2 fp8 cache; baseline: FlashMLA's decode kernel with padded heads",
        f"{_SUITES}.sparse_mla:decode",
        (
            *(_decode(heads, batch, 1, 8192, 2048) for batch in (128, 1, 8, 32, 512) for heads in _HEADS),
            *(_decode(heads, batch, 2, 8192, 2048) for batch in (128, 1, 8, 32, 512) for heads in (16, 128)),
            *(_decode(16, batch, s_q, 8192, 2048, _OVERLAPS[0]) for s_q in (1, 2) for batch in (128, 8)),
        ),
        (_decode(3, 2, 2, 70, 20), _decode(3, 2, 2, 70, 20, _OVERLAPS[1])),
    ),
    Suite(
        "sparse-mla-prefill-bf16",
        "sparse prefill from a V3.2 bf16 cache; baseline: FlashMLA with padded heads",
        f"{_SUITES}.sparse_mla:prefill",
        tuple(
            _prefill(heads, q, kv, 2048, layout="bf16")
            for q, kv in product((4096, 512), (65536, 8192))
            for heads in _HEADS
        ),
        (_prefill(3, 5, 70, 20, layout="bf16"),),
    ),
    Suite(
        "sparse-mla-decode-bf16",
        "sparse decode from a V3.2 bf16 cache; baselines: FA3 over single rows, FlashMLA with padded heads",
        f"{_SUITES}.sparse_mla:decode",
        (
            *(
                _decode(heads, batch, 1, 8192, 2048, layout="bf16")
                for batch in (128, 1, 8, 32, 512)
                for heads in _HEADS
            ),
            *(_decode(16, batch, 2, 8192, 2048, layout="bf16") for batch in (128, 1, 8, 32, 512)),
        ),
        (_decode(3, 2, 2, 70, 20, layout="bf16"),),
    ),
    Suite(
        "v4-prefill",
        "a complete V4 prefill, window and selected keys; baselines: SGLang's path and FlashMLA's decode kernel",
        f"{_SUITES}.v4:prefill",
        (
            *(_v4(64, q, 65536, 256) for q in (8192, 16384, 32768, 4096, 2048, 1024, 512)),
            *(_v4(heads, q, 65536, 256) for heads in (8, 16, 128) for q in (2048, 8192)),
            # The shortest and longest contexts first: a run with too little time skips those between.
            *(_v4(64, q, kv, 256) for kv in (393216, 4096, 131072, 16384) for q in _V4_CHUNKS[kv]),
            *(_v4(64, q, 65536, 64) for q in (2048, 8192)),
        ),
        (_v4(3, 5, 300, 64, topk=16, window=8),),
    ),
    Suite(
        "v4-decode",
        "a V4 decode step, window and selected keys; baseline: FlashMLA's decode kernel with padded heads",
        f"{_SUITES}.v4:decode",
        tuple(_v4_decode(heads, batch, 32768) for batch in (128, 1, 8, 32, 512) for heads in (64, 8, 16, 32, 128)),
        (_v4_decode(3, 2, 80, topk=16, window=8, page_size=64),),
    ),
    Suite(
        "v4-pro-prefill",
        "a complete prefill of V4-Pro, which selects 1024 keys; baselines as of v4-prefill",
        f"{_SUITES}.v4:prefill",
        tuple(_v4(heads, q, 65536, 256, topk=1024) for heads in (16, 128, 8, 64, 32) for q in (8192, 2048)),
        (_v4(3, 5, 300, 64, topk=32, window=8),),
    ),
    Suite(
        "v4-pro-decode",
        "a decode step of V4-Pro, which selects 1024 keys; baseline: FlashMLA's decode kernel with padded heads",
        f"{_SUITES}.v4:decode",
        tuple(
            _v4_decode(heads, batch, 32768, topk=1024) for batch in (128, 1, 8, 32) for heads in (16, 128, 8, 64, 32)
        ),
        (_v4_decode(3, 2, 160, topk=32, window=8, page_size=64),),
    ),
    Suite(
        "indexer-topk",
        "fp8 indexer logits and top-k in a memory budget; baseline: DeepGEMM in one piece and a top-k",
        f"{_SUITES}.indexer:indexer_topk",
        (
            *(
                _indexer(q, kv, 64, 2048, 512)
                for q, kv in ((8192, 131072), (4096, 65536), (8192, 32768), (2048, 8192), (512, 131072))
            ),
            *(_indexer(q, kv, 64, 2048, 256) for q, kv in ((8192, 131072), (4096, 65536))),
            # Chunks between those, and V4's selection from compressed keys.
            *(_indexer(q, kv, 64, 2048, 512) for q, kv in ((8192, 16384), (2048, 32768), (2048, 131072), (128, 65536))),
            *(_indexer(q, kv, 64, 512, 512) for q, kv in ((8192, 32768), (8192, 16384))),
            # GLM-5's heads.
            *(
                _indexer(q, kv, 32, 2048, 512)
                for q, kv in ((8192, 131072), (4096, 65536), (8192, 32768), (8192, 16384), (2048, 8192), (512, 131072))
            ),
        ),
        (_indexer(6, 90, 4, 16, 1),),
    ),
    Suite(
        "indexer-paged",
        "the indexer of a decode step from the paged cache; baseline: DeepGEMM's logits and torch.topk",
        f"{_SUITES}.indexer:paged",
        tuple(_indexer_paged(batch, kv, 64, 2048) for batch, kv in ((128, 8192), (32, 65536), (8, 131072), (1, 65536))),
        (_indexer_paged(2, 128, 4, 16),),
    ),
    Suite(
        "topk",
        "top-k of rows of float32 logits; baselines: the libraries' top-k kernels",
        f"{_SUITES}.indexer:topk_rows",
        tuple(
            _topk(q, kv, 2048)
            for q, kv in (
                (1024, 131072),
                (2048, 65536),
                (4096, 65536),
                (4096, 8192),
                (8192, 8192),
                (8192, 16384),
                (128, 65536),
                (8, 131072),
            )
        ),
        (_topk(5, 90, 16),),
    ),
    Suite(
        "mha-one-shot",
        "dense attention of a short prefill against sparse attention of the same tokens: the crossover",
        f"{_SUITES}.mha:one_shot",
        tuple(_mha(heads, q, 2048) for heads in (16, 32, 128) for q in (256, 512, 1024, 1536, 2048, 3072, 4096)),
        (_mha(2, 12, 8),),
    ),
    Suite(
        "kv-cache",
        "writing to and reading from the caches",
        f"{_SUITES}.memory:kv_cache",
        tuple(
            one
            for layout, rows in product(("v32_fp8", "v4_fp8", "bf16"), (65536, 4096, 128))
            for one in _cache(rows, 131072, layout, 64)
        ),
        _cache(10, 128, "v32_fp8", 64) + _cache(10, 128, "v4_fp8", 64),
    ),
    Suite(
        "index-kernels",
        "page-table transforms, padding, and V4's window and combined indices",
        f"{_SUITES}.memory:index_ops",
        _index_ops(4096, 65536, 2048, 4) + _index_ops(128, 8192, 2048, 128),
        _index_ops(6, 64, 16, 2),
    ),
)

SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}


def selected_suites(names: Iterable[str]) -> list[Suite]:
    """The suites with these names; all suites if there are none.

    Raises:
        BenchError: there is no such suite.
    """
    wanted = list(names)
    unknown = [name for name in wanted if name not in SUITES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], SUITES, 1, 0.75)
        hint = f". Did you mean {near[0]!r}? Allowed: " if near else "; allowed: "
        raise BenchError(f"suite is {unknown[0]!r}{hint}{', '.join(SUITES)}")
    return [SUITES[name] for name in wanted or SUITES]


def selection_of(fields: Mapping[str, Any]) -> str:
    """The selections of a case; those of a record without the field are random."""
    return str(fields.get("selection", RANDOM))


def describe_fields(fields: dict[str, Any]) -> str:
    """A case as text: "heads 16, q 4096"."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())
