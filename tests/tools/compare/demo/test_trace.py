import json

import pytest

from nsa_plugin.tools.compare.demo.trace import TraceError, build_trace, read_trace


def plan(phase, attention, reason="because"):
    return {"phase": phase, "attention": attention, "provider": "reference", "reasons": {"attention": reason}}


PLANS = {
    "p0": plan("extend", "mha_one_shot", "short"),
    "p1": plan("extend", "sparse_prefill", "long"),
    "p2": plan("decode", "sparse_decode", "one row"),
}


def entry(step, *rows, rank=0):
    requests = [
        {"request_id": f"cmpl-{name}-0-1f2e", "q_tokens": q, "kv_tokens": kv, "plan": key} for name, q, kv, key in rows
    ]
    return {
        "step": step,
        "pid": 1,
        "rank": rank,
        "requests": requests,
        "plans": {row[3]: PLANS[row[3]] for row in rows},
    }


ENTRIES = [
    entry(1, ("short", 10, 10, "p0"), ("long", 20, 20, "p1")),
    entry(2, ("short", 1, 11, "p2"), ("long", 20, 40, "p1")),
    entry(3, ("short", 1, 12, "p2"), ("long", 1, 41, "p2")),
]


def test_routes_of_each_request():
    trace = build_trace(ENTRIES, ["short", "long"])
    short = trace.routes("short")
    assert [(r.phase, r.attention, r.steps, r.q_tokens, r.reason) for r in short] == [
        ("extend", "mha_one_shot", 1, 10, "short"),
        ("decode", "sparse_decode", 2, 2, "one row"),
    ]
    assert [(r.attention, r.steps, r.q_tokens) for r in trace.routes("long")] == [
        ("sparse_prefill", 2, 40),
        ("sparse_decode", 1, 1),
    ]
    assert trace.prefill_chunks("long") == 2
    assert trace.attention_counts() == {"mha_one_shot": 1, "sparse_prefill": 2, "sparse_decode": 3}


def test_batches_that_mix_prefill_and_decode_are_counted():
    assert build_trace(ENTRIES, ["short", "long"]).mixed_batches == 1
    assert build_trace(ENTRIES[2:], ["short", "long"]).mixed_batches == 0


def test_other_ranks_and_the_engines_own_requests_do_not_count():
    noise = [entry(1, ("warmup", 4, 4, "p0")), entry(1, ("short", 10, 10, "p0"), rank=1)]
    trace = build_trace(noise, ["short"])
    assert trace.routes("short") == []
    assert trace.prefill_chunks("short") == 0


def test_a_request_that_was_never_scheduled_has_no_route():
    assert build_trace(ENTRIES, ["absent"]).routes("absent") == []


def test_reading_a_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ENTRIES))
    assert read_trace(path, ["long"]).steps["long"] == build_trace(ENTRIES, ["long"]).steps["long"]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1, "rank": 0}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ENTRIES[0]) + "\n" + line + "\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2"):
        read_trace(path, ["short"])


def test_no_trace_says_what_may_be_wrong(tmp_path):
    with pytest.raises(TraceError, match="is it enabled"):
        read_trace(tmp_path / "trace.jsonl", ["short"])
