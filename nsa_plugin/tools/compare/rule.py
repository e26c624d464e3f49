"""The rule: when two servers agree, and when the comparison may say so. docs/compare.md explains it.

Greedy answers of two servers are compared up to the first different token, because what follows is conditioned on
different text. Up to there, and for both tokens at that point, log probabilities are compared. `forced` requests
compare the log probabilities of the prompt's own tokens, where answers cannot diverge. How far the plugin may be from
stock follows from how far stock is from itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from nsa_plugin.tools.compare.measured import AGAIN, STOCK, Measured, Run
from nsa_plugin.tools.compare.workload import FORCED, LIMIT, SAME
from nsa_plugin.tools.serving.engine import V4, V32
from nsa_plugin.tools.serving.requests import Answer

# The plugin may be this many times as far from stock as stock is from itself.
TIMES = 2.0


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Differences in nats that always pass, even if stock repeats itself exactly.

    Attributes:
        largest: of one log probability, or between two tokens where answers diverge.
        mean: over the log probabilities of answers.
        forced: mean over forced positions, whose tokens are less likely.
    """

    largest: float
    mean: float
    forced: float


# The effect of one more rounding on the model of `--heads` (16 heads, 700 to 3000 tokens, the last 512 positions, in
# plain torch). Arithmetic in bfloat16 instead of float32 changes the log probability of the likeliest token by 0.08 on
# average and 0.67 at most, and that of a random token by 0.08; two such servers differ by √2 times that. A latent
# rounded to fp8, in tiles of 128, changes them by 0.16, 1.4 and 0.19; a path that reads fresh keys and one that reads
# an fp8 cache differ by that. Attending to wrong tokens changes the likeliest token's by 1.9 on average.
FLOORS = {
    "bf16": Floor(largest=0.7, mean=0.11, forced=0.12),
    "fp8": Floor(largest=1.5, mean=0.17, forced=0.2),
}
# With V4 every path, stock's and the plugin's, reads the fp8 cache, so the cache's rounding affects both alike. What
# remains is arithmetic: engines convert each linear layer's input to fp8, where a tiny difference may become a whole
# code. Computed in the same way (the checkpoint of `--family v4`, its implementation in transformers 5.19, inputs and
# window keys rounded to fp8 in tiles of 128; 700 tokens, the last 512 positions): bfloat16 instead of float32 changes
# the likeliest token by 0.153 on average and 0.82 at most, and a random one by 0.211; in attention alone by 0.12, 0.65
# and 0.182. Attending to wrong tokens of the window changes them by 2.98 and 1.45 on average.
V4_FLOOR = Floor(largest=0.85, mean=0.16, forced=0.22)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One request answered by two servers, or by one server in two groups. Differences are absolute and in nats.

    Attributes:
        prompt: its length in tokens.
        tokens: generated tokens; 0 for `forced` requests.
        equal: tokens before the first different one.
        positions: compared log probabilities.
        largest, mean: of the differences; infinite if a value is not a number.
        gap: how much a server prefers its own token where the answers diverge, the larger of the two; infinite if one
            does not list the other's token. None: the answers do not diverge.
        problem: why there is nothing to compare, or "".
    """

    group: str
    name: str
    prompt: int
    tokens: int = 0
    equal: int = 0
    positions: int = 0
    largest: float = 0.0
    mean: float = 0.0
    gap: float | None = None
    problem: str = ""


def compare(ours: Answer, theirs: Answer, *, group: str, name: str, prompt: int) -> Compared:
    """Compare two answers to one prompt."""
    made = partial(Compared, group=group, name=name, prompt=prompt)
    if problem := ours.error or theirs.error:
        return made(problem=problem)
    if ours.prompt_logprobs or theirs.prompt_logprobs:
        if len(ours.prompt_logprobs) != len(theirs.prompt_logprobs):
            problem = f"{len(ours.prompt_logprobs)} and {len(theirs.prompt_logprobs)} log probabilities of the prompt"
            return made(problem=problem)
        return _compared(made, _differences(zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)))
    for answer in (ours, theirs):
        if not (len(answer.token_ids) == len(answer.logprobs) == len(answer.top) and answer.token_ids):
            problem = f"{len(answer.token_ids)} tokens, {len(answer.logprobs)} log probabilities"
            return made(problem=problem)
    if len(ours.token_ids) != len(theirs.token_ids):
        problem = f"{len(ours.token_ids)} and {len(theirs.token_ids)} tokens"
        return made(problem=problem)

    tokens = len(ours.token_ids)
    equal = next((i for i in range(tokens) if ours.token_ids[i] != theirs.token_ids[i]), tokens)
    differences = _differences(zip(ours.logprobs[:equal], theirs.logprobs[:equal], strict=True))
    gap = None
    if equal < tokens:
        one, other = ours.token_ids[equal], theirs.token_ids[equal]
        a, b = ours.top[equal], theirs.top[equal]
        differences += _differences((a[token], b[token]) for token in (one, other) if token in a and token in b)
        gap = max(_preference(a, one, other), _preference(b, other, one))
    return _compared(made, differences, tokens=tokens, equal=equal, gap=gap)


def _compared(made: Callable[..., Compared], differences: list[float], **more: object) -> Compared:
    return made(
        **more,
        positions=len(differences),
        largest=max(differences, default=0.0),
        mean=sum(differences) / len(differences) if differences else 0.0,
    )


def _differences(pairs: Iterable[tuple[float, float]]) -> list[float]:
    # NaN compares as neither less nor greater: count it as infinitely wrong.
    return [math.inf if math.isnan(a - b) else abs(a - b) for a, b in pairs]


def _preference(top: Mapping[int, float], chosen: int, other: int) -> float:
    """How much a server prefers its token to another one; infinite if the other is not listed."""
    if chosen not in top or other not in top:
        return math.inf
    gap = top[chosen] - top[other]
    return math.inf if math.isnan(gap) else max(gap, 0.0)


def between(measured: Measured, ours: Run, theirs: Run) -> list[Compared]:
    """Requests that both servers answered, in the same groups, without prompts meant to make stock fail."""
    pairs = [(group, group) for group in ours.answers if group in theirs.answers and group != LIMIT]
    return _compare_groups(measured, ours, theirs, pairs)


def against_stock(measured: Measured, stock: Run, run: Run, allowed: Tolerance) -> list[Compared]:
    """As `between`. Where stock's answers to one prompt do not agree with each other, the closer one counts."""
    others: dict[tuple[str, str], list[str]] = {}
    for pair in (pair for pair in SAME if set(pair) <= stock.answers.keys()):
        for one in _compare_groups(measured, stock, stock, [pair]):
            if not one.problem and not allowed.holds(one):
                for group, other in (pair, pair[::-1]):
                    others.setdefault((group, one.name), []).append(other)

    def closer(one: Compared) -> Compared:
        against = partial(compare, theirs=run.answers[one.group][one.name], group=one.group, name=one.name)
        twins = (stock.answers[other][one.name] for other in others.get((one.group, one.name), []))
        found = (one, *(against(twin, prompt=one.prompt) for twin in twins))
        return next((other for other in found if allowed.holds(other)), one)

    return [closer(one) for one in between(measured, stock, run)]


