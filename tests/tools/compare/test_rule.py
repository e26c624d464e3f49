"""The rule by which two servers agree."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from nsa_plugin.tools.compare import rule
from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, STOCK, Answer, Measured, Run
from nsa_plugin.tools.compare.rule import Compared, compare
from nsa_plugin.tools.compare.tolerance import FLOORS, V4_FLOOR, floor_of, tolerance
from nsa_plugin.tools.compare.verdict import agreement_checks, judge

TOP = {1: -1.0, 2: -1.3, 3: -4.0}


def answer(tokens: list[int], *, shift: float = 0.0, top: dict[int, float] = TOP, **more: Any) -> Answer:
    """An answer whose every position has the same distribution, its log probabilities moved by `shift`."""
    best = {token: value + shift for token, value in top.items()}
    return Answer(
        token_ids=tuple(tokens),
        logprobs=tuple(best[token] for token in tokens),
        top=tuple(best for _ in tokens),
        **more,
    )


def compared(ours: Answer, theirs: Answer) -> rule.Compared:
    return compare(ours, theirs, group="single", name="p", prompt=100)


def test_equal_answers_differ_by_nothing() -> None:
    one = compared(answer([1, 1, 1]), answer([1, 1, 1]))
    assert (one.equal, one.tokens, one.largest, one.gap, one.problem) == (3, 3, 0.0, None, "")


def test_log_probabilities_are_compared_up_to_and_at_the_first_difference_and_not_after() -> None:
    ours = replace(answer([1, 1, 1]), logprobs=(-1.0, -1.0, -50.0))
    theirs = answer([1, 2, 3], shift=0.1)
    one = compared(ours, theirs)
    assert one.equal == 1
    assert one.positions == 3  # the first token, and both tokens where they part
    assert one.largest == pytest.approx(0.1)
    assert one.mean == pytest.approx(0.1)


def test_gap_is_the_larger_preference_of_the_two() -> None:
    ours, theirs = answer([1]), answer([2], top={1: -1.5, 2: -1.0})
    assert compared(ours, theirs).gap == pytest.approx(0.5)
    assert compared(theirs, ours).gap == pytest.approx(0.5)


def test_token_that_the_other_does_not_list_is_no_tie() -> None:
    assert compared(answer([1]), answer([9], top={9: -1.0})).gap == math.inf


@pytest.mark.parametrize("where", ["logprobs", "top"])
def test_no_number_is_infinitely_wrong(where: str) -> None:
    ours = answer([1, 2])
    broken = replace(ours, logprobs=(math.nan, -1.3)) if where == "logprobs" else ours
    other = answer([1, 3], top={**TOP, 2: math.nan}) if where == "top" else ours
    one = compared(broken, other)
    assert not tolerance([], FLOORS["fp8"]).holds(one)


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        (answer([1]), answer([], error="out of memory"), "out of memory"),
        (answer([1]), answer([1, 1]), "1 and 2 tokens"),
        (answer([]), answer([]), "0 tokens, 0 log probabilities"),
        (replace(answer([1]), top=()), answer([1]), "1 tokens, 1 log probabilities"),
        (Answer(prompt_logprobs=(-1.0,)), Answer(prompt_logprobs=()), "1 and 0 log probabilities of the prompt"),
    ],
)
def test_what_cannot_be_compared_is_a_problem_and_does_not_agree(ours: Answer, theirs: Answer, problem: str) -> None:
    one = compared(ours, theirs)
    assert one.problem == problem
    assert not tolerance([], FLOORS["bf16"]).holds(one)


def test_tolerance_follows_from_stock_itself_and_never_falls_below_the_floor() -> None:
    quiet = [compared(answer([1, 1]), answer([1, 1], shift=0.001))]
    assert tolerance(quiet, FLOORS["bf16"]).largest == FLOORS["bf16"].largest
    assert tolerance(quiet, FLOORS["fp8"]).answers_mean == FLOORS["fp8"].mean
    loud = [compared(answer([1, 1]), answer([1, 1], shift=0.9))]
    allowed = tolerance(loud, FLOORS["bf16"])
    assert allowed.largest == pytest.approx(1.8)
    assert allowed.answers_mean == pytest.approx(1.8)
    assert allowed.forced_mean == FLOORS["bf16"].forced  # nothing was forced


def test_v4_has_a_floor_of_its_own_and_otherwise_what_follows_from_stock() -> None:
    assert floor_of("fp8", "v4") == V4_FLOOR
    assert (floor_of("fp8"), floor_of("fp8", "v3.2"), floor_of("bf16")) == (
        FLOORS["fp8"],
        FLOORS["fp8"],
        FLOORS["bf16"],
    )
    one = measured(plugin_shift=1.0)
    one.facts |= {"kv": "fp8"}
    assert "the plugin agrees, request by request" not in failed(one)  # V3.2's fp8 allows 1.5
    one.facts |= {"family": "v4"}
    assert "the plugin agrees, request by request" in failed(one)
    # Stock whose chunks of another size differ by more is what the plugin may differ by.
    one.runs[STOCK].answers |= {"rows": {"q": answer([1] * 8)}, "rows-batch": {"q": answer([1] * 8, shift=0.6)}}
    one.prompts |= {group: {"q": 100} for group in ("rows", "rows-batch")}
    verdict = judge(one)
    assert verdict.tolerance.own_largest == pytest.approx(0.6)
    assert verdict.tolerance.largest == pytest.approx(1.2)
    assert failed(one) == []


def test_gap_of_stock_itself_counts_and_an_infinite_one_does_not() -> None:
    parted = compared(answer([1], top={1: -1.0, 2: -2.0}), answer([2], top={1: -2.0, 2: -1.0}))
    assert tolerance([parted], FLOORS["bf16"]).largest == pytest.approx(2.0)
    far = compared(answer([1]), answer([9], top={9: -1.0}))
    assert tolerance([far], FLOORS["bf16"]).largest == FLOORS["bf16"].largest


def test_mean_of_stock_is_that_of_the_groups_that_differ_most() -> None:
    """Answers repeated to the last bit must not thin out those of another batch size."""
    same = [replace(compared(answer([1]), answer([1])), group="single / single-again") for _ in range(9)]
    other = replace(compared(answer([1]), answer([1], shift=0.4)), group="single / batch")
    assert tolerance([*same, other], FLOORS["bf16"]).answers_mean == pytest.approx(0.8)


def test_forced_positions_are_judged_by_their_mean() -> None:
    def forced(difference: float) -> rule.Compared:
        ours = Answer(prompt_logprobs=(-5.0,) * 100)
        theirs = Answer(prompt_logprobs=(-5.0 + difference, *(-5.0 for _ in range(99))))
        return compare(ours, theirs, group="forced", name="p", prompt=100)

    allowed = tolerance([], FLOORS["bf16"])
    assert allowed.holds(forced(5.0))  # one position of a hundred, by 5 nats: 0.05 in the mean
    assert not allowed.holds(forced(50.0))


def measured(plugin_shift: float = 0.0, control: list[int] | None = None, **changes: Any) -> Measured:
    """Stock that answers twice with a difference of 0.1, the plugin, and a control."""

    def run(role: str, answers: dict[str, Answer]) -> Run:
        report = {} if role == STOCK else {"active": True}
        return Run(
            role=role,
            report=report,
            routes={"decode/sparse_decode/cuda": 3} if report else {},
            answers={group: {"p": one} for group, one in answers.items()},
            done=True,
        )

    stock = {"single": answer([1] * 8), "single-again": answer([1] * 8, shift=0.1)}
    plugin = {group: answer([1] * 8, shift=plugin_shift) for group in stock}
    broken = {"single": answer(control or [3] * 8)}
    runs = {STOCK: run(STOCK, stock), PLUGIN: run(PLUGIN, plugin), CONTROL: run(CONTROL, broken)}
    return Measured(
        facts={"kv": "bf16", "index_topk": 64},
        asked={"runs": list(runs), "cases": ["single"]},
        prompts={group: {"p": 100} for group in stock},
        runs=runs,
        **changes,
    )


def failed(one: Measured) -> list[str]:
    return [check.name for check in judge(one).checks if not check.holds]


def test_all_holds() -> None:
    assert failed(measured()) == []


def test_plugin_beyond_the_tolerance_fails_by_request_and_by_mean() -> None:
    assert failed(measured(plugin_shift=0.3)) == ["the plugin agrees in the mean of answers"]  # 0.2 allowed
    assert failed(measured(plugin_shift=0.8))[0] == "the plugin agrees, request by request"  # 0.7 allowed


def answers_of(*largest: float, agreeing: int = 200) -> list[Compared]:
    """Answers with these largest differences, and others that agree."""
    shifts = [*largest, *[0.1] * (agreeing - len(largest))]
    return [Compared(group="concurrent", name=f"c{i}", prompt=9, largest=shift) for i, shift in enumerate(shifts)]


def test_a_few_answers_may_be_outliers() -> None:
    allowed = tolerance([], FLOORS["bf16"])  # 0.7, and 1.6 for one answer in a hundred
    few = answers_of(1.2, 1.5)
    assert allowed.few_outliers(few) == few[:2]
    check = agreement_checks(few, allowed)[0]
    assert check.holds
    assert check.detail.endswith(
        "of 0.700 allowed, and 1.600 in a few; 2 of 200 answers: concurrent c0: largest difference 1.200 of 0.700; "
        "concurrent c1: largest difference 1.500 of 0.700"
    )
    gap = replace(few[0], largest=0.1, equal=3, gap=1.19)
    assert allowed.few_outliers([gap, *few[1:]]) == [gap, few[1]]


@pytest.mark.parametrize(
    ("answers", "rejected"),
    [
        (answers_of(1.2, 1.2, 1.2), 3),  # too many
        (answers_of(1.2, agreeing=99), 1),
        (answers_of(1.2, 1.7), 1),  # too far; the other one stays an outlier
        ([replace(answers_of(1.2)[0], equal=3, gap=1.7), *answers_of()[1:]], 1),
        ([replace(answers_of()[0], gap=math.inf), *answers_of()[1:]], 1),
        ([replace(answers_of()[0], problem="no answer"), *answers_of()[1:]], 1),
        ([*answers_of(), Compared(group="forced", name="p9", prompt=9, positions=8, mean=0.3)], 1),
    ],
)
def test_other_answers_are_no_outliers(answers: list[Compared], rejected: int) -> None:
    allowed = tolerance([], FLOORS["bf16"])
    check = agreement_checks(answers, allowed)[0]
    assert not check.holds
    assert check.detail.count(":") == rejected


def test_v4_has_no_outliers() -> None:
    """Nothing shows how far rounding moves a few of its answers."""
    answers = answers_of(0.9)
    assert tolerance([], V4_FLOOR).few_outliers(answers) == []
    assert not agreement_checks(answers, tolerance([], V4_FLOOR))[0].holds


def test_stock_that_differs_more_from_itself_allows_as_much() -> None:
    loud = [Compared(group="single", name="p", prompt=9, largest=1.0)]
    allowed = tolerance(loud, FLOORS["bf16"])
    assert (allowed.largest, allowed.outlier) == (2.0, 2.0)


def test_either_of_two_stock_answers_counts_where_they_disagree() -> None:
    """Stock was seen to give two answers to one prompt in two rounds."""
    one, elsewhere = measured(), answer([9] * 8, top={9: -1.0, 8: -1.2})
    one.runs[STOCK].answers["single-again"]["p"] = elsewhere
    assert failed(one) == []  # the plugin gives stock's first answer in both rounds
    detail = next(check.detail for check in judge(one).checks if check.name == "stock against itself")
    assert "the closer one counts: single / single-again p" in detail
    one.runs[PLUGIN].answers["single-again"]["p"] = answer([3] * 8)
    assert failed(one) == ["the plugin agrees, request by request"]  # an answer that stock never gave


@pytest.mark.parametrize(
    ("dp", "cached", "checked", "holds"), [(1, 64, True, True), (1, 0, True, False), (2, 0, False, True)]
)
def test_a_prefix_cache_is_looked_for_where_there_is_one_alone(
    dp: int, cached: int, checked: bool, holds: bool
) -> None:
    """With data parallelism a hit depends on the router. The answers of the case are compared all the same."""
    one = measured(least_cached={"p": 64})
    one.facts |= {"dp": dp}
    one.asked["cases"].append("prefix")
    for run in one.runs.values():
        run.answers["prefix"] = {"p": replace(run.answers["single"]["p"], cached_tokens=cached)}
    one.prompts["prefix"] = {"p": 100}
    assert ("the prefix cache was hit" in [check.name for check in judge(one).checks]) == checked
    assert judge(one).holds == holds
    one.runs[PLUGIN].answers["prefix"]["p"] = answer([3] * 8)
    assert "the plugin agrees, request by request" in failed(one)


@pytest.mark.parametrize(
    ("stock", "plugin", "holds"),
    [((64, 64), (64, 64), True), ((64, 0), (64, 0), True), ((64, 0), (0, 0), False), ((0, 0), (64, 64), False)],
)
def test_the_plugin_reuses_the_prefixes_that_stock_reuses(
    stock: tuple[int, int], plugin: tuple[int, int], holds: bool
) -> None:
    """An engine may drop a prefix by design. If stock reuses none, the comparison has not seen the cache at all."""
    one = measured(least_cached={"p": 64, "q": 64})
    one.facts |= {"dp": 1}
    one.asked["cases"].append("prefix")
    one.prompts["prefix"] = {"p": 100, "q": 100}
    for role, run in one.runs.items():
        cached = zip("pq", plugin if role == PLUGIN else stock, strict=True)
        run.answers["prefix"] = {
            name: replace(run.answers["single"]["p"], cached_tokens=tokens) for name, tokens in cached
        }
    (check,) = [check for check in judge(one).checks if check.name == "the prefix cache was hit"]
    assert check.holds == holds
    assert ("q: 0 tokens cached, at least 64 expected" in check.detail) == (0 in stock + plugin)


def test_control_that_agrees_is_blind() -> None:
    (check,) = [check for check in judge(measured(control=[1] * 8)).checks if not check.holds]
    assert check.name == "wrong tokens are noticed"
    assert check.detail.startswith("the comparison is blind")


def test_control_counts_only_where_the_plugin_served_and_something_is_selected() -> None:
    idle = measured()
    idle.runs[CONTROL].routes = {}
    assert failed(idle) == ["wrong tokens are noticed"]
    short = measured()
    short.prompts = {group: {"p": 64} for group in short.prompts}
    assert failed(short) == ["wrong tokens are noticed"]


def test_control_that_did_not_answer_has_noticed_nothing() -> None:
    one = measured()
    one.runs[CONTROL].answers["single"]["p"] = Answer(error="group single: no answer after 3 s")
    assert failed(one) == ["wrong tokens are noticed"]


def climbing(stock: dict[str, Answer], plugin: dict[str, Answer]) -> Measured:
    """Prompts of 100, 200 and 300 tokens until one fails."""
    one = measured()
    one.asked = {"runs": [STOCK, PLUGIN], "cases": ["limit"]}
    one.prompts = {"limit": {f"p{count}": count for count in (100, 200, 300)}}
    del one.runs[CONTROL]
    one.runs[STOCK].answers, one.runs[PLUGIN].answers = {"limit": stock}, {"limit": plugin}
    return one


WELL, GONE = answer([1, 2]), Answer(error="the server ended with 137\nlog:\n  torch.OutOfMemoryError: 4.00 GiB")


@pytest.mark.parametrize(
    ("stock", "plugin", "holds", "said"),
    [
        (
            {"p100": WELL, "p200": GONE},
            {"p100": WELL, "p200": WELL, "p300": WELL},
            True,
            "stock answers up to 100 tokens and fails at 200 (the server ended with 137 torch.OutOfMemoryError: "
            "4.00 GiB); the plugin answers 200",
        ),
        ({"p100": GONE}, {"p100": GONE}, False, "the plugin does not, and fails at 100"),
        ({"p100": WELL, "p200": GONE}, {"p100": WELL}, False, "the plugin does not"),
        (
            {"p100": WELL, "p200": GONE},
            {"p100": WELL, "p200": replace(WELL, logprobs=(math.nan, -1.0))},
            False,
            "no number for a log probability",
        ),
        ({"p100": WELL, "p200": WELL}, {"p100": WELL}, False, "stock did not fail at any prompt of up to 200 tokens"),
        ({}, {}, False, "stock did not fail at any prompt of up to 0 tokens"),
    ],
)
def test_stock_has_to_fail_at_a_prompt_that_the_plugin_answers(
    stock: dict[str, Answer], plugin: dict[str, Answer], holds: bool, said: str
) -> None:
    one = climbing(stock, plugin)
    checks = {check.name: check for check in judge(one).checks}
    check = checks.pop("the plugin answers a prompt that stock fails at")
    assert (check.holds, said in check.detail) == (holds, True), check.detail
    assert checks.keys() == {"complete", "the plugin served"}  # nothing is asked of agreement


@pytest.mark.parametrize(
    ("facts", "holds"),
    [
        ({"context parallelism": "2 ranks share each request's KV cache"}, True),
        ({"context parallelism": "4 ranks share each request's KV cache"}, False),
        ({}, False),
    ],
)
def test_the_plugin_has_to_serve_the_shared_kv_cache(facts: dict[str, str], holds: bool) -> None:
    one = climbing({"p100": WELL}, {"p100": WELL})
    one.runs["plugin"].report = {"active": True, "facts": facts}
    one.facts["dcp"] = 2
    (check,) = [check for check in judge(one).checks if check.name == "the plugin served a KV cache that 2 ranks share"]
    assert check.holds is holds
    assert check.detail == facts.get("context parallelism", "its start-up report does not say so")


def test_what_is_missing_is_named() -> None:
    one = measured(ended="terminated")
    del one.runs[CONTROL]
    one.runs[PLUGIN].skipped = ["single-again"]
    (check,) = [check for check in judge(one).checks if check.name == "complete"]
    assert check.detail == "terminated; plugin: not enough time for single-again; control was not run"
    assert not check.holds


@pytest.mark.parametrize(("cases", "holds"), [(["single", "ttft"], True), (["ttft"], False)])
@pytest.mark.parametrize(
    ("speed", "detail"),
    [
        ({}, "plugin: ttft-2000 not timed"),
        ({"ttft-2000": {"ttft_ms": [20.0, 21.0]}}, "plugin: ttft-2000 timed 2 times only"),
    ],
)
def test_load_that_was_not_timed_is_said_and_counts_where_nothing_else_was_asked(
    cases: list[str], holds: bool, speed: dict[str, dict[str, list[float]]], detail: str
) -> None:
    one = measured()
    one.asked["cases"] = cases
    one.runs[PLUGIN].skipped = ["ttft-2000"]
    one.runs[PLUGIN].speed = speed
    (check,) = [check for check in judge(one).checks if check.name == "complete"]
    assert (check.holds, check.detail) == (holds, detail)


def test_measurements_are_read_back_as_they_were_saved(tmp_path: Any) -> None:
    one = measured()
    one.runs[PLUGIN].answers["single"]["p"] = replace(answer([1, 2]), logprobs=(math.nan, -1.0), cached_tokens=7)
    path = tmp_path / "measured.jsonl"
    one.save(path)
    one.save(path)  # a second time, from the lines that are kept
    again = Measured.load(path)
    assert json.dumps(again.runs[PLUGIN].answers["single"]["p"].as_dict()) == json.dumps(
        one.runs[PLUGIN].answers["single"]["p"].as_dict()
    )
    assert [check.detail for check in judge(again).checks] == [check.detail for check in judge(one).checks]
