"""The routes of a V4 prefill that engines serve, with stand-ins for SGLang's functions and for FlashMLA."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nsa_plugin.errors import NoProviderError
from nsa_plugin.kernels.kv_cache import open_cache, reference_read
from nsa_plugin.kernels.sparse_mla import reference_prefill
from nsa_plugin.kernels.v4_prefill import combined_width
from nsa_plugin.libraries.registry import Registry
from nsa_plugin.tools.bench.cases import SUITES, BenchCase, case
from nsa_plugin.tools.bench.outcome import Outcome
from nsa_plugin.tools.bench.runner import BenchOptions, run_suite
from nsa_plugin.tools.bench.suites import v4
from tests.tools.bench import fakes
from tests.tools.bench.fakes import RATES, FakeTimer

SERVED = v4.BY_WORKSPACE.format("flash_mla")

# Of SGLang 0.5.16's `SparsePrefillChunkCache.build`.
ARGUMENTS = {
    "seq_lens",
    "extend_seq_lens",
    "req_pool_indices",
    "req_to_token",
    "full_to_swa",
    "swa_window_size",
    "swa_page_size",
    "num_qo_tokens",
    "max_seq_len",
}


class Sglang:
    """The functions of SGLang 0.5.16 that the contender calls, in torch, with checks; `calls` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.shift, self.page_size = 0, 64
        self.heads: set[int] = set()
        engine = self

        class ChunkCache:
            c4_flat_token_ids: torch.Tensor
            swa_token_ids: torch.Tensor

            @classmethod
            def build(cls, **given: Any) -> ChunkCache:
                engine.calls["build"] += 1
                made = cls()
                made.given = SimpleNamespace(**given)
                assert given.keys() == ARGUMENTS
                assert given["swa_page_size"] == engine.page_size
                for name in ("seq_lens", "extend_seq_lens", "req_pool_indices", "req_to_token"):
                    assert given[name].dtype == torch.int32
                assert given["full_to_swa"].dtype == torch.int64
                (context,), (rows,) = given["seq_lens"].tolist(), given["extend_seq_lens"].tolist()
                assert given["max_seq_len"] == context
                assert given["num_qo_tokens"] == rows
                made.first = max(0, context - rows - given["swa_window_size"] + 1)
                ids = given["req_to_token"][given["req_pool_indices"][0], made.first : context]
                made.swa_token_ids = given["full_to_swa"][ids.long()].int()
                return made

            def ensure_c4(self, page_table: torch.Tensor, c4_page_size: int) -> None:
                engine.calls["ensure_c4"] += 1
                assert page_table.shape[0] == self.given.num_qo_tokens
                entry = torch.arange(self.given.max_seq_len // 4)
                self.c4_flat_token_ids = (
                    page_table[0, entry // c4_page_size] * c4_page_size + entry % c4_page_size
                ).int()

            def combine_c4_layer(self, c4_sparse_raw_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                engine.calls["combine_c4_layer"] += 1
                chosen, given = c4_sparse_raw_indices, self.given
                assert chosen.dtype == torch.int32
                topk, window, rows = chosen.shape[1], given.swa_window_size, given.num_qo_tokens
                combined = torch.full((rows, combined_width(window, topk)), -1, dtype=torch.int32)
                lengths = torch.zeros(rows, dtype=torch.int32)
                for row, position in enumerate(range(given.max_seq_len - rows, given.max_seq_len)):
                    count, seen = min((position + 1) // 4, topk), min(position + 1, window)
                    reached = torch.arange(position - seen + 1, position + 1) - self.first
                    combined[row, :count] = chosen[row, :count]
                    combined[row, count : count + seen] = len(self.c4_flat_token_ids) + reached + engine.shift
                    lengths[row] = count + seen
                return combined, lengths

        class ScratchRows:
            def __init__(self, device: torch.device) -> None:
                self.buffer = torch.empty(0, 1, 512, dtype=torch.bfloat16, device=device)

            def get(self, num_tokens: int) -> torch.Tensor:
                if num_tokens > len(self.buffer):
                    self.buffer = torch.full((num_tokens, 1, 512), float("nan"), dtype=torch.bfloat16)
                return self.buffer[:num_tokens]

        self.chunk_cache = ChunkCache
        for name, functions in {
            "sglang.srt.layers.attention.dsv4.sparse_prefill_utils": {
                "SparsePrefillChunkCache": ChunkCache,
                "SparsePrefillWorkspace": ScratchRows,
            },
            "sglang.kernels.ops.attention.dsv4.dequant_k_cache": {"dequantize_k_cache_paged": self.dequantize},
            "sgl_kernel.flash_mla": {"flash_mla_sparse_fwd": self.sparse_fwd},
        }.items():
            module = ModuleType(name)
            vars(module).update(functions)
            monkeypatch.setitem(sys.modules, name, module)

    def dequantize(
        self, quant_k_cache: torch.Tensor, page_table_1_flattened: torch.Tensor, page_size: int, out: torch.Tensor
    ) -> None:
        self.calls["dequantize"] += 1
        assert quant_k_cache.is_contiguous()
        assert quant_k_cache.shape[1] % 576 == 0
        assert out.shape == (len(page_table_1_flattened), 1, 512)
        cache = open_cache(quant_k_cache, "v4_fp8", page_size)
        out.squeeze(1).copy_(reference_read(cache, page_table_1_flattened))

    def sparse_fwd(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int,
        attn_sink: None,
        topk_length: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        self.calls["sparse_fwd"] += 1
        self.heads.add(q.shape[1])
        assert attn_sink is None
        result = reference_prefill(q, kv, indices, scale=sm_scale, d_v=d_v, topk_length=topk_length)
        return result.out, result.max_logits, result.lse / 0.693  # of base 2


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Sglang:
    return Sglang(monkeypatch)


def prefill(heads: int, q: int, kv: int, page_size: int = 64) -> BenchCase:
    fields = {"heads": heads, "q": q, "kv": kv, "topk": 64, "window": 16, "page_size": page_size}
    return case("v4_prefill_route", **fields, layout="v4_fp8")


def run(*cases: BenchCase, registry: Registry | None = None, wanted: str = "none") -> Outcome:
    where = fakes.context(registry, wanted)
    return run_suite(SUITES["v4-prefill"], cases, where, FakeTimer(), RATES, BenchOptions())


@pytest.mark.parametrize(
    ("heads", "q", "kv", "page_size"),
    [(64, 6, 600, 64), (3, 5, 300, 256), (65, 40, 40, 256), (64, 30, 33, 64)],
)
def test_sglangs_route_attends_the_cases_caches_and_indices(
    engine: Sglang, heads: int, q: int, kv: int, page_size: int
) -> None:
    engine.page_size = page_size
    outcome = run(prefill(heads, q, kv, page_size))
    assert outcome.failed == []
    (row,) = outcome.rows
    assert row["provider"] == row["baseline"] == v4.SGLANG
    assert row["max_error"] < 1e-2
    assert engine.heads == {64 if heads <= 64 else 128}


def test_a_route_that_reads_other_rows_is_found_wrong(engine: Sglang) -> None:
    engine.shift = 1
    (failure,) = run(prefill(64, 6, 600)).failed
    assert failure["provider"] == v4.SGLANG
    assert failure["reason"].startswith("wrong result")


def test_what_is_made_once_a_batch_is_not_made_in_the_call(engine: Sglang) -> None:
    run(prefill(64, 6, 600))
    calls = engine.calls["sparse_fwd"]
    assert calls >= 3  # the first, that for memory, and the timed one
    assert engine.calls == {
        "build": 1,
        "ensure_c4": 1,
        "combine_c4_layer": calls,
        "dequantize": 2 * calls,
        "sparse_fwd": calls,
    }


def test_what_sglang_keeps_between_layers_is_its_extra_memory(engine: Sglang) -> None:
    (row,) = run(prefill(64, 6, 600)).rows
    rows, output = 600 // 4 + 6 + 16 - 1, 6 * 64 * 512 * 2
    kept = rows * 1024 + 6 * 4 * combined_width(16, 64) + 6 * 4
    assert row["extra_mib"] == pytest.approx(1.5 + (kept - output) / 2**20, abs=0.06)  # 1.5 is the clock's


def test_without_sglang_its_route_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.dsv4.sparse_prefill_utils", None)
    assert v4.SGLANG in {refused["provider"] for refused in run(prefill(64, 6, 600)).refused}


def test_another_version_of_sglang_is_refused_by_what_it_lacks(engine: Sglang) -> None:
    del engine.chunk_cache.combine_c4_layer
    refused = {one["provider"]: one["reason"] for one in run(prefill(64, 6, 600)).refused}
    assert refused[v4.SGLANG] == "this SGLang's SparsePrefillChunkCache has no combine_c4_layer; 0.5.16 has"
    # 0.5.23 has renamed it.
    del sys.modules["sglang.kernels.ops.attention.dsv4.dequant_k_cache"].dequantize_k_cache_paged
    refused = {one["provider"]: one["reason"] for one in run(prefill(64, 6, 600)).refused}
    assert refused[v4.SGLANG] == "this SGLang's dequant_k_cache has no dequantize_k_cache_paged; 0.5.16 has"


class WithFlashMla(Registry):
    """A registry on a CPU whose FlashMLA provider supports bf16 rows."""

    def load(self, op: str, name: str, **_: Any) -> Any:
        def attend(*_: Any, **__: Any) -> Any:
            raise NoProviderError(f"{name} reads bf16 rows")

        return attend


@pytest.mark.parametrize(("heads", "q", "kv"), [(64, 6, 600), (3, 20, 20)])
def test_rows_are_attended_as_an_adapter_does(monkeypatch: pytest.MonkeyPatch, heads: int, q: int, kv: int) -> None:
    made: list[tuple[torch.Tensor, ...]] = []

    def sparse_fwd(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, d_v: int, **given: Any
    ) -> tuple[torch.Tensor, ...]:
        assert given.pop("use_legacy")
        assert indices.shape[2] % 128 == 0
        assert indices.dtype == torch.int32
        result = reference_prefill(q, kv, indices, scale=scale, d_v=d_v, **given)
        made.append((result.out, indices))
        return result.out, result.max_logits, result.lse

    library = ModuleType("flash_mla")
    vars(library)["flash_mla_sparse_fwd"] = sparse_fwd
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    outcome = run(prefill(heads, q, kv), registry=WithFlashMla(), wanted="flash_mla")
    assert [(row["provider"], row["max_error"] < 1e-2) for row in outcome.rows] == [(SERVED, True)]

    # The kernel's own output is the result: nothing is copied behind it.
    workload = v4.prefill(prefill(heads, q, kv), fakes.context(WithFlashMla(), "flash_mla"))
    (served,) = (one for one in workload.contenders if one.name == SERVED)
    result = served.load()()
    assert result.out.data_ptr() == made[-1][0].data_ptr()
    assert served.output_bytes == q * heads * 512 * 2


def test_a_query_sees_its_window_and_the_entries_before_it() -> None:
    windows = v4._windows(torch.arange(0, 4, dtype=torch.int32), 3)
    # The first query's token is in row 3.
    assert windows.indices.tolist() == [[3, -1, -1], [3, 4, -1], [3, 4, 5], [4, 5, 6]]
    assert windows.lengths.tolist() == [1, 2, 3, 3]
    later = v4._windows(torch.arange(9, 11, dtype=torch.int32), 3)
    assert later.indices.tolist() == [[1, 2, 3], [2, 3, 4]]
    counted = v4._compact(torch.tensor([[-1, -1], [4, -1], [4, 5]], dtype=torch.int32))
    assert counted.lengths.tolist() == [1, 1, 2]


def test_the_cases_reach_from_short_contexts_to_the_longest() -> None:
    cases = [one.as_dict() for one in SUITES["v4-prefill"].cases]
    by_context: dict[Any, set[Any]] = {}
    for one in cases:
        if (one["heads"], one["page_size"]) == (64, 256):
            by_context.setdefault(one["kv"], set()).add(one["q"])
    every = {512, 2048, 8192, 16384, 32768}
    assert by_context == {
        4096: {512, 2048, 4096},
        16384: every - {32768},
        65536: every | {1024, 4096},
        131072: every,
        393216: every,
    }
    assert {one["heads"] for one in cases} == {8, 16, 64, 128}
    assert all(int(one["q"]) <= int(one["kv"]) for one in cases)


def test_what_decisions_compare_is_measured_before_the_other_contexts() -> None:
    contexts = [one.number("kv") for one in SUITES["v4-prefill"].cases if one.number("page_size") == 256]
    compared = contexts.count(65536)
    assert set(contexts[:compared]) == {65536}
    assert list(dict.fromkeys(contexts[compared:])) == [393216, 4096, 131072, 16384]
