"""Comparison of one engine's answers with another's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa_plugin.tools.compare import cross_engine
from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, STOCK, Answer, Measured, Run
from nsa_plugin.tools.compare.tolerance import FLOORS, V4_FLOOR, Floor
from nsa_plugin.tools.compare.workload import LIMIT
from nsa_plugin.tools.pages import site
from nsa_plugin.tools.serving.engine import CompareError
from tests.tools.compare.command import Behave, arguments, call, failed

FLAGS = {"sglang": ("--kv-cache-dtype", "bfloat16", "--chunked-prefill-size", "8192")}
FLAGS |= {"vllm": ("--kv-cache-dtype", "bfloat16", "--max-num-batched-tokens", "8192")}
CASES = ("--case", "single", "--case", "batch", "--case", "forced")


def line_of(tmp_path: Path, model: Path, engine: str, *more: str) -> list[str]:
    logs = tmp_path / "logs" / engine
    return [*arguments(tmp_path, model, *CASES, "--logs", str(logs), *more, engine=engine), "--", *FLAGS[engine]]


def kept(tmp_path: Path, engine: str) -> str:
    return str(tmp_path / "logs" / engine / "measured.jsonl")


def recorded(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*/*-beside-*.json")
    return dict(json.loads(path.read_text()))


def test_two_engines_that_agree(fake: Behave, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fake()
    assert call(capsys, line_of(tmp_path, model, "sglang"))[0] == 0
    code, out, _ = call(capsys, line_of(tmp_path, model, "vllm", "--beside", kept(tmp_path, "sglang")))
    made = recorded(tmp_path / "records")
    assert (code, failed(made)) == (0, []), out
    assert made["suite"] == "vllm-0.24.0-v32-16heads-bf16-chunk8192-beside-sglang-0.5.16"
    assert (made["engine"], made["beside"]["engine"]) == ("vllm 0.24.0", "sglang 0.5.16")
    assert (made["engine_flags"], made["beside"]["engine_flags"]) == ([*FLAGS["vllm"]], [*FLAGS["sglang"]])
    assert made["servers"].keys() == made["beside"]["servers"].keys() == {STOCK, PLUGIN, CONTROL}
    assert re.fullmatch("[0-9a-f]{64}", made["checkpoint"])
    assert made["requests"].keys() == {"single", "single-again", "batch", "forced", "forced-batch"}
    assert "--beside" not in made["command"]
    said = " ".join(out.split())
    assert "✓ With the plugin vllm 0.24.0 and sglang 0.5.16 match each other as closely as the two stock" in said

    rows = {(row["provider"], row["case"].get("control"), row["case"]["requests"]): row for row in made["rows"]}
    for group in made["requests"]:
        stock, plugin = rows["stock", None, group], rows["nsa-plugin", None, group]
        assert (stock["baseline"], plugin["baseline"]) == ("stock", "nsa-plugin")
        assert stock["requests"] == plugin["requests"] > 0
        # The stand-ins' noise, another for each engine.
        assert 0 < stock["max_error"] < 0.05
        assert 0 < plugin["max_error"] < 0.05
    assert rows["nsa-plugin", None, "batch"]["equal"] == rows["nsa-plugin", None, "batch"]["tokens"] > 100
    # Of the last 24 tokens of three prompts, as SGLang has them: all but the first.
    assert rows["nsa-plugin", None, "forced"]["positions"] == 3 * 23
    for engine in ("vllm 0.24.0", "sglang 0.5.16"):
        assert rows["nsa-plugin", engine, "single"]["rejected"] > 0

    text = "".join(site.pages(tmp_path / "records").values())
    assert f"# {made['suite']}\n" in text
    for between in ("stock, stock", "plugin, plugin", "control of vllm 0.24.0, plugin"):
        assert f"| {between} | single |" in text
    assert f"Checkpoint: {made['checkpoint'][:12]}; both engines got the same files and requests" in text

    # What was saved gives the same record again, without a server.
    again = ["compare", "vllm", "--measured", kept(tmp_path, "vllm"), "--beside", kept(tmp_path, "sglang")]
    assert call(capsys, [*again, "--json", str(tmp_path / "again")])[0] == 0
    assert recorded(tmp_path / "again") == made


def test_two_engines_that_do_not(fake: Behave, pids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = fake()
    call(capsys, line_of(tmp_path, model, "sglang"))
    line = line_of(tmp_path, fake("wrong"), "vllm", "--beside", kept(tmp_path, "sglang"))
    # Other terms are said before a server starts.
    started = pids.read_text()
    code, _, err = call(capsys, [*line[:-1], "4096"])
    assert code == 2
    assert "vllm 0.24.0 and sglang 0.5.16 cannot be compared: tokens of a prefill" in err
    assert "4096 (vllm 0.24.0) and 8192 (sglang 0.5.16)" in err
    assert pids.read_text() == started

    code, out, _ = call(capsys, line)
    assert code == 1
    assert "the plugin agrees, request by request" in failed(recorded(tmp_path / "records"))
    assert out.count("✗ FAILED") == 2  # vLLM's own comparison, and that beside SGLang's


def engine(name: str = "one 1", *, plugin: float = 0.0, stock: float = 0.0, control: float = 9.0) -> Measured:
    """An engine whose servers add these offsets to their log probabilities."""

    def run(role: str, shift: float) -> Run:
        best = {1: -1.0 + shift, 2: -1.5 + shift}
        token = 2 if shift > 5 else 1
        single = Answer(token_ids=(token,) * 4, logprobs=(best[token],) * 4, top=(best,) * 4)
        forced = Answer(token_ids=(1,), logprobs=(-1.0,), top=(best,), prompt_logprobs=(-4.0 + shift,) * 8)
        active = {} if role == STOCK else {"active": True}
        answers = {"single": {"p": single}, "forced": {"p": forced}}
        return Run(role=role, report=active, routes={"decode": 1} if active else {}, answers=answers, done=True)

    facts = {"engine": name, "family": "v3.2", "checkpoint": "c0", "heads": 16, "kv": "bf16", "chunk": 8192}
    facts |= {"flags": ["--kv-cache-dtype", "bfloat16"], "selects_above": 64}
    runs = {role: run(role, shift) for role, shift in ((STOCK, stock), (PLUGIN, plugin), (CONTROL, control))}
    return Measured(
        facts=facts,
        asked={"runs": list(runs), "cases": ["single", "forced"]},
        prompts={group: {"p": 100} for group in ("single", "forced")},
        digests={"single": "s0", "forced": "f0"},
        runs=runs,
    )


def not_held(one: Measured, other: Measured) -> list[str]:
    cross_engine.check_same(one, other)
    return [check.name for check in cross_engine.judge(one, other).checks if not check.holds]


MEANS = ["the plugin agrees in the mean of answers", "the plugin agrees in the mean of forced positions"]
NOTICED = "wrong tokens are noticed"


def test_how_far_stock_is_from_stock_is_how_far_the_plugin_may_be() -> None:
    assert not_held(engine(), engine("two 2")) == []
    assert not_held(engine(plugin=0.3), engine("two 2")) == ["the plugin agrees, request by request", *MEANS]
    # Twice as far as stock, and no further.
    assert not_held(engine(plugin=0.3, stock=0.16), engine("two 2")) == []
    assert MEANS[0] in not_held(engine(plugin=0.35, stock=0.16), engine("two 2"))
    # An engine whose plugin is where its stock is, and both far away from the other engine.
    assert not_held(engine(plugin=1.0, stock=1.0), engine("two 2")) == []


def test_controls_of_both_engines_must_be_noticed() -> None:
    assert not_held(engine(control=0.0), engine("two 2")) == [f"{NOTICED}, one 1"]
    assert not_held(engine(), engine("two 2", control=0.0)) == [f"{NOTICED}, two 2"]
    # Stock servers so far apart that anything would pass.
    assert not_held(engine(stock=4.9), engine("two 2")) == [f"{NOTICED}, one 1", f"{NOTICED}, two 2"]
    without = engine("two 2")
    del without.runs[CONTROL]
    assert not_held(engine(), without) == ["complete, two 2", f"{NOTICED}, two 2"]


def test_a_plugin_that_did_not_serve_agrees_for_nothing() -> None:
    idle = engine("two 2")
    idle.runs[PLUGIN].routes = {}
    assert not_held(engine(), idle) == ["the plugin served, two 2"]
    idle.runs[PLUGIN] = Run(role=PLUGIN, error="the server died")
    assert "the plugin agrees, request by request" in not_held(engine(), idle)


def test_forced_positions_are_a_prompts_last_tokens_as_far_as_both_have_them() -> None:
    one, other = engine(), engine("two 2")
    for role, run in other.runs.items():
        own = run.answers["forced"]["p"]
        run.answers["forced"]["p"] = replace(own, prompt_logprobs=(-90.0, *own.prompt_logprobs))
        assert len(one.runs[role].answers["forced"]["p"].prompt_logprobs) == 8
    assert not_held(one, other) == []
    verdict = cross_engine.judge(one, other)
    assert [compared.positions for compared in verdict.plugin if compared.group == "forced"] == [8]
    other.runs[PLUGIN].answers["forced"]["p"] = Answer(token_ids=(1,))
    assert "the plugin agrees, request by request" in not_held(one, other)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoint": "c1"}, "the checkpoint's digest: c0 (one 1) and c1 (two 2)"),
        ({"checkpoint": None}, "c0 (one 1) and not known (two 2)"),  # as an earlier release saved it
        ({"kv": "fp8"}, "the KV cache: bf16 (one 1) and fp8 (two 2)"),
        (
            {"chunk": None},
            "tokens of a prefill chunk (--chunked-prefill-size of SGLang, --max-num-batched-tokens of vLLM): ",
        ),
        ({"heads": 8}, "heads per rank: 16 (one 1) and 8 (two 2)"),
        ({"family": "v4"}, "the family: v3.2 (one 1) and v4 (two 2)"),
        ({"flags": []}, "two 2 was given no --kv-cache-dtype"),
    ],
)
def test_other_terms_are_refused(changes: dict[str, Any], says: str) -> None:
    other = engine("two 2")
    other.facts |= changes
    with pytest.raises(CompareError, match=re.escape(says)):
        cross_engine.check_same(engine(), other)


def test_other_requests_are_refused() -> None:
    other = engine("two 2")
    other.digests["forced"] = "f1"
    with pytest.raises(CompareError, match="one 1 and two 2 cannot be compared: other requests in forced"):
        cross_engine.check_same(engine(), other)
    other.digests = {"batch": "b0"}
    with pytest.raises(CompareError, match="they have no requests in common"):
        cross_engine.check_same(engine(), other)


def test_a_suite_says_of_the_other_engine_what_differs() -> None:
    def suite(one: str, other: str) -> str:
        return cross_engine._suite({"suite": one}, {"suite": other})

    assert suite("vllm-1-v32-16heads-fp8", "sglang-2-v32-16heads-fp8") == "sglang-2"
    assert suite("vllm-1-v32-16heads-fp8", "sglang-2-v32-16heads-fp8-mtp") == "sglang-2-v32-16heads-fp8-mtp"


def test_a_control_must_be_noticed_beside_the_other_engines_plugin() -> None:
    """The plugin of the same engine does not count."""
    found = not_held(engine(control=2.0), engine("two 2", plugin=2.0))
    assert f"{NOTICED}, one 1" in found
    assert f"{NOTICED}, two 2" not in found
    idle = engine("two 2")
    idle.runs[CONTROL].routes = {}
    assert not_held(engine(), idle) == [f"{NOTICED}, two 2"]


def test_what_leaves_nothing_to_judge_does_not_hold() -> None:
    without = engine("two 2")
    del without.runs[STOCK]
    assert "stock against the other stock" in not_held(engine(), without)
    # Prompts that are attended to as a whole show no wrong selection.
    short = engine(), engine("two 2")
    for one in short:
        one.facts["selects_above"] = 100
    assert not_held(*short) == [f"{NOTICED}, one 1", f"{NOTICED}, two 2"]
    unknown = engine(), engine("two 2")
    for one in unknown:
        one.facts["checkpoint"] = None
    with pytest.raises(CompareError, match=re.escape("not known (one 1) and not known (two 2)")):
        cross_engine.check_same(*unknown)
    climbs = engine(), engine("two 2")
    for one in climbs:
        one.digests = {LIMIT: "l0"}
    with pytest.raises(CompareError, match="they have no requests in common"):
        cross_engine.check_same(*climbs)


@pytest.mark.parametrize(
    ("facts", "floor"),
    [
        ({}, FLOORS["bf16"]),
        ({"kv": "fp8", "flags": ["--kv-cache-dtype", "fp8"]}, FLOORS["fp8"]),
        ({"kv": "fp8", "family": "v4", "flags": []}, V4_FLOOR),  # whose cache is fp8 without a flag
    ],
)
def test_the_floor_is_that_of_the_cache_and_the_family(facts: dict[str, Any], floor: Floor) -> None:
    pair = engine(), engine("two 2")
    for one in pair:
        one.facts |= facts
    cross_engine.check_same(*pair)
    allowed = cross_engine.judge(*pair).tolerance
    assert (allowed.largest, allowed.answers_mean, allowed.forced_mean) == (floor.largest, floor.mean, floor.forced)


def test_an_engine_is_not_beside_itself() -> None:
    with pytest.raises(CompareError, match="both are one 1"):
        cross_engine.check_same(engine(), engine())
    assert not_held(engine("one 1"), engine("one 2")) == []


@pytest.mark.parametrize("common", [0, 1, 6, 7, 8])
def test_as_many_forced_positions_as_were_asked_for(common: int) -> None:
    """All but the first are needed: with fewer there is nothing that could differ."""
    one, other = engine(), engine("two 2")
    one.forced = 8
    for run in other.runs.values():
        answer = run.answers["forced"]["p"]
        run.answers["forced"]["p"] = replace(answer, prompt_logprobs=answer.prompt_logprobs[:common])
    assert ("the plugin agrees, request by request" in not_held(one, other)) == (common < 7)
