"""Makes the comparison: a server for each role, one after the other, and what it gives, saved after every step."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from nsa_plugin.compare.client import send
from nsa_plugin.compare.engine import CompareError, Engine
from nsa_plugin.compare.load import Load, measure
from nsa_plugin.compare.measured import Answer, Measured, Run
from nsa_plugin.compare.rule import AGAIN, CONTROL, PLUGIN, STOCK
from nsa_plugin.compare.serving import EngineServer
from nsa_plugin.compare.workload import Group
from nsa_plugin.demo.server import ServerError

# Each role is a server of its own. The control is the plugin with wrong tokens on purpose.
ROLES = (STOCK, PLUGIN, CONTROL, AGAIN)
# Groups that the control answers too: one company is enough to notice that tokens are wrong.
CONTROL_GROUPS = ("single", "batch", "forced")

# Seconds kept for each server that is still to come: a start with its kernels compiled, and the agreement's requests;
# less where all of them would take more than half of the time.
_RESERVE_S = 75.0
# No group of requests and no load takes longer while its server is well, the first compilation of kernels included.
_STEP_S = 300.0
_DEAD_S = 10.0
_HEARTBEAT_S = 15.0
_TAIL_LINES, _TAIL_WIDTH = 40, 240
_PLAN = re.compile(r"new plan \S+: (\S+) on (\S+)")

Say = Callable[[str], None]


def speaker(write: Callable[[str], None]) -> Say:
    """Writes lines with the time of day and the seconds since now."""
    started = time.monotonic()
    return lambda text: write(f"{datetime.now():%H:%M:%S} {time.monotonic() - started:6.1f} s  {text}")


@dataclass(kw_only=True)
class Comparison:
    """A comparison to be made.

    Attributes:
        measured: filled as it goes.
        flags: of the engine, for every server.
        groups, loads: what each server is sent.
        logs: directory of the servers' logs and the plugin's reports.
        deadline: on `time.monotonic`'s clock; nothing is begun or waited for after it.
        start_timeout: seconds until a server must be healthy.
        on_step: called after each step; saves what was measured.
    """

    engine: Engine
    measured: Measured
    model: Path
    flags: Sequence[str]
    groups: Sequence[Group]
    loads: Sequence[Load]
    logs: Path
    deadline: float
    start_timeout: float
    say: Say
    on_step: Callable[[], object]
    _to_come: list[str] = field(default_factory=list)
    _reserve: float = _RESERVE_S

    def make(self, roles: Sequence[str]) -> None:
        """Run the servers of `roles`. What fails is in the runs, and does not keep the others from being made."""
        measured = self.measured
        for group in self.groups:
            measured.prompts[group.name] = {request.name: len(request.prompt) for request in group.requests}
            measured.least_cached |= {one.name: one.cached_tokens for one in group.requests if one.cached_tokens}
        self.on_step()
        self._reserve = min(_RESERVE_S, self._left() / (2 * len(roles)))
        for position, role in enumerate(roles):
            self._to_come = list(roles[position + 1 :])
            reason = self._pointless(role)
            if reason:
                self.say(f"{role}: left out, {reason}")
                measured.runs[role] = Run(role=role, error=f"left out: {reason}")
                continue
            run = measured.runs[role] = Run(role=role)
            try:
                self._serve(run)
                run.done = True
            except (ServerError, CompareError) as error:
                run.error = str(error)
                self.say(f"{role}: FAILED: {error}")
            self.on_step()

    def _pointless(self, role: str) -> str:
        if self._left() <= 0:
            return "the time is over"
        runs = self.measured.runs
        if STOCK in runs and not runs[STOCK].start_seconds:
            return "stock did not start"
        if role == CONTROL and PLUGIN in runs and not runs[PLUGIN].active:
            return "the plugin did not serve"
        return ""

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _serve(self, run: Run) -> None:
        log = self.logs / f"{run.role}.log"
        report = self.logs / f"{run.role}-report.json"
        report.unlink(missing_ok=True)
        plugin = run.role in (PLUGIN, CONTROL)
        environ = {"NSA_PLUGIN_REPORT": str(report), "NSA_PLUGIN_TRACE": "log"} if plugin else {}
        if run.role == CONTROL:
            environ["NSA_PLUGIN_FAULT"] = "shift_indices"
        said = [time.monotonic()]

        def waiting(seconds: float) -> None:
            if time.monotonic() - said[0] >= _HEARTBEAT_S:
                said[0] = time.monotonic()
                last = server.tail(1)
                self.say(f"{run.role}: starting for {seconds:.0f} s: {last[0][:150] if last else 'nothing logged yet'}")

        timeout = min(self.start_timeout, self._left())
        server = EngineServer(
            self.engine,
            self.model,
            self.flags,
            plugin=plugin,
            environ=environ,
            log=log,
            start_timeout=timeout,
            on_progress=waiting,
        )
        self.say(f"{run.role}: starting, {timeout:.0f} s allowed, log {log}")
        try:
            server.start()
        except ServerError:
            for line in server.tail(_TAIL_LINES):
                self.say(f"  | {line[:_TAIL_WIDTH]}")
            raise
        try:
            run.start_seconds = round(server.start_seconds, 1)
            run.command = " ".join(server.command())
            self.say(f"{run.role}: healthy after {run.start_seconds} s")
            self._note_plugin(run, server, report, log)
            self.on_step()
            self._ask(run, server)
            if run.role != CONTROL:
                self._time(run, server)
        finally:
            try:
                self._note_plugin(run, server, report, log)
            finally:
                server.stop()
                self.say(f"{run.role}: stopped")

    def _ask(self, run: Run, server: EngineServer) -> None:
        for group in self.groups:
            if run.role == CONTROL and group.name not in CONTROL_GROUPS:
                continue
            left = self._left() - self._reserve * len(self._to_come)
            if left <= 0:
                run.skipped.append(group.name)
                self.say(f"{run.role}: {group.name} skipped, the time is short")
                continue
            started = time.monotonic()
            try:
                answers = send(self.engine, server.url, group, min(left, _STEP_S))
            except CompareError as error:
                self._see_alive(server)
                answers = {request.name: Answer(error=str(error)) for request in group.requests}
            run.answers[group.name] = answers
            refused = [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error]
            self.say(
                f"{run.role}: {group.name}, {len(answers)} requests {group.how} in {time.monotonic() - started:.1f} s"
                + (f"; refused {len(refused)}, {refused[0]}" if refused else "")
            )
            self.on_step()

    def _see_alive(self, server: EngineServer) -> None:
        """Raise ServerError if the server dies now: that says more than the connection that broke with it."""
        server.check_alive(min(_DEAD_S, max(0.0, self._left())))

    def _time(self, run: Run, server: EngineServer) -> None:
        # What is left is shared by the servers that are still to be timed; the control only starts and answers.
        timed = [role for role in self._to_come if role != CONTROL]
        kept = self._reserve * len(self._to_come)
        until = time.monotonic() + max(0.0, self._left() - kept) / (1 + len(timed))
        for load in self.loads:
            left = until - time.monotonic()
            if left <= 0:
                run.skipped.append(load.name)
                self.say(f"{run.role}: {load.name} skipped, the time is short")
                continue

            def said(text: str, name: str = load.name) -> None:
                self.say(f"{run.role}: {name}: {text}")

            vocab_size = self.measured.facts["vocab_size"]
            try:
                run.speed[load.name] = measure(
                    self.engine, server.url, load, vocab_size, min(max(left, 1.0), _STEP_S), said
                )
            except CompareError as error:
                self._see_alive(server)
                run.skipped.append(load.name)
                self.say(f"{run.role}: {error}")
            self.on_step()

    def _note_plugin(self, run: Run, server: EngineServer, report: Path, log: Path) -> None:
        """What the plugin says of itself, as far as it is there; nothing here fails a run."""
        if run.role not in (PLUGIN, CONTROL):
            return
        try:
            run.report = json.loads(report.read_text())
        except (OSError, ValueError):
            run.report = {}
        try:
            run.routes = dict(self.engine.routes(server.get(self.engine.metrics_path, timeout=5.0))) or run.routes
        except ServerError as error:
            self.say(f"{run.role}: no metrics: {error}")
        found = _PLAN.findall(log.read_text(errors="replace")) if log.exists() else []
        run.planned = list(dict.fromkeys(f"{route}/{provider}" for route, provider in found))
