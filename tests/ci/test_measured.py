"""The table of times: made from records alone, the same every time, and read back as it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ci import measured as generator
from nsa_plugin.decision import timings
from nsa_plugin.decision.dispatch import decide
from nsa_plugin.decision.shapes import BatchShape, ModelShape, Phase
from nsa_plugin.decision.timings import COPIED_CONTEXT, SELECTIONS
from nsa_plugin.libraries.devices import synthetic
from nsa_plugin.settings import Settings
from nsa_plugin.tools.bench.cases import SUITES, BenchError
from nsa_plugin.tools.bench.group import workloads
from nsa_plugin.tools.bench.suites import mha, sparse_mla, v4

HOST = {"gpu": "NVIDIA H200", "gpus": 1, "torch": "2.11.0", "triton": "3.6.0", "libraries": {}, "commit": "0123abc"}
KEY = (90, "sparse_mla_prefill", "v32_fp8")


def row(op: str, provider: str, time: float, **case: Any) -> dict[str, Any]:
    shape = {"heads": 16, "q": 4096, "kv": 65536, "topk": 2048, "layout": "v32_fp8"} | case
    statistics = {"min_us": time, "runs": 5, "floor_us": 1.0, "max_error": 0.0}
    compared = {"baseline": None, "baseline_us": None, "speedup": None}
    return {"op": op, "case": shape, "provider": provider, "median_us": time} | statistics | compared


def prefill(provider: str, time: float, **case: Any) -> dict[str, Any]:
    return row("sparse_mla_prefill", provider, time, **case)


def decode(provider: str, time: float, batch: int, s_q: int) -> dict[str, Any]:
    made = row("sparse_mla_decode", provider, time, batch=batch, s_q=s_q, kv=8192)
    del made["case"]["q"]
    return made


def v4_row(provider: str, time: float, **case: Any) -> dict[str, Any]:
    shape = {"heads": 64, "q": 8192, "topk": 512, "window": 128, "page_size": 256, "layout": "v4_fp8"} | case
    return row("v4_prefill_route", provider, time, **shape)


def dense(provider: str, time: float, **more: float) -> dict[str, Any]:
    made = row("mha_one_shot", provider, time, q=1024, kv=1024)
    del made["case"]["layout"]
    return made | more


def write(
    folder: Path,
    name: str,
    rows: list[dict[str, Any]],
    date: str = "2026-01-02",
    gpu: str = "",
    l2: str = "flushed",
    emulates: int = 0,
) -> None:
    host = HOST | {"l2": l2} | ({"gpu": gpu} if gpu else {}) | ({"emulates": emulates} if emulates else {})
    path = folder / host["gpu"].lower().replace(" ", "-") / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    record = {"schema": 1, "suite": name, "command": "nsa-plugin bench", "date": date, "host": host, "rows": rows}
    path.write_text(json.dumps(record))


def collected(folder: Path) -> timings.Timings:
    """The times of a folder's records."""
    table, _ = generator.collect(folder)
    return table


def loaded(text: str) -> timings.Timings:
    return timings.from_json(json.loads(text))


def test_rows_of_every_op_find_their_place(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        [
            prefill("cuda", 1550.0),
            prefill("cuda", 200.0, q=512),
            prefill("cuda", 100.0, q=512, heads=8),
            prefill("triton", 9000.0),
            prefill(sparse_mla.PADDED, 2410.0),  # over rows that somebody else has made: no route of a batch
            prefill(sparse_mla.WITH_COPY, 2440.0),
            prefill(v4.DECODE_KERNEL, 3000.0),
            decode("cuda", 40.0, 64, 2),
            decode("cuda", 30.0, 8, 1),
            decode(sparse_mla.PADDED, 50.0, 8, 1),
            decode("flash_mla", 60.0, 8, 1),  # with its schedule, which an engine makes once for all layers
            v4_row("cuda", 5000.0),
            v4_row(v4.DECODE_KERNEL, 4000.0),
            v4_row(v4.BY_WORKSPACE.format("flash_mla"), 3500.0),
            v4_row(v4.BY_WORKSPACE.format("triton"), 3600.0),
        ],
    )
    assert collected(tmp_path) == {
        (90, "sparse_mla_decode", "v32_fp8"): {
            "cuda sparse_decode": {16: ((8, 30.0), (128, 40.0))},
            "flash_mla sparse_decode": {16: ((8, 50.0),)},
        },
        KEY: {
            "cuda sparse_prefill": {8: ((512, 100.0),), 16: ((512, 200.0), (4096, 1550.0))},
            "flash_mla sparse_decode": {16: ((4096, 3000.0),)},
            "flash_mla sparse_prefill after dequantisation": {16: ((4096, 2440.0),)},
            "triton sparse_prefill": {16: ((4096, 9000.0),)},
        },
        (90, "sparse_mla_prefill", "v4_fp8"): {
            "cuda sparse_prefill": {64: ((8192, 5000.0),)},
            "flash_mla sparse_decode": {64: ((8192, 4000.0),)},
            "flash_mla sparse_prefill after dequantisation": {64: ((8192, 3500.0),)},
        },
    }


