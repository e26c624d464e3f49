import math

import pytest
import torch

from nsa_plugin.tools.compare.rule import compare_with_reference
from nsa_plugin.tools.compare.tolerance import TOLERANCES, ReferenceTolerance
from nsa_plugin.tools.compare.verdict import judge_with_reference
from nsa_plugin.tools.reference import ReferenceRun
from nsa_plugin.tools.serving.requests import Answer, PromptRequest

STRICT = ReferenceTolerance(margin=1e-3, logprob=1e-3, outlier=1e-2, outlier_share=0.02)
LOOSE = ReferenceTolerance(margin=1.0)
VOCABULARY = 8


@pytest.fixture
def run():
    """Six positions; token p is preferred at position p, token 7 is next."""
    logits = torch.zeros(6, VOCABULARY)
    logits[range(6), range(6)] = 3.0
    logits[:, 7] = 2.5
    return ReferenceRun(
        logprobs=logits.log_softmax(-1),
        selected=(),
        index_margin=torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1, 0.05], [1.0] * 6]),
        router_margin=torch.empty(0, 6),
    )


def answer_for(run, tokens, *, logprobs=None, new_tokens=None):
    """An answer to a prompt of three tokens: its first token is judged by row 2."""
    rows = run.logprobs[2 : 2 + len(tokens)]
    logprobs = [float(row[token]) for row, token in zip(rows, tokens, strict=True)] if logprobs is None else logprobs
    request = PromptRequest(name="r", prompt=(1, 2, 3), new_tokens=new_tokens or len(tokens))
    return request, Answer(
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        top=tuple({int(i): float(row[i]) for i in row.topk(3).indices} for row in rows[: len(logprobs)]),
    )


def compare(request, answer, run):
    return compare_with_reference(request, answer, run, group="demo")


def control_noticed(control):
    return judge_with_reference([], control, STRICT).holds


def test_the_references_own_answer_agrees(run):
    comparison = compare(*answer_for(run, [2, 3, 4]), run)
    assert STRICT.holds(comparison)
    assert (comparison.tokens, comparison.equal, STRICT.ties(comparison)) == (3, 3, 0)
    assert comparison.largest < 1e-6
    assert STRICT.explain(comparison) == ""


def test_another_token_is_wrong(run):
    comparison = compare(*answer_for(run, [2, 7, 4]), run)
    assert not STRICT.holds(comparison)
    assert comparison.equal == 2
    (mismatch,) = STRICT.wrong(comparison)
    assert (mismatch.position, mismatch.token, mismatch.expected) == (1, 7, 3)
    assert mismatch.margin == pytest.approx(0.5)
    assert mismatch.index_margin == pytest.approx(0.2)
    assert "token 1: got token 7, the reference prefers 3 by 5.0e-01" in STRICT.explain(comparison)


def test_a_token_within_the_margin_is_a_tie(run):
    comparison = compare(*answer_for(run, [2, 7, 4]), run)
    assert LOOSE.holds(comparison)
    assert (comparison.equal, LOOSE.ties(comparison)) == (2, 1)


def test_a_token_beyond_the_margin_is_wrong_in_bfloat16_too(run):
    comparison = compare(*answer_for(run, [2, 6, 4]), run)
    assert [mismatch.token for mismatch in LOOSE.wrong(comparison)] == [6]
    assert LOOSE.ties(comparison) == 0


@pytest.mark.parametrize("error", [0.02, math.nan, math.inf])
def test_a_logprob_that_is_off_is_wrong(run, error):
    right = [float(run.logprobs[2 + i, 2 + i]) for i in range(3)]
    comparison = compare(*answer_for(run, [2, 3, 4], logprobs=[right[0], right[1] + error, right[2]]), run)
    assert comparison.equal == 3
    assert [mismatch.position for mismatch in STRICT.wrong(comparison)] == [1]
    assert "logprob off by" in STRICT.explain(comparison)
    assert comparison.largest == (pytest.approx(0.02, abs=1e-5) if error == 0.02 else math.inf)


@pytest.mark.parametrize(("error", "outliers"), [(5e-4, 0), (5e-3, 1)])
def test_a_logprob_that_is_a_little_off_is_an_outlier(run, error, outliers):
    right = [float(run.logprobs[2 + i, 2 + i]) for i in range(3)]
    comparison = compare(*answer_for(run, [2, 3, 4], logprobs=[right[0], right[1] + error, right[2]]), run)
    assert STRICT.holds(comparison)
    assert STRICT.outliers(comparison) == outliers


def test_a_run_may_have_few_outliers(run):
    one = compare(*answer_for(run, [2], logprobs=[float(run.logprobs[2, 2]) + 5e-3]), run)
    none = compare(*answer_for(run, [2, 3, 4]), run)
    assert STRICT.allows_outliers_of([none])
    assert STRICT.allows_outliers_of([one, *[none] * 17]), "1 of 52"
    assert not STRICT.allows_outliers_of([one, *[none] * 16]), "1 of 49"
    assert LOOSE.allows_outliers_of([compare(*answer_for(run, [2], logprobs=[-9.0]), run)])


def test_the_other_candidates_logprobs_count(run):
    request, answer = answer_for(run, [2, 3])
    answer.top[1][7] += 0.5
    comparison = compare(request, answer, run)
    assert [mismatch.position for mismatch in STRICT.wrong(comparison)] == [1]
    assert comparison.largest == pytest.approx(0.5, abs=1e-5)


def test_logprobs_are_measured_even_where_they_are_not_judged(run):
    comparison = compare(*answer_for(run, [2, 3], logprobs=[-9.0, -9.0]), run)
    assert LOOSE.holds(comparison)
    assert comparison.largest > 8


def test_a_short_answer_is_wrong(run):
    comparison = compare(*answer_for(run, [2, 3], new_tokens=3), run)
    assert not STRICT.holds(comparison)
    assert STRICT.explain(comparison) == "2 tokens instead of 3"


def test_missing_logprobs_are_wrong(run):
    comparison = compare(*answer_for(run, [2, 3, 4], logprobs=[-0.5]), run)
    assert not LOOSE.holds(comparison)
    assert "1 log probabilities for 3 tokens" in LOOSE.explain(comparison)


def test_a_refused_request_is_wrong(run):
    request, _ = answer_for(run, [2])
    comparison = compare(request, Answer(error="the server answered 400"), run)
    assert LOOSE.explain(comparison) == "the server answered 400"


def test_an_explanation_names_a_few_and_counts_the_rest(run):
    explanation = STRICT.explain(compare(*answer_for(run, [6, 6, 6]), run), count=2)
    assert explanation.count("got token 6") == 2
    assert explanation.endswith("; and 1 more")


def test_the_control_noticed_only_if_every_request_has_wrong_tokens(run):
    wrong_tokens = compare(*answer_for(run, [6, 6, 6]), run)
    right = compare(*answer_for(run, [2, 3, 4]), run)
    only_logprobs = compare(*answer_for(run, [2, 3, 4], logprobs=[-9.0] * 3), run)
    assert control_noticed([wrong_tokens])
    assert not control_noticed([wrong_tokens, right])
    assert not control_noticed([wrong_tokens, only_logprobs])
    assert not control_noticed([])


def test_a_tolerance_for_each_dtype_and_none_that_hides_a_wrong_token():
    from nsa_plugin.tools.checkpoints.v32 import DTYPES

    assert set(TOLERANCES) == set(DTYPES)
    assert all(tolerance.margin <= 1.0 for tolerance in TOLERANCES.values())
