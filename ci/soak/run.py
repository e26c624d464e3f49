"""Run a soak: probes on the idle server, the load, the probes again, and a killed worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ci.soak.client import Client, compared, new_session
from ci.soak.ending import kill_worker
from ci.soak.engines import CENSUS, RUNNING, Setup, count_of, preemptions_of
from ci.soak.judge import RULES
from ci.soak.measured import Kind, Sent, Soak
from ci.soak.traffic import Traffic, malformed, oversized
from ci.soak.watch import Watch
from nsa_plugin.tools.checkpoints.v32 import write_checkpoint
from nsa_plugin.tools.compare.measured import PLUGIN
from nsa_plugin.tools.compare.role_server import RoleServer
from nsa_plugin.tools.serving.client import send, settle
from nsa_plugin.tools.serving.engine import CompareError
from nsa_plugin.tools.serving.process import ServerError
from nsa_plugin.tools.serving.requests import Answer, RequestGroup
from nsa_plugin.tools.terminal import Steps

# Clients that send one request after the other, beyond what the server runs at once; some always wait.
_MORE_CLIENTS = 4
_THINK_S = 0.5
_BURST_EVERY_S, _BURST = 20.0, 3  # a burst is this many times what the server runs at once
_SAMPLES, _SAMPLE_EVERY_S = 120, 5.0
_START_S, _IDLE_S = 600.0, 30.0  # empty caches of compiled kernels cost minutes
_COLUMNS = 70  # of a line of the server's log


@dataclass
class Options:
    """The command's options."""

    setup: Setup
    minutes: float
    seed: int
    work_dir: Path
    flags: list[str] = field(default_factory=list)
    model: Path | None = None
    commit: str | None = None


@dataclass
class Finished:
    soak: Soak
    version: str
    command: list[str]
    start_seconds: float
    problem: str = ""


def run_soak(options: Options, steps: Steps) -> Finished:
    """Run all steps. A server that fails ends the run; what was measured until then is judged.

    Raises:
        CompareError: the engine is not installed.
        ServerError: the server did not start, or left a process that could not be ended.
    """
    setup = options.setup
    version = setup.engine.version()
    traffic = Traffic(setup.limits, options.seed)
    margin, split_share = RULES[setup.spec.dtype]
    soak = Soak(minutes=options.minutes, margin=margin, split_share=split_share)
    with steps.step("Writing the checkpoint"):
        model = options.model or write_checkpoint(options.work_dir / "model", setup.spec)
    with steps.step(f"Starting {setup.engine.name} {version} with the plugin") as say:
        one = RoleServer(
            PLUGIN,
            engine=setup.engine,
            model=model,
            flags=[*setup.flags, *options.flags],
            logs=options.work_dir,
            start_timeout=_START_S,
            environ=setup.environ(options.work_dir),
            on_progress=lambda seconds, line: say(f"{seconds:.0f} s, {line[:_COLUMNS]}"),
        )
        one.start()
    finished = Finished(soak, version, one.server.command(), one.server.start_seconds)
    try:
        with steps.step("Asking the idle server"):
            idle = _alone(one, setup, traffic)
        with steps.step(f"Load for {options.minutes:g} minutes") as say:
            asyncio.run(_load(one, setup, traffic, soak, idle, options.work_dir / CENSUS, say))
        with steps.step("Asking the idle server again"):
            soak.running = _running(one, setup)
            again = _alone(one, setup, traffic)
            soak.repeats += [compared(name, idle[name], answer, after=True) for name, answer in again.items()]
            text = one.server.get(setup.engine.metrics_path, timeout=30)
            soak.preemptions = preemptions_of(text)
            soak.routes = dict(setup.engine.routes(text))
        with steps.step("Killing a worker"):
            asyncio.run(_end(one, setup, traffic, soak, idle))
    except (CompareError, ServerError) as error:
        finished.problem = str(error)
    finally:
        one.server.stop()
    return finished


def _alone(one: RoleServer, setup: Setup, traffic: Traffic) -> dict[str, Answer]:
    """The probes' answers, each sent alone to a server with an empty prefix cache.

    Raises:
        CompareError: a probe got an error.
    """
    group = RequestGroup(name="probes", case="soak", how="one by one, uncached", requests=tuple(traffic.probes))
    found = send(setup.engine, one.server.url, group, setup.timeout)
    for name, answer in found.items():
        if answer.error:
            raise CompareError(f"{name}: {answer.error}")
    return found


def _running(one: RoleServer, setup: Setup) -> int | None:
    """Requests that the server still holds once it had time to finish them; None if it does not say."""
    settle(setup.engine, one.server.url, _IDLE_S)
    deadline = time.monotonic() + _IDLE_S
    while True:
        running = count_of(one.server.get(setup.engine.metrics_path, timeout=30), RUNNING)
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.5)


async def _load(
    one: RoleServer,
    setup: Setup,
    traffic: Traffic,
    soak: Soak,
    idle: dict[str, Answer],
    counts: Path,
    say: Callable[[str], None],
) -> None:
    seconds = 60 * soak.minutes
    started = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started

    every = min(_SAMPLE_EVERY_S, seconds / _SAMPLES)
    bad, huge = malformed(setup.engine), oversized(setup.engine, setup.limits)

    async with new_session() as session:
        client = Client(setup.engine, one.server.url, session, clock, setup.timeout, idle, soak.repeats)

        async def request() -> Sent:
            kind = traffic.kind()
            if kind in (Kind.MALFORMED, Kind.OVERSIZED):
                what, body = next(bad if kind is Kind.MALFORMED else huge)
                return await client.post(kind, body, what=what)
            if kind is Kind.PROBE:
                return await client.send(kind, traffic.probe())
            drawn = traffic.request()
            if kind is Kind.DISCONNECT:
                return await client.send(kind, drawn, traffic.number(1, max(1, drawn.new_tokens // 2)))
            return await client.send(kind, drawn, 0.05 + traffic.seconds(2.0))

        async def visitor() -> None:
            while clock() < seconds:
                soak.sent.append(await request())
                counts = Counter(str(one.end) for one in soak.sent)
                say(f"{clock():.0f} s: {', '.join(f'{count} {end}' for end, count in counts.items())}")
                one.server.check_alive()
                await asyncio.sleep(traffic.seconds(_THINK_S))

        async def bursts() -> None:
            wait = min(_BURST_EVERY_S, seconds / 4)
            while clock() + wait < seconds:
                await asyncio.sleep(wait)
                group = [client.send(Kind.BURST, traffic.request()) for _ in range(_BURST * setup.limits.running)]
                soak.sent += await asyncio.gather(*group)

        with Watch(one.server, clock, every, gpu=setup.gpu, counts=counts) as watch:
            visitors = [visitor() for _ in range(setup.limits.running + _MORE_CLIENTS)]
            try:
                await asyncio.gather(bursts(), *visitors)
            finally:
                soak.memory = watch.samples
        client.repeats = []


async def _end(one: RoleServer, setup: Setup, traffic: Traffic, soak: Soak, idle: dict[str, Answer]) -> None:
    async with new_session() as session:
        client = Client(setup.engine, one.server.url, session, time.monotonic, setup.timeout, idle)
        soak.ending = await kill_worker(one.server, client, traffic)
