"""The requests, their form for SGLang, and how its answers are read."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from nsa_plugin.libraries.capabilities import Op, RowLimit
from nsa_plugin.tools.compare.load import SpeedLoad, _check_answers, _readings, _Timed, left_out, loads
from nsa_plugin.tools.compare.model import SPEC, SPEC_V4, edges, row_edges, selects_above
from nsa_plugin.tools.compare.model import digest as checkpoint_digest
from nsa_plugin.tools.compare.workload import AGREEMENT_CASES, SAME, prompt_lengths, until_it_fails, workload
from nsa_plugin.tools.serving.common import token_count
from nsa_plugin.tools.serving.engine import CompareError
from nsa_plugin.tools.serving.sglang import SglangEngine

ENGINE = SglangEngine()


def test_lengths_on_a_gpu_are_those_that_matter_there() -> None:
    assert prompt_lengths(2048, 32000) == [32, 700, 1500, 2047, 2048, 2049, 3000, 6000, 12000, 32000]


def test_lengths_of_v4_are_around_its_window_and_its_ratios_too() -> None:
    config = SPEC_V4.config()
    assert (selects_above(config), edges(config)) == (2048, [128, 2052])
    lengths = prompt_lengths(selects_above(config), 32000, edges(config))
    more = {127, 128, 129, 2051, 2052, 2053}
    assert set(lengths) == {*prompt_lengths(2048, 32000), *more}
    assert lengths == sorted(lengths)
    assert selects_above(SPEC.config()) == SPEC.index_topk
    assert edges(SPEC.config()) == []


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (2048, [2049]),
        (8192, [8193]),
        (11673, [11622, 11623, 11673, 11674]),
        (16384, [11622, 11623, 11673, 11674, 16384, 16385]),
        (32768, [11622, 11623, 11673, 11674, 16384, 32768, 32769]),
        (None, [11622, 11623, 11673, 11674, 16384, 32768]),
    ],
)
def test_prefills_of_v4_have_the_rows_that_matter_as_far_as_a_chunk_holds_them(
    chunk: int | None, expected: list[int]
) -> None:
    """The last one is a chunk and one token: its second prefill has one query token. Longer prompts are split."""
    assert row_edges(SPEC_V4.config(), chunk) == expected
    assert row_edges(SPEC.config(), chunk) == []


def test_the_row_edges_are_those_of_the_first_flash_mla_and_of_sglangs_threshold() -> None:
    first = RowLimit(op=Op.SPARSE_MLA_DECODE, words_per_row=5, words=1)
    edges = row_edges(SPEC_V4.config(), 32768)
    assert {first.rows(227 << 10), first.rows(227 << 10) + 1} <= set(edges)
    assert {first.rows(228 << 10), first.rows(228 << 10) + 1} <= set(edges)  # 11673: reckoned with 228 KiB


def test_prompts_that_are_to_make_stock_fail_are_ever_longer() -> None:
    group = until_it_fails(4096, [300, 100, 200, 100])
    assert [(request.name, len(request.prompt)) for request in group.requests] == [
        ("p100", 100),
        ("p200", 200),
        ("p300", 300),
    ]


@pytest.mark.parametrize(("index_topk", "context"), [(64, 128), (64, 300), (2048, 4096), (2048, 32000)])
def test_no_prompt_is_longer_than_the_context_and_pairs_hold_the_same(index_topk: int, context: int) -> None:
    rows = (context // 2, context - 1, context + 1)
    groups = {group.name: group for group in workload(4096, index_topk, context, row_edges=rows)}
    assert [len(request.prompt) for request in groups["rows"].requests] == [context // 2, context - 1]
    for group in groups.values():
        names = [request.name for request in group.requests]
        assert len(set(names)) == len(names)
        for request in group.requests:
            assert 0 < len(request.prompt) <= context
            assert all(10 <= token < 4096 for token in request.prompt)
            assert request.prompt_logprobs < len(request.prompt)
    for one, other in SAME:
        prompts = [{request.name: request.prompt for request in groups[name].requests} for name in (one, other)]
        common = prompts[0].keys() & prompts[1].keys()
        assert common == prompts[1].keys()
        assert all(prompts[0][name] == prompts[1][name] for name in common)
    again = [r for r in groups["prefix"].requests if r.cached_tokens]
    assert len({len(request.prompt) > index_topk for request in again}) == 2  # some below index_topk, some above
    prompts = [request.prompt for request in groups["prefix"].requests]
    for first, other, turn in (prompts[:3], prompts[3:]):
        assert other[: len(first) // 2] == first[: len(first) // 2]
        assert other[: len(first)] != first
        assert turn[: len(first)] == first
        assert len(turn) > len(first)


def test_prompts_do_not_depend_on_the_cases() -> None:
    whole = {group.name: group for group in workload(4096, 64, 300, row_edges=[200])}
    seen = set()
    for case in AGREEMENT_CASES:
        for group in workload(4096, 64, 300, [case], row_edges=[200]):
            assert group == whole[group.name]
            seen.add(group.name)
    assert seen == whole.keys()


def test_context_without_a_selection_is_refused() -> None:
    with pytest.raises(CompareError, match=r"from more than 2048 tokens, so the context needs at least .* 4096"):
        workload(4096, 2048, 4000)


def test_loads_fit_the_context() -> None:
    assert [load.name for load in loads(32000)] == [
        *("decode-32x4096-in-one", "ttft-2000", "ttft-8192", "ttft-32000"),
        *("prefill-100x2000", "prefill-100x2000-in-one", "decode-16x4096", "steps-4096-512-out", "turns-12x3000-1000"),
    ]
    assert [load.name for load in loads(300)] == [
        "decode-32x300-in-one",
        "ttft-300",
        "prefill-100x300",
        "prefill-100x300-in-one",
        "decode-16x300",
        "steps-300-300-out",
        "turns-12x300-300",
    ]
    assert loads(300, ["single"]) == []


def test_the_prompts_of_a_load_may_have_lengths_in_turn() -> None:
    (turns,) = loads(32000, ["turns"])
    assert (turns.requests, turns.lengths, turns.prompt) == (24, [3000, 1000] * 12, 2000)
    assert (turns.in_one, turns.measures) == (True, ("input_tokens_per_s",))
    (mixed,) = loads(60_000, ["mixed"])
    assert mixed.lengths == [1000] * 40


@pytest.mark.parametrize(
    ("answers", "tokens", "says"), [(2, 1, ""), (1, 1, "1 answers to 2"), (2, 2, "2 tokens instead of 1")]
)
def test_all_prompts_of_one_request_are_answered(answers: int, tokens: int, says: str) -> None:
    load = SpeedLoad(name="x", case="prefill", requests=2, prompt=3, new_tokens=1, repeat=1, in_one=True)
    assert load.measures == ("input_tokens_per_s",)
    text = json.dumps([{"meta_info": {"output_token_logprobs": [[-1.0, 5, None]] * tokens}}] * answers)
    with pytest.raises(CompareError, match=says) if says else nullcontext():
        _check_answers(ENGINE, load, text)


def test_prompts_that_are_timed_alone_may_be_named_and_the_longest_are_repeated_least() -> None:
    named = loads(131072, ["ttft"], [128000, 13000, 30000])
    assert [load.name for load in named] == ["ttft-13000", "ttft-30000", "ttft-128000"]
    assert [load.repeat for load in named] == [9, 9, 5]
    assert [load.repeat for load in loads(32000, ["ttft"])] == [21, 15, 9]


def test_the_mixed_load_is_left_out_where_the_context_is_too_short_for_it() -> None:
    (mixed,) = loads(60_000, ["mixed"])
    assert (mixed.name, mixed.long, mixed.requests, mixed.prompt) == ("mixed-60000-40x1000", 60_000, 40, 1000)
    assert left_out(60_000, ["mixed"]) == {}
    assert loads(59_999, ["mixed"]) == []
    assert left_out(59_999, ["mixed"]) == {
        mixed.name: "it has a prompt of 60000 tokens; --context allows 59999",
    }
    assert left_out(59_999, ["ttft"]) == {}


def test_readings_of_short_requests_are_without_those_of_the_long_one() -> None:
    load = SpeedLoad(name="x", case="mixed", requests=3, prompt=10, new_tokens=1, repeat=1, long=600)
    found = _readings(load, [_Timed(first=first, tokens=1) for first in (9.0, 1.0, 2.0, 3.0)], 9.0)
    assert {name: found[name] for name in load.measures} == {"ttft_ms": 2000, "long_ttft_ms": 9000}


def test_output_tokens_are_those_asked_for() -> None:
    in_one, usual = loads(32000, ["decode"])
    (long,) = loads(32000, ["decode"], output_tokens=4096)
    assert (usual.name, usual.new_tokens, usual.repeat) == ("decode-16x4096", 256, 21)
    assert (in_one.requests, in_one.new_tokens, in_one.repeat, in_one.in_one) == (32, 256, 9, True)
    assert in_one.measures == ("output_tokens_per_s", "first_output_tokens_per_s")
    assert (long.name, long.prompt, long.new_tokens, long.repeat) == ("decode-16x4096-4096-out", 4096, 4096, 3)


def test_numbers_of_flags() -> None:
    read = {"8192": 8192, "8k": 8000, "8K": 8192, "1.5k": 1500, "1M": 1 << 20}
    assert {text: token_count(text) for text in read} == read
    assert [token_count(text) for text in (None, "", "auto", "-1", "0", "8x")] == [None] * 6


def test_a_group_that_asks_for_something_else_has_another_digest() -> None:
    (one, again, *_) = workload(256, 64, 136, ["single"])
    assert one.digest() == workload(256, 64, 136, ["single", "forced"])[0].digest()
    others = [again, *workload(256, 64, 136, ["single"], seed=8)[:1], *workload(256, 64, 140, ["single"])[:1]]
    others += [replace(one, how="at once"), replace(one, requests=one.requests[:-1])]
    assert len({group.digest() for group in (one, *others)}) == 6


def test_a_checkpoint_of_other_weights_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    found = {checkpoint_digest(tmp_path)}
    for content in (b"a" * (3 << 20), b"a" * (3 << 20) + b"b", b"b" + b"a" * (3 << 20), b"ab"):
        weights.write_bytes(content)
        found.add(checkpoint_digest(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    found.add(checkpoint_digest(tmp_path))
    weights.rename(tmp_path / "model-1.safetensors")
    found.add(checkpoint_digest(tmp_path))
    assert len(found) == 7
    (tmp_path / "config.json").unlink()
    with pytest.raises(CompareError, match="cannot be read"):
        checkpoint_digest(tmp_path)


def test_readings_of_a_load() -> None:
    timed = _Timed()
    for tokens, now in ((1, 0.5), (1, 0.6), (3, 0.9), (4, 1.0)):  # an event without a new token, and one with two
        timed.event(tokens, now)
    load = SpeedLoad(name="x", case="decode", requests=1, prompt=100, new_tokens=4, repeat=1)
    found = _readings(load, [timed], 2.0)
    assert found["ttft_ms"] == pytest.approx(500)
    assert timed.gaps == pytest.approx([0.2, 0.2, 0.1])
    assert found["itl_ms"] == pytest.approx(200)
    assert (found["input_tokens_per_s"], found["output_tokens_per_s"]) == (50, 2)
    with pytest.raises(CompareError, match="4 tokens instead of 5"):
        _readings(SpeedLoad(name="x", case="decode", requests=1, prompt=100, new_tokens=5, repeat=1), [timed], 2.0)


def test_bodies_of_sglang() -> None:
    one = ENGINE.body([[1, 2, 3, 4]], 5, top=2, prompt_logprobs=3)
    assert one["input_ids"] == [1, 2, 3, 4]
    assert one["logprob_start_len"] == 1
    assert one["sampling_params"] == {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    two = ENGINE.body([[1, 2, 3, 4], [5, 6]], 5, top=2)
    assert two["input_ids"] == [[1, 2, 3, 4], [5, 6]]
    assert two["logprob_start_len"] == [-1, -1]
    assert "return_logprob" not in ENGINE.body([[1]], 1, stream=True)


def test_answers_of_sglang() -> None:
    meta = {
        "output_token_logprobs": [[-0.123456789, 7, None], [None, 8, None]],
        "output_top_logprobs": [[[-0.123456789, 7, None], [-2.0, 9, None]], [[-1.0, 8, None]]],
        "input_token_logprobs": [[None, 3, None], [-4.5, 4, None]],
        "cached_tokens": 64,
        "finish_reason": {"type": "length", "length": 2},
    }
    (one,) = ENGINE.answers({"meta_info": meta})
    assert one.token_ids == (7, 8)
    assert one.logprobs[0] == -0.12346
    assert math.isnan(one.logprobs[1])
    assert one.top[0] == {7: -0.12346, 9: -2.0}
    assert one.prompt_logprobs == (-4.5,)
    assert (one.cached_tokens, one.error) == (64, "")
    (aborted,) = ENGINE.answers([{"meta_info": {**meta, "finish_reason": {"type": "abort", "message": "too long"}}}])
    assert aborted.error == "too long"
    with pytest.raises(CompareError, match="not as expected"):
        ENGINE.answers({"error": "no"})


def test_an_answer_without_log_probabilities_has_its_tokens() -> None:
    meta = {"cached_tokens": 0, "finish_reason": {"type": "length", "length": 2}}
    (one,) = ENGINE.answers({"output_ids": [7, 8], "meta_info": meta})
    assert (one.token_ids, one.logprobs, one.top, one.error) == ((7, 8), (), (), "")


def test_prefills_of_two_kinds_are_counted_from_the_metrics() -> None:
    text = """# TYPE sglang:nsa_plugin_combined_prefills_total counter
