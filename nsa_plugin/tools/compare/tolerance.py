"""How far answers may be from those of stock, and from the float32 reference model. docs/compare.md explains it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nsa_plugin.tools.compare.rule import Compared, Position, is_forced, mean
from nsa_plugin.tools.serving.engine import V4, V32

# The plugin may be this many times as far from stock as stock is from itself.
TIMES = 2.0


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Differences in nats that always pass, even if stock repeats itself exactly.

    Attributes:
        largest: of one log probability, or between two tokens where answers diverge.
        outlier: the same in a few answers; see `OUTLIER_SHARE`.
        mean: over the log probabilities of answers.
        forced: mean over forced positions, whose tokens are less likely.
    """

    largest: float
    outlier: float
    mean: float
    forced: float


# `largest` and the means are the effect of one more rounding on the model of `--heads` (16 heads, 700 to 3000 tokens,
# the last 512 positions, computed once in plain torch, without a record). Arithmetic in bfloat16 instead of float32
# changes the log probability of the likeliest token by 0.08 on average and 0.67 at most, and that of a random token by
# 0.08; two such servers differ by √2 times that. A latent rounded to fp8, in tiles of 128, changes them by 0.16, 1.4
# and 0.19; a path that reads fresh keys and one that reads an fp8 cache differ by that. Attending to wrong tokens
# changes the likeliest token's by 1.9 on average.
#
# Over many positions a few differ by more, and a gap, the difference of two log probabilities, by more still:
# docs/benchmarks/cpu/compare-floors.json, written by `python -m nsa_plugin.tools.compare.floors`. Two servers that
# compute in bfloat16 each differ from float32 like its first row, so from each other by √2 times 1.125 at most, and two
# that read fresh and fp8 keys like its second, by 1.438. `outlier` is the larger of the two, rounded up. Such requests
# must be few, and the means still decide: a wrong kernel moves them all.
FLOORS = {
    "bf16": Floor(largest=0.7, outlier=1.6, mean=0.11, forced=0.12),
    "fp8": Floor(largest=1.5, outlier=1.6, mean=0.17, forced=0.2),
}
# Largest share of the answers that may be outliers.
OUTLIER_SHARE = 0.01
# With V4 every path, stock's and the plugin's, reads the fp8 cache, so the cache's rounding affects both alike. What
# remains is arithmetic: engines convert each linear layer's input to fp8, where a tiny difference may become a whole
# code. Computed once, without a record (the checkpoint of `--family v4`, its implementation in transformers 5.19,
# inputs and window keys rounded to fp8 in tiles of 128; 700 tokens, the last 512 positions): bfloat16 instead of
# float32 changes the likeliest token by 0.153 on average and 0.82 at most, and a random one by 0.211; in attention
# alone by 0.12, 0.65 and 0.182. Attending to wrong tokens of the window changes them by 2.98 and 1.45 on average.
V4_FLOOR = Floor(largest=0.85, outlier=0.85, mean=0.16, forced=0.22)


@dataclass(frozen=True, kw_only=True)
class Tolerance(ABC):
    """What the difference of one request may be."""

    @abstractmethod
    def holds(self, one: Compared) -> bool:
        """Whether a request agrees."""

    @abstractmethod
    def explain(self, one: Compared) -> str:
        """Why a request does not agree."""