def test_selections_are_filed_apart(tmp_path: Path) -> None:
    rows = [v4_row("cuda", 4.0), v4_row("cuda", 5.0, topk=1024), v4_row("cuda", 6.0, topk=256)]
    write(tmp_path, "a", rows)
    assert collected(tmp_path) == {
        (90, "sparse_mla_prefill", "v4_fp8"): {"cuda sparse_prefill": {64: ((8192, 4.0),)}},
        (90, "sparse_mla_prefill", "v4_fp8, 1024 selected"): {"cuda sparse_prefill": {64: ((8192, 5.0),)}},
    }


def test_indexers_are_filed_by_what_they_select(tmp_path: Path) -> None:
    def indexer(provider: str, time: float, budget_mib: int = 512) -> dict[str, Any]:
        made = row("indexer_topk", provider, time, heads=64, q=8192, kv=131072, topk=2048, budget_mib=budget_mib)
        del made["case"]["layout"]
        return made

    rows = [indexer("cuda", 14000.0), indexer("deep_gemm", 17000.0), indexer("deep_gemm", 18000.0, budget_mib=256)]
    write(tmp_path, "a", [*rows, indexer("deep_gemm in one piece, torch.topk", 30000.0)])
    found = collected(tmp_path)
    assert found == {
        (90, "indexer_topk", timings.selected_from(2048, 131072)): {
            "cuda": {64: ((8192, 14000.0),)},
            "deep_gemm": {64: ((8192, 17000.0),)},
        },
    }


def test_dense_and_sparse_attention_of_a_prompt_have_their_projections(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        [
            dense("fa3", 30.0, up_projection_us=12.0),
            dense(mha.SDPA, 40.0, up_projection_us=12.0),
            dense(mha.SPARSE.format("cuda"), 300.0, absorb_us=25.0),
            dense(mha.SPARSE.format(sparse_mla.PADDED), 400.0, absorb_us=25.0),
        ],
    )
    assert collected(tmp_path) == {
        (90, "mha_one_shot", "bf16"): {
            "fa3 mha_one_shot": {16: ((1024, 42.0),)},
            "flash_mla sparse_prefill": {16: ((1024, 425.0),)},
        },
        (90, "mha_one_shot", "v32_fp8"): {
            "cuda sparse_prefill": {16: ((1024, 325.0),)},
            "fa3 mha_one_shot": {16: ((1024, 42.0),)},
            "flash_mla sparse_prefill after dequantisation": {16: ((1024, 425.0),)},
        },
    }


@pytest.mark.parametrize("reverse", [False, True])
def test_the_longest_context_counts_then_the_largest_page_then_the_latest_record(tmp_path: Path, reverse: bool) -> None:
    rows = [
        prefill("cuda", 1.0, kv=8192),
        prefill("cuda", 2.0, kv=COPIED_CONTEXT),
        prefill("cuda", 9.0, kv=2 * COPIED_CONTEXT),
        v4_row("cuda", 9.0, kv=393216, page_size=256),
        v4_row("cuda", 3.0, page_size=64),
        v4_row("cuda", 4.0, page_size=256),
    ]
    write(tmp_path, "b" if reverse else "a", rows[::-1] if reverse else rows, "2026-01-02")
    newer = [prefill("cuda", 5.0, kv=8192), prefill("triton", 6.0), v4_row("cuda", 7.0, page_size=256)]
    write(tmp_path, "a" if reverse else "b", [*newer, prefill("triton", 6.5, kv=8192)], "2026-01-03")
    table = collected(tmp_path)
    assert table[KEY]["cuda sparse_prefill"] == {16: ((4096, 2.0),)}
    assert table[KEY]["triton sparse_prefill"] == {16: ((4096, 6.0),)}
    assert table[90, "sparse_mla_prefill", "v4_fp8"]["cuda sparse_prefill"] == {64: ((8192, 7.0),)}


