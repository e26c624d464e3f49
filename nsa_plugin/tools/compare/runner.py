"""Run a comparison: start a server for each role, send requests and loads, and save the result after every step.

Servers run one after the other, or together: then all start at the same time, answer one after the other and are timed
in turns. Both modes process batches, of one server or of all, in the same steps.

The speed of servers that run one after the other differs by far more than a few per cent, and so does one machine's
speed from minute to minute. So servers that run together are timed in turns: each repetition of a load runs on every
server before the next one starts, and the order of the servers rotates. Two servers never work at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nsa_plugin.tools.compare.lifecycle import HEARTBEAT_S, Say, finish_all, recover, start_all
from nsa_plugin.tools.compare.load import FIRST, SpeedLoad, measure
from nsa_plugin.tools.compare.measured import AGAIN, CONTROL, PLUGIN, PLUGIN_AGAIN, STOCK, Measured, Run
from nsa_plugin.tools.compare.role_server import RoleServer
from nsa_plugin.tools.compare.workload import LIMIT
from nsa_plugin.tools.serving.client import scored, send
from nsa_plugin.tools.serving.engine import CompareError, ServedEngine
from nsa_plugin.tools.serving.process import ServerError, free_ports
from nsa_plugin.tools.serving.requests import Answer, RequestGroup

# Each role is a server of its own. The control is the plugin with deliberately wrong tokens; the plugin's second server
# is only timed.
ROLES = (STOCK, PLUGIN, CONTROL, AGAIN, PLUGIN_AGAIN)
# Groups that the control answers too: enough to notice wrong tokens.
CONTROL_GROUPS = ("single", "batch", "forced", "rows")

# Seconds kept for each server still to come: its start with kernel compilation, and the agreement requests. Fewer if
# all servers together would need more than half of the time.
_RESERVE_S = 75.0
# Limit for a group or a repetition on a healthy server, including the first compilation of kernels.
_STEP_S = 300.0
# Wait this long to see whether a server with a broken connection is gone.
_DEAD_S = 10.0


@dataclass(kw_only=True)
class EngineComparison:
    """A comparison to run.

    Attributes:
        measured: filled during the run; with `together`, all servers run at the same time.
        new_server: makes the server of a role, given `port` and `start_timeout`.
        groups, loads: sent to each server.
        deadline: on `time.monotonic`'s clock; nothing starts or is waited for after it.
        start_timeout: seconds until a server must be healthy.
        on_step: called after each step to save what was measured.
    """

    engine: ServedEngine
    measured: Measured
    new_server: Callable[..., RoleServer]
    groups: Sequence[RequestGroup]
    loads: Sequence[SpeedLoad]
    deadline: float
    start_timeout: float
    say: Say
    on_step: Callable[[], object]
    _to_come: list[str] = field(default_factory=list)
    _reserve: float = _RESERVE_S

    def __post_init__(self) -> None:
        measured = self.measured
        for group in self.groups:
            measured.prompts[group.name] = {request.name: len(request.prompt) for request in group.requests}
            measured.digests[group.name] = group.digest()
            measured.forced = max([measured.forced, *(request.prompt_logprobs for request in group.requests)])
            measured.least_cached |= {one.name: one.cached_tokens for one in group.requests if one.cached_tokens}

    def make(self, roles: Sequence[str]) -> None:
        """Run the servers of `roles`. Failures are recorded in the runs and do not stop the other servers."""
        measured = self.measured
        self.on_step()
        self._keep_time(len(roles))
        batches = [list(roles)] if measured.together else [[role] for role in roles]
        for position, batch in enumerate(batches):
            self._to_come = [role for later in batches[position + 1 :] for role in later]
            self._serve(batch)

    def _keep_time(self, servers: int) -> None:
        self._reserve = min(_RESERVE_S, self._left() / (2 * servers))

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _serve(self, roles: Sequence[str]) -> None:
        """Start the servers of a batch, send the requests, time the loads, and stop the servers."""
        servers = self._servers([role for role in roles if not self._left_out(Run(role=role))])
        if not servers:
            return
        try:
            start_all(servers)
            if self.measured.together:
                self._keep_time(len(servers))
            self.measured.runs |= {one.role: one.run for one in servers if one.run.error}
            for position, one in enumerate(servers):
                if one.run.error or self._left_out(one.run):
                    continue
                self.measured.runs[one.role] = one.run
                self.on_step()
                to_come = [later for later in servers[position + 1 :] if not later.run.error]
                self._ask(one, len(self._to_come) + len(to_come))
            timed = [one for one in servers if self.loads and one.role != CONTROL and not one.run.error]
            # Even an idle server uses some of the host.
            self._end([one for one in servers if one not in timed])
            self._time(timed)
            self._end(timed)
        finally:
            finish_all(servers, self.say)
            self.on_step()

    def _end(self, servers: Sequence[RoleServer]) -> None:
        finish_all(servers, self.say)
        for one in servers:
            one.run.done = not one.run.error

    def _servers(self, roles: Sequence[str]) -> list[RoleServer]:
        timeout = min(self.start_timeout, self._left())
        ports = free_ports(len(roles))
        return [
            self.new_server(role, port=port, start_timeout=timeout) for role, port in zip(roles, ports, strict=True)
        ]

    def _left_out(self, run: Run) -> bool:
        """Leave a server out if running it is pointless; its run records why. Returns whether it is left out."""
        reason = self._pointless(run.role)
        if reason:
            self.say(f"{run.role}: left out, {reason}")
            run.error = f"left out: {reason}"
            self.measured.runs[run.role] = run
        return bool(reason)

    def _pointless(self, role: str) -> str:
        if self._left() <= 0:
            return "no time is left"
        runs = self.measured.runs
        if STOCK in runs and not runs[STOCK].start_seconds:
            return "stock did not start"
        if role == CONTROL and PLUGIN in runs and not runs[PLUGIN].active:
            return "the plugin did not serve"
        return ""

    def _ask(self, one: RoleServer, to_come: int) -> None:
        """Send the agreement groups, and keep time for the servers still to come."""
        run = one.run
        for group in () if run.role == PLUGIN_AGAIN else self.groups:
            if run.role == CONTROL and group.name not in CONTROL_GROUPS:
                continue
            left = self._left() - self._reserve * to_come
            if left <= 0:
                run.skipped.append(group.name)
                one.say(f"{group.name} skipped, not enough time left")
                continue
            if group.case == LIMIT:
                self._ask_until_it_fails(one, group, self._reserve * to_come)
                continue
            started = time.monotonic()
            answers = self._answers(one, group, self._reserve * to_come)
            if answers is None:
                return
            run.answers[group.name] = answers
            refused = [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error]
            one.say(
                f"{group.name}, {len(answers)} requests {group.how} in {time.monotonic() - started:.1f} s"
                + (f"; refused {len(refused)}, {refused[0]}" if refused else "")
            )
            self.on_step()
        # Record now whether the plugin served: the control may start while this server is still running.
        one.note_plugin()

    def _answers(self, one: RoleServer, group: RequestGroup, kept: float) -> dict[str, Answer] | None:
        """Send a group and score its answers; those that came before a late one count. None: the server is gone.

        Args:
            kept: seconds for the servers still to come.
        """
        answers: dict[str, Answer] = {}
        try:
            send(self.engine, one.server.url, group, min(self._left() - kept, _STEP_S), answers.__setitem__)
            problem = ""
        except CompareError as error:
            problem = str(error)
            if not recover(one, self.engine, self._left()):
                return None
        if answers and not group.top:
            answered = replace(group, requests=tuple(request for request in group.requests if request.name in answers))
            limit = min(max(self._left() - kept, 1.0), _STEP_S)
            try:
                answers = scored(self.engine, one.server.url, answered, answers, limit)
            except CompareError as error:
                answers, problem = {}, str(error)
                if not recover(one, self.engine, self._left()):
                    return None
        return {request.name: answers.get(request.name, Answer(error=problem)) for request in group.requests}

    def _ask_until_it_fails(self, one: RoleServer, group: RequestGroup, kept: float) -> None:
        """Send a group's requests one by one until one is refused or the server is gone.

        For stock that is a result, which the run's `fell` records. A slow server has not failed.

        Args:
            kept: seconds for the servers still to come.
        """
        run, answers = one.run, dict[str, Answer]()
        for request in group.requests:
            started, left = time.monotonic(), self._left() - kept
            try:
                if left <= 0:
                    raise CompareError("not enough time left")
                answers |= send(self.engine, one.server.url, replace(group, requests=(request,)), min(left, _STEP_S))
            except CompareError as error:
                try:
                    one.server.check_alive(min(_DEAD_S, max(0.0, self._left())))
                except ServerError as failed:
                    answers[request.name] = Answer(error=str(failed))
                    if run.role == PLUGIN:
                        one.fail(failed)
                    else:
                        run.fell = str(failed)
                else:
                    run.skipped.append(group.name)
                    one.say(f"{group.name} ended at {request.name}: {error}")
                    break
            problem = answers[request.name].error
            seconds = time.monotonic() - started
            outcome = problem.splitlines()[0] if problem else "answered"
            one.say(f"{group.name} {request.name} {outcome} in {seconds:.1f} s")
            if problem:
                break
        run.answers[group.name] = answers
        self.on_step()

    def _time(self, servers: Sequence[RoleServer]) -> None:
        """Time every load on the servers; fills `speed` and `skipped` of their runs.

        A server that fails has its run's `error` set and is stopped. A server whose request fails leaves the load.
        Neither stops the others, and earlier readings are kept.
        """
        # The servers still to be timed share the time that is left; the control only starts and answers.
        timed_later = [role for role in self._to_come if role != CONTROL]
        kept = self._reserve * len(self._to_come)
        until = time.monotonic() + max(0.0, self._left() - kept) / (1 + len(timed_later))
        for load in self.loads:
            alive = [one for one in servers if not one.run.error]
            if not alive:
                return
            self._time_load(load, alive, until)
            for one in alive:
                one.say(f"{load.name}: {_summary(one.run.speed.get(load.name, {}), load)}")
            self.on_step()

    def _time_load(self, load: SpeedLoad, servers: Sequence[RoleServer], until: float) -> None:
        taking_part, said = list(servers), time.monotonic()
        for repetition in range(load.repeat + 1):
            first = repetition % len(servers)
            for one in [*servers[first:], *servers[:first]]:
                if one in taking_part and not self._repeat(load, repetition, one, until):
                    taking_part.remove(one)
            if taking_part and time.monotonic() - said >= HEARTBEAT_S:
                said = time.monotonic()
                self.say(f"{load.name}: {repetition} of {load.repeat} repetitions timed")

    def _repeat(self, load: SpeedLoad, repetition: int, one: RoleServer, until: float) -> bool:
        """Run one repetition on one server. Returns whether the server may take another one."""
        left = until - time.monotonic()
        vocab_size, timeout = self.measured.facts["vocab_size"], min(max(left, 1.0), _STEP_S)
        try:
            if left <= 0:
                raise CompareError("not enough time left")
            found = measure(self.engine, one.server.url, load, repetition, vocab_size, timeout)
        except CompareError as error:
            one.run.skipped.append(load.name)
            one.say(f"{load.name} ended: {error}")
            recover(one, self.engine, until - time.monotonic())
            return False
        readings = one.run.speed.setdefault(load.name, {})
        for name, value in found.items():
            measured = name if repetition else f"{FIRST}{name}"
            if measured in load.measures:
                readings.setdefault(measured, []).append(value)
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