@dataclass(frozen=True, kw_only=True)
class StockTolerance(Tolerance):
    """The differences allowed for the plugin, and stock's own differences that they follow from, in nats.

    Attributes:
        largest, outlier, answers_mean, forced_mean: allowed; see `Floor`.
        own_largest, own_answers_mean, own_forced_mean: of stock against itself. A mean is the largest over the pairs of
            groups or servers.
    """

    largest: float
    outlier: float
    answers_mean: float
    forced_mean: float
    own_largest: float
    own_answers_mean: float
    own_forced_mean: float

    def holds(self, one: Compared) -> bool:
        """Whether a request agrees. The mean of a single answer says little; the mean of forced positions is judged."""
        if one.problem or (one.largest > self.largest and not is_forced(one)):
            return False
        if is_forced(one):
            return one.mean <= self.forced_mean
        return one.gap is None or one.gap <= self.largest

    def few_outliers(self, compared: Sequence[Compared]) -> list[Compared]:
        """The answers that do not agree by little: all within `outlier`, and few; none if there are more."""
        answers = [one for one in compared if not is_forced(one)]
        beyond = [one for one in answers if not self.holds(one)]
        found = [one for one in beyond if not one.problem and max(one.largest, one.gap or 0.0) <= self.outlier]
        return found if len(found) <= OUTLIER_SHARE * len(answers) else []

    def explain(self, one: Compared) -> str:
        if one.problem:
            what = one.problem
        elif is_forced(one):
            what = f"mean difference {one.mean:.4f} of {self.forced_mean:.4f}"
        elif one.gap is not None and one.gap > self.largest:
            what = f"token {one.equal} differs and is not a near tie, gap {one.gap:.3f} of {self.largest:.3f}"
        else:
            what = f"largest difference {one.largest:.3f} of {self.largest:.3f}"
        return f"{one.group} {one.name}: {what}"


def floor_of(kv: str, family: str = V32) -> Floor:
    """The floor for a model of `family` with a KV cache of `kv`, "bf16" or "fp8"."""
    return V4_FLOOR if family == V4 else FLOORS[kv]


def tolerance(own: Iterable[Compared], floor: Floor) -> StockTolerance:
    """The tolerance that follows from stock's own differences and the floor."""
    own = [one for one in own if not one.problem]
    answers = [one for one in own if not is_forced(one)]
    # Infinite differences, from stock answers that are not numbers or diverge widely, would allow everything.
    spreads = [value for one in answers for value in (one.largest, one.gap or 0.0) if math.isfinite(value)]
    largest = max(spreads, default=0.0)
    answers_mean, forced_mean = (
        max((mean(one for one in rows if one.group == group) for group in {one.group for one in rows}), default=0.0)
        for rows in (answers, [one for one in own if is_forced(one)])
    )
    return StockTolerance(
        largest=max(TIMES * largest, floor.largest),
        outlier=max(TIMES * largest, floor.outlier),
        answers_mean=max(TIMES * answers_mean, floor.mean),
        forced_mean=max(TIMES * forced_mean, floor.forced),
        own_largest=largest,
        own_answers_mean=answers_mean,
        own_forced_mean=forced_mean,
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceTolerance(Tolerance):
    """How far a server may be from the float32 reference, in nats.

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

    def holds(self, one: Compared) -> bool:
        return not one.problem and not self.wrong(one)

    def explain(self, one: Compared, count: int = 3) -> str:
        wrong = self.wrong(one)
        more = f"; and {len(wrong) - count} more" if len(wrong) > count else ""
        return "; ".join([*([one.problem] if one.problem else []), *map(str, wrong[:count])]) + more

    def wrong(self, one: Compared) -> list[Position]:
        """Positions outside the tolerance."""
        return [
            at
            for at in one.judged
            # NaN is within no margin.
            if not at.margin <= self.margin or (self.outlier is not None and at.logprob_error > self.outlier)
        ]

    def ties(self, one: Compared) -> int:
        """Tokens other than the reference's that are within `margin`."""
        return sum(at.token != at.expected and at.margin <= self.margin for at in one.judged)

    def outliers(self, one: Compared) -> int:
        """Positions whose log probabilities differ by more than `logprob`."""
        return sum(self.logprob is not None and at.logprob_error > self.logprob for at in one.judged)

    def allows_outliers_of(self, compared: Iterable[Compared]) -> bool:
        """Whether a run stays within `outlier_share`."""
        compared = list(compared)
        return sum(map(self.outliers, compared)) <= self.outlier_share * sum(one.tokens for one in compared)


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
