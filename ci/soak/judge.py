"""Judge a soak: each check passes or says why it failed."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from ci.soak.measured import LEAVING_KINDS, REFUSED_KINDS, End, Kind, Sample, Soak
from nsa_plugin.tools.compare.tolerance import TOLERANCES
from nsa_plugin.tools.compare.verdict import Check

MIB = 2**20
# Largest share of well-formed requests that may get an error: a server under pressure may refuse, but rarely.
ERROR_SHARE = 0.01
# Growth between the medians of the second and the last quarter of the load; the first quarter is warm-up.
HOST_GROWTH, HOST_SHARE = 64 * MIB, 0.03
GPU_GROWTH, GPU_SHARE = 256 * MIB, 0.01
FILES_GROWTH = 64
# A batch has a few objects for each of its requests and plans; what grows by more than those of some batches is kept.
OBJECTS_GROWTH = 300
_FEWEST_SAMPLES = 3  # in a quarter
TOO_FEW = "too few samples"
PRESSURE, OBJECTS = "cache pressure", "plugin objects"
"""Names of the checks of preemptions and of the plugin's objects."""
_NAMED = 3

# By dtype: (margin in nats, share of repeats that may differ). Batching changes the order of additions. In float32 that
# moves a log probability by no more than the demo's `outlier`, so another token is right only if the idle server held
# both that nearly equal, and that is rare. In bfloat16 nearly every long answer splits somewhere, so only the margin
# is judged, of the first different token and of the log probabilities before it: a wrong key that changes no token
# still moves those. After the first different token the contexts differ, and nothing more is compared.
RULES = {
    "float32": (TOLERANCES["float32"].outlier or TOLERANCES["float32"].margin, 0.05),
    "bfloat16": (TOLERANCES["bfloat16"].margin, 1.0),
}


def judge(soak: Soak) -> list[Check]:
    """Every check of a soak, passed or failed."""
    return [check(soak) for check in CHECKS]


def traffic(soak: Soak) -> Check:
    """The load had every kind of request; otherwise the other checks show little."""
    counts = Counter(one.kind for one in soak.sent)
    missing = [kind for kind in Kind if not counts[kind]]
    detail = f"no request of kind: {', '.join(missing)}" if missing else f"{counts.total()} requests of every kind"
    return Check(name="traffic", holds=not missing, detail=detail)


def answers(soak: Soak) -> Check:
    """Every well-formed request is answered completely, left by its client as planned, or gets an error (rarely)."""
    asked = [one for one in soak.sent if one.kind not in REFUSED_KINDS]
    bad = [
        one
        for one in asked
        if one.end in (End.SHORT, End.LOST, End.HUNG, End.REFUSED)
        or (one.end is End.LEFT and one.kind not in LEAVING_KINDS)
    ]
    errors = sum(one.end is End.ERROR for one in asked)
    if bad:
        named = "; ".join(f"{one.kind}: {one.end} {one.status} {one.detail}".strip() for one in bad[:_NAMED])
        return Check(name="answers", holds=False, detail=f"{len(bad)} of {len(asked)} requests: {named}")
    if not asked or errors > ERROR_SHARE * len(asked):
        said = next((one.detail for one in asked if one.end is End.ERROR), "")
        return Check(name="answers", holds=False, detail=f"{errors} of {len(asked)} requests got an error: {said}")
    return Check(name="answers", holds=True, detail=f"{len(asked)} well-formed requests, {errors} errors")


def tokens(soak: Soak) -> Check:
    """Probes under load give the idle server's tokens, but for near ties, and its log probabilities; see `RULES`."""
    return _repeats(soak, after=False, name="tokens under load")


def afterwards(soak: Soak) -> Check:
    """After the load the server holds no request and answers the probes as before it."""
    if soak.running:
        return Check(name="afterwards", holds=False, detail=f"the idle server still holds {soak.running} requests")
    return _repeats(soak, after=True, name="afterwards")


def _repeats(soak: Soak, *, after: bool, name: str) -> Check:
    repeats = [one for one in soak.repeats if one.after is after]
    wrong = [one for one in repeats if not one.gap <= soak.margin]
    moved = [one for one in repeats if not one.logprob_error <= soak.margin]
    split = sum(one.same < one.tokens for one in repeats)
    same, total = sum(one.same for one in repeats), sum(one.tokens for one in repeats)
    if wrong:
        named = "; ".join(f"{one.name} at token {one.same} (gap {one.gap:.2g})" for one in wrong[:_NAMED])
        detail = f"{len(wrong)} of {len(repeats)} probes gave other tokens: {named}"
    elif moved:
        named = "; ".join(f"{one.name} ({one.logprob_error:.2g})" for one in moved[:_NAMED])
        detail = (
            f"{len(moved)} of {len(repeats)} probes gave other log probabilities (allowed {soak.margin:g}): {named}"
        )
    elif not repeats:
        detail = "no probe was answered"
    else:
        ties = f", {split} differ at a near tie (gap at most {soak.margin:g})" if split else ""
        error = max(one.logprob_error for one in repeats)
        detail = f"{len(repeats)} probes, {same} of {total} tokens the same, log probabilities within {error:.2g}{ties}"
    holds = bool(repeats) and not wrong and not moved and split <= soak.split_share * len(repeats)
    return Check(name=name, holds=holds, detail=detail)


