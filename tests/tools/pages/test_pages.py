"""The benchmark pages and plots, from records."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from ci import docs
from nsa_plugin.libraries.capabilities import Op
from nsa_plugin.libraries.manifest import supporting
from nsa_plugin.libraries.registry import OPS, REFERENCE, Registry
from nsa_plugin.tools.bench import record
from nsa_plugin.tools.bench.cases import BenchError
from nsa_plugin.tools.compare import record as comparison_record
from nsa_plugin.tools.compare.report import AGREEMENT_COLUMNS, serve_columns, tables
from nsa_plugin.tools.pages import comparisons, kernels, plots, site, summary
from nsa_plugin.tools.pages.markdown import FAILED, STOPPED
from tests.tools.pages.records import ROWS, one_record, row


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_has_a_line_a_case_and_only_what_varies() -> None:
    text = kernels.op_table("sparse_mla_prefill", ROWS)
    caption, _, header, _, *lines, _, errors = text.splitlines()
    assert "q 4096, kv 65536, topk 2048, layout v32_fp8" in caption
    assert "over stock" in caption
    assert cells(header) == ["heads", "floor µs", "stock", "ours", "best ÷ floor"]
    assert [cells(line) for line in lines] == [
        ["8", "400.0", "300.0", "480.0 (0.62×, 12 MiB)", "0.75"],
        ["16", "400.0", "2400", "800.0 (3.00×)", "2.00"],
    ]
    assert errors == "Largest error: stock 2.0e-04, ours 2.0e-04."


def test_provider_that_has_no_figure_for_a_case_leaves_a_dash() -> None:
    _, _, _, _, line, *_ = kernels.op_table("sparse_mla_prefill", ROWS[:3]).splitlines()
    assert cells(line) == ["8", "400.0", "300.0", "-", "0.75"]


def test_without_a_baseline_no_speed_up_is_shown() -> None:
    alone = row("ours", 800.0, baseline=None, baseline_us=None, speedup=None)
    text = kernels.op_table("sparse_mla_prefill", [alone])
    assert "speed-up" not in text
    assert "| 800.0 |" in text


def test_an_emulated_gpu_shows_rates_and_shares() -> None:
    host = {"gpu": "NVIDIA H100 80GB HBM3", "emulates": 86}
    most = kernels.emulated_tflops(host)
    assert most == pytest.approx(132 * 1.98 * 1024 / 1e3)
    assert kernels.emulated_tflops(host | {"gpu": "another"}) == kernels.emulated_tflops(host | {"emulates": 70}) == 0
    stock = row("stock", 800.0, tflops=200.0)
    ours = row("cuda, unions", 800.0, tflops=201.0)
    for limit, share in ((most, ", 75% of SM86's tensor cores"), (0.0, "")):
        text = kernels.op_table("sparse_mla_prefill", [stock, ours], emulated=("SM86", limit))
        assert "| 800.0 (200 TFLOPS, 50% of the limit) |" in text
        assert f"201 TFLOPS, 50% of the limit{share}) |" in text


def test_a_page_beside_each_record_has_its_provenance_gaps_and_plot(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    path = record.write(one_record(ROWS), folder)
    other = record.write(one_record([row("ours", 5.0)], suite="another"), folder)
    other.with_suffix(".svg").write_text("<svg/>")
    made = site.pages(folder)
    assert made.keys() == {path.with_suffix(".md"), other.with_suffix(".md"), folder / "records.md"}
    text = made[path.with_suffix(".md")]
    assert "# sparse-mla-prefill\n\nSparse prefill from the V3.2 fp8 cache" in text
    assert "- Record: [sparse-mla-prefill.json](sparse-mla-prefill.json), 2026-01-02, commit 0123abc\n" in text
    assert "- Command: `nsa-plugin bench sparse-mla-prefill`\n" in text
    assert "- Device: NVIDIA H200; measured rates: copy 4250.0 GB/s, bf16" in text
    assert "- Software: torch 2.11.0, triton 3.6.0, sgl-flash-mla 1.0.0" in text
    assert "Not supported:\n\n- fa3 for sparse_mla_prefill: layout is v32_fp8 (2 cases)" in text
    assert "Failed, so not timed:\n\n- x for sparse_mla_prefill: wrong result: NaN (heads 2, q 1)" in text
    assert "Not measured within the run's time budget: 1 cases." in text
    assert "![" not in text
    assert "![another](another.svg)" in made[other.with_suffix(".md")]
    index = made[folder / "records.md"]
    assert index.index("h200/sparse-mla-prefill.md") < index.index("h200/another.md")


@pytest.mark.parametrize(
    ("suite", "ends"),
    [
        ("sparse-mla-prefill-back-to-back", "; timed call after call, without emptying the L2 cache"),
        (
            "portable-sparse-mla-prefill",
            "; the plugin's kernels run as on a GPU with less shared memory and no fp8 instructions",
        ),
        (
            "sparse-mla-prefill-beside-rivals",
            "; beside kernels for few heads that SGLang and vLLM install and do not use by default",
        ),
    ],
)
def test_a_page_says_how_its_suite_was_run(suite: str, ends: str) -> None:
    plain = kernels.describe("sparse-mla-prefill")
    assert plain
    assert kernels.describe(suite) == plain + ends
    assert kernels.position(suite)[0] == kernels.position("sparse-mla-prefill")[0]


@pytest.mark.parametrize(
    ("suite", "tp", "starts"),
    [
        (
            "token-shard-tp4",
            4,
            "Resharding over 4 GPUs, 128 heads in all: each GPU attends with all heads for its share",
        ),
        ("token-shard-tp2-32heads", 2, "Resharding over 2 GPUs, 32 heads in all: "),
    ],
)
def test_a_resharding_suite_says_what_it_measures(suite: str, tp: int, starts: str, tmp_path: Path) -> None:
    case = row("ours", 1.0)["case"] | {"tp": tp, "heads": 32 if tp == 4 else 16}
    path = record.write(one_record([row("ours", 800.0, case=case)], suite=suite), tmp_path)
    made = site.pages(tmp_path)
    assert f"# {suite}\n\n{starts}" in made[path.with_suffix(".md")]
    assert "[How to read these tables](../../kernels.md#how-kernels-are-measured)." in made[path.with_suffix(".md")]
    assert f"| [{suite}](h200/{suite}.md) | {starts}" in made[tmp_path / "records.md"]


@pytest.mark.parametrize(
    ("providers", "ends"),
    [
        (["cuda", "torch.topk"], "the libraries' top-k kernels"),
        (["cuda", "sgl_kernel.fast_topk_v2"], "; with SGLang's top-k"),
        (
            ["deep_gemm in one piece, sgl_kernel.fast_topk_v2", "deep_gemm in one piece, vllm.top_k_per_row_prefill"],
            "; with SGLang's and vLLM's top-k",
        ),
    ],
)
def test_a_record_of_the_top_k_says_which_engines_kernels_it_has(providers: list[str], ends: str) -> None:
    about = kernels.about_record(one_record([row(provider, 1.0) for provider in providers], suite="topk"))
    assert about.startswith(kernels.describe("topk"))
    assert about.endswith(ends)
    assert kernels.about_record(one_record([row(providers[-1], 1.0)], suite="another")) == ""


def test_the_page_of_a_comparison_links_to_the_records_and_to_what_its_columns_mean() -> None:
    pages = [made for path, made in site.pages(docs.RECORDS).items() if path.stem.startswith(("sglang-", "vllm-"))]
    assert pages
    for text in pages:
        heading, first, *_ = text.split("\n\n")[1:]
        assert heading.startswith("# ")
        assert re.findall(r"\]\((.+?)\)", first) == [
            "../records.md#engine-comparisons",
            "../../compare.md#how-to-read-a-record",
        ]
    assert "\n## Engine comparisons\n" in (docs.RECORDS / "records.md").read_text()
    _, _, explained = (docs.RECORDS.parent / "compare.md").read_text().partition("\n## How to read a record\n")
    names = set(AGREEMENT_COLUMNS)
    for _, one in comparison_record.read(docs.RECORDS):
        names |= {*serve_columns(one), *(measure for _, measure, *_ in tables(one)[1])}
    assert {"in pairs", "ttft ms"} <= names
    assert [name for name in sorted(names) if name.replace("|", r"\|") not in explained] == []


def test_without_records_every_table_says_so(tmp_path: Path) -> None:
    assert site.pages(tmp_path).keys() == {tmp_path / "records.md"}
    assert {generate() for generate in site.generators(tmp_path).values()} == {summary.NOTHING}


def test_rewrite_brings_the_summary_and_every_page_up_to_date(tmp_path: Path) -> None:
    folder, page = tmp_path / "benchmarks", tmp_path / "benchmarks.md"
    path = record.write(one_record(ROWS), folder)
    page.write_text("before\n<!-- generated: kernel-highlights -->\nold\n<!-- end of kernel-highlights -->\nafter\n")
    assert set(site.rewrite(page, folder)) == {page, path.with_suffix(".md"), folder / "records.md"}
    text = page.read_text()
    assert text.startswith("before\n<!-- generated: kernel-highlights -->\nNo record is here yet.\n<!-- end of")
    assert text.endswith("-->\nafter\n")
    assert site.rewrite(page, folder) == []
    path.unlink()
    assert set(site.rewrite(page, folder)) == {path.with_suffix(".md"), folder / "records.md"}
    assert not path.with_suffix(".md").exists()


def test_summary_has_the_fastest_path_of_the_plugin_for_each_case(tmp_path: Path) -> None:
    rows = [
        row("flash_mla padded", 2400.0, baseline="flash_mla padded"),
        row("triton", 1200.0, baseline="flash_mla padded"),
        row("cuda", 800.0, baseline="flash_mla padded"),
        row("somebody else's", 1.0, baseline="flash_mla padded"),
        row("cuda", 3200.0, heads=64, baseline="flash_mla padded"),
        row("cuda", 1.0, q=512, baseline="flash_mla padded"),
    ]
    shared = row("cuda", 1.0, baseline="flash_mla padded")
    shared["case"] |= {"selection": "overlap 95%"}
    rows.append(shared)
    record.write(one_record(rows), tmp_path)
    _, _, *lines = site.generators(tmp_path)["kernel-highlights"]().splitlines()
    link = "[record](benchmarks/h200/sparse-mla-prefill.md)"
    assert [cells(line)[1:] for line in lines] == [
        ["heads 16, q 4096, kv 65536", "2,400 (flash_mla padded)", "800.0 (cuda)", "3.00×", link],
        ["heads 64, q 4096, kv 65536", "2,400 (flash_mla padded)", "3,200 (cuda)", "0.75×", link],
    ]


def test_a_highlight_beside_a_stand_in_gives_way_to_one_beside_an_engines_kernel() -> None:
    def measured(heads: int, baseline: str) -> dict[str, Any]:
        case = {"heads": heads, "q": 8192, "kv": 131072, "topk": 2048, "budget_mib": 512}
        return {"op": "indexer_topk", "case": case, "provider": "cuda", "baseline": baseline} | {
            "median_us": 10.0,
            "baseline_us": 20.0,
        }

    stand_in, engines = "deep_gemm in one piece, torch.topk", "deep_gemm in one piece, sgl_kernel.fast_topk_v2"
    one = (Path("one.json"), {"suite": "indexer-topk", "rows": [measured(32, stand_in), measured(64, stand_in)]})
    other = (Path("other.json"), {"suite": "indexer-topk", "rows": [measured(64, engines)]})
    found = {(path.stem, row["case"]["heads"]) for _, path, row in summary.highlights([one, other])}
    assert found == {("one", 32), ("other", 64)}
    assert {path.stem for _, path, _ in summary.highlights([one])} == {"one"}


def test_the_summary_looks_at_every_library_that_may_select() -> None:
    """A library that decisions choose, and the page forgets, would leave its page with a slower figure."""
    (indexer,) = (highlight for highlight in summary.HIGHLIGHTS if highlight.op == Op.INDEXER_TOPK)
    assert set(indexer.plugin) == set(supporting(Op.INDEXER_TOPK)) - {REFERENCE}


def served(measure: str, **more: Any) -> dict[str, Any]:
    return {
        "op": "serve",
        "case": {"heads": 16, "requests": 1, "prompt": 8192, "new_tokens": 1, "measure": measure},
        "speedup": 1.5,
        "median": 20.0,
        "q1": 19.0,
        "q3": 21.0,
        "baseline_median": 30.0,
        "baseline_q1": 29.0,
        "baseline_q3": 31.0,
    } | more


def comparison(rows: list[dict[str, Any]], *, holds: bool = True, gpu: str = "NVIDIA H200") -> dict[str, Any]:
    agrees = {"name": "the plugin agrees, request by request", "holds": holds, "detail": ""}
    return {
        "suite": "sglang-1.0-v32",
        "engine": "sglang 1.0",
        "host": {"gpus": 1, "gpu": gpu},
        "model": {"architectures": ["DeepseekV32ForCausalLM"]},
        "rows": rows,
        "verdict": {"holds": holds, "checks": [agrees]},
    }


@pytest.mark.parametrize(
    ("more", "cell"),
    [
        ({}, "**1.50×**"),
        ({"paired_speedup": 1.4, "baseline_again_paired_speedup": 0.9}, "**1.40×** (0.90×)"),
        (
            {"paired_speedup": 1.4, "baseline_again_paired_speedup": 1.2},
            "1.40× (1.20×)",
        ),  # half of it is noise
        ({"q3": 29.5}, "1.50×"),  # the readings overlap
        ({"baseline_again_q1": 22.0, "baseline_again_q3": 31.0}, "**1.50×**"),
        ({"baseline_again_q1": 20.5, "baseline_again_q3": 31.0}, "1.50×"),  # with those of the second stock server
        ({"speedup": 0.5, "q1": 59.0, "q3": 61.0}, "**0.50×**"),
        ({"again_speedup": 1.45, "again_q1": 20.0, "again_q3": 22.0}, "**1.50× and 1.45×**"),
        (
            {"again_paired_speedup": 1.4, "again_speedup": 1.45, "again_q1": 20.0, "again_q3": 22.0},
            "**1.50× and 1.40×**",
        ),
        ({"again_speedup": 1.02, "again_q1": 28.0, "again_q3": 29.5}, "1.50× and 1.02×"),  # the second overlaps
        ({"again_speedup": 0.9, "again_q1": 32.0, "again_q3": 34.0}, "1.50× and 0.90×"),  # in the other direction
        (
            {"again_speedup": 1.1, "again_q1": 27.0, "again_q3": 28.0, "baseline_again_speedup": 1.06},
            "1.50× and 1.10× (1.06×)",
        ),  # of the second, more than half is noise
    ],
)
def test_a_speed_up_is_bold_where_the_readings_tell_the_servers_apart(more: dict[str, Any], cell: str) -> None:
    path = Path("benchmarks/h200/x.json")
    text = summary.first_token([(path, comparison([served("ttft_ms", **more)]))])
    assert cells(text.splitlines()[0]) == ["server", "8,192", "record"]
    assert cells(text.splitlines()[2]) == ["SGLang 1.0, V3.2, 16 heads", cell, "[record](benchmarks/h200/x.md)"]


def test_other_loads_have_a_line_each_with_every_measure() -> None:
    mixed = {"heads": 16, "requests": 40, "prompt": 1000, "new_tokens": 32, "long": 60000}
    many = {"heads": 16, "requests": 100, "prompt": 2000, "new_tokens": 1}
    rows = [
        served("", case=many | {"measure": "input_tokens_per_s", "in_one": True}, speedup=3.0),  # on its own page
        served("", case=mixed | {"measure": "ttft_ms"}),
        served("", case=mixed | {"measure": "long_ttft_ms"}, q3=30.0),
        served("", case=many | {"measure": "input_tokens_per_s"}, speedup=2.0),
        served("ttft_ms"),  # one prompt alone is not among them
    ]
    header, _, *lines = summary.loads([(Path("h200/x.json"), comparison(rows))]).splitlines()
    measures = ["first token", "first token of the long prompt", "throughput"]
    assert cells(header) == ["server", "load", *measures, "record"]
    assert [cells(line)[1:-1] for line in lines] == [
        ["40 prompts of 1,000 tokens, 32 out, behind one of 60,000", "**1.50×**", "1.50×", "-"],
        ["100 prompts of 2,000 tokens", "-", "-", "**2.00×**"],
    ]


def test_a_load_is_shown_of_the_newest_version_that_was_timed_with_it() -> None:
    other = {"heads": 16, "requests": 1, "prompt": 2000, "new_tokens": 1, "measure": "ttft_ms"}
    old = comparison([served("ttft_ms"), served("ttft_ms", case=other)])
    new = comparison([served("ttft_ms")]) | {"engine": "sglang 1.10", "suite": "sglang-1.10-v32-context100000-speed"}
    older = comparison([served("ttft_ms")]) | {"engine": "sglang 1.9", "suite": "sglang-1.9-v32"}
    eager = comparison([served("ttft_ms")]) | {"engine": "sglang 1.9", "suite": "sglang-1.9-v32-eager"}
    given = [(Path(f"h200/{name}.json"), one) for name, one in (("o", old), ("n", new), ("p", older), ("e", eager))]
    lines = [cells(line) for line in summary.first_token(given).splitlines()[2:]]
    assert [(line[1] != "-", line[2] != "-", line[3]) for line in lines] == [
        (True, False, "[record](benchmarks/h200/o.md)"),  # newer versions were not timed with 2000 tokens
        (False, True, "[record](benchmarks/h200/n.md)"),
        (False, True, "[record](benchmarks/h200/e.md)"),  # served otherwise
    ]


def test_two_servers_of_each_kind_stand_for_one() -> None:
    def row(prompt: int, **more: Any) -> dict[str, Any]:
        case = {"heads": 16, "requests": 1, "prompt": prompt, "new_tokens": 1, "measure": "ttft_ms"}
        return served("ttft_ms", case=case, **more)

    once = comparison([row(500), row(2000), row(8192), row(32000)]) | {"suite": "sglang-1.0-v32-speed"}
    twice = comparison([row(prompt, again_speedup=1.4, again_q1=20.0, again_q3=22.0) for prompt in (8192, 32000)])
    both = [(Path("h200/o.json"), once), (Path("h200/t.json"), twice | {"suite": "sglang-1.0-v32-speed-two-servers"})]
    lines = [cells(line) for line in summary.first_token(both).splitlines()]
    assert lines[0] == ["server", "2,000", "8,192", "32,000", "record"]
    assert sorted(line[1:-1] for line in lines[2:]) == [
        ["**1.50×**", "-", "-"],
        ["-", "**1.50× and 1.40×**", "**1.50× and 1.40×**"],
    ]


def test_the_same_load_on_another_gpu_has_a_line_of_its_own_with_its_name() -> None:
    old = comparison([served("ttft_ms")])
    new = comparison([served("ttft_ms")], gpu="NVIDIA H100 80GB HBM3") | {"engine": "sglang 1.1"}
    lines = summary.first_token([(Path("h200/o.json"), old), (Path("h100/n.json"), new)]).splitlines()[2:]
    names = [cells(line)[0] for line in lines]
    assert names == ["SGLang 1.0, V3.2, 16 heads", "SGLang 1.1, V3.2, 16 heads, H100"]


def test_servers_are_in_the_order_of_engines_models_and_numbers_of_heads() -> None:
    lines = [
        [f"{name}, {heads} heads"]
        for name in ("vLLM 0.9, V4", "vLLM 0.8, V3.2", "SGLang 1.0, V4")
        for heads in (128, 8)
    ]
    ordered = [line[0] for line in sorted(lines, key=summary._by_server)]
    assert ordered == [
        "SGLang 1.0, V4, 8 heads",
        "SGLang 1.0, V4, 128 heads",
        "vLLM 0.8, V3.2, 8 heads",
        "vLLM 0.8, V3.2, 128 heads",
        "vLLM 0.9, V4, 8 heads",
        "vLLM 0.9, V4, 128 heads",
    ]


def test_a_server_that_reshards_because_it_is_asked_to_says_so() -> None:
    asked = comparison([served("ttft_ms")]) | {"servers": {"plugin": {"settings": {"token_shard": "on"}}}}
    auto = comparison([served("ttft_ms")]) | {"servers": {"plugin": {"settings": {"token_shard": "auto"}}}}
    for made, name in ((asked, "SGLang 1.0, V3.2, 16 heads, token_shard=on"), (auto, "SGLang 1.0, V3.2, 16 heads")):
        (line,) = summary.first_token([(Path("h200/o.json"), made)]).splitlines()[2:]
        assert cells(line)[0] == name
        assert summary.reshards_if_asked(made) is name.endswith("on")


@pytest.mark.parametrize("settings", [{"mha_max_kv": 2048}, {"split_prefill": "on"}, {"mha_max_kv": 0}])
def test_a_server_told_what_to_attend_densely_is_not_in_the_summary(settings: dict[str, Any]) -> None:
    given = {"mha_max_kv": -1, "split_prefill": "off"}
    many = served("output_tokens_per_s")
    rows = [served("ttft_ms"), many | {"case": many["case"] | {"requests": 4, "new_tokens": 9}}]
    told, default = (
        (Path(f"h200/{n}.json"), comparison(rows) | {"servers": {"plugin": {"settings": one}}})
        for n, one in enumerate((given | settings, given))
    )
    for table in (summary.first_token, summary.loads):
        assert table([told]) == summary.NOTHING
        assert table([told, default]) == table([default]) != summary.NOTHING


def test_prompts_that_stock_fails_at() -> None:
    limit = {
        "op": "limit",
        "case": {"heads": 64},
        "answered": [1000, 3000],
        "baseline_answered": [],
        "baseline_failed_at": 1000,
    }
    text = summary.limits([(Path("h200/x.json"), comparison([limit]))])
    assert cells(text.splitlines()[2])[1:4] == ["no length that was tried", "1,000 tokens", "3,000 tokens"]


OTHER = "failed {}, not its tolerance (kept for the record)"


def test_a_comparison_that_failed_is_labelled_and_linked() -> None:
    agreement = {"op": "agreement", "provider": "nsa-plugin"}
    records = [
        (Path("h200/a.json"), comparison([agreement])),
        (Path("h200/b.json"), comparison([agreement], holds=False)),
        (Path("h200/c.json"), comparison([served("ttft_ms")])),  # no answers were compared
    ]
    (line,) = summary.correctness(records).splitlines()[2:]
    assert cells(line) == [
        "SGLang 1.0, V3.2",
        "[1](benchmarks/records.md#engine-comparisons)",
        f"[{FAILED}](benchmarks/h200/b.md)",
    ]


@pytest.mark.parametrize(
    ("failed", "shown"),
    [
        ([], "speed only; answers were not compared"),
        (["complete"], f"**{STOPPED}**"),
        (["the prefix cache was hit"], f'**{OTHER.format("one check")}: "the prefix cache was hit"**'),
        (["complete", "the plugin served"], f'**{OTHER.format("2 checks")}: "complete", "the plugin served"**'),
        (["the prefix cache was hit", "the plugin agrees in the mean of answers"], f"**{FAILED}**"),
    ],
)
def test_only_a_check_of_agreement_is_a_failed_tolerance(failed: list[str], shown: str) -> None:
    record = comparison([served("ttft_ms")], holds=not failed)
    checks = [{"name": name, "holds": False, "detail": ""} for name in failed]
    agrees = {"name": "the plugin agrees, request by request", "holds": True, "detail": ""}
    record["verdict"]["checks"] = [agrees, *checks]
    assert comparisons.result(record) == shown
    record["rows"] = [{"op": "agreement", "provider": "nsa-plugin"}]  # answers were compared until then
    (line,) = summary.correctness([(Path("h200/a.json"), record)]).splitlines()[2:]
    assert cells(line)[2] == (f"[{shown.strip('*')}](benchmarks/h200/a.md)" if failed else "0")


def mha(provider: str, q: int, median: float, **beside: float) -> dict[str, Any]:
    return row(provider, median, q=q, op="mha_one_shot", **beside)


def test_crossover_adds_what_the_engine_computes_beside_each() -> None:
    rows = [
        mha("dense", 256, 10.0, up_projection_us=5.0),
        mha("sparse", 256, 10.0, absorb_us=9.0),
        mha("dense", 512, 20.0, up_projection_us=30.0),
        mha("slow dense", 512, 90.0, up_projection_us=30.0),
        mha("sparse", 512, 30.0, absorb_us=5.0),
        mha("dense", 1024, 20.0, up_projection_us=1.0),  # nothing to compare with
    ]
    assert kernels.crossovers(rows).splitlines()[-1] == "- 16 heads: up to 256 tokens, not at 512"
    assert kernels.crossovers(rows[:2]).endswith("at every length measured, 256 to 256 tokens")
    assert kernels.crossovers(rows[2:]).endswith("at no length measured, 512 to 512 tokens")
    assert kernels.crossovers(ROWS) == ""


def test_panels_show_what_varies_alone() -> None:
    rows = [row("ours", 1.0, heads=h, q=q) for q in (4096, 512) for h in (8, 16, 32)]
    found = {panel.axis: panel for panel in plots.panels(rows)}
    assert found.keys() == {"q", "heads"}
    assert found["heads"].fixed["q"] == 4096  # the first of two groups of equal size
    assert len(found["heads"].rows) == 3
    assert [one["case"]["q"] for one in found["q"].rows] == [4096, 512]


def test_panels_where_queries_are_all_the_keys() -> None:
    rows = [row("ours", 1.0) | {"case": {"heads": 16, "q": q, "kv": q}} for q in (256, 512, 1024)]
    panel = next(panel for panel in plots.panels(rows) if panel.axis == "q")
    assert panel.fixed == {"heads": 16}
    assert len(panel.rows) == 3


def test_floors_of_ops_with_other_work_are_drawn_apart() -> None:
    rows = [row(provider, 1.0, heads=h, floor_us=floor) for h, floor in ((8, 1.0), (16, 2.0)) for provider in "ab"]
    (panel,) = plots.panels(rows[:3])  # b has no figure for 16 heads
    assert plots.floors(panel) == {"floor": {8: 1.0, 16: 2.0}}
    rows += [row("c", 1.0, heads=h, floor_us=9.0) for h in (8, 16)]
    (panel,) = plots.panels(rows)
    assert plots.floors(panel) == {
        "floor of this plugin: a": {8: 1.0, 16: 2.0},
        "floor of this plugin: c": {8: 9.0, 16: 9.0},
    }


def test_a_kernel_has_one_colour_in_every_plot_and_the_legend_tells_plugin_and_stock_apart() -> None:
    names = ["flash_mla padded", "flash_mla", "triton", "token_shard deep_gemm, flash_mla, 2 chunks", "sparse_mla cuda"]
    names += ["deep_gemm in one piece, flashinfer.top_k_ragged_transform"]
    drawn = plots.styles(names)
    assert [drawn[name]["label"] for name in names] == [
        "stock: FlashMLA padded",
        "this plugin: FlashMLA",
        "this plugin: Triton",
        "this plugin: resharded, DeepGEMM, FlashMLA, 2 chunks",
        "this plugin: sparse, CUDA",
        "stock: DeepGEMM in one piece, FlashInfer top_k_ragged_transform",
    ]
    flash_mla = [drawn[names[position]] for position in (0, 1, 3)]
    assert len({one["color"] for one in flash_mla}) == 1
    assert len({one["marker"] for one in flash_mla}) == 3
    assert drawn["triton"]["color"] == plots.styles(["triton"])["triton"]["color"] != flash_mla[0]["color"]
    assert plots.styles(["a new one"]) == plots.styles(["a new one"])


def test_scaling_is_over_the_records_of_every_group_and_the_largest_groups_alone(tmp_path: Path) -> None:
    def group(ranks: int, suite: str = "token-shard") -> dict[str, Any]:
        shapes = [{"heads": 128 // ranks, "q": q, "kv": 65536, "tp": ranks} for q in (8192, 2048)]
        rows = [row(name, 100.0 / ranks) | {"case": shape} for shape in shapes for name in ("ours", "stock")]
        return one_record(rows, suite=f"{suite}-tp{ranks}")

    records = {ranks: group(ranks) for ranks in (2, 8, 4)}
    folder = record.write(records[2], tmp_path).parent
    assert plots.scaling(records[2], folder) == []  # nothing varies yet
    for made in (records[8], records[4], group(16, "token-shard-other"), one_record(ROWS)):
        record.write(made, tmp_path)
    assert plots.scaling(records[2], folder) == plots.scaling(records[4], folder) == []
    assert plots.scaling(one_record(ROWS), folder) == []
    (panel,) = plots.scaling(records[8], folder)
    assert (panel.axis, panel.fixed) == ("tp", {"q": 8192, "kv": 65536})
    assert [(one["case"]["tp"], one["median_us"]) for one in panel.rows if one["provider"] == "ours"] == [
        (2, 50.0),
        (4, 25.0),
        (8, 12.5),
    ]
    (folder / "token-shard-tp4.json").write_text("{}")
    with pytest.raises(BenchError, match=r"token-shard-tp4\.json: not a record"):
        plots.scaling(records[8], folder)


def test_plots_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(BenchError, match=r"pip install matplotlib"):
        plots.draw(one_record(ROWS), tmp_path / "x.svg")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot_is_the_same_for_the_same_record(tmp_path: Path) -> None:
    texts = []
    for name in ("a.svg", "b.svg"):
        assert plots.draw(one_record(ROWS), tmp_path / name)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
    for word in (b"query heads", b"ours", b"stock", b"floor", b"NVIDIA H200"):
        assert word in texts[0]
    assert not plots.draw(one_record(ROWS[:2]), tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_kernels_page_says_what_a_library_takes_and_names_every_provider() -> None:
    table = docs.kernels_table()
    for op in OPS:
        assert f"| `{op}` | " in table
        for provider in Registry().providers(op):
            assert provider.name == REFERENCE or f"| `{op}` | {provider.name} | " in table
    if "flash_mla" in {provider.name for provider in Registry().providers("sparse_mla_prefill")}:
        assert "| `sparse_mla_prefill` | flash_mla | SM90 | bf16 | 64 or 128 | multiples of 128 |" in table