sglang:nsa_plugin_combined_prefills_total{kind="split",tp_rank="0"} 3.0
sglang:nsa_plugin_combined_prefills_total{kind="split",tp_rank="4"} 2.0
sglang:nsa_plugin_combined_prefills_total{kind="mixed",tp_rank="0"} 1.0
sglang:nsa_plugin_combined_prefills_created{kind="mixed",tp_rank="0"} 1.7e9
"""
    assert dict(ENGINE.combined(text)) == {"split": 5, "mixed": 1}
    assert ENGINE.combined("sglang:num_running_reqs 0.0\n") == {}


def test_resharded_query_tokens_are_counted_by_phase() -> None:
    text = """sglang:nsa_plugin_resharded_query_tokens_total{phase="extend",tp_rank="0"} 8192.0
sglang:nsa_plugin_resharded_query_tokens_total{phase="extend",tp_rank="4"} 8192.0
sglang:nsa_plugin_resharded_query_tokens_total{phase="decode",tp_rank="0"} 64.0
sglang:nsa_plugin_query_tokens_total{attention="sparse_decode",phase="decode",provider="cuda"} 99.0
"""
    assert dict(ENGINE.resharded(text)) == {"extend": 16384, "decode": 64}


def test_short_and_long_prompts_alternate_so_that_a_chunk_has_both() -> None:
    alone, batch = workload(1000, 2048, 32000, ["interleaved"])
    assert (alone.how, batch.how) == ("one by one", "one batch")
    assert alone.requests == batch.requests
    counts = [len(request.prompt) for request in batch.requests]
    assert all(count > 2048 for count in counts[::2])
    assert all(count <= 2048 for count in counts[1::2])
    # However a chunk of 8192 tokens begins, it has both kinds: more than 512 tokens of short prompts among them.
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    for first in range(0, sum(counts) - 8192, 64):
        inside = [
            min(end, first + 8192) - max(end - count, first)
            for count, end in zip(counts, ends, strict=True)
            if count <= 2048 and end > first and end - count < first + 8192
        ]
        assert sum(inside) >= 512


def test_the_prompts_that_sglang_mixes_ask_for_no_log_probabilities() -> None:
    once, again = workload(1000, 2048, 32000, ["mixed-chunk"])
    assert (once.how, once.top, again.how, again.top) == ("at once", 0, "at once", 0)
    assert {one.name for one in once.requests} == {one.name for one in again.requests}
    assert sum(len(one.prompt) for one in once.requests) > 4 * 8192
    assert sum(len(one.prompt) > 2048 for one in once.requests) >= 10
    assert max(len(one.prompt) for one in once.requests) <= 8192


def test_routes_from_the_metrics_are_summed_over_what_else_tells_them_apart() -> None:
    text = """# TYPE sglang:nsa_plugin_batches_total counter