def test_only_random_selections_decide_with_or_without_the_field(tmp_path: Path) -> None:
    shared = prefill("cuda", 2.0, selection="overlap 95%")
    write(tmp_path, "a", [prefill("cuda", 1550.0, selection="random"), shared], "2026-01-03")
    write(tmp_path, "b", [prefill("triton", 3900.0)], "2026-01-01")
    routes = collected(tmp_path)[KEY]
    assert routes["cuda sparse_prefill"] == {16: ((4096, 1550.0),)}
    assert routes["triton sparse_prefill"] == {16: ((4096, 3900.0),)}


def test_runs_back_to_back_decide_nothing(tmp_path: Path) -> None:
    write(tmp_path, "a", [prefill("cuda", 1550.0)])
    before = collected(tmp_path)
    write(
        tmp_path, "a-back-to-back", [prefill("cuda", 1.0), prefill("triton", 1.0)], date="2026-01-03", l2="back to back"
    )
    assert collected(tmp_path) == before


def test_runs_of_the_portable_path_decide_nothing(tmp_path: Path) -> None:
    write(tmp_path, "a", [prefill("cuda", 1550.0)])
    before = collected(tmp_path)
    write(tmp_path, "portable-a", [prefill("cuda", 1.0), prefill("triton", 1.0)], date="2026-01-03", emulates=86)
    assert collected(tmp_path) == before


def test_what_no_decision_compares_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "topk", [prefill("cuda", 1.0, topk=1024), v4_row("cuda", 1.0, window=64)])
    write(tmp_path, "other", [row("kv_cache_read", "triton", 1.0), prefill("fa4", 1.0)])
    write(tmp_path, "gpu", [prefill("cuda", 1.0)], gpu="NVIDIA H100")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "demo.json").write_text(json.dumps({"rows": [{"equal": 5}]}))
    assert collected(tmp_path) == {}


def test_another_gpu_of_the_version_stands_in_where_nothing_was_measured(tmp_path: Path) -> None:
    write(tmp_path, "a", [prefill("cuda", 1.0, q=64)])
    h100 = [prefill("cuda", 9.0, q=64), prefill("triton", 9.0, q=128), v4_row("cuda", 2.0), v4_row("triton", 3.0)]
    # A decision's reasons name one GPU for all times of the indexer.
    h100.append(row("indexer_topk", "cuda", 9.0, heads=64, q=8192, kv=131072, budget_mib=512))
    write(tmp_path, "b", h100, gpu="NVIDIA H100 80GB HBM3")
    table, stand_ins = generator.collect(tmp_path)
    assert list(table[KEY]) == ["cuda sparse_prefill"]  # not the H100's, beside times of the H200
    (other,) = (key for key in table if key != KEY)
    assert len(table[other]) == 2
    assert stand_ins == {other: "H100"}
    rows = json.loads(generator.render(table, stand_ins))["times"]
    assert {(row["layout"], row.get("gpu")) for row in rows} == {(KEY[2], None), (other[2], "H100")}


def test_the_gpu_of_a_time_is_named() -> None:
    pro, v4 = "v4_fp8, 1024 selected", "v4_fp8"
    assert timings.gpu_of(90, "sparse_mla_prefill", pro) == timings.STAND_INS[90, "sparse_mla_prefill", pro] == "H100"
    assert timings.gpu_of(90, "sparse_mla_prefill", v4) == timings.gpu_of(90) == "H200"
    assert timings.gpu_of(100) == "SM100"


def test_a_record_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "a.json").write_text("{")
    with pytest.raises(BenchError, match=r"a\.json: not JSON"):
        collected(tmp_path)


@pytest.mark.parametrize("count", [0, 1, 4, 60])
def test_the_file_holds_the_table(tmp_path: Path, count: int) -> None:
    write(tmp_path, "a", [prefill("cuda", 1.5 + step, q=step + 1, heads=8) for step in range(count)])
    table = collected(tmp_path)
    assert loaded(generator.render(table, {})) == table
    assert json.loads(generator.render(table, {}))["gpus"] == {"90": "H200"}


