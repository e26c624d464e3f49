"""Floors against numbers worked out by hand."""

from __future__ import annotations

import pytest

from nsa_plugin.tools.bench import floors
from nsa_plugin.tools.bench.floors import Gather, Rates, Work

RATES = Rates(copy_gb_s=4250.0, matmul_tflops=686.0, fp8_matmul_tflops=1000.0)


def test_decode_of_128_sequences_gathers_172_megabytes() -> None:
    named = 128 * 2048
    gather = Gather(selected=named, distinct=named, row_bytes=656, width=named)
    work = floors.sparse_mla(rows=128, heads=16, d_qk=576, d_v=512, gathers=[gather])
    rows = 171_966_464  # 128 * 2048 * 656
    queries = 128 * 16 * (576 + 512) * 2 + 128 * 16 * 4
    assert work.bytes == rows + queries + 128 * 2048 * 4
    assert work.gather_bytes == work.bytes
    assert work.flops == 2 * 128 * 2048 * 16 * 1088
    assert floors.floor_us(Work(bytes=rows), RATES) == pytest.approx(40.46, abs=0.01)


def test_prefill_counts_a_row_once_however_many_queries_name_it() -> None:
    named = 4096 * 2048
    gather = Gather(selected=named, distinct=min(named, 65536), row_bytes=656, width=named)
    work = floors.sparse_mla(rows=4096, heads=16, d_qk=576, d_v=512, gathers=[gather], statistics=2)
    outside = 4096 * 16 * (1088 * 2 + 2 * 4) + named * 4
    assert work.bytes == outside + 65536 * 656
    assert work.gather_bytes == outside + named * 656
    # 292 Gflop at 686 TFLOPS are 0.426 ms, and 65536 rows take far less.
    assert floors.floor_us(work, RATES) == pytest.approx(425.7, abs=0.1)
    # Every selected row from memory: 0.32 µs a token for the rows alone.
    assert floors.gather_us(work, RATES) == pytest.approx(4096 * 0.3161 + outside / 4250e3, rel=1e-3)


def test_two_caches_add_up() -> None:
    one, other = Gather(10, 8, 584, 12), Gather(30, 20, 584, 40)
    both = floors.sparse_mla(rows=2, heads=4, d_qk=512, d_v=512, gathers=[one, other])
    assert both.bytes == 2 * 4 * 1024 * 2 + 2 * 4 * 4 + 52 * 4 + 28 * 584
    assert both.flops == 2 * 40 * 4 * 1024


def test_indexer_of_8192_by_131072_is_bound_by_fp8_products() -> None:
    work = floors.indexer_topk(rows=8192, keys=131072, heads=64, dim=128, topk=2048, scored=8192 * 131072)
    assert work.flops == 17_592_186_044_416
    assert work.bytes == 8192 * 64 * 132 + 131072 * 132 + 8192 * 2048 * 4
    assert floors.floor_us(work, RATES) == pytest.approx(17592.2, abs=0.1)


def test_topk_reads_its_logits_once() -> None:
    assert floors.topk_rows(rows=1024, keys=131072, topk=2048).bytes == 1024 * 131072 * 4 + 1024 * 2048 * 4


@pytest.mark.parametrize(("q", "kv", "pairs"), [(1, 1, 1), (4, 4, 10), (1, 9, 9), (3, 5, 12)])
def test_causal_pairs(q: int, kv: int, pairs: int) -> None:
    assert floors.causal_pairs(q, kv) == pairs == sum(kv - q + i + 1 for i in range(q))


def test_dense_attention() -> None:
    work = floors.mha(q=4, kv=4, heads=2, d_qk=192, d_v=128)
    assert work.flops == 2 * 10 * 2 * 320
    assert work.bytes == 2 * (4 * 2 * 320) * 2
    assert work.gather_bytes == 0
    assert floors.gather_us(work, RATES) is None


def test_cache_writer_and_reader() -> None:
    assert floors.cache_rows(rows=10, dim=576, row_bytes=656).bytes == 10 * (1152 + 656 + 8)
    assert floors.cache_rows(rows=10, dim=512, row_bytes=584).bytes == 10 * (1024 + 584 + 8)


def test_rate_that_was_not_measured_leaves_its_part_out() -> None:
    work = Work(bytes=4250_000, flops=10**15, fp8=True)
    assert floors.floor_us(work, Rates(4250.0, 686.0, None)) == pytest.approx(1.0)
    assert floors.floor_us(work, RATES) == pytest.approx(1e6)
    assert floors.floor_us(Work(bytes=0, flops=686_000_000), RATES) == pytest.approx(1.0)
