"""What a soak measures. Plain data, so that the judge can be tested on made-up measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """A kind of request. The first seven are well-formed."""

    PLAIN = "plain"  # the answer in one piece
    STREAM = "stream"
    SLOW = "slow reader"  # a stream that the client reads with pauses
    DISCONNECT = "disconnect"  # the client leaves in the middle of a stream
    CANCEL = "cancel"  # the client gives up before the answer
    BURST = "burst"  # one of many sent at the same moment
    PROBE = "probe"  # its tokens are compared with those that the server gave when it was idle
    MALFORMED = "malformed"
    OVERSIZED = "oversized"


REFUSED_KINDS = (Kind.MALFORMED, Kind.OVERSIZED)
LEAVING_KINDS = (Kind.DISCONNECT, Kind.CANCEL)


class End(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"  # with every requested token
    LEFT = "client left"  # as planned
    REFUSED = "refused"  # HTTP status 4xx
    ERROR = "error"  # HTTP status 5xx, or an error in the stream
    SHORT = "short"  # another number of tokens, without an error
    LOST = "lost"  # the connection broke without an answer
    HUNG = "hung"  # no answer in time


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One request and how it ended.

    Attributes:
        at: seconds from the start of the load to sending.
        seconds: from sending to the end.
        first_token: seconds from sending to the first token of a stream; 0 if there was none.
        status: HTTP status; 0 = none.
        detail: what a malformed request contains, or what went wrong.
    """

    kind: Kind
    end: End
    at: float = 0.0
    seconds: float = 0.0
    first_token: float = 0.0
    status: int = 0
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A probe answered again, compared with its answer on the idle server.

    Attributes:
        after: sent alone once the load was over, not under load.
        tokens: tokens generated.
        same: tokens before the first one that differs.
        gap: how much more probable, in nats, the idle server held its own token where the two first differ; 0 if they
            do not differ, infinite if the other token was not among the most probable.
        logprob_error: largest difference of a log probability among the `same` tokens; infinite if one is missing.
    """

    name: str
    tokens: int
    same: int
    gap: float = 0.0
    logprob_error: float = 0.0
    after: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The server's memory at one moment.

    Attributes:
        at: seconds since the start of the load.
        rss: resident bytes, the sum over all processes of the server.
        files: open file descriptors of all processes.
        gpu: bytes that the server uses on all GPUs, see `watch.gpu_bytes`; None without a GPU.
        objects: instances of the plugin's classes in all processes; None before the first count.
    """

    at: float
    rss: int
    processes: int
    files: int = 0
    gpu: int | None = None
    objects: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What happened when a worker process was killed.

    Attributes:
        killed: title of the process.
        ended: the server ended by itself.
        status: if it did not, the HTTP status of a request sent to it; 0 = no answer.
        seconds: from the kill to the server's end or to that answer.
        in_flight: how the requests ended that were being answered.
        left: processes that still ran after the server's end.
    """

    killed: str
    ended: bool
    status: int
    seconds: float
    in_flight: Counter[End]
    left: Sequence[str] = ()


@dataclass(kw_only=True)
class Soak:
    """A whole run.

    Attributes:
        minutes: of load, as requested.
        margin, split_share: what `judge.tokens` allows, see `judge.RULES`.
        preemptions: requests that the server preempted or retracted; None if its metrics could not be read.
        routes: batches that the plugin planned, by "phase/attention/provider".
        running: requests that the server still held a while after the load; None if it does not say.
    """

    minutes: float
    margin: float
    split_share: float
    sent: list[Sent] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)
    preemptions: int | None = None
    routes: Mapping[str, int] = field(default_factory=dict)
    running: int | None = None
    ending: Ending | None = None
