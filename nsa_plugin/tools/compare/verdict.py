"""The verdict of a comparison: checks that passed or say why they failed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nsa_plugin.telemetry import MIXED, SHORT_WITH_LONG, SPLIT
from nsa_plugin.tools.compare import rule
from nsa_plugin.tools.compare.load import TURNS
from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, PLUGIN_AGAIN, STOCK, Measured, Run
from nsa_plugin.tools.compare.rule import Compared
from nsa_plugin.tools.compare.tolerance import ReferenceTolerance, StockTolerance, Tolerance, floor_of, tolerance
from nsa_plugin.tools.compare.workload import AGREEMENT_CASES, INTERLEAVED, LIMIT, MIXED_CHUNK
from nsa_plugin.tools.serving.engine import V32

_NAMED = 4  # requests that a check lists

AGREES = "the plugin agrees"
"""How the names of the checks begin that compare answers with the tolerance."""

SHARED_CACHE = "context parallelism"
"""The fact in a start-up report that says how many ranks share the KV cache."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that the comparison must have shown."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The checks, and the differences they judge.

    Attributes:
        own: stock against itself or, of two engines, against the other stock. Empty if the baseline is the reference.
        plugin: the plugin against its baseline: stock, the reference or, of two engines, the other plugin.
        controls: the plugin with deliberately wrong tokens against the baseline, under the name ""; of two engines,
            each engine's name and its control against the other engine's plugin.
    """

    checks: Sequence[Check]
    tolerance: Tolerance
    own: Sequence[Compared]
    plugin: Sequence[Compared]
    controls: Mapping[str, Sequence[Compared]]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def judge(measured: Measured) -> Verdict:
    """Judge what was measured so far."""
    runs = measured.runs
    own = rule.own_differences(measured)
    # Files saved by earlier releases have no family; they are of V3.2.
    allowed = tolerance(own, floor_of(measured.facts["kv"], measured.facts.get("family", V32)))
    stock = runs.get(STOCK)

    def against_stock(role: str) -> list[Compared]:
        if stock is None or role not in runs:
            return []
        return rule.against_stock(measured, stock, runs[role], allowed.holds)

    plugin, control = against_stock(PLUGIN), against_stock(CONTROL)
    agreement = any(case in AGREEMENT_CASES for case in measured.asked["cases"])
    checks = [complete(measured)]
    if PLUGIN in runs:
        checks.append(active(runs[PLUGIN]))
        if (ranks := measured.facts.get("dcp", 1)) > 1:
            checks.append(shares_cache(runs[PLUGIN], ranks))
        checks += combined_checks(measured, runs[PLUGIN])
        if runs[PLUGIN].report.get("settings", {}).get("token_shard") == "on":
            checks.append(reshards(runs[PLUGIN]))
    if PLUGIN_AGAIN in runs:
        checks.append(active(runs[PLUGIN_AGAIN], "the plugin's second server served"))
    late = [run.built_late for role, run in runs.items() if role in (PLUGIN, PLUGIN_AGAIN)]
    if known := [names for names in late if names is not None]:
        checks.append(built_before([name for names in known for name in names]))
    if agreement:
        nothing = "no request was answered twice by stock: its own spread is not known"
        checks.append(spread_check(own, allowed, name="stock against itself", nothing=nothing))
        checks += agreement_checks(plugin, allowed)
        # With data parallelism each group of ranks has its own prefix cache and the router picks the group, so a miss
        # is no fault. The answers are compared all the same.
        if "prefix" in measured.asked["cases"] and measured.least_cached and measured.facts["dp"] == 1:
            checks.append(_cached(measured))
        # Files saved by earlier releases are of V3.2, where the two are equal.
        selects_above = measured.facts.get("selects_above", measured.facts["index_topk"])
        checks.append(control_check(control, allowed, runs.get(CONTROL), selects_above))
    if LIMIT in measured.asked["cases"]:
        checks.append(_limit(measured))
    return Verdict(checks=checks, tolerance=allowed, own=own, plugin=plugin, controls={"": control})


def judge_with_reference(
    plugin: Sequence[Compared], control: Sequence[Compared] | None, allowed: ReferenceTolerance
) -> Verdict:
    """Judge answers against the float32 reference.

    Args:
        control: answers that are known to be wrong; each must be rejected for its tokens. None: no control was run.
    """
    checks = [_agrees(f"{one.name} agrees", allowed.holds(one), f"{one.name} disagrees") for one in plugin]
    few = allowed.allows_outliers_of(plugin)
    checks.append(_agrees("few log probabilities differ", few, "too many log probabilities differ"))
    if control is not None:
        noticed = bool(control) and all(tokens_rejected(one, allowed) for one in control)
        blind = "the control was not noticed, so the comparison is blind"
        checks.append(_agrees("wrong tokens are noticed", noticed, blind))
    return Verdict(checks=checks, tolerance=allowed, own=(), plugin=plugin, controls={"": control or ()})


def _agrees(name: str, holds: bool, otherwise: str) -> Check:
    return Check(name=name, holds=holds, detail="" if holds else otherwise)


def tokens_rejected(one: Compared, allowed: ReferenceTolerance) -> bool:
    """Whether a request has wrong tokens. Wrong log probabilities alone would not show that tokens are judged."""
    return any(at.token != at.expected for at in allowed.wrong(one))


def complete(measured: Measured) -> Check:
    """Whether everything needed for agreement was measured; without agreement cases, whether everything was timed."""
    missing, untimed = [measured.ended] if measured.ended else [], list[str]()
    for role in measured.asked["runs"]:
        run = measured.runs.get(role)
        if run is None:
            missing.append(f"{role} was not run")
            continue
        if run.error:
            missing.append(f"{role}: {_first_and_last(run.error)}")
        elif not run.done:
            missing.append(f"{role} was not completed")
        for skipped in run.skipped:
            if skipped in measured.prompts:
                missing.append(f"{role}: not enough time for {skipped}")
            else:
                times = max(map(len, run.speed.get(skipped, {}).values()), default=0)
                untimed.append(f"{role}: {skipped} {f'timed {times} times only' if times else 'not timed'}")
    detail = "; ".join(missing + untimed)
    if not any(case in AGREEMENT_CASES for case in measured.asked["cases"]):
        missing += untimed
    return Check(name="complete", holds=not missing, detail=detail or "everything asked for was measured")


def built_before(late: Sequence[str]) -> Check:
    """Whether the warm-up had built every kernel of the plugin, so that no request waited for one."""
    detail = f"built: {', '.join(dict.fromkeys(late))}" if late else ""
    return Check(name="no kernel of the plugin was built while serving", holds=not late, detail=detail)


def active(run: Run, name: str = "the plugin served") -> Check:
    """Whether the plugin was seen to serve."""
    if not run.report:
        detail = "its server wrote no start-up report"
    elif not run.report.get("active"):
        notes = "; ".join(run.report.get("notes", ())) or "no reason given"
        detail = f"its start-up report says it does not serve: {notes}"
    elif not run.active:
        detail = "it is on, but neither its counters nor its trace show a batch"
    else:
        counted = [f"{route} x{count}" for route, count in sorted(run.routes.items())]
        counted += [f"{count} resharded query tokens in {phase}" for phase, count in sorted(run.resharded.items())]
        detail = ", ".join(counted) or f"plans in the log: {', '.join(run.planned)}"
    return Check(name=name, holds=run.active, detail=detail)


def shares_cache(run: Run, ranks: int) -> Check:
    """Whether the plugin planned for a KV cache that `ranks` ranks share (decode context parallelism)."""
    found = run.report.get("facts", {}).get(SHARED_CACHE, "its start-up report does not say so")
    name = f"the plugin served a KV cache that {ranks} ranks share"
    return Check(name=name, holds=run.active and str(found).startswith(f"{ranks} ranks"), detail=str(found))


def reshards(run: Run) -> Check:
    """Whether the plugin resharded some batch."""
    counted = sum(run.resharded.values())
    return Check(name="heads were resharded", holds=counted > 0, detail=f"{counted} query tokens, counted")


def combined_checks(measured: Measured, run: Run) -> list[Check]:
    """Whether the plugin planned the prefills with requests of two kinds that its server was set up for."""
    found, cases = list[Check](), measured.asked["cases"]

    def add(name: str, kind: str, why: str = "") -> None:
        counted = run.combined.get(kind, 0)
        detail = f"{counted} prefills, counted" + (f"; the start-up report: {why}" if why and not counted else "")
        found.append(Check(name=name, holds=counted > 0, detail=detail))

    if run.report.get("settings", {}).get("split_prefill") == "on" and not {INTERLEAVED, TURNS}.isdisjoint(cases):
        why = run.report.get("facts", {}).get(SHORT_WITH_LONG, "")
        add("short prompts attended densely next to long ones", SPLIT, why)
    if measured.facts.get("mixed_chunk") and MIXED_CHUNK in cases:
        add("decode steps ran in prefills", MIXED)
    return found


def spread_check(own: Sequence[Compared], allowed: StockTolerance, *, name: str, nothing: str) -> Check:
    """Whether the differences that `allowed` follows from were measured.

    Args:
        nothing: the message if there are none.
    """
    problems = [f"{one.group} {one.name}: {one.problem}" for one in own if one.problem]
    detail = (
        f"largest difference {allowed.own_largest:.3f}, mean {allowed.own_answers_mean:.4f}, "
        f"mean of forced positions {allowed.own_forced_mean:.4f}; {_equal(own)}"
    )
    if differ := [f"{one.group} {one.name}" for one in own if not one.problem and not allowed.holds(one)]:
        detail += (
            f"; two answers to one prompt differ by more than is allowed, and the closer one counts: {_some(differ)}"
        )
    return Check(name=name, holds=bool(own) and not problems, detail=_some(problems) or (detail if own else nothing))


def agreement_checks(
    plugin: Sequence[Compared], allowed: StockTolerance, between: str = "stock and the plugin"
) -> list[Check]:
    """Whether the plugin's answers are close enough, request by request and on average.

    Args:
        between: the compared servers, for the message.
    """
    outliers = allowed.few_outliers(plugin)
    rejected = [one for one in plugin if not allowed.holds(one) and one not in outliers]
    answers = [one for one in plugin if not rule.is_forced(one)]
    parted = [one for one in answers if one.gap is not None]
    detail = (
        f"{len(plugin)} requests, {_equal(plugin)}; {len(parted)} answers diverge, all at near ties; "
        f"largest difference {max((one.largest for one in answers), default=0.0):.3f} of {allowed.largest:.3f} allowed"
    )
    if outliers:
        named = _some([allowed.explain(one) for one in outliers])
        detail += f", and {allowed.outlier:.3f} in a few; {len(outliers)} of {len(answers)} answers: {named}"
    if not plugin:
        detail = f"no request was answered by both {between}"
    holds, detail = bool(plugin) and not rejected, _some([allowed.explain(one) for one in rejected]) or detail
    checks = [Check(name=f"{AGREES}, request by request", holds=holds, detail=detail)]
    forced = ("forced positions", [one for one in plugin if rule.is_forced(one)], allowed.forced_mean)
    for what, some, limit in (("answers", answers, allowed.answers_mean), forced):
        if some:
            found, name = rule.mean(some), f"{AGREES} in the mean of {what}"
            checks.append(Check(name=name, holds=found <= limit, detail=f"{found:.4f} of {limit:.4f} allowed"))
    return checks


def _equal(compared: Sequence[Compared]) -> str:
    equal, tokens = sum(one.equal for one in compared), sum(one.tokens for one in compared)
    return f"{equal} of {tokens} tokens equal before answers diverge"


def _cached(measured: Measured) -> Check:
    """The plugin reuses every prefix that stock reuses, and stock reuses one at least.

    Stock may drop a prefix by design: SGLang 0.5.23 keeps one of V4 only as long as its sliding window is cached.
    """
    missed: dict[str, dict[str, str]] = {STOCK: {}, PLUGIN: {}}
    for role, misses in missed.items():
        run = measured.runs.get(role)
        answers = run.answers.get("prefix", {}) if run is not None else {}
        for name, least in measured.least_cached.items():
            got = answers[name].cached_tokens if name in answers else None
            if got is None or got < least:
                said = "no answer" if got is None else f"{got} tokens cached"
                misses[name] = f"{role}, {name}: {said}, at least {least} expected"
    dropped, lost = missed[STOCK].keys(), missed[PLUGIN].keys() - missed[STOCK].keys()
    holds = not lost and len(dropped) < len(measured.least_cached)
    detail = _some([*missed[STOCK].values(), *missed[PLUGIN].values()]) or "by stock and the plugin"
    if dropped and holds:
        detail = f"by the plugin wherever by stock; {detail}"
    return Check(name="the prefix cache was hit", holds=holds, detail=detail)


def control_check(control: Sequence[Compared], allowed: StockTolerance, run: Run | None, selects_above: int) -> Check:
    """Wrong tokens must be noticed in prompts with a selection: those of more than `selects_above` tokens."""
    name = "wrong tokens are noticed"
    # Unanswered requests, for lack of time for example, show nothing.
    long = [one for one in control if one.prompt > selects_above and not one.problem]
    if run is None or not long:
        return Check(name=name, holds=False, detail="no control was run: the comparison may be blind")
    if not run.active:
        return Check(name=name, holds=False, detail="the plugin did not serve in the control: nothing was made wrong")
    noticed = [one for one in long if not allowed.holds(one)]
    forced = [one for one in long if rule.is_forced(one)]
    # The mean of answers says nothing here: they diverge at once, which leaves little to compare.
    holds = 2 * len(noticed) >= len(long) and (not forced or rule.mean(forced) > allowed.forced_mean)
    detail = f"{len(noticed)} of {len(long)} requests longer than {selects_above} tokens rejected"
    if forced:
        detail += f", mean of forced positions {rule.mean(forced):.3f} of {allowed.forced_mean:.4f} allowed"
    return Check(name=name, holds=holds, detail=detail if holds else f"the comparison is blind: {detail}")


def _limit(measured: Measured) -> Check:
    """Stock must fail at a prompt that the plugin answers."""
    stock, plugin = climb(measured, STOCK), climb(measured, PLUGIN)
    if stock.failed_at is None:
        detail = f"stock did not fail at any prompt of up to {max(stock.answered, default=0)} tokens"
    else:
        detail = f"stock answers up to {max(stock.answered, default=0)} tokens and fails at {stock.failed_at}"
        detail += f" ({stock.error}); the plugin "
        detail += f"answers {stock.failed_at}" if stock.failed_at in plugin.answered else "does not"
        if plugin.failed_at is not None:
            detail += f", and fails at {plugin.failed_at} ({plugin.error})"
    holds = stock.failed_at is not None and stock.failed_at in plugin.answered
    return Check(name="the plugin answers a prompt that stock fails at", holds=holds, detail=detail)


@dataclass(frozen=True, kw_only=True)
class Climb:
    """How far a server came with longer and longer prompts.

    Attributes:
        answered: tokens of the prompts answered with log probabilities that are numbers.
        failed_at: tokens of the first prompt that failed; None: there was none.
        error: the failure in one line.
    """

    answered: Sequence[int] = ()
    failed_at: int | None = None
    error: str = ""


def climb(measured: Measured, role: str) -> Climb:
    """How far a role's server came; see `workload.until_it_fails`."""
    run = measured.runs.get(role)
    answered: list[int] = []
    for name, answer in run.answers.get(LIMIT, {}).items() if run is not None else ():
        prompt = measured.prompts[LIMIT][name]
        if answer.error:
            return Climb(answered=answered, failed_at=prompt, error=_first_and_last(answer.error))
        if not answer.token_ids or any(map(math.isnan, answer.logprobs)):
            return Climb(answered=answered, failed_at=prompt, error="no number for a log probability")
        answered.append(prompt)
    return Climb(answered=answered)


def _first_and_last(error: str) -> str:
    """The failure, and the last error in the server's log."""
    lines = error.splitlines()
    return " ".join(dict.fromkeys((lines[0], lines[-1].strip())))


def _some(lines: Iterable[str]) -> str:
    lines = list(lines)
    more = f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return "; ".join(lines[:_NAMED]) + more