sglang:nsa_plugin_batches_total{attention="sparse_decode",phase="decode",provider="cuda",tp_rank="0"} 3.0
sglang:nsa_plugin_batches_total{attention="sparse_decode",phase="decode",provider="cuda",tp_rank="1"} 3.0
sglang:nsa_plugin_batches_total{attention="mha_one_shot",phase="extend",provider="fa3",tp_rank="0"} 1.0
sglang:nsa_plugin_batches_created{attention="mha_one_shot",phase="extend",provider="fa3",tp_rank="0"} 1.7e9
sglang:num_running_reqs{engine_type="unified"} 0.0
"""
    assert dict(ENGINE.routes(text)) == {"decode/sparse_decode/cuda": 6, "extend/mha_one_shot/fa3": 1}


def test_facts_from_the_flags() -> None:
    plain = ENGINE.facts([], "v3.2")
    assert (plain["kv"], plain["tp"], plain["attention_tp"], plain["variant"]) == ("bf16", 1, 1, [])
    assert plain["prefix_cache"]
    assert ENGINE.facts([], "v4")["kv"] == "fp8"
    flags = "--tp 8 --dp-size=4 --enable-dp-attention --kv-cache-dtype fp8_e4m3 --disable-radix-cache"
    flags += " --speculative-algorithm EAGLE --chunked-prefill-size 4096 --disable-cuda-graph"
    found = ENGINE.facts(flags.split(), "v3.2")
    assert (found["kv"], found["tp"], found["dp"], found["attention_tp"]) == ("fp8", 8, 4, 2)
    assert found["variant"] == ["eager", "noprefix", "mtp", "chunk4096"]
    assert (plain["chunk"], found["chunk"]) == (None, 4096)
    assert ENGINE.facts(["--chunked-prefill-size", "-1"], "v4")["chunk"] is None  # no chunks
    assert not found["prefix_cache"]


def test_servers_differ_in_the_plugin_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:

    flags = ["--tp", "8"]
    stock = ENGINE.command(Path("/model"), 1234, flags, plugin=False)
    assert ENGINE.command(Path("/model"), 1234, flags, plugin=True) == [*stock, "--enable-nsa-plugin"]
    assert {"--skip-tokenizer-init", "--incremental-streaming-output"} <= set(stock)
    assert ENGINE.environ(plugin=False)["NSA_PLUGIN_ENABLED"] == "0"
    assert ENGINE.environ(plugin=True)["NSA_PLUGIN_ENABLED"] == "1"


def test_missing_engine_and_missing_entry_point_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(CompareError, match="SGLang is not installed"):
        ENGINE.version()
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.16")
    monkeypatch.setattr(metadata, "entry_points", lambda **wanted: [])
    with pytest.raises(CompareError, match="would not find the plugin"):
        ENGINE.version()
