"""Compare the answers of two engines to the same requests for the same checkpoint.

Two engines do not fit into one Python environment. So each runs a comparison, and the two saved files are judged here.
The rule is that of docs/compare.md with another yardstick: engines round at different places, so the plugin's two
servers may differ as much as the two stock servers. Each engine's control must be noticed against the other engine's
plugin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nsa_plugin.tools.compare import record, rule
from nsa_plugin.tools.compare.measured import CONTROL, PLUGIN, STOCK, Measured, Run
from nsa_plugin.tools.compare.rule import Compared
from nsa_plugin.tools.compare.tolerance import floor_of, tolerance
from nsa_plugin.tools.compare.verdict import (
    Check,
    Verdict,
    active,
    agreement_checks,
    complete,
    control_check,
    spread_check,
)
from nsa_plugin.tools.compare.workload import LIMIT
from nsa_plugin.tools.serving.common import flag_value
from nsa_plugin.tools.serving.engine import V4, CompareError
from nsa_plugin.tools.serving.requests import Answer

# Facts that must be equal: answers depend on them as well as on the engine.
_SAME = {
    "family": "the family",
    "checkpoint": "the checkpoint's digest",
    "heads": "heads per rank",
    "kv": "the KV cache",
    "chunk": "tokens of a prefill chunk (--chunked-prefill-size of SGLang, --max-num-batched-tokens of vLLM)",
}


def check_same(one: Measured, other: Measured) -> None:
    """Check that the answers of the two can be compared. Answers may still be missing.

    Raises:
        CompareError: checkpoints, requests or flags differ or are unknown.
    """
    engines = [each.facts["engine"] for each in (one, other)]
    found = [f"both are {engines[0]}"] if engines[0] == engines[1] else []
    for name, what in _SAME.items():
        values = [each.facts.get(name) for each in (one, other)]
        if None in values or values[0] != values[1]:
            said = (f"{value or 'not known'} ({engine})" for value, engine in zip(values, engines, strict=True))
            found.append(f"{what}: {' and '.join(said)}")
    # The default depends on the engine's version; V4's cache is always fp8.
    for each in (one, other):
        if each.facts.get("family") != V4 and flag_value(each.facts["flags"], "--kv-cache-dtype") is None:
            found.append(f"{each.facts['engine']} was given no --kv-cache-dtype")
    groups = _groups(one, other)
    if not groups:
        found.append("they have no requests in common")
    if unlike := [name for name in groups if one.digests[name] != other.digests[name]]:
        found.append(f"other requests in {', '.join(unlike)}")
    if found:
        raise CompareError(f"{' and '.join(engines)} cannot be compared: {'; '.join(found)}")


def _groups(one: Measured, other: Measured) -> list[str]:
    return [name for name in one.digests if name in other.digests and name != LIMIT]


def judge(one: Measured, other: Measured) -> Verdict:
    """Judge the answers of two engines; `check_same` must have passed."""
    stock, plugin = _between(one, STOCK, other, STOCK), _between(one, PLUGIN, other, PLUGIN)
    allowed = tolerance(stock, floor_of(one.facts["kv"], one.facts["family"]))
    checks, controls = [], {}
    for each in (one, other):
        checks.append(_of_engine(complete(each), each))
        if PLUGIN in each.runs:
            checks.append(_of_engine(active(each.runs[PLUGIN]), each))
    nothing = "no request was answered by both stock servers"
    checks.append(spread_check(stock, allowed, name="stock against the other stock", nothing=nothing))
    checks += agreement_checks(plugin, allowed, "engines with the plugin")
    for each, against in ((one, other), (other, one)):
        control = controls[_engine(each)] = _between(each, CONTROL, against, PLUGIN)
        noticed = control_check(control, allowed, each.runs.get(CONTROL), one.facts["selects_above"])
        checks.append(_of_engine(noticed, each))
    return Verdict(checks=checks, tolerance=allowed, own=stock, plugin=plugin, controls=controls)


def _engine(each: Measured) -> str:
    return str(each.facts["engine"])


def _of_engine(check: Check, each: Measured) -> Check:
    return replace(check, name=f"{check.name}, {_engine(each)}")


def _between(one: Measured, role: str, other: Measured, other_role: str) -> list[Compared]:
    ours, theirs = one.runs.get(role), other.runs.get(other_role)
    if ours is None or theirs is None:
        return []
    return rule.between(one, _cut(ours, theirs, one.forced), _cut(theirs, ours, one.forced))


def _cut(run: Run, other: Run, asked: int) -> Run:
    """The run with as many log probabilities of a prompt's end as both have.

    vLLM returns them for all of a prompt's tokens, SGLang for those requested except the first.

    Args:
        asked: `Measured.forced`; fewer than that in common (less the first) is an error.
    """

    def cut(answer: Answer, theirs: Answer | None) -> Answer:
        if theirs is None or not answer.prompt_logprobs:
            return answer
        count = min(len(answer.prompt_logprobs), len(theirs.prompt_logprobs))
        if count < asked - 1:
            return replace(answer, error=f"{count} log probabilities of the prompt in common instead of {asked}")
        return replace(answer, prompt_logprobs=answer.prompt_logprobs[-count:])

    answers = {
        group: {name: cut(answer, other.answers.get(group, {}).get(name)) for name, answer in answers.items()}
        for group, answers in run.answers.items()
    }
    return replace(run, answers=answers)


def as_record(one: Measured, other: Measured, verdict: Verdict) -> dict[str, Any]:
    """The cross-engine record: the first engine's without speed, and under "beside" the other's.

    It also has "checkpoint", a digest, and "requests", a digest of each group (`RequestGroup.digest`).
    """
    made, others = record.head(one), record.head(other)
    case = record.case_of(one) | {"beside": _engine(other)}
    return made | {
        "suite": f"{made['suite']}-beside-{_suite(made, others)}",
        "timed": None,
        "beside": {
            **{name: others[name] for name in ("suite", "command", "host", "engine", "engine_flags")},
            "servers": record.servers(other),
        },
        "checkpoint": one.facts["checkpoint"],
        "requests": {name: one.digests[name] for name in _groups(one, other)},
        **record.judged(verdict, record.agreement_rows(verdict, case, record.OURS), record.servers(one)),
    }


def _suite(made: dict[str, Any], others: dict[str, Any]) -> str:
    """The other's suite, without the part after the engine's name and version that both share."""
    ours, theirs = (each["suite"].split("-", 2) for each in (made, others))
    return "-".join(theirs[:2] if ours[2:] == theirs[2:] else theirs)
