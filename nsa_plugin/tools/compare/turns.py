"""Time loads on servers that run at the same time, in turns; on one server, one repetition after the other.

The speed of servers that run one after the other differs by far more than a few per cent, and so does one machine's
speed from minute to minute. So each repetition runs on every server before the next one starts, and the order of the
servers rotates. Two servers never work at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsa_plugin.tools.compare.lifecycle import HEARTBEAT_S, Say, recover, set_failed
from nsa_plugin.tools.compare.load import SpeedLoad, measure
from nsa_plugin.tools.compare.role_server import RoleServer
from nsa_plugin.tools.serving.engine import CompareError, ServedEngine
from nsa_plugin.tools.serving.process import ServerError

# Limit for a repetition on a healthy server, including the first compilation of kernels.
_REPETITION_S = 300.0


@dataclass(kw_only=True)
class Turns:
    """Loads to time.

    Attributes:
        vocab_size: see `load.measure`.
        until: on `time.monotonic`'s clock; no repetition starts or is waited for after it.
        on_step: called after each load to save what was measured.
    """

    engine: ServedEngine
    loads: Sequence[SpeedLoad]
    vocab_size: int
    until: float
    say: Say
    on_step: Callable[[], object]

    def take(self, servers: Sequence[RoleServer]) -> None:
        """Time every load on the servers; fills `speed` and `skipped` of their runs.

        A server that fails has its run's `error` set and is stopped. A server whose request fails leaves the load.
        Neither stops the others, and earlier readings are kept.
        """
        for load in self.loads:
            alive = [one for one in servers if not one.run.error]
            if not alive:
                return
            self._time(load, alive)
            for one in alive:
                self.say(f"{one.role}: {load.name}: {_summary(one.run.speed.get(load.name, {}), load)}")
            self.on_step()

    def _time(self, load: SpeedLoad, servers: Sequence[RoleServer]) -> None:
        taking_part = list(servers)
        said = time.monotonic()
        for repetition in range(load.repeat + 1):
            first = repetition % len(servers)
            for one in [*servers[first:], *servers[:first]]:
                if one not in taking_part:
                    continue
                if not self._repeat(load, repetition, one):
                    taking_part.remove(one)
            if taking_part and time.monotonic() - said >= HEARTBEAT_S:
                said = time.monotonic()
                self.say(f"{load.name}: {repetition} of {load.repeat} repetitions timed")

    def _repeat(self, load: SpeedLoad, repetition: int, one: RoleServer) -> bool:
        """Run one repetition on one server. Returns whether the server may take another one."""
        left = self.until - time.monotonic()
        try:
            if left <= 0:
                raise CompareError("not enough time left")
            found = measure(
                self.engine, one.server.url, load, repetition, self.vocab_size, min(max(left, 1.0), _REPETITION_S)
            )
        except CompareError as error:
            one.run.skipped.append(load.name)
            self.say(f"{one.role}: {load.name} ended: {error}")
            try:
                recover(one, self.engine, self.until - time.monotonic())
            except ServerError as failed:
                set_failed(one, failed, self.say)
            return False
        if repetition:  # the first one warms up
            readings = one.run.speed.setdefault(load.name, {})
            for name, value in found.items():
                readings.setdefault(name, []).append(value)
        return True


def _summary(readings: dict[str, list[float]], load: SpeedLoad) -> str:
    if not readings:
        return "not timed"
    count = len(next(iter(readings.values())))
    shown = [
        f"{name} {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        for name, values in readings.items()
    ]
    return f"{count} of {load.repeat} repetitions, median {', '.join(shown)}"
