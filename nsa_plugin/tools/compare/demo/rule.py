"""Judges the server's answers by the reference model, and the judge by answers that are known to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsa_plugin.tools.compare.demo.requests import Answer

if TYPE_CHECKING:
    from nsa_plugin.tools.reference import ReferenceRun


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far the server may be from the float32 reference. Log probabilities are natural.

    Attributes:
        margin: a generated token that is not the reference's first choice is wrong where the reference
            prefers its own by more than this, and a tie where it does not.
        logprob: |difference| of a log probability beyond which a position is an outlier. None: differences
            are measured and stated, not judged.
        outlier: |difference| beyond which a position is wrong.
        outlier_share: the largest share of a run's positions that may be outliers.
    """

    margin: float
    logprob: float | None = None
    outlier: float | None = None
    outlier_share: float = 0.0

    def outliers_hold(self, comparisons: Sequence[Comparison]) -> bool:
        """Whether a run has no more outliers than it may."""
        tokens = sum(comparison.tokens for comparison in comparisons)
        return sum(comparison.outliers for comparison in comparisons) <= self.outlier_share * tokens


# In float32 only the order of additions differs: 3e-5 on this model. But where two tokens at the edge of a selection
# score alike, that decides which one is attended; of a thousand selections about one turns, and of those that turn
# one in twenty moves a log probability by more than 1e-3, and none that was seen by more than 6e-3. Attending to all
# tokens instead of the selected ones puts more than half of the positions beyond 1e-3, and leaving out the indexer's
# fp8 rounding a fifth.
#
# In bfloat16 every activation is rounded to 8 bits: log probabilities are seen to differ by up to 0.8, and the
# preferred token where the choice was within 0.5. Attention to wrong tokens differs by 4 in the median.
TOLERANCES = {
    "float32": Tolerance(margin=1e-3, logprob=1e-3, outlier=1e-2, outlier_share=0.02),
    "bfloat16": Tolerance(margin=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A generated token that disagrees.

    Attributes:
        position: in the answer, from 0.
        token, expected: the server's and the reference's choice.
        margin: by how much the reference prefers its own, in nats.
        logprob_error: largest |difference| of the log probabilities that the server gave at this position.
        index_margin: the least margin of the reference's own selection at this position over the layers, see
            `ReferenceRun`; near zero, rounding alone decides what is attended.
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
class Comparison:
    """One request, compared.

    Attributes:
        name: of the request.
        tokens: generated tokens.
        equal: of them, those that are the reference's first choice.
        ties: of the others, those within the tolerance's margin.
        outliers: positions whose log probabilities are off by more than `Tolerance.logprob`.
        max_logprob_error: largest |difference| of all log probabilities that the server gave.
        wrong: positions that the tolerance does not cover.
        problem: what is wrong with the answer as a whole, or "".
    """

    name: str
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


def compare(answer: Answer, reference: ReferenceRun, tolerance: Tolerance) -> Comparison:
    """Every token and log probability of an answer against the reference.

    Args:
        reference: run on the prompt and the server's own tokens, so that each position is judged by itself.
    """
    first = len(answer.request.prompt) - 1
    problem = ""
    if len(answer.token_ids) != answer.request.max_tokens:
        problem = f"{len(answer.token_ids)} tokens where {answer.request.max_tokens} were asked for"
    elif not len(answer.logprobs) == len(answer.top_logprobs) == len(answer.token_ids):
        problem = f"{len(answer.logprobs)} log probabilities for {len(answer.token_ids)} tokens"

    equal = ties = outliers = 0
    worst = 0.0
    wrong = []
    given = zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=False)
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
    return Comparison(
        name=answer.request.name,
        tokens=len(answer.token_ids),
        equal=equal,
        ties=ties,
        outliers=outliers,
        max_logprob_error=worst,
        wrong=tuple(wrong),
        problem=problem,
    )


def control_holds(comparisons: Sequence[Comparison]) -> bool:
    """Whether the comparison sees answers that are known to be wrong.

    Every request must be rejected for its tokens: log probabilities alone would not show that tokens are judged.
    """
    return bool(comparisons) and all(
        any(mismatch.token != mismatch.expected for mismatch in comparison.wrong) for comparison in comparisons
    )