def refusals(soak: Soak) -> Check:
    """Malformed and oversized requests get an HTTP status 4xx."""
    asked = [one for one in soak.sent if one.kind in REFUSED_KINDS]
    bad = {one.detail: f"{one.detail}: {one.end} {one.status}" for one in asked if one.end is not End.REFUSED}
    detail = "; ".join(list(bad.values())[:_NAMED]) if bad else f"{len(asked)} requests got 4xx"
    return Check(name="refusals", holds=bool(asked) and not bad, detail=detail)


def pressure(soak: Soak) -> Check:
    """The KV cache was too small for the load, so that the server preempted requests."""
    if soak.preemptions is None:
        return Check(name=PRESSURE, holds=False, detail="the server's preemptions were not counted")
    return Check(name=PRESSURE, holds=soak.preemptions > 0, detail=f"{soak.preemptions} preemptions")


def plugin(soak: Soak) -> Check:
    """The plugin planned sparse prefills and decode steps."""
    served = {route.split("/")[1] for route, batches in soak.routes.items() if batches}
    missing = {"sparse_prefill", "sparse_decode"} - served
    total = sum(soak.routes.values())
    detail = f"no batch by {', '.join(sorted(missing))}" if missing else f"{total} batches by {len(soak.routes)} paths"
    return Check(name="plugin", holds=not missing, detail=detail)


def host_memory(soak: Soak) -> Check:
    """The resident memory of the server's processes is flat after warm-up."""
    return _flat(soak, "host memory", lambda one: one.rss, HOST_GROWTH, HOST_SHARE)


def gpu_memory(soak: Soak) -> Check:
    """The GPUs' memory in use is flat after warm-up."""
    if soak.memory and all(one.gpu is None for one in soak.memory):
        return Check(name="GPU memory", holds=True, detail="no GPU")
    return _flat(soak, "GPU memory", lambda one: one.gpu or 0, GPU_GROWTH, GPU_SHARE)


def plugin_objects(soak: Soak) -> Check:
    """The plugin keeps nothing of a batch.

    Objects in reference cycles, the engine's too, live until Python's garbage collector has run in full. In SGLang's
    scheduler that takes three minutes, in which their number rises by thousands. What is kept survives it, so the
    fewest of either half after warm-up are compared.
    """
    if soak.memory and all(one.objects is None for one in soak.memory):
        return Check(name=OBJECTS, holds=False, detail="no process of the server counted")
    fewest = []
    for first, end in ((1.0, 2.5), (2.5, 4.0)):
        found = [one.objects for one in _between(soak, first, end) if one.objects is not None]
        if len(found) < _FEWEST_SAMPLES:
            return Check(name=OBJECTS, holds=False, detail=TOO_FEW)
        fewest.append(min(found))
    then, later = fewest
    return Check(name=OBJECTS, holds=later - then <= OBJECTS_GROWTH, detail=f"at least {then}, then {later}")


def open_files(soak: Soak) -> Check:
    """Clients that left do not leave file descriptors behind."""
    return _flat(soak, "open files", lambda one: one.files, FILES_GROWTH)


def _flat(soak: Soak, name: str, read: Callable[[Sample], int | None], growth: int, share: float = 0.0) -> Check:
    """Whether the median grows by at most `growth` or, if that is more, by `share` of itself."""
    quarters = _quarters(soak, read)
    if quarters is None:
        return Check(name=name, holds=False, detail=TOO_FEW)
    second, last = quarters
    allowed = max(growth, share * second)
    detail = f"{second:.0f}, then {last:.0f}"
    if share:
        detail = f"{second / MIB:.0f} MiB, then {last / MIB:.0f} MiB (allowed growth {allowed / MIB:.0f} MiB)"
    return Check(name=name, holds=last - second <= allowed, detail=detail)


def _quarters(soak: Soak, read: Callable[[Sample], int | None]) -> tuple[float, float] | None:
    """Medians of the second and of the last quarter of the load; None if a quarter has too few samples."""
    found = []
    for quarter in (1, 3):
        values = [value for one in _between(soak, quarter, quarter + 1) if (value := read(one)) is not None]
        if len(values) < _FEWEST_SAMPLES:
            return None
        found.append(statistics.median(values))
    return found[0], found[1]


def _between(soak: Soak, first: float, end: float) -> list[Sample]:
    """The samples from one number of quarters of the load to another."""
    return [one for one in soak.memory if first <= 4 * one.at / (60 * soak.minutes) < end]


def killed(soak: Soak) -> Check:
    """After a worker is killed no request hangs, and the server ends or answers with an error."""
    ending = soak.ending
    if ending is None:
        return Check(name="worker killed", holds=False, detail="no worker was killed")
    bad = {end: count for end, count in ending.in_flight.items() if end in (End.HUNG, End.SHORT)}
    how = "the server ended" if ending.ended else f"the server answered {ending.status or 'nothing'}"
    counts = ", ".join(f"{count} {end}" for end, count in sorted(ending.in_flight.items()))
    holds = not bad and (ending.ended or ending.status >= 400)
    detail = f"{ending.killed}: {how} after {ending.seconds:.1f} s; in flight: {counts or 'none'}"
    return Check(name="worker killed", holds=holds and bool(ending.in_flight), detail=detail)


def processes(soak: Soak) -> Check:
    """The server leaves no process behind."""
    left: Sequence[str] = soak.ending.left if soak.ending else ["no worker was killed"]
    return Check(name="processes left", holds=not left, detail="; ".join(left) or "none")


CHECKS = (
    *(traffic, answers, tokens, refusals, pressure, plugin, afterwards, host_memory, gpu_memory, plugin_objects),
    *(open_files, killed, processes),
)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that `share` of them do not exceed; NaN for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