def test_writing_and_checking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records, module = tmp_path / "records", tmp_path / "timings.json"
    records.mkdir()
    module.write_text("")
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "RECORDS", records)
    monkeypatch.setattr(generator, "TIMINGS", module)

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["measured", *arguments])
        return generator.main()

    assert main("--check") == 1
    assert "timings.json: not what docs/benchmarks gives; run: make docs" in capsys.readouterr().err
    assert module.read_text() == ""
    assert main() == 0
    assert loaded(module.read_text()) == {}
    write(records, "a", [prefill("cuda", 1.5)])
    assert main("--check") == 1
    assert main() == 0
    assert main("--check") == 0
    assert loaded(module.read_text()) == {KEY: {"cuda sparse_prefill": {16: ((4096, 1.5),)}}}


def group_record(folder: Path, tp: int) -> None:
    """A record of resharding: its suite's cases and providers, 0.25 us a row in one piece.

    In pieces 0.25 us a row too, and 64 us more for two pieces, 192 us less for four.
    """
    whole, *chunked = (workloads.chunked(chunks, "flash_mla") for chunks in workloads.CHUNKS)
    in_place = workloads.chunked(1, "flash_mla" + workloads.IN_PLACE)
    rows = []
    for case in workloads.suite(tp).cases:
        fields = case.as_dict()
        time = int(fields["batch"] if "batch" in fields else fields["q"]) / 4 + (fields["kv"] == 65536)
        layer = workloads.chunked(1, "deep_gemm, flash_mla")
        others = [layer] if case.op == workloads.LAYER else [sparse_mla.PADDED, "cuda"]
        times = {name: 1.0 for name in others}
        if case.op == workloads.ATTENTION:
            times |= {whole: time}
            if "q" in fields:
                times |= {in_place: 2 * time} | dict(zip(chunked, (time + 64, time - 192), strict=True))
        rows += [row(case.op, name, time) | {"case": fields} for name, time in times.items()]
    write(folder, f"token-shard-tp{tp}", rows)


def test_heads_for_tokens_are_filed_where_the_decision_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tp in (2, 8):
        group_record(tmp_path, tp)
    table = collected(tmp_path)
    copied, in_place = "flash_mla sparse_prefill after dequantisation", "flash_mla sparse_decode"
    wanted: dict[Any, Any] = {}
    for tp in (2, 8):
        heads = 128 // tp
        wanted[90, f"token_shard_attention tp{tp}", "v32_fp8"] = {  # of two contexts the longer
            f"token_shard by {copied}": {heads: ((2048, 512.0), (8192, 2048.0))},
            f"token_shard by {copied}, 2 chunks": {heads: ((2048, 576.0), (8192, 2112.0))},
            f"token_shard by {copied}, 4 chunks": {heads: ((2048, 320.0), (8192, 1856.0))},
            f"token_shard by {in_place}": {heads: ((2048, 1024.0), (8192, 4096.0))},
        }
        steps = ((128, 32.0), (256, 64.0), (512, 128.0))
        wanted[90, f"token_shard_steps tp{tp}", "v32_fp8"] = {f"token_shard by {in_place}": {heads: steps}}
    assert table == wanted

    attention = {key: times for key, times in timings.TIMINGS.items() if key[1] != "indexer_topk"}
    monkeypatch.setattr(timings, "TIMINGS", attention | table)
    model = ModelShape(attn_tp_size=8, kv_layout="v32_fp8")
    for batch, time in (
        (BatchShape.from_lengths(Phase.EXTEND, [4096], [4096]), "834 us"),  # and 2.5 us of the copy
        (BatchShape.from_lengths(Phase.DECODE, [1] * 384, [5000] * 384, cuda_graph=True), "96 us"),
    ):
        plan = decide(model, batch, synthetic(90), Settings())
        assert plan.token_shard
        assert f" {time} (" in plan.reasons["token_shard"]
        assert plan.token_shard_chunks == (4 if batch.phase is Phase.EXTEND else 1)


def test_this_checkouts_times_are_what_its_records_give() -> None:
    assert generator.TIMINGS.read_text() == generator.render(*generator.collect(generator.RECORDS)), "run: make docs"


