"""A soak that passes, and its judgement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ci.soak.judge import MIB, RULES, judge
from ci.soak.measured import LEAVING_KINDS, REFUSED_KINDS, End, Ending, Kind, Repeat, Sample, Sent, Soak

MARGIN, SPLIT = RULES["float32"]


def expected(kind: Kind) -> End:
    return End.REFUSED if kind in REFUSED_KINDS else End.LEFT if kind in LEAVING_KINDS else End.ANSWERED


def good() -> Soak:
    """A soak of ten minutes that passes."""
    sent = [Sent(kind=kind, end=expected(kind), seconds=1.0, status=200) for kind in Kind for _ in range(10)]
    repeats = [Repeat(name="probe", tokens=24, same=24, after=after) for after in (False, True) for _ in range(20)]
    flat = Sample(at=0, rss=2000 * MIB, processes=3, files=100, gpu=9000 * MIB, objects=5000)
    memory = [replace(flat, at=at, objects=None if at < 20 else 5000) for at in range(0, 600, 5)]
    ending = Ending(killed="EngineCore", ended=True, status=0, seconds=2.0, in_flight=Counter({End.ERROR: 6}))
    return Soak(
        minutes=10,
        margin=MARGIN,
        split_share=SPLIT,
        sent=sent,
        repeats=repeats,
        memory=memory,
        preemptions=5,
        routes={"extend/sparse_prefill/portable": 10, "decode/sparse_decode/portable": 90},
        running=0,
        ending=ending,
    )


def failed(soak: Soak) -> list[str]:
    return [check.name for check in judge(soak) if not check.holds]


def by_rule(soak: Soak, dtype: str) -> Soak:
    """The soak, to be judged as one of a model of that dtype."""
    soak.margin, soak.split_share = RULES[dtype]
    return soak
