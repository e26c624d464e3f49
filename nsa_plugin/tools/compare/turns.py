"""Times the loads on servers that are alive at the same time, in turns; on one server, one repetition after the other.

Servers that run one after the other differ in speed by far more than a few per cent, and so does one machine from one
minute to the next. So a repetition is made on each server before the next one is made on any, and the server that is
first changes from repetition to repetition. No two servers ever have work at the same time.
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

# No repetition takes longer while its server is well, the first compilation of kernels included.
_REPETITION_S = 300.0


@dataclass(kw_only=True)
class Turns:
    """Loads that are timed.

    Attributes:
        vocab_size: see `load.measure`.
        until: on `time.monotonic`'s clock; no repetition is begun or waited for after it.
        on_step: called after each load; saves what was measured.
    """

    engine: ServedEngine
    loads: Sequence[SpeedLoad]
    vocab_size: int
    until: float
    say: Say
    on_step: Callable[[], object]

    def take(self, servers: Sequence[RoleServer]) -> None:
        """Time every load on the servers; `speed` and `skipped` of their runs are filled.

        A server that fails has its run's `error` set and is stopped. One whose request fails leaves the load. Neither
        keeps the others from being timed, and the readings before it are kept.
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
        """One repetition on one server. Whether there may be another."""
        left = self.until - time.monotonic()
        try:
            if left <= 0:
                raise CompareError("the time is short")
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
