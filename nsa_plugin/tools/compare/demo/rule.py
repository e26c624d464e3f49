"""Judge answers against the float32 reference model, and check the judge with answers that are known to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_plugin.tools.compare.demo.trace import RouteSummary
from nsa_plugin.tools.serving.requests import Answer, PromptRequest

if TYPE_CHECKING:
    from nsa_plugin.tools.reference import ReferenceRun


@dataclass(frozen=True, kw_only=True)
class ReferenceTolerance:
    """How far the server may be from the float32 reference. Log probabilities are natural.

    Attributes:
        margin: a generated token other than the reference's first choice is wrong if the reference prefers its own
            token by more than this, and a tie otherwise.
        logprob: a position is an outlier if a log probability differs by more than this. None: report differences
            without judging them.
        outlier: a position is wrong if a log probability differs by more than this.
        outlier_share: largest share of a run's positions that may be outliers.
    """

    margin: float
    logprob: float | None = None
    outlier: float | None = None
    outlier_share: float = 0.0

    def allows_outliers_of(self, comparisons: Sequence[ReferenceComparison]) -> bool:
        """Whether the run stays within `outlier_share`."""
        tokens = sum(comparison.tokens for comparison in comparisons)
        return sum(comparison.outliers for comparison in comparisons) <= self.outlier_share * tokens


# In float32 only the order of additions differs: 3e-5 on this model. But if two tokens at the edge of a selection have
# nearly the same score, that order decides which one is selected. About one selection in a thousand changes; one in
# twenty of those moves a log probability by more than 1e-3, and none seen so far by more than 6e-3. Attending to all
# tokens instead of the selected ones puts more than half of the positions beyond 1e-3; leaving out the indexer's fp8
# rounding puts a fifth beyond it.
#
# In bfloat16 every activation is rounded to 8 bits. Log probabilities differ by up to 0.8, and the preferred token
# differs where the choice was within 0.5. Attention to wrong tokens differs by 4 in the median.
TOLERANCES = {
    "float32": ReferenceTolerance(margin=1e-3, logprob=1e-3, outlier=1e-2, outlier_share=0.02),
    "bfloat16": ReferenceTolerance(margin=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A generated token that disagrees.

    Attributes:
        position: in the answer, from 0.
        token, expected: the server's choice and the reference's.
        margin: how much the reference prefers its own token, in nats.
        logprob_error: largest |difference| of the server's log probabilities at this position.
        index_margin: smallest margin of the reference's selection at this position over the layers, see
            `ReferenceRun`. Near zero, rounding alone decides which token is attended to.
    """

    position: int
    token: int
    expected: int
    margin: float
    logprob_error: float
    index_margin: float

    def __str__(self) -> str:
        what = (
            f"logprob off by {self.logprob_error:.1e}"
            if self.token == self.expected
            else f"got token {self.token}, the reference prefers {self.expected} by {self.margin:.1e}"
        )
        return f"token {self.position}: {what} (margin of the selection there: {self.index_margin:.1e})"


@dataclass(frozen=True, kw_only=True)
class ReferenceComparison:
    """The comparison of one request.

    Attributes:
        name, purpose: of the request.
        prompt_tokens, cached_tokens: of the prompt, and those from the prefix cache.
        seconds: see `Answer`.
        routes: the routes that the request took, if the trace was read.
        tokens: generated tokens.
        equal: tokens that are the reference's first choice.
        ties: other tokens within the tolerance's margin.
        outliers: positions whose log probabilities differ by more than `ReferenceTolerance.logprob`.
        max_logprob_error: largest |difference| of all log probabilities in the answer.
        wrong: positions outside the tolerance.
        problem: what is wrong with the whole answer, or "".
    """

    name: str
    purpose: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    routes: Sequence[RouteSummary] = ()
    tokens: int
    equal: int
    ties: int
    outliers: int
    max_logprob_error: float
    wrong: tuple[Mismatch, ...]
    problem: str = ""

    @property
    def agrees(self) -> bool:
        return not self.wrong and not self.problem

    def explanation(self, count: int = 3) -> str:
        """Why the request does not agree; "" if it does."""
        more = f"; and {len(self.wrong) - count} more" if len(self.wrong) > count else ""
        return "; ".join([*([self.problem] if self.problem else []), *map(str, self.wrong[:count])]) + more


def compare(
    request: PromptRequest, answer: Answer, reference: ReferenceRun, tolerance: ReferenceTolerance
) -> ReferenceComparison:
    """Compare every token and log probability of an answer with the reference.

    Args:
        reference: a run on the prompt and the server's tokens, so that each position is judged independently.
    """
    first = len(request.prompt) - 1
    problem = answer.error
    if not problem and len(answer.token_ids) != request.new_tokens:
        problem = f"{len(answer.token_ids)} tokens instead of {request.new_tokens}"
    elif not problem and not len(answer.logprobs) == len(answer.top) == len(answer.token_ids):
        problem = f"{len(answer.logprobs)} log probabilities for {len(answer.token_ids)} tokens"

    equal = ties = outliers = 0
    worst = 0.0
    wrong = []
    given = zip(answer.token_ids, answer.logprobs, answer.top, strict=False)
    for position, (token, logprob, top) in enumerate(given):
        row = reference.logprobs[first + position]
        expected = int(row.argmax())
        margin = float(row[expected] - row[token])
        errors = [abs(value - float(row[candidate])) for candidate, value in {**top, token: logprob}.items()]
        # nan compares as neither less nor more: let it count as infinitely wrong.
        error = max(float("inf") if value != value else value for value in errors)
        worst = max(worst, error)
        equal += token == expected
        tie = token != expected and margin <= tolerance.margin
        ties += tie
        outliers += tolerance.logprob is not None and error > tolerance.logprob
        if (token != expected and not tie) or (tolerance.outlier is not None and error > tolerance.outlier):
            index_margins = reference.index_margin[:, first + position]
            wrong.append(
                Mismatch(
                    position=position,
                    token=token,
                    expected=expected,
                    margin=margin,
                    logprob_error=error,
                    index_margin=float(index_margins.min()) if index_margins.numel() else float("inf"),
                )
            )
    return ReferenceComparison(
        name=request.name,
        purpose=request.purpose,
        prompt_tokens=len(request.prompt),
        cached_tokens=answer.cached_tokens,
        seconds=round(answer.seconds, 3),
        tokens=len(answer.token_ids),
        equal=equal,
        ties=ties,
        outliers=outliers,
        max_logprob_error=worst,
        wrong=tuple(wrong),
        problem=problem,
    )


def control_noticed(comparisons: Sequence[ReferenceComparison]) -> bool:
    """Whether the comparison rejects answers that are known to be wrong.

    Every request must be rejected for its tokens; log probabilities alone would not show that tokens are judged.
    """
    return bool(comparisons) and all(
        any(mismatch.token != mismatch.expected for mismatch in comparison.wrong) for comparison in comparisons
    )