def test_rows_of_a_bf16_cache_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's prefill kernel and FA3 read them; the decision follows the times."""
    layout = {"layout": "bf16"}
    rows = [prefill(name, time, **layout) for name, time in (("cuda", 1500.0), (sparse_mla.PADDED, 1900.0))]
    rows += [
        row("sparse_mla_decode", name, time, batch=128, s_q=1, kv=8192, **layout)
        for name, time in (("cuda", 90.0), (sparse_mla.FA3, 140.0), (sparse_mla.PADDED, 150.0))
    ]
    rows.append(prefill(sparse_mla.SINGLE_TOKENS, 1400.0, **layout))  # no route of a prefill, whatever its time
    for one in rows[2:5]:
        del one["case"]["q"]
    write(tmp_path, "a", rows)
    table = collected(tmp_path)
    assert table == {
        (90, "sparse_mla_decode", "bf16"): {
            "cuda sparse_decode": {16: ((128, 90.0),)},
            "fa3 sparse_decode": {16: ((128, 140.0),)},
            "flash_mla sparse_prefill": {16: ((128, 150.0),)},
        },
        (90, "sparse_mla_prefill", "bf16"): {
            "cuda sparse_prefill": {16: ((4096, 1500.0),)},
            "fa3 sparse_decode": {16: ((4096, 1400.0),)},
            "flash_mla sparse_prefill": {16: ((4096, 1900.0),)},
        },
    }
    model, device = ModelShape(attn_tp_size=8, kv_layout="bf16"), synthetic(90)
    batches = [
        BatchShape.from_lengths(Phase.EXTEND, [4096], [65536]),
        BatchShape.from_lengths(Phase.DECODE, [1] * 128, [8192] * 128),
    ]
    monkeypatch.setattr(timings, "TIMINGS", {})
    assert [decide(model, batch, device, Settings()).provider for batch in batches] == ["flash_mla", "fa3"]
    monkeypatch.setattr(timings, "TIMINGS", table)
    assert [decide(model, batch, device, Settings()).provider for batch in batches] == ["cuda", "cuda"]


def test_the_labels_are_those_of_the_suites() -> None:
    prefills, decodes, routes = (
        generator.ROUTES[op] for op in ("sparse_mla_prefill", "sparse_mla_decode", "v4_prefill_route")
    )
    assert set(prefills) == {"cuda", "triton", v4.DECODE_KERNEL, sparse_mla.WITH_COPY}
    assert set(decodes) == {"cuda", "triton", sparse_mla.PADDED}
    rows, steps = (generator.BF16_ROUTES[op] for op in ("sparse_mla_prefill", "sparse_mla_decode"))
    assert set(rows) == {"cuda", "triton", sparse_mla.PADDED, sparse_mla.SINGLE_TOKENS}
    assert set(steps) == {"cuda", "triton", sparse_mla.PADDED, sparse_mla.FA3}
    assert set(routes) == {"cuda", "triton", v4.DECODE_KERNEL, v4.BY_WORKSPACE.format("flash_mla")}
    sparse = {mha.SPARSE.format(name) for name in ("cuda", "triton", sparse_mla.PADDED)}
    assert {name for names in generator.BESIDE.values() for name in names} == sparse
    kernels = "flash_mla", "cuda"  # of a model with many heads, and with few
    in_place = workloads.chunked(1, "flash_mla" + workloads.IN_PLACE)
    prefills = {workloads.chunked(chunks, kernel) for kernel in kernels for chunks in workloads.CHUNKS}
    steps = {workloads.chunked(1, kernel) for kernel in kernels}
    assert (set(generator.RESHARDED), set(generator.RESHARDED_STEPS)) == ({*prefills, in_place}, steps)


def test_the_suites_measure_what_the_table_holds() -> None:
    """Selections, and the context of a copy, of the cases that `nsa-plugin bench` runs."""
    bf16 = "sparse-mla-prefill-bf16", "sparse-mla-decode-bf16"
    pro = "v4-pro-prefill", "v4-pro-decode"
    for suite in ("sparse-mla-prefill", "sparse-mla-decode", *bf16, "v4-prefill", "v4-decode", *pro):
        for case in SUITES[suite].cases:
            fields = case.as_dict()
            name = timings.filed(str(fields["layout"]), (fields["topk"], fields.get("window", 0)))
            assert name in (timings.MORE_SELECTIONS if suite in pro else SELECTIONS)
    for suite in ("sparse-mla-prefill", "v4-prefill"):
        assert COPIED_CONTEXT in {case.number("kv") for case in SUITES[suite].cases}