def within(measured: Measured, run: Run) -> list[Compared]:
    """Requests that one server answered in two groups; groups are named "one / other"."""
    return _compare_groups(measured, run, run, [pair for pair in SAME if set(pair) <= run.answers.keys()])


def _compare_groups(measured: Measured, ours: Run, theirs: Run, pairs: Iterable[tuple[str, str]]) -> list[Compared]:
    return [
        compare(
            answer,
            theirs.answers[other][name],
            group=one if one == other else f"{one} / {other}",
            name=name,
            prompt=measured.prompts[one][name],
        )
        for one, other in pairs
        for name, answer in ours.answers[one].items()
        if name in theirs.answers[other]
    ]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The differences allowed for the plugin, and stock's own differences that they follow from, in nats.

    Attributes:
        largest, answers_mean, forced_mean: allowed; see `Floor`.
        own_largest, own_answers_mean, own_forced_mean: of stock against itself. A mean is the largest over the pairs of
            groups or servers.
    """

    largest: float
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


def is_forced(one: Compared) -> bool:
    return one.group.startswith(FORCED)


def mean(compared: Iterable[Compared]) -> float:
    """Mean difference over all positions; 0 without any."""
    rows = [one for one in compared if one.positions]
    return sum(one.mean * one.positions for one in rows) / max(1, sum(one.positions for one in rows))


def own_differences(measured: Measured) -> list[Compared]:
    """All known differences of stock from itself: within each stock server, and between the two."""
    stock, again = measured.runs.get(STOCK), measured.runs.get(AGAIN)
    found = [one for run in (stock, again) if run is not None for one in within(measured, run)]
    if stock is not None and again is not None:
        found += between(measured, stock, again)
    return found


def floor_of(kv: str, family: str = V32) -> Floor:
    """The floor for a model of `family` with a KV cache of `kv`, "bf16" or "fp8"."""
    return V4_FLOOR if family == V4 else FLOORS[kv]


def tolerance(own: Iterable[Compared], floor: Floor) -> Tolerance:
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
    return Tolerance(
        largest=max(TIMES * largest, floor.largest),
        answers_mean=max(TIMES * answers_mean, floor.mean),
        forced_mean=max(TIMES * forced_mean, floor.forced),
        own_largest=largest,
        own_answers_mean=answers_mean,
        own_forced_mean=forced_mean,
    )
