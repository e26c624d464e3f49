"""The differences between two answers to one prompt. docs/compare.md explains it.

Greedy answers of two servers are compared up to the first different token, because what follows is conditioned on
different text. Up to there, and for both tokens at that point, log probabilities are compared. `forced` requests
compare the log probabilities of the prompt's own tokens, where answers cannot diverge. The float32 reference model gets
the server's tokens, so with it as the baseline every position is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nsa_plugin.tools.compare.measured import AGAIN, STOCK, Measured, Run
from nsa_plugin.tools.compare.workload import FORCED, LIMIT, SAME
from nsa_plugin.tools.serving.requests import Answer, PromptRequest

if TYPE_CHECKING:
    from nsa_plugin.tools.reference import ReferenceRun


@dataclass(frozen=True, kw_only=True)
class Position:
    """A generated token compared with the reference's choice after the same tokens.

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
class Compared:
    """One request answered by a server and its baseline, or twice by one server. Differences are absolute, in nats.

    The baseline is another server or the reference model.

    Attributes:
        prompt: its length in tokens.
        tokens: generated tokens; 0 for `forced` requests.
        equal: tokens before the first different one; with the reference, all that are its first choice.
        positions: compared log probabilities.
        largest, mean: of the differences; infinite if a value is not a number.
        gap: how much a server prefers its own token where the answers diverge, the larger of the two; infinite if one
            does not list the other's token. None: the answers do not diverge.
        judged: each generated token, if the baseline is the reference.
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
    judged: tuple[Position, ...] = ()
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


def compare_with_reference(request: PromptRequest, answer: Answer, reference: ReferenceRun, *, group: str) -> Compared:
    """Compare every token and log probability of an answer with the reference.

    Args:
        reference: a run on the prompt and the server's tokens, so that each position is judged independently.
    """
    problem, tokens = answer.error, len(answer.token_ids)
    if not problem and tokens != request.new_tokens:
        problem = f"{tokens} tokens instead of {request.new_tokens}"
    elif not problem and not len(answer.logprobs) == len(answer.top) == tokens:
        problem = f"{len(answer.logprobs)} log probabilities for {tokens} tokens"

    differences, judged = list[float](), list[Position]()
    given = zip(answer.token_ids, answer.logprobs, answer.top, strict=False)
    for row, (token, logprob, top) in enumerate(given, len(request.prompt) - 1):
        expected = int(reference.logprobs[row].argmax())
        likely = reference.logprobs[row].tolist()
        errors = _differences((value, likely[candidate]) for candidate, value in {**top, token: logprob}.items())
        index_margins = reference.index_margin[:, row].tolist()
        differences += errors
        judged.append(
            Position(
                position=len(judged),
                token=token,
                expected=expected,
                margin=likely[expected] - likely[token],
                logprob_error=max(errors),
                index_margin=min(index_margins, default=math.inf),
            )
        )
    made = partial(Compared, group=group, name=request.name, prompt=len(request.prompt), problem=problem)
    return _compared(
        made,
        differences,
        tokens=tokens,
        equal=sum(at.token == at.expected for at in judged),
        gap=max((at.margin for at in judged if at.token != at.expected), default=None),
        judged=tuple(judged),
    )


def between(measured: Measured, ours: Run, theirs: Run) -> list[Compared]:
    """Requests that both servers answered, in the same groups, without prompts meant to make stock fail."""
    pairs = [(group, group) for group in ours.answers if group in theirs.answers and group != LIMIT]
    return _compare_groups(measured, ours, theirs, pairs)


def against_stock(measured: Measured, stock: Run, run: Run, agrees: Callable[[Compared], bool]) -> list[Compared]:
    """As `between`. Where stock's answers to one prompt do not agree with each other, the closer one counts."""
    others: dict[tuple[str, str], list[str]] = {}
    for pair in (pair for pair in SAME if set(pair) <= stock.answers.keys()):
        for one in _compare_groups(measured, stock, stock, [pair]):
            if not one.problem and not agrees(one):
                for group, other in (pair, pair[::-1]):
                    others.setdefault((group, one.name), []).append(other)

    def closer(one: Compared) -> Compared:
        against = partial(compare, theirs=run.answers[one.group][one.name], group=one.group, name=one.name)
        twins = (stock.answers[other][one.name] for other in others.get((one.group, one.name), []))
        found = (one, *(against(twin, prompt=one.prompt) for twin in twins))
        return next((other for other in found if agrees(other)), one)

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
